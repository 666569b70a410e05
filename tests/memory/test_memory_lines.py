"""`growth` by line: exponents that are known, what to write instead, and functions that cannot be measured.

One list of programs whose growth is known, however long: tests of exponents, of advice and of reports draw from it.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop.memory import Growth, LineGrowth, Site, growth, saved_bytes

FLOAT = 4
B, D = 2, 4
TS = (64, 128, 256, 512)
SQUARES = (64, 144, 256, 400)  # numbers with an exact root
SOURCE = Path(__file__).read_text().splitlines()


def at(found: Growth, mark: str) -> LineGrowth:
    """The growth of the line of this file that ends in the mark."""
    (number,) = [i for i, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    (line,) = [line for line in found.lines if (line.site.file, line.site.line) == (__file__, number)]
    return line


# -- exponents


def mixed(T: int) -> Callable[[], Tensor]:
    """Lines that keep bytes ~ 1, T^0.5, T, T^1.5, T^2, and a constant beside T and beside T^2."""
    small, wide = torch.randn(D, requires_grad=True), torch.randn(500, requires_grad=True)
    root, long = (torch.randn(n, requires_grad=True) for n in (math.isqrt(T), T))

    def fn() -> Tensor:
        found = [small.tanh()]  # constant
        found += [root.tanh()]  # root
        for t in range(T):
            found += [small.tanh()]  # linear
            found += [root.tanh()]  # power 1.5
            found += [long.tanh()]  # square
            found += [small.sin().tanh() if t else wide.tanh()]  # constant beside linear
            found += [long[: t + 1].tanh() if t else wide.tanh()]  # constant beside square
        return torch.cat(found).sum()

    return fn


def test_exponents_of_saved_bytes():
    found = growth(mixed, SQUARES)
    powers = {
        "constant": 0,
        "root": 0.5,
        "linear": 1,
        "power 1.5": 1.5,
        "square": 2,
        "constant beside linear": 1,
        "constant beside square": 2,
    }
    for mark, power in powers.items():
        line = at(found, mark)
        assert (mark, line.exponent) == (mark, pytest.approx(power, abs=0.05))
        assert (mark, line.made_exponent) == (mark, pytest.approx(power, abs=0.05))
    last = SQUARES[-1]
    assert at(found, "square").saved == tuple(T * T * FLOAT for T in SQUARES)
    assert (
        at(found, "constant beside linear").saved[-1] == (500 + (last - 1) * D) * FLOAT
    )  # the input of tanh is not kept
    assert sum(line.saved[-1] for line in found.lines) == found.bytes[-1]
    assert sum(line.share for line in found.lines) == pytest.approx(1)


def cat_cache(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        cache, loss = xs[:0], torch.zeros(())
        for x in xs.unbind(0):
            cache = torch.cat([cache, x[None]])  # cat
            loss = loss + cache.pow(2).sum()  # squares
        return loss

    return fn


def test_the_whole_and_the_guilty_line_first():
    found = growth(cat_cache, TS)
    guilty = found.lines[0]
    assert guilty == at(found, "cat")
    assert guilty.saved == found.bytes == tuple(B * D * FLOAT * T * (T + 1) // 2 for T in TS)
    assert (guilty.exponent, found.marginal) == (pytest.approx(2, abs=0.05), pytest.approx(2, abs=0.05))
    assert (found.peak_exponent, found.peak_marginal) == (pytest.approx(2, abs=0.1), pytest.approx(2, abs=0.05))
    assert all(peak >= n for peak, n in zip(found.peaks, found.bytes, strict=True))
    assert guilty.share == 1
    assert len(found.seconds) == len(TS)
    text = str(found).splitlines()
    assert text[0].startswith(str(guilty.site))
    assert "16,809,984" not in text[1]
    assert text[1].strip().startswith(f"{guilty.saved[-1]:,} bytes saved for backward, T^2.00")
    assert text[2].strip() == guilty.advice


def test_the_peak_is_that_of_a_step_that_nobody_watches():
    """Forward keeps y and 2 y; backward adds the gradients of y in place, as it does without a mode."""
    x = torch.randn(1000, requires_grad=True)
    size = 1000 * FLOAT

    def make(T: int) -> Callable[[], Tensor]:
        def fn() -> Tensor:
            y = x.sin()
            return torch.stack([(y * t).sum() for t in range(T)]).sum()

        return fn

    found = growth(make, (4, 8, 16))
    assert found.bytes == (0, 0, 0)
    assert all(3 * size <= peak < 3 * size + 1000 for peak in found.peaks)


def test_gradients_go_to_nobody():
    x = torch.randn(D, requires_grad=True)
    x.grad = torch.ones(D)
    growth(lambda T: lambda: sum((x.sin().sum() for _ in range(T)), torch.zeros(())), (2, 4))
    assert torch.equal(x.grad, torch.ones(D))


def test_only_bytes_are_measured_where_measure_is_given():
    found = growth(cat_cache, (8, 16), measure=saved_bytes)
    whole = growth(cat_cache, (8, 16))
    assert found == whole  # what stands beside is not compared
    assert (found.lines, found.peaks, found.seconds, found.failed) == ((), (), (), None)


# -- what to write instead


def where_on_a_buffer(T: int) -> Callable[[], Tensor]:
    xs, slots = torch.randn(T, B, D, requires_grad=True), torch.arange(T)[:, None, None]

    def fn() -> Tensor:
        buffer, loss = torch.zeros(T, B, D), torch.zeros(())
        for t, x in enumerate(xs.unbind(0)):
            buffer = torch.where(slots == t, x, buffer)  # where
            loss = loss + buffer.pow(2).sum()
        return loss

    return fn


def stacked_in_the_loop(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        kept, loss = [], torch.zeros(())
        for x in xs.unbind(0):
            kept.append(x)
            loss = loss + torch.stack(kept).pow(2).sum()  # stack
        return loss

    return fn


def read_by_index(T: int) -> Callable[[], Tensor]:
    xs, W = torch.randn(T, B, D, requires_grad=True), torch.randn(D, D)

    def fn() -> Tensor:
        h = torch.zeros(B, D)
        for t in range(T):
            x = xs[t]  # read
            h = torch.tanh(x + h @ W)
        return h.sum()

    return fn


def assigned_in_place(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        ys = torch.zeros(T, B, D)
        for t, x in enumerate(xs.unbind(0)):
            ys[t] = x.sin()  # assigned
        return ys.sum()

    return fn


def cloned_each_step(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        buffer, kept = torch.zeros(T, B, D), []
        with torch.no_grad():
            for t, x in enumerate(xs.unbind(0)):
                buffer[t] = x
                kept.append(buffer.clone())  # clone
        return sum(((version * xs).sum() for version in kept), torch.zeros(()))

    return fn


def reordered_history(T: int) -> Callable[[], Tensor]:
    xs, W = torch.randn(T, B, D, requires_grad=True), torch.randn(D, requires_grad=True)

    def fn() -> Tensor:
        history, loss = torch.zeros(T, B, D), torch.zeros(())
        for _ in xs.unbind(0):
            history = history.index_select(1, torch.tensor([1, 0]))  # reordered
            loss = loss + (history * W).sum()
        return loss

    return fn


def written_out_of_place(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        buffer, loss = torch.zeros(T, B, D), torch.zeros(())
        for t, x in enumerate(xs.unbind(0)):
            buffer = buffer.index_copy(0, torch.tensor([t]), x[None])  # written
            loss = loss + buffer.pow(2).sum()
        return loss

    return fn


def weights_of_attention(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        array, loss = tl.TensorArray(capacity=T), torch.zeros(())
        for x in xs.unbind(0):
            array.append(x)
            past = array[: len(array)]
            weights = torch.softmax((past * x).sum(-1), 0)  # softmax
            loss = loss + (weights[..., None] * past).sum(0).pow(2).sum()
        return loss

    return fn


def overwritten_and_read_in_full(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        array, loss = tl.TensorArray.unstack(torch.zeros(T, B, D)), torch.zeros(())
        for t, x in enumerate(xs.unbind(0)):
            array[t] = x.sin()  # overwritten
            loss = loss + array.stack().pow(2).sum()
        return loss

    return fn


def features_joined(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        array, loss = tl.TensorArray(capacity=T), torch.zeros(())
        for x in xs.unbind(0):
            array.append(x)
            past = array[: len(array)]
            both = torch.cat([past, past], -1)  # joined
            loss = loss + both.pow(2).sum()
        return loss

    return fn


ADVICE = {
    "cat": (cat_cache, "tl.TensorArray: array.append"),
    "where": (where_on_a_buffer, "array.write_rows"),
    "stack": (stacked_in_the_loop, "stack once, after the loop"),
    "read": (read_by_index, "tl.TensorArray.unstack(xs)"),
    "assigned": (assigned_in_place, "array.write(t, x)"),
    "clone": (cloned_each_step, "no copy is needed"),
    "reordered": (reordered_history, "tl.beam_search"),
    "written": (written_out_of_place, "array.write(i, x)"),
    "softmax": (weights_of_attention, "tl.attention(q, keys, values)"),
    "joined": (features_joined, "Each step keeps what it computes on a whole sequence"),
    "overwritten": (overwritten_and_read_in_full, "checkpoints=K"),
}


@pytest.mark.parametrize("mark", ADVICE)
def test_the_guilty_line_and_what_to_write_instead(mark: str):
    make, advice = ADVICE[mark]
    found = growth(make, (16, 32, 64))
    line = at(found, mark)
    assert line.superlinear
    assert max(line.exponent, line.peak_exponent, line.made_exponent) == pytest.approx(2, abs=0.1)
    assert advice in (line.advice or "")
    assert line == found.lines[0]
    assert str(line.advice) in str(found)


def test_a_loop_that_grows_with_T_alone_has_no_guilty_line():
    xs = torch.randn(64, B, D, requires_grad=True)

    def make(T: int) -> Callable[[], Tensor]:
        def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(x + h)
            return h, h

        return lambda: tl.scan(body, torch.zeros(B, D), xs[:T])[1].sum()

    found = growth(make, (16, 32, 64))
    assert not any(line.superlinear or line.advice for line in found.lines)
    assert str(found).startswith("       T            bytes")


def test_what_is_computed_on_all_earlier_steps():
    def make(T: int) -> Callable[[], Tensor]:
        x = torch.randn(T, requires_grad=True)
        return lambda: sum((x[: t + 1].tanh().sum() for t in range(T)), torch.zeros(()))  # kept

    line = at(growth(make, (16, 32, 64)), "kept")
    assert line.exponent == pytest.approx(2, abs=0.1)
    assert line.advice is not None


def test_a_growth_is_data():
    found = growth(cat_cache, (8, 16))
    data = json.loads(json.dumps(found.as_dict()))
    assert data["Ts"] == [8, 16]
    assert data["lines"][0]["saved"] == list(found.lines[0].saved)
    assert data["lines"][0]["site"]["code"] == found.lines[0].site.code
    assert data["failed"] is None


# -- functions that cannot be measured


def failing(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, requires_grad=True)

    def fn() -> Tensor:
        if T > 32:
            raise MemoryError("out of slots")  # failed
        return xs.tanh().sum()

    return fn


def test_a_failure_keeps_what_smaller_sizes_gave():
    found = growth(failing, (8, 16, 32, 64, 128))
    assert (found.Ts, found.bytes) == ((8, 16, 32), (32, 64, 128))
    assert found.exponent == pytest.approx(1)
    assert found.failed == (64, "MemoryError: out of slots")
    assert found.failed_at[-1] == Site(
        __file__, found.failed_at[-1].line, "fn", 'raise MemoryError("out of slots")  # failed'
    )
    assert f"failed at T=64: MemoryError: out of slots\n    {found.failed_at[0]}" in str(found)
    assert found.as_dict()["failed"] == {"T": 64, "error": "MemoryError: out of slots"}


def test_one_size_alone_has_no_exponent():
    found = growth(failing, (32, 64))
    assert found.Ts == (32,)
    assert math.isnan(found.exponent)
    assert found.as_dict()["exponent"] is None
    assert "failed at T=64" in str(found)


def test_a_failure_at_the_first_size_comes_through():
    with pytest.raises(MemoryError):
        growth(failing, (64, 128))


def test_nothing_saved_and_no_gradient():
    found = growth(lambda T: lambda: torch.zeros(T).sum(), (4, 8, 16))
    assert (found.bytes, found.exponent, found.peak_exponent) == ((0, 0, 0), 0, pytest.approx(1, abs=0.3))
    ungraded = growth(lambda T: torch.no_grad()(lambda: torch.ones(T, requires_grad=True).sin().sum()), (4, 8))
    assert ungraded.bytes == (0, 0)


def test_no_bytes_at_small_sizes_alone():
    x = torch.randn(D, requires_grad=True)
    found = growth(lambda T: lambda: sum((x.tanh().sum() for _ in range(T - 4)), x.sum()), (4, 8, 16))
    assert found.bytes == (0, 4 * D * FLOAT, 12 * D * FLOAT)
    assert found.marginal == pytest.approx(1, abs=0.05)


def test_torch_func_is_measured():
    x = torch.randn(D, requires_grad=True)

    def make(T: int) -> Callable[[], Tensor]:
        return lambda: sum((torch.func.grad(lambda v: v.sin().sum())(x).sum() for _ in range(T)), torch.zeros(()))

    found = growth(make, (16, 32, 64))
    (line,) = [line for line in found.lines if line.site.file == __file__]
    assert line.made_exponent == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("result", "kind", "message"),
    [
        (None, TypeError, r"growth: make_fn\(4\)\(\) must return a loss, a tensor of one element; got NoneType"),
        ([torch.ones(1)], TypeError, r"got list. Without backward: measure=saved_bytes or measure=peak"),
        (torch.ones(3, requires_grad=True) * 2, ValueError, r"got shape \(3,\). Return its sum, or"),
    ],
)
def test_a_result_that_is_no_loss(result: object, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        growth(lambda T: lambda: result, (4, 8))


def test_a_graph_that_is_gone_is_pytorch_s_error():
    def step() -> Tensor:
        loss = torch.ones(3, requires_grad=True).sin().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        growth(lambda T: step, (4, 8))


def test_a_reentrant_checkpoint_is_refused_by_torch_and_the_other_measured():
    x = torch.randn(D, requires_grad=True)

    def make(reentrant: bool) -> Callable[[int], Callable[[], Tensor]]:
        def loss(T: int) -> Tensor:
            found = torch.zeros(())
            for t in range(T):
                found = found + checkpoint(lambda y: y.sin().tanh().sum(), x * t, use_reentrant=reentrant)
            return found

        return lambda T: lambda: loss(T)

    make(False)(1)().backward()  # torch's checkpoint keeps a number of its first call in a process
    assert growth(make(False), (4, 8)).bytes == (4 * D * FLOAT, 8 * D * FLOAT)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        growth(make(True), (4, 8))


@pytest.mark.parametrize(
    ("make_fn", "Ts", "kind", "message"),
    [
        (3, (4, 8), TypeError, r"growth: make_fn must be a function of T that gives a function; got int"),
        (lambda T: torch.ones(()), (4, 8), TypeError, r"make_fn\(4\) must give a function.*got Tensor. Pass lambda T:"),
        (cat_cache, (4, 8.5), TypeError, r"growth: Ts must be ints.*got \(4, 8.5\)"),
        (cat_cache, (8, 4), ValueError, r"growth: Ts must be two or more rising sizes.*got \(8, 4\)"),
        (cat_cache, (4,), ValueError, r"growth: Ts must be two or more rising sizes"),
    ],
)
def test_bad_arguments(
    make_fn: Callable[..., Callable[[], Tensor]], Ts: tuple[int, ...], kind: type[Exception], message: str
):
    with pytest.raises(kind, match=message):
        growth(make_fn, Ts)


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]):
    growth(cat_cache, (4, 8), progress=True)
    assert "growth: 100%" in capsys.readouterr().err


def test_progress_moves_within_a_size(monkeypatch: pytest.MonkeyPatch):
    """Five passes a size, each as many steps as T: the end can be foretold, and the largest size moves too."""
    moves: list[tuple[str, int]] = []

    class Bar:
        def __init__(self, total: int, desc: str, **_: object) -> None:
            self.total, self.desc, self.done = total, desc, 0
            bars.append(self)

        def set_description(self, desc: str, refresh: bool = True) -> None:
            self.desc = desc if refresh else self.desc

        def update(self, steps: int) -> None:
            self.done += steps
            moves.append((self.desc, steps))

        def close(self) -> None:
            pass

    bars: list[Bar] = []
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    growth(cat_cache, (4, 8), progress=True)
    (bar,) = bars
    assert bar.done == bar.total == 5 * (4 + 8)
    within = [what for what, steps in moves if "T=8" in what and steps == 8]
    assert within[:3] == ["growth: T=8, forward", "growth: T=8, backward", "growth: T=8, timed run 1"]
    growth(cat_cache, (4, 8), measure=saved_bytes, progress=True)
    assert bars[1].done == bars[1].total == 4 + 8
    growth(lambda T: lambda: torch.zeros(T).sum(), (4, 8), progress=True)
    assert bars[2].done == bars[2].total  # no backward to wait for
