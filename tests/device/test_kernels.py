"""Loops as kernels, on the pretended device: results and gradients, launches and waits, and what goes another way."""

import ctypes
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop.compiler.targets import ptx
from tensorloop.compiler.targets.ptx import made
from tensorloop.compiler.targets.ptx.driver import DriverError
from tensorloop.compiler.targets.ptx.ptx_target import PtxTarget
from tensorloop.loop.compiled.run.plan import plans
from tests.device import kernels, pretended
from tests.device.kernels import PretendedKernels
from tests.support.pretended_driver import NAMES, Launch

Body = Callable[[Any, Any], tuple[Any, Any]]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedKernels]:
    """Kernels are asked for, and no plan is there yet."""
    monkeypatch.setenv(PtxTarget.variable, "1")
    with kernels.fresh() as found:
        yield found


def random(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, dtype=dtype, device="cpu").to("cuda").requires_grad_()


def leaves(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def results(run: Callable[[Any], Any], given: list[Tensor], compiled: Any) -> list[Tensor]:
    """What a loop gives, and gradients of all that."""
    found = leaves(run(compiled))
    floating = [x for x in found if x.requires_grad]
    weights = [torch.linspace(1, 2, x.numel(), device=x.device).view_as(x) for x in floating]
    grads = torch.autograd.grad([(x * w).sum() for x, w in zip(floating, weights, strict=True)], given)
    return [x.detach() for x in found] + list(grads)


def hold(run: Callable[[Any], Any], given: list[Tensor]) -> None:
    """The compiled loop is the eager one; twice, as the first call makes a plan."""
    expected = results(run, given, False)
    for _ in range(2):
        torch.testing.assert_close(results(run, given, "strict"), expected)


def rnn(T: int, B: int, H: int, dtype: torch.dtype = torch.float64) -> tuple[Callable[[Any], Any], list[Tensor]]:
    w, xs, h = random(H, H, dtype=dtype), random(T, B, H, dtype=dtype), random(B, H, dtype=dtype)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w / max(H, 1) ** 0.5 + x)
        return h, h

    return lambda compiled: tl.scan(body, h, xs, compile=compiled), [w, xs, h]


def lstm(T: int, B: int, H: int) -> tuple[Callable[[Any], Any], list[Tensor]]:
    wx, wh, b = random(3, 4 * H), random(H, 4 * H), random(4 * H)
    xs, h, c = random(T, B, 3), random(B, H), random(B, H)

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = state
        i, f, g, o = (x @ wx + h @ wh + b).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h, c), h

    return lambda compiled: tl.scan(body, (h, c), xs, compile=compiled), [wx, wh, b, xs, h, c]


def crf(T: int, B: int, H: int) -> tuple[Callable[[Any], Any], list[Tensor]]:
    w, xs, a = random(H, H), random(T, B, H), random(B, H)

    def body(a: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.logsumexp(a[:, :, None] + w, 1) + x, None

    return lambda compiled: tl.scan(body, a, xs, compile=compiled), [w, xs, a]


def normed(T: int, B: int, H: int) -> tuple[Callable[[Any], Any], list[Tensor]]:
    """Rows meet: all of the step is one group's."""
    w, xs, h = random(H, H), random(T, B, H), random(B, H)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(h @ w + x)
        z = (z - z.mean(0)) * torch.rsqrt(z.var(0, unbiased=False) + 0.1)
        return torch.where(x > 0, z, h), z.amax(-1)

    return lambda compiled: tl.scan(body, h, xs, compile=compiled), [w, xs, h]


def counted(T: int, B: int, H: int) -> tuple[Callable[[Any], Any], list[Tensor]]:
    """Ints, bools, and rows that go on alone."""
    xs, h = random(T, B, H), random(B, H)
    lens = (torch.arange(B) % max(T, 1) + 1).to("cuda")

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, n = state
        go = n < lens
        return (torch.where(go[:, None], h.sin() + x, h), n + go), go

    start = torch.zeros(B, dtype=torch.int64, device="cuda")
    return lambda compiled: tl.scan(body, (h, start), xs, compile=compiled), [xs, h]


def described() -> list[str]:
    """What is said of the kernel of a loop's steps."""
    plans.clear()
    run, _ = rnn(3, 2, 4)
    with torch.no_grad():
        run("strict")
    (plan,) = plans._plans.values()
    return ptx.describe(plan.forward.partition.loop)


LOOPS = {"rnn": rnn, "lstm": lstm, "crf": crf, "normed": normed, "counted": counted}


@pytest.mark.parametrize(("T", "B", "H"), [(5, 3, 4), (1, 1, 1), (2, 2, 33)])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_the_eager_one(name: str, T: int, B: int, H: int, asked: PretendedKernels) -> None:
    run, given = LOOPS[name](T, B, H)
    before = len(asked.library.launches)
    hold(run, given)
    assert len(asked.library.launches) - before == 6  # forward and backward, twice, and each has proved itself


@pytest.mark.parametrize("order", ["turned", "random"])
def test_whichever_lane_is_first(order: str, asked: PretendedKernels) -> None:
    asked.order.how = order
    hold(*normed(4, 3, 5))
    hold(*lstm(4, 3, 5))


def test_rows_are_shared_out_among_groups(asked: PretendedKernels) -> None:
    hold(*rnn(3, 200, 2))
    assert {launch.groups for launch in asked.library.launches[-4:]} == {100}  # of 132 multiprocessors


def test_one_launch_for_any_number_of_steps_and_no_wait(asked: PretendedKernels) -> None:
    counts = []
    for steps in (20, 1000):
        run, given = rnn(steps, 2, 4)
        results(run, given, "strict")
        with pretended.counted() as found:
            last, ys = run("strict")
            (last.sum() + ys.sum()).backward()
        assert not found.syncs, found.places()
        assert found.operations["kernel"] == 2
        counts.append(found.launches)
    assert counts[0] == counts[1] == 16


def test_no_steps_launch_nothing(asked: PretendedKernels) -> None:
    before = len(asked.library.launches)
    run, (_, _, h) = rnn(0, 2, 3)
    last, ys = run("strict")
    torch.testing.assert_close(last, h)
    assert ys.shape == (0, 2, 3)
    torch.testing.assert_close(torch.autograd.grad(last.sum(), h), (torch.ones_like(h),))
    assert len(asked.library.launches) == before


def test_a_length_that_is_not_known_waits_for_the_first_condition_and_for_each_part(asked: PretendedKernels) -> None:
    w = random(4, 4)

    def run(compiled: Any) -> Any:
        h = torch.ones(2, 4, dtype=torch.float64, device="cuda")
        return tl.while_loop(
            lambda h: h.sum() < 40, lambda h: h * 1.5 + w.sin().mean(), h, max_steps=50, compile=compiled
        )

    hold(run, [w])
    with pretended.counted() as found:
        run("strict")
    assert len(found.syncs) == 2, found.places()
    assert found.operations["kernel"] == 1


def test_with_checkpoints(asked: PretendedKernels) -> None:
    w, xs, h = random(4, 4), random(12, 2, 4), random(2, 4)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h

    hold(lambda compiled: tl.scan(body, h, xs, checkpoints=3, compile=compiled), [w, xs, h])


def test_an_index_that_is_out_of_range_is_an_error(asked: PretendedKernels) -> None:
    table, h = random(7, 3), random(2, 3)

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, i = state
        h = h.sin() + table[i] + x
        return (h, i + 1), h

    def run(steps: int, compiled: Any) -> Any:
        start = torch.tensor([0, 2], device="cpu").to("cuda")
        return tl.scan(body, (h, start), torch.ones(steps, dtype=torch.float64, device="cuda"), compile=compiled)

    hold(lambda compiled: run(5, compiled), [table, h])
    before = len(asked.library.launches)
    with pytest.raises(IndexError, match="index out of range"):
        run(6, "strict")
    assert len(asked.library.launches) == before + 1


# ---- streams, devices, threads, graphs of the user's


def test_a_launch_is_on_the_stream_and_the_device_of_its_tensors(asked: PretendedKernels) -> None:
    run, given = rnn(3, 2, 4)
    hold(run, given)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results(run, given, "strict")
    assert [launch.stream for launch in asked.library.launches[-2:]] == [stream.stream_id] * 2
    with torch.device("cuda:1"):
        h, xs = torch.ones(2, 4), torch.ones(3, 2, 4)
    last, _ = tl.scan(lambda h, x: (h.sin() + x, None), h, xs, compile="strict")
    assert last.device == torch.device("cuda:1")
    assert asked.library.pushed[-1] != asked.library.pushed[0]  # contexts
    assert not asked.library.contexts


def test_several_threads_run_one_loop(asked: PretendedKernels) -> None:
    run, given = rnn(5, 3, 4)
    expected, found = results(run, given, "strict"), list[list[Tensor]]()
    threads = [threading.Thread(target=lambda: found.append(results(run, given, "strict"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for one in found:
        torch.testing.assert_close(one, expected)


def test_a_graph_of_the_users_has_the_launch_once_the_kernel_is_loaded(
    asked: PretendedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = rnn(3, 2, 4)
    with torch.no_grad():
        expected = run(False)
        before = len(asked.library.launches)
        run("strict")  # which makes the plan, as no call does while a graph is made
        gc.collect()
        modules = len(asked.library.modules)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        torch.testing.assert_close(run("strict"), expected)
        assert len(asked.library.launches) == before + 3
        plans.clear()
        gc.collect()
        assert len(asked.library.modules) == modules  # the graph may be replayed


def test_modules_go_with_their_plans(asked: PretendedKernels) -> None:
    gc.collect()
    before = len(asked.library.modules)
    hold(*rnn(3, 2, 5))
    assert len(asked.library.modules) == before + 2
    plans.clear()
    gc.collect()
    assert len(asked.library.modules) == before


# ---- what goes another way


@pytest.mark.extended("cuModuleGetFunction-7", "cuFuncGetAttribute-", "Ex-1]", "Ex-3]", "Ex-7", "Ex-9", "Ex-20")
@pytest.mark.parametrize("code", sorted(NAMES))
@pytest.mark.parametrize("call", ["cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetAttribute"])
def test_what_cannot_be_loaded_runs_as_torchs_operations(call: str, code: int, asked: PretendedKernels) -> None:
    asked.library.fails[call] = code
    before = len(asked.library.launches)
    run, given = rnn(3, 2, 4)
    hold(run, given)
    assert len(asked.library.launches) == before
    assert described() == [f"no kernel: the CUDA driver's {call} gave {NAMES[code][0]} ({code}): {NAMES[code][1]}"]


def test_a_kernel_that_is_wrong_gives_way(asked: PretendedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(launch: Launch) -> None:
        asked.run(launch)
        address = launch.words[-3]  # the last tensor before status and the number of steps: the carry at the end
        number = ctypes.c_double.from_address(address)
        number.value += 1e-3

    monkeypatch.setattr(asked.library, "run", wrong)
    run, given = rnn(3, 2, 4)
    expected = results(run, given, False)
    with pytest.warns(
        RuntimeWarning, match=r"is left to CUDA graphs .* since one launch, .* numbers otherwise"
    ) as told:
        torch.testing.assert_close(results(run, given, "strict"), expected)
    assert len(told) == 2  # forward and backward
    before = len(asked.library.launches)
    torch.testing.assert_close(results(run, given, "strict"), expected)
    assert len(asked.library.launches) == before


@pytest.mark.parametrize("code", [2, 701])
def test_a_launch_without_room_is_done_another_way_and_said_once(code: int, asked: PretendedKernels) -> None:
    run, given = rnn(3, 2, 4)
    expected = results(run, given, "strict")
    asked.library.fails["cuLaunchKernel"] = code
    with pytest.warns(
        RuntimeWarning, match=f"a compiled loop goes on another way .*cuLaunchKernel gave {NAMES[code][0]}"
    ):
        torch.testing.assert_close(results(run, given, "strict"), expected)
    asked.library.fails.clear()
    before = len(asked.library.launches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(results(run, given, "strict"), expected)
    assert len(asked.library.launches) == before


@pytest.mark.parametrize("code", [code for code in NAMES if code not in (2, 701)])
def test_a_launch_that_fails_otherwise_is_an_error_by_name(code: int, asked: PretendedKernels) -> None:
    run, given = rnn(3, 2, 4)
    results(run, given, "strict")
    asked.library.fails["cuLaunchKernel"] = code
    with pytest.raises(DriverError, match=rf"cuLaunchKernel gave {NAMES[code][0]} \({code}\)"):
        results(run, given, "strict")


def test_what_needs_too_much_of_a_lane_runs_as_torchs_operations(asked: PretendedKernels) -> None:
    lines = [
        "one launch: 2 groups of 32 lanes, 2 barriers a step",
        "320 bytes of shared memory a group, 128 of them matrices that are read once a launch, "
        "32 registers and 0 bytes a lane",
        "64 bytes read and 64 written a step in the device's memory",
    ]
    assert described() == lines
    body, h, xs = lambda h, x: (torch.tanh(h + x), None), random(2, 4), random(3, 2, 4)
    text = tl.explain(body, h, xs).text.splitlines()
    begun = text.index("forward: one launch, 2 x 32 lanes")
    assert text[begun + 1] == "  one launch: 2 groups of 32 lanes, 0 barriers a step"
    needs = dict(asked.library.needs)
    for attribute, value, said in (
        (3, made.MOST_SPILLED + 1, "65 bytes a lane beside its registers, of at most 64"),
        (0, 16, "a group of 32 lanes, of which the device takes 16"),
    ):
        asked.library.needs[attribute] = value
        try:
            assert described() == [f"no kernel: {said}"]
            hold(*rnn(3, 2, 4))
        finally:
            asked.library.needs |= needs


@pytest.mark.parametrize("n", range(len(made.LIMITS)))
def test_what_is_much_for_one_group_goes_to_the_target_below(
    n: int, asked: PretendedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list(made.LIMITS)
    limits[n] = limits[n]._replace(most=-1)
    monkeypatch.setattr(made, "LIMITS", tuple(limits))
    (line,) = described()
    assert line.endswith(f"{limits[n].what}, of at most -1: {limits[n].why}")
    before = len(asked.library.launches)
    hold(*rnn(3, 2, 4))
    assert len(asked.library.launches) == before


def test_scratch_that_is_too_large_for_shared_memory_lies_in_the_devices(
    asked: PretendedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = made.text_for
    monkeypatch.setattr(made, "text_for", lambda kernels, facts: text(kernels, facts._replace(shared=0)))
    hold(*lstm(4, 3, 5))
    assert {launch.shared for launch in asked.library.launches[-4:]} == {0}


def test_kernels_are_for_who_asks(asked: PretendedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PtxTarget.variable)
    before = len(asked.library.launches)
    hold(*rnn(3, 2, 4))
    assert len(asked.library.launches) == before
    monkeypatch.setenv(PtxTarget.variable, "1")
    hold(*rnn(3, 2, 4))
    assert len(asked.library.launches) == before + 6


def test_a_singular_matrix_is_torchs_error_with_the_step(asked: PretendedKernels) -> None:
    xs = torch.eye(3).repeat(9, 2, 1, 1)
    xs[7, 1] = 0.0

    def loop(xs: Tensor, compile: Any) -> Any:
        return tl.scan(lambda c, x: (c + 0.1, torch.linalg.cholesky(x + 0 * c)), torch.zeros(()), xs, compile=compile)

    torch.testing.assert_close(loop(xs[:7], "strict"), loop(xs[:7], False))
    before, said = len(asked.library.launches), []
    for compile in ("strict", False):
        with pytest.raises(RuntimeError) as caught:
            loop(xs, compile)
        said.append((type(caught.value), str(caught.value), caught.value.__notes__))
    assert said[0] == said[1]
    assert len(asked.library.launches) == before + 1
