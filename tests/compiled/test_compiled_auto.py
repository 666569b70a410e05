"""`compile="auto"`: eager until the work done shows that compiling pays; by counts, silently, the same each time."""

import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.loop.compiled import auto


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    auto._known.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    auto._known.clear()


def work() -> auto.Work:
    (found,) = auto._known.values()
    return found


W = torch.eye(4, requires_grad=True)


def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h @ W + x)
    return h, h * 2


def call(length: int, **how: Any) -> tuple[Tensor, Tensor]:
    xs = torch.linspace(-1, 1, length * 8).view(length, 2, 4)
    return tl.scan(body, torch.zeros(2, 4), xs, **how)


def test_it_is_eager_until_the_work_pays_and_then_compiled() -> None:
    states = []
    expected = call(50)
    while len(states) < 60:
        found = call(50, compile="auto")
        torch.testing.assert_close(found, expected)
        states.append(work().state)
    operations = work().operations
    assert operations in (4, 5, 6)
    assert states[0] == "eager"
    assert states[-1] == "compiled"
    assert states == sorted(states, key=("eager", "compiled").index)
    # From the call on that would make the eager work larger than what a plan costs.
    eager = states.count("eager")
    assert eager > 1  # the first call guesses
    bound = auto.PLAN + operations * auto.PLANNED
    assert work().done < bound <= work().done + auto.cost_of(50, operations)
    (grad,) = torch.autograd.grad(call(50, compile="auto")[1].sum(), W)
    torch.testing.assert_close(grad, torch.autograd.grad(expected[1].sum(), W)[0])


def test_a_long_loop_is_compiled_at_once_and_lengths_are_counted_together() -> None:
    call(20_000, compile="auto")
    assert work().state == "compiled"
    auto._known.clear()
    for length in range(40, 140):
        call(length, compile="auto")
    assert work().state == "compiled"


def test_without_gradients_steps_cost_less_and_are_counted_apart() -> None:
    with torch.no_grad():
        call(50, compile="auto")
    call(50, compile="auto")
    less, more = (found.done for found in auto._known.values())
    assert 0 < less < more


def test_a_call_without_a_step_says_nothing() -> None:
    call(20_000, compile="auto")
    assert call(0, compile="auto")[1].shape == (0, 2, 4)
    assert work().state == "compiled"
    call(20_000, compile="auto")
    assert work().state == "compiled"


def test_a_step_that_fails_is_not_counted() -> None:
    def fails(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        raise KeyError(h + x)

    with pytest.raises(KeyError):
        tl.scan(fails, torch.zeros(4), torch.ones(3, 4), compile="auto")
    assert work().operations is None


def test_what_cannot_be_compiled_stays_eager_without_a_word() -> None:
    def reads(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h + torch.tensor(float(x.sum()) ** 2), x.nonzero().sum()

    xs = torch.arange(40_000.0).view(-1, 2)
    expected = tl.scan(reads, torch.zeros(()), xs)
    for _ in range(3):
        torch.testing.assert_close(tl.scan(reads, torch.zeros(()), xs, compile="auto"), expected)
    assert work().state == "refused"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tl.scan(reads, torch.zeros(()), xs, compile=True)
    assert [x.category for x in said] == [tl.loop.NotCompiledWarning]


def test_an_error_of_the_body_is_the_eager_loops() -> None:
    def fails(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h @ x, x

    with pytest.raises(RuntimeError) as eager:
        tl.scan(fails, torch.zeros(2, 3), torch.ones(200_000, 2, 4))
    with pytest.raises(RuntimeError) as automatic:
        tl.scan(fails, torch.zeros(2, 3), torch.ones(200_000, 2, 4), compile="auto")
    assert str(automatic.value) == str(eager.value)


def test_deterministic_algorithms_keep_it_eager() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        call(20_000, compile="auto")
        assert work().state == "eager"
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_loops_and_checkpoints() -> None:
    for _ in range(3):
        k, h = tl.while_loop(
            lambda c: c[0] < 9000, lambda c: (c[0] + 1, c[1] + 1), (torch.tensor(0), torch.ones(2)), compile="auto"
        )
        assert (int(k), float(h[0])) == (9000, 9001)
    assert {x.state for x in auto._known.values()} == {"compiled"}
    auto._known.clear()
    assert tl.fori_loop(0, 200_000, lambda i, c: c + 1, torch.zeros(()), compile="auto") == 200_000
    torch.testing.assert_close(tl.map(lambda x: x * 2, torch.arange(5), compile="auto"), torch.arange(5) * 2)
    auto._known.clear()
    expected = torch.autograd.grad(call(300)[1].sum(), W)
    for _ in range(12):
        found = torch.autograd.grad(call(300, compile="auto", checkpoints=5)[1].sum(), W)
        torch.testing.assert_close(found, expected)
    assert work().state == "compiled"


@torch.jit.script
def scripted(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + torch.sin(y)


def test_counting_is_not_seen_by_who_watches_steps() -> None:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = scripted(h, x * W[0])
        return h * 0.5, h

    def gradient(**how: Any) -> Tensor:
        ys = tl.scan(step, torch.zeros(4), torch.linspace(-1, 1, 24).view(6, 4), **how)[1]
        return torch.autograd.grad(ys.sum(), W)[0]

    for checkpoints in (2, tl.Checkpoints(budget=4000), None):
        found = gradient(compile="auto", checkpoints=checkpoints)
        torch.testing.assert_close(found, gradient(checkpoints=checkpoints))
    assert all(found.operations for found in auto._known.values())
    assert len(auto._known) == 2


def test_a_default_for_loops_that_are_not_told() -> None:
    with tl.set_default_compile("auto"):
        call(20_000)
        assert work().state == "compiled"
        auto._known.clear()
        call(20_000, compile=False)
        assert not auto._known
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(auto.compile))
        thread.start()
        thread.join()
        assert seen == ["auto"]
    assert auto.compile is False
    call(20)
    assert not auto._known
    before = tl.set_default_compile("strict")
    try:
        with pytest.raises(RuntimeError, match="not compiled"):
            tl.scan(lambda h, x: (h, x.nonzero()), torch.zeros(()), torch.ones(3, 2))
    finally:
        before.__exit__()
    assert auto.compile is False


def test_loops_within_other_functions_are_as_they_were() -> None:
    def step(state: tuple[()], tokens: Tensor) -> tuple[tuple[()], Tensor]:
        return state, torch.linspace(-1, 1, 25).view(5, 5).sin()[tokens].log_softmax(-1)

    def run() -> Any:
        found = tl.beam_search(step, (), batch_size=2, beam_size=2, bos_id=0, eos_id=4, max_steps=3)
        root = tl.fixed_point(torch.cos, torch.zeros(3))
        last, _ = tl.compat.torch_scan(lambda c, x: (c + x, c.clone()), torch.tensor(0), torch.arange(4))
        grown = tl.compat.torch_while_loop(lambda i: i < 3, lambda i: (i + 1,), (0,))
        sums = tl.associative_scan(torch.add, torch.arange(5.0))
        return found.scores, root, grown, sums, last

    expected = run()
    for how in ("strict", True, "auto"):
        with tl.set_default_compile(how):  # pyright: ignore[reportArgumentType]
            torch.testing.assert_close(run(), expected)
    assert not auto._known


def test_a_default_can_be_set_again() -> None:
    told = tl.set_default_compile("auto")
    for _ in range(2):
        with told:
            assert auto.compile == "auto"
        assert auto.compile is False


def test_bad_input() -> None:
    for wrong in ("always", 1, "Auto"):
        with pytest.raises(TypeError, match=r'compile must be True, False, "auto" or "strict", got'):
            call(3, compile=wrong)
    with pytest.raises(
        TypeError, match=r'set_default_compile: compile must be True, False, "auto" or "strict", got None'
    ):
        tl.set_default_compile(None)
    with pytest.raises(TypeError, match=r"set_default_compile: compile must be .*, got str"):
        tl.set_default_compile("sometimes")  # pyright: ignore[reportArgumentType]
    assert auto.compile is False


PROGRAM = """
import torch
import tensorloop as tl
torch.manual_seed(0)
torch.set_num_threads(1)
cell = torch.nn.GRUCell(8, 8)
optimizer = torch.optim.SGD(cell.parameters(), 0.1)
for _ in range(40):
    h, _ = tl.scan(lambda h, x: (cell(x, h), None), torch.zeros(4, 8), torch.randn(100, 4, 8), compile="auto")
    optimizer.zero_grad()
    h.square().sum().backward()
    optimizer.step()
from tensorloop.loop.compiled import auto
print([w.state for w in auto._known.values()], [p.detach().view(torch.int32).sum().item() for p in cell.parameters()])
"""


def test_a_program_gives_the_same_bits_at_each_run() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True) for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.startswith("['compiled']")
