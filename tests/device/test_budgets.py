"""What each feature asks of a device: exact numbers, which may only go down.

For each there are launches and syncs of a step, and what a call has besides, forward and backward, where what is kept
from a first call is known. `python -m pytest --device tests/device/test_budgets.py` holds them; without kernels of
`tensorloop_cuda`, as on any device on which they cannot run.
"""

from typing import NamedTuple

import pytest
import torch

from tests.device import pretended
from tests.device.features import FEATURES

SHORT, LONG = 8, 24


class Budget(NamedTuple):
    """A step's launches and syncs as the slope between two lengths, and the rest of a call.

    The rest is less than 0 where steps of the longer call cost more, as with checkpoints. `reads` are those of the
    state of a generator in all of the longer call.
    """

    launches: float
    syncs: float
    call_launches: float
    call_syncs: float
    reads: int

    def __str__(self) -> str:
        return f"Budget({', '.join(f'{x:g}' for x in self)})"


BUDGETS: dict[str, Budget] = {
    "python_loop": Budget(8, 0, 13, 0, 0),
    "scan": Budget(9, 0, 14, 0, 0),
    "scan_checkpointed": Budget(22.88, 0, -23, 1, 2),
    "scan_offloaded": Budget(17.44, 0, 14.5, 1, 2),
    "scan_until": Budget(11, 1, 14, 0, 0),
    "scan_until_rows": Budget(13, 1, 27, -1, 0),
    "while_loop": Budget(8, 1, 10, 1, 0),
    "while_loop_rows_all_run": Budget(9, 1, 21, 1, 0),
    "while_loop_rows_stop": Budget(22, 1, 8, 1, 0),
    "while_loop_rows_stop_checkpointed": Budget(50.88, 1, -73, 1, 2),
    "packed_scan": Budget(15, 0, 27, 0, 0),
    "packed_scan_checkpointed": Budget(31.5, 0, -19, 0, 2),
    "fixed_point": Budget(16, 2, 29, 1, 2),
    "fori_loop": Budget(6, 0, 8, 0, 0),
    "linear_recurrence": Budget(1, 0, 66, 0, 0),
    "compiled_scan": Budget(0.5, 0, 23, 0, 0),
    "compiled_scan_checkpointed": Budget(0.75, 0, 25, 0, 0),
    "compiled_scan_until": Budget(0.62, 0.12, 28, 1, 0),
    "compiled_while_loop": Budget(0.62, 0.12, 26, 1, 0),
    "compiled_while_loop_rows_stop": Budget(3.31, 0.44, 24.5, -1.5, 0),
    "compiled_lstm": Budget(0.5, 0, 37, 0, 0),
    "compiled_dropout": Budget(1.25, 0, 24, 0, 2),
    "compiled_array_append": Budget(0.5, 0, 38, 0, 0),
    "array_append": Budget(3, 0, 11, 0, 0),
    "array_prefix": Budget(6.12, 0, 22, 0, 0),
    "array_slot_on_device": Budget(3, 1, 13, 0, 0),
    "array_attention": Budget(18.5, 0, 22, 0, 0),
    "array_attention_window": Budget(18.5, 0, 22, 0, 0),
    "beam_model_alone": Budget(18, 0, 8, 0, 0),
    "beam_search": Budget(52, 1, 221, 2, 0),
    "beam_search_no_grad": Budget(39, 1, 202, 2, 0),
    "beam_search_checkpointed": Budget(103.75, 1, 88, 2, 2),
    "edit_distance": Budget(4, 0, 30, 1, 0),
    "packed_pad": Budget(0, 0, 23, 0, 0),
    "packed_sum": Budget(0, 0, 16, 0, 0),
    "packed_softmax": Budget(0, 0, 36, 0, 0),
    "packed_cumsum": Budget(1, 0, 54, 0, 0),
    "packed_amax": Budget(0, 0, 44, 0, 0),
    "packed_rows_sliced": Budget(0, 0, 12, 0, 0),
    "packed_row": Budget(0, 0, 11, 0, 0),
    "packed_time_sliced": Budget(0, 0, 26, 0, 0),
    "packed_unbind": Budget(0, 0, 25, 0, 0),
    "packed_flip": Budget(0, 0, 18, 0, 0),
    "packed_attention": Budget(0, 0, 93, 0, 0),
    "packed_attention_window": Budget(0, 0, 113, 0, 0),
    "pack_padded": Budget(0, 0, 24, 0, 0),
    "pack_padded_lens_on_device": Budget(0, 0, 28, 1, 0),
}


def counted(name: str, steps: int) -> pretended.Counts:
    torch.manual_seed(0)
    with torch.device("cpu"):  # as most programs have it
        run = FEATURES[name](steps)
        run()
        with pretended.counted() as counts:
            run()
    return counts


def measured(name: str) -> tuple[Budget, pretended.Counts]:
    short, long = (counted(name, steps) for steps in (SHORT, LONG))
    found = []
    for a, b in ((short.launches, long.launches), (len(short.syncs), len(long.syncs))):
        step = (b - a) / (LONG - SHORT)
        found.append((round(step, 2), round(a - step * SHORT, 2)))
    (launches, call_launches), (syncs, call_syncs) = found
    return Budget(launches, syncs, call_launches, call_syncs, long.reads), long


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_keeps_its_budget(name: str) -> None:
    found, counts = measured(name)
    budget = BUDGETS[name]
    if found == budget:
        return
    if all(new <= old for new, old in zip(found, budget, strict=True)):
        pytest.fail(f"{name} asks for less than it did: write {found} into BUDGETS")
    where = "\n".join(f"  {line}" for line in counts.places())
    pytest.fail(f"{name}: {found} is more than {budget}; in a call of {LONG} steps there were\n{where}")


def test_each_budget_is_of_a_feature() -> None:
    assert list(BUDGETS) == list(FEATURES)


def main() -> None:
    """Prints the table as it is now."""
    pretended.start()
    for name in FEATURES:
        print(f'    "{name}": {measured(name)[0]},')


if __name__ == "__main__":
    main()
