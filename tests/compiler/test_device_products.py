"""Products by lanes of a device: several for an element, outs that are read again, inputs fetched ahead."""

import pytest
import torch
from torch import Tensor

from tensorloop.compiler.emitter.device.devices import Coroutines, Nvptx
from tensorloop.compiler.emitter.device.kernel import device_text
from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.ir.kernels import Matmul
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.step import Step, Unsupported
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.ptx import made
from tensorloop.compiler.targets.ptx.assemble import ptx_of
from tests.support import ptxas, sass
from tests.support.lane_races import unneeded_waits
from tests.support.lanes import LanesCore
from tests.support.recurrences import Given, assert_same, recurrence
from tests.support.recurrent_cells import CELLS, inputs


def teams(step: Step, device: Nvptx) -> list[int]:
    plan = KernelPlan(lowered(step), device)
    return [share.team for unit, share in zip(plan.units, plan.shares, strict=True) if isinstance(unit, Matmul)]


def product(depth: int, columns: int, rows: int, dtype: torch.dtype, *, added: bool) -> tuple[Step, Given]:
    """h @ w + x, of which the next step takes as many columns as there are."""

    def draw(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape).to(dtype) if not dtype.is_floating_point else torch.randn(shape, dtype=dtype)

    given: Given = [draw(depth, columns), draw(columns, depth)], [draw(4, rows, columns)], [draw(rows, depth)]

    def step(invariants: list[Tensor], slices: list[Tensor], carry: list[Tensor]) -> dict[str, list[Tensor]]:
        made = torch.addmm(slices[0], carry[0], invariants[0]) if added else carry[0] @ invariants[0]
        return {"carry": [(made @ invariants[1]).clamp(-9, 9)], "outs": [made]}

    return recurrence(step, *given), given


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("added", [True, False], ids=["added", "alone"])
@pytest.mark.parametrize(("lanes", "groups"), [(128, 1), (64, 2), (32, 3)])
@pytest.mark.parametrize(
    ("depth", "columns", "rows"), [(1, 1, 2), (32, 1, 3), (12, 5, 3), (48, 2, 5), (7, 3, 2), (64, 32, 2)]
)
@pytest.mark.few("12-5-3-32-3-added-dtype2", "1-1-2-128-1-added-dtype0", "64-32-2-64-2-alone-dtype1")
def test_several_lanes_make_an_element(depth, columns, rows, lanes, groups, added, dtype) -> None:
    """Uneven groups, odd depths, more teams than elements; guarded, so that a team without one reads nothing else."""
    rec, given = product(depth, columns, rows, dtype, added=added)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    for order in ("as is", "random"):
        core = LanesCore(rec, lanes, groups, order, guarded=True, local=1 << 20)
        assert_same(core, rec, 4, *given, **tolerance)


def test_a_team_without_an_element_reads_what_is_there() -> None:
    """62 of 64 teams: their rows would lie far behind all memory of the group."""
    rec, given = product(12, 1, 2, torch.float64, added=False)
    assert max(teams(rec, Nvptx("sm_80", 256, groups=1))) == 4
    assert_same(LanesCore(rec, 256, 1, guarded=True, local=1 << 20), rec, 4, *given)


@pytest.mark.parametrize(("depth", "columns", "rows", "groups"), [(64, 8, 2, 2), (12, 5, 3, 1), (16, 2, 4, 2)])
def test_lanes_of_a_team_meet_nowhere(depth: int, columns: int, rows: int, groups: int) -> None:
    rec, _ = product(depth, columns, rows, torch.float64, added=True)
    plan = KernelPlan(lowered(rec), Coroutines(host(), 64, groups))
    assert max(share.team for share in plan.shares) > 1
    assert unneeded_waits(plan) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients_have_all_their_digits(dtype: torch.dtype) -> None:
    """From an approximation of 23 and of 20 bits; at the ends, too, where one over the denominator is hardly normal."""
    most = 87.3 if dtype == torch.float32 else 708.3
    ends = torch.tensor([-most, most, 0.0, 1e-30, 9.2, -9.2], dtype=dtype)
    x = torch.cat([ends, torch.randn(200, dtype=dtype) * 8])
    given: Given = [], [x[None]], [torch.zeros(1)]

    def body(inv, xs, c):
        (x,) = xs
        return {"carry": c, "outs": [x.sigmoid(), x.tanh(), x.expm1(), (x * x + 1).log()]}

    rec = recurrence(body, *given)
    tolerance = 6e-7 if dtype == torch.float32 else 2e-15
    assert_same(LanesCore(rec, 32), rec, 1, *given, rtol=tolerance, atol=tolerance / 100)


def test_idle_lanes_share_what_is_summed_up() -> None:
    rec, _ = product(64, 8, 2, torch.float32, added=True)
    assert teams(rec, Nvptx("sm_80", 128, groups=2)) == [16, 2]  # 8 columns and 64 of one row
    assert teams(rec, Nvptx("sm_80", 128, groups=2, local=0)) == [1, 1]  # lines in the device's memory are far apart
    assert teams(product(7, 4, 2, torch.float32, added=True)[0], Nvptx("sm_80", 128, groups=2))[0] == 1  # not evenly


def test_lines_of_a_matrix_begin_in_other_banks() -> None:
    """Eight lanes of a team and four elements, four bytes each, are all banks of shared memory."""
    plan = KernelPlan(lowered(product(64, 32, 2, torch.float32, added=True)[0]), Nvptx("sm_80", 256, groups=2))
    strides = {one.right.strides[-2] for one in plan.near.values() if one.right.shape[-1] % 32 == 0}
    assert strides == {36, 68}
    assert len({(36 * line + column) % 32 for line in range(8) for column in range(4)}) == 32


@pytest.mark.parametrize(("name", "times"), [("lstm", 1), ("gru", 2)])  # how often a step reads its input
def test_what_a_device_reads_a_step(name: str, times: int) -> None:
    """Inputs, asked for a step before, and nothing that the step has made; no division with a branch."""
    given = inputs(CELLS[name], 5, 4, 32, torch.float32)
    rec = recurrence(CELLS[name].step, *given, reverse=CELLS[name].reverse)
    text = device_text(lowered(rec), Nvptx("sm_80"))
    assert text.traffic.read <= times * sum(x[0].nbytes for x in given[1])
    found = ptx_of(text.module, "sm_80").decode()
    assert found.count("prefetch.global.L1") == len(given[1])
    assert "div." not in found
    assert "rcp.approx.ftz.f32" in found


def test_inputs_are_fetched_ahead_within_their_memory() -> None:
    """The last step asks for its own again; the last of uneven groups asks for its rows alone: both are guarded."""
    for reverse in (False, True):
        given: Given = [], [torch.randn(3, 5, 40), torch.randn(3, 1)], [torch.zeros(5, 40)]
        rec = recurrence(lambda inv, xs, c: {"carry": [c[0] * xs[1] + xs[0]], "outs": [c[0]]}, *given, reverse=reverse)
        core = LanesCore(rec, 32, 2, "random", guarded=True)
        for steps in (1, 3):
            assert_same(core, rec, steps, *given)


def test_a_group_that_reads_much_is_left_to_graphs() -> None:
    given = inputs(CELLS["lstm"], 5, 32, 256, torch.float32)
    rec = recurrence(CELLS["lstm"].step, *given)
    with pytest.raises(Unsupported, match=r"[\d,]+ bytes that one group reads a step, of at most 65,536: one multi"):
        made.text_for(lowered(rec), made.A100)


@pytest.mark.skipif(not (ptxas.find_ptxas() and sass.find_nvdisasm()), reason="needs the extra `ptxas`")
@pytest.mark.parametrize("arch", ptxas.ARCHITECTURES)
def test_the_longest_chain_of_a_step(arch: str) -> None:
    """An LSTM of 4 x 32. With one sum a lane and divisions with branches it was 159 forward and 138 backward."""
    forward, backward = (sass.chain_of(sass.disassembled(step, arch)) for step in sass.steps_on_device(4, 32))
    assert forward.longest <= 72
    assert forward.loads <= 2
    assert backward.longest <= 36
    assert backward.loads <= 8  # 137 before: those of dgates are of shared memory now
