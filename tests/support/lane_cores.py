"""Every compiled loop as device text with lanes as coroutines, in numbers and an order drawn by a seed.

What has no device text is made machine code of the CPU, and counted by the reason.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tensorloop.compiler.step import Step, Unsupported
from tensorloop.compiler.targets.cpu import native_core
from tests.support.lanes import ORDERS, LanesCore
from tests.support.ptx_checks import ARCHITECTURES, check_ptx

# Tests of the CPU's own core: its threads and their clock, its memory, what it says of itself. Left out with others.
NATIVE = (
    *(
        f"test_emitter_loops.py::test_threads_give_what_one_gives[{one}"
        for one in ("lstm b", "gru", "layer", "attention")
    ),
    "test_emitter_loops.py::test_the_core_is_made_of_any_recurrence_with_its_places",
    "test_emitter_team.py::test_fewer_threads_than_were_asked_for",
    "test_emitter_team.py::test_a_team_has_the_scratch_memory_of_one_thread",
    "test_emitter_team.py::test_a_step_is_shared_where_that_pays",
    "test_emitter_loops.py::test_threads_give_what_one_gives",
    "test_operations.py::test_a_step_runs_on_the_target_of_its_place",
    "test_compiled_array_checkpoints.py::test_no_more_is_held_than_by_the_eager_loop",
    "test_compiled_arrays.py::test_threads_share_rows",
    "test_compiled_checkpoints.py::test_blocks_of_large_carries_are_short",
    "test_compiled_checkpoints.py::test_a_budget_bounds_what_is_held_and_the_block",
    "test_compiled_checkpoints.py::test_two_backward_passes_keep_no_more",  # bit for bit, in any order
    "test_compiled_complex.py::test_a_transform_is_part_of_the_machine_code",
    "test_emitter_random.py::test_threads_do_a_random_step_together",
    "test_compiled_explain.py::test_a_loop_of_the_host_is_explained_on_a_device",
    "test_compiled_explain.py::test_other_products_with_xs_are_hoisted_and_weight_gradients_come_after",
    "test_compiled_explain.py::test_a_cache_that_others_can_write_costs_speed_alone",
    "test_compiled_few_steps.py::test_much_work_stays",
    "test_compiled_numbers_and_lengths.py::test_most_of_these_bodies_are_native",
    "test_compiled_pieces.py::",
    "test_compiled_row_arrays.py::test_rows_are_shared_out_among_threads",
    "test_compiled_packed.py::test_a_cut_spares_operations_or_bytes",
    "test_compiled_pays.py::",
    "test_compiled_tables.py::test_the_gradient_of_a_table_takes_memory_for_its_rows",
    "test_compiled_sums.py::test_the_gradient_of_a_weight_takes_memory_for_no_step",
    "test_compiled_together.py::",
)
LANES, GROUPS = (1, 8, 32, 128), (1, 2, 4)


def looks_inside(test: str) -> bool:
    """Whether a test is of the CPU's own core."""
    return any(name in test for name in NATIVE)


class Made:
    """How many cores were made, by what came of it."""

    def __init__(self) -> None:
        self.ways: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def lines(self) -> list[str]:
        """What a run of tests says at its end."""
        total = self.ways.total()
        made = ", ".join(f"{count} with {way}" for way, count in sorted(self.ways.items()))
        return [f"{total} loops as device text: {made}", *(f"{n} refused: {why}" for why, n in self.refused.items())]


@contextlib.contextmanager
def on(seed: int) -> Iterator[Made]:
    """Makes such cores, in the whole process."""
    draw, made = random.Random(seed), Made()

    def emitted(step: Step, *, folder: Any = None, target: Any = None) -> Any:
        lanes, groups, order = draw.choice(LANES), draw.choice(GROUPS), draw.choice(ORDERS)
        local, guarded = draw.choice((0, 48 * 1024)), draw.random() < 0.3
        try:
            found = LanesCore(step, lanes, groups, order, seed=draw.random(), local=local, guarded=guarded)
            check_ptx(found.kernels, draw.choice(ARCHITECTURES))
        except Unsupported as lack:
            made.refused[lack.args[0] if lack.args else str(lack)] += 1
            native_core.instead.remove(emitted)
            try:
                return native_core.emit(step, folder=folder, target=target)
            finally:
                native_core.instead.append(emitted)
        made.ways[f"{lanes} lanes"] += 1
        return found

    native_core.instead.append(emitted)
    try:
        yield made
    finally:
        native_core.instead.remove(emitted)
