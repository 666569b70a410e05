"""Small operations of graphs as kernels of ours: nodes counted, values and gradients, proofs, what is left to torch."""

import ctypes
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.emitter.device.piece import PieceText
from tensorloop.compiler.step import CoreCall, Step
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.graphs import pieces
from tensorloop.compiler.targets.graphs.graph_core import FUSED, GRAPHS, GraphCore
from tensorloop.compiler.targets.graphs.graph_target import GraphTarget
from tensorloop.compiler.targets.ptx import assemble, piece_kernels
from tensorloop.loop.compiled.run.plan import plans
from tests.device import kernels, pretended
from tests.device.graph_steps import call_of, cell, counting, step_of, until
from tests.device.kernels import PretendedKernels
from tests.support.pretended_driver import Launch
from tests.support.recurrences import Given
from tests.support.recurrent_cells import CELLS

KINDS = ("view", "pointwise", "reduction", "movement", "constant")
Loop = tuple[Callable[[Any], Any], list[Tensor]]


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedKernels]:
    """Pieces are made, and no plan is there yet."""
    monkeypatch.setattr(pieces, "SMALL", KINDS)
    with kernels.fresh() as found:
        yield found


def random(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*size, dtype=dtype, device="cpu") / size[-1] ** 0.5).to("cuda").requires_grad_()


def lstm(T: int, B: int, H: int) -> Loop:
    wx, wh, b, xs, h, c = (
        *(random(H, 4 * H), random(H, 4 * H), random(4 * H)),
        *(random(T, B, H), random(B, H), random(B, H)),
    )

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = state
        i, f, g, o = (x @ wx + h @ wh + b).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h, c), h

    return lambda compiled: tl.scan(body, (h, c), xs, compile=compiled), [wx, wh, b, xs, h, c]


def gru(T: int, B: int, H: int) -> Loop:
    wx, wh, b, xs, h = random(H, 3 * H), random(H, 3 * H), random(3 * H), random(T, B, H), random(B, H)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        (xr, xz, xn), (hr, hz, hn) = (x @ wx).chunk(3, -1), (h @ wh + b).chunk(3, -1)
        z = (xz + hz).sigmoid()
        h = (1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * h
        return h, h

    return lambda compiled: tl.scan(body, h, xs, compile=compiled), [wx, wh, b, xs, h]


def gated(T: int, B: int, H: int) -> Loop:
    """A block of a transformer without its attention: a norm over features, a gate, two products."""
    up, gate, down, xs, h = random(H, 2 * H), random(H, 2 * H), random(2 * H, H), random(T, B, H), random(B, H)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = h + x
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-5)
        h = h + (torch.nn.functional.silu(z @ gate) * (z @ up)) @ down
        return h, h

    return lambda compiled: tl.scan(body, h, xs, compile=compiled), [up, gate, down, xs, h]


LOOPS = {"lstm": lstm, "gru": gru, "gated": gated}


def results(run: Callable[[Any], Any], given: list[Tensor], compiled: Any) -> list[Tensor]:
    """The last carry, the outs, and gradients of both."""
    last, ys = run(compiled)
    found = [*(last if isinstance(last, tuple) else [last]), ys]
    weights = [torch.linspace(1, 2, x.numel(), dtype=x.dtype, device=x.device).view_as(x) for x in found]
    grads = torch.autograd.grad([(x * w).sum() for x, w in zip(found, weights, strict=True)], given)
    return [*(x.detach() for x in found), *grads]


def nodes(core: Any) -> int:
    """Those of the graph of one step, copies of its outs among them."""
    (recorded,) = core._recorded.values()
    return len(recorded._chunks[1].graph.tape)


def cores() -> list[GraphCore]:
    """The loop forward and the loop backward of the plan that there is."""
    (plan,) = plans._plans.values()
    (backward,) = plan._backward.values()
    return [plan.forward.core, backward.core]  # pyright: ignore[reportReturnType]


# name: nodes of a step of torch's operations, forward and backward, and with kernels of ours
NODES = {"lstm": ((14, 28), (5, 5)), "gru": ((15, 24), (5, 6)), "gated": ((16, 28), (10, 10))}


@pytest.mark.parametrize("name", LOOPS)
def test_nodes_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, given = LOOPS[name](1, 4, 256)
    found = []
    for kinds in ((), KINDS):
        monkeypatch.setattr(pieces, "SMALL", kinds)
        plans.clear()
        results(run, given, "strict")
        found.append(tuple(map(nodes, cores())))
    assert tuple(found) == NODES[name]


def hold(core: Any, step: Step, given: Given, steps: int) -> int:
    """A core gives what the eager one gives, but for roundings; how many steps that is."""
    mine, theirs = call_of(step, given, steps), call_of(step, given, steps)
    (last, done), (expected, count) = core(mine), EagerCore(step)(theirs)
    assert done == count
    first, end = (steps - done, steps) if step.reverse else (0, done)
    parts = [([*last, *mine.sums], [*expected, *theirs.sums]), (mine.outs, theirs.outs)]
    for n, (found, right) in enumerate(parts):
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(*((x[first:end], y[first:end]) if n else (x, y)), equal_nan=True)
    return done


@pytest.mark.parametrize("order", ["as is", "turned", "random"])
@pytest.mark.parametrize("name", LOOPS)
def test_values_and_gradients_are_those_of_the_eager_loop(
    name: str, order: str, short: None, ran: PretendedKernels
) -> None:
    ran.order.how = order
    run, given = LOOPS[name](7, 3, 5)
    expected = results(run, given, False)
    for _ in range(2):
        torch.testing.assert_close(results(run, given, "strict"), expected)
    assert all(core._fused.used for core in cores())


@pytest.mark.parametrize("name", CELLS)
def test_cells_give_what_they_give_step_by_step(name: str, short: None) -> None:
    step, given = cell(name, 9)
    core = GraphCore(step)
    for steps in (9, 1, 3):
        assert hold(core, step, given, steps) == steps
    assert core.way == GRAPHS


@pytest.mark.parametrize("ends", [1, 7, 20])
def test_a_loop_ends_where_its_condition_says(ends: int, short: None) -> None:
    given = counting(20, ends)
    step = step_of(until(3 * ends), *given)
    core = GraphCore(step)
    assert hold(core, step, given, 20) == ends
    assert core._fused.used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, short: None) -> None:
    step, given = cell("gru", 5, dtype)
    core, call = GraphCore(step), call_of(step, given, 5)
    last, _ = core(call)
    torch.testing.assert_close(last, EagerCore(step)(call_of(step, given, 5))[0], atol=1e-2, rtol=1e-2)
    assert core._fused.used


def looked_at(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
    """Views of results, inside of pieces and beside them; a constant; what nobody needs; complex numbers."""
    (w,), (x,), (h, n) = inv, xs, carry
    a = (h + x).tanh()
    z = torch.complex(a, x * 2).abs()
    b = (a.t() @ w)[:, 1:].relu() + torch.ones(3, 1, dtype=h.dtype) * a.t()[:, :1]
    parts = torch.cat([b.t(), z[:1] + 1]).flip(0)
    unused = parts.exp()
    assert unused.shape == parts.shape
    return {"carry": [parts.t()[:, :2].t() + h, n * 3 + 1], "outs": [a.t(), b[0], h.t(), n % 2 == 0], "sums": [a.sum()]}


@pytest.mark.parametrize(("reverse", "most"), [(False, 128), (True, 128), (False, 2)])
def test_what_is_looked_at_from_elsewhere(
    reverse: bool, most: int, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "MOST", most)
    w, x, h = (torch.randn(*size, dtype=torch.float64, device="cpu") for size in ((2, 3), (5, 2, 3), (2, 3)))
    given = [w], [x], [h, torch.ones(4, dtype=torch.int64, device="cpu")]
    step = step_of(looked_at, *given, reverse=reverse)
    core = GraphCore(step)
    assert hold(core, step, given, 5) == 5
    assert core._fused.used


@pytest.mark.parametrize("most", [3, 128])
@pytest.mark.parametrize("name", [*CELLS, "looked at"])
def test_nothing_that_leaves_a_piece_comes_back(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MOST", most)
    if name == "looked at":
        w, x, h = (torch.randn(*size, dtype=torch.float64, device="cpu") for size in ((2, 3), (5, 2, 3), (2, 3)))
        step = step_of(looked_at, [w], [x], [h, torch.ones(4, dtype=torch.int64, device="cpu")])
    else:
        step, _ = cell(name)
    order, found = pieces.cut(step)
    assert max((len(piece.own) for piece in found), default=0) <= most
    for piece in found:
        outside, own = set[Any](), set(piece.own)
        for n in step.graph.nodes:
            if n not in own and any(a in own or a in outside for a in n.all_input_nodes) and not pieces.is_free(n):
                outside.add(n)
            assert n not in own or outside.isdisjoint(n.all_input_nodes)
        began = min(order.index(n) for n in own)
        assert all(n.op == "placeholder" or order.index(n) < began for n in piece.given)
    places = {n: i for i, n in enumerate(order)}
    assert all(places[a] < places[n] for n in order for a in n.all_input_nodes)


# ---- what is left to torch


def said() -> str:
    """What is said of a loop's graphs."""
    step, _ = cell("lstm")
    return GraphTarget().describe(step)[0]


def plain(core: GraphCore, step: Step, given: Given) -> None:
    """Holds a core whose graphs have torch's operations alone, and that nothing is said of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hold(core, step, given, 3)
    call = call_of(step, given, 3)
    with pretended.counted() as counts:
        core(call)
    assert counts.operations.keys() == {"graph", "aten::_foreach_copy_"}
    (recorded,) = core._recorded.values()
    assert recorded._module is core.eager.module


def test_explain_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said().endswith("; it has 2 launches a step, 1 of them ours, for 11 operations")
    monkeypatch.setattr(pieces, "SMALL", ())
    assert said().endswith("; it has 11 operations a step")


def test_an_llvm_whose_text_is_invalid_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "OLDEST_PTX", 99)
    assert "; it has 11 operations a step; no kernels of their own for some: llvmlite stands on LLVM " in said()
    step, given = cell("lstm", 3)
    core = GraphCore(step)
    plain(core, step, given)
    assert core.way == GRAPHS


@pytest.mark.parametrize("call", ["cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetAttribute"])
def test_what_cannot_be_loaded_is_torchs(call: str, ran: PretendedKernels) -> None:
    ran.library.fails[call] = 218
    step, given = cell("lstm", 3)
    plain(GraphCore(step), step, given)


def test_a_device_of_small_blocks_has_none(ran: PretendedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ran.library.needs, 0, 16)
    step, given = cell("lstm", 3)
    plain(GraphCore(step), step, given)


def test_a_piece_without_text_is_left_out_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = piece_kernels.piece_text

    def text(step: Any, device: Any) -> PieceText:
        if len(step.outs) > 1:
            raise piece_kernels.Unsupported("two at once")
        return made(step, device)

    monkeypatch.setattr(piece_kernels, "piece_text", text)
    step, given = cell("kutta", 3)
    core = GraphCore(step)
    hold(core, step, given, 3)
    assert core._fused.used
    assert GraphTarget().describe(step)[0].endswith("; no kernels of their own for some: two at once")


# ---- proofs


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 64e-12), (torch.float32, 64e-5), (torch.bfloat16, 2**-7)])
def test_many_steps_are_as_many_times_less_close(dtype: torch.dtype, close: float) -> None:
    step, given = cell("lstm", 3, dtype)
    core = GraphCore(step)
    core(call_of(step, given, 3))
    (recorded,) = core._recorded.values()
    assert recorded._oracle.close == close


def wrong_from(ran: PretendedKernels, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose last tensor is a little off, from one of their runs on."""
    done, runs = ran.done, list[Launch]()

    def wrong(launch: Launch) -> None:
        done(launch)
        runs.append(launch)
        if len(runs) > first:
            number = ctypes.c_double.from_address(launch.words[-2])
            number.value += 1e-3

    monkeypatch.setattr(ran, "done", wrong)


GIVES = f"is left to {GRAPHS}, since {FUSED} "


@pytest.mark.parametrize(
    ("first", "text"),
    [(0, "gives 1 of 24 numbers otherwise, .* in out"), (20, "gives .* numbers otherwise, .*")],
    ids=["by itself", "in a graph"],
)
def test_a_kernel_that_is_wrong_leaves_graphs_to_torchs_operations(
    first: int, text: str, ran: PretendedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, given = cell("lstm", 9)
    wrong_from(ran, first, monkeypatch)
    core = GraphCore(step)
    with pytest.warns(RuntimeWarning, match=GIVES + text) as told:
        hold(core, step, given, 9)
    assert len(told) == 1
    assert core.way.startswith(f"{GRAPHS}, since {FUSED} ")
    assert not core._fused.used
    plain(core, step, given)


@pytest.fixture
def ten_bits() -> Iterator[None]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.usefixtures("ten_bits")
def test_products_that_round_what_they_are_given_are_given_ten_bits(
    ran: PretendedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, given = cell("lstm", 3)
    core = GraphCore(step)
    core(call_of(step, given, 3))
    (recorded,) = core._recorded.values()
    assert recorded._oracle.close == 2**-9
    wrong_from(ran, 0, monkeypatch)  # the kernels are not
    core = GraphCore(step)
    with pytest.warns(RuntimeWarning, match=GIVES + "gives 1 of 24"):
        core(call_of(step, given, 3))
    (recorded,) = core._recorded.values()
    assert recorded._oracle.close == 1e-12  # torch's own graphs give the same bits


def test_a_launch_that_fails_leaves_graphs_to_torchs_operations(ran: PretendedKernels) -> None:
    step, given = cell("lstm", 3)
    ran.library.fails["cuLaunchKernel"] = 701
    core = GraphCore(step)
    with pytest.warns(RuntimeWarning, match=GIVES + "do not run: .*CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        hold(core, step, given, 3)
    plain(core, step, given)


def test_roundings_that_a_piece_magnifies_are_no_fault(
    short: None, ran: PretendedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
        big = (carry[0].abs() + 12).exp()
        return {
            "carry": [carry[0].cos() + xs[0]],
            "outs": [big * 1.5 - big * 1.25 - big * 0.25, big.sin(), big % 1 > 0.5],
        }

    given = [], [torch.randn(4, 300, device="cpu")], [torch.randn(300, device="cpu")]
    core = GraphCore(step := step_of(body, *given))
    core(call_of(step, given, 4))
    assert core._fused.used


def test_modules_go_with_their_plans(ran: PretendedKernels) -> None:
    gc.collect()
    before, (run, given) = len(ran.library.modules), lstm(2, 2, 3)
    results(run, given, "strict")
    assert len(ran.library.modules) == before + 3
    plans.clear()
    gc.collect()
    assert len(ran.library.modules) == before


def test_a_graph_of_the_users_has_torchs_operations() -> None:
    step, given = cell("lstm", 3)
    core, call = GraphCore(step), call_of(step, given, 3)
    core(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last, _ = core(call)
    graph.replay()
    torch.testing.assert_close(last, EagerCore(step)(call)[0], rtol=0, atol=0)


def test_threads_and_streams(short: None) -> None:
    step, given = cell("lstm", 5)
    core = GraphCore(step)
    for stream in (None, torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            hold(core, step, given, 5)
    assert len(core._recorded) == 2
    assert len({id(recorded._module) for recorded in core._recorded.values()}) == 1  # kernels are made once


def test_invariants_that_come_again(short: None) -> None:
    step, given = cell("gru", 5)
    core, call = GraphCore(step), call_of(step, given, 1)
    run = core.stepping(call.invariants)
    for _ in range(2):
        found, _ = run(CoreCall(*call_of(step, given, 1)))
        torch.testing.assert_close(found, EagerCore(step)(call_of(step, given, 1))[0])
