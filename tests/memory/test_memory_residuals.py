"""What is kept for backward, by line: bytes counted by hand, lines found by a mark at their end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop.memory import Residual, Residuals, Site, collector_off, saved, saved_residuals, track

FLOAT = 4
T, B, D = 6, 2, 8
SOURCE = Path(__file__).read_text().splitlines()


def line(mark: str) -> int:
    """The number of the line of this file that ends in the mark."""
    (found,) = [i for i, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    return found


def bytes_by_line(found: Residuals) -> dict[int, int]:
    assert all(site.file == __file__ for site in found.by_line())
    return {site.line: n for site, n in found.by_line().items()}


def check(fn: Callable[[], Tensor], by_hand: dict[str, int]) -> Residuals:
    """The bytes of each marked line are those counted by hand, and all bytes are those that `saved` finds."""
    found = saved_residuals(fn)
    assert bytes_by_line(found) == {line(mark): n for mark, n in by_hand.items()}
    assert found.bytes == saved(fn).bytes == sum(by_hand.values())
    return found


# -- five counts by hand


def test_a_recurrent_loop_keeps_its_states():
    W, xs = torch.randn(D, D, requires_grad=True), torch.randn(T, B, D)

    def fn() -> Tensor:
        h = torch.zeros(B, D)  # initial state
        loss = torch.zeros(())
        for x in xs:
            h = torch.tanh(x + h @ W)  # state
            loss = loss + h.sum()
        return loss

    # tanh keeps its output, mm the state before (for the gradient of W); xs is added, so nobody keeps it.
    found = check(fn, {"state": T * B * D * FLOAT, "initial state": B * D * FLOAT})
    (state, initial) = found.entries
    assert (state.operation, state.count, state.shape, state.dtype) == ("tanh", T, (B, D), "float32")
    assert (state.held_by, initial.operation) == ("autograd", "zeros")
    (weight,) = found.inputs
    assert (weight.operation, weight.shape, weight.bytes) == ("input", (D, D), D * D * FLOAT)
    assert weight.site.line == line("state")


def test_a_cat_cache_keeps_all_its_versions():
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        cache, loss = xs[:0], torch.zeros(())
        for x in xs.unbind(0):
            cache = torch.cat([cache, x[None]])  # growing
            loss = loss + cache.pow(2).sum()  # squares
        return loss

    found = check(fn, {"growing": B * D * FLOAT * T * (T + 1) // 2})
    assert {entry.saved_at.line for entry in found.entries if entry.saved_at} == {line("squares")}
    assert [entry.shape for entry in found.entries] == [(t, B, D) for t in range(T, 0, -1)]


def test_modules_count_at_the_line_that_calls_them():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner, self.outer = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)  # norm
            y = self.inner(y)  # inner
            return x + self.outer(nn.functional.gelu(y))  # outer

    block, x = Block(), torch.randn(B, D)
    by_hand = {
        "norm": B * D * FLOAT + 2 * B * FLOAT,  # the output for the Linear; mean and rstd
        "inner": B * 4 * D * FLOAT,  # what goes into gelu
        "outer": B * 4 * D * FLOAT,  # what comes out of it
    }
    found = check(lambda: block(x).sum(), by_hand)
    assert {entry.site.function.rpartition(".")[2] for entry in found.entries} == {"forward"}
    assert {entry.operation for entry in found.inputs} == {"input"}


def test_prefixes_of_an_array_count_its_buffers_once():
    xs = torch.randn(8, B, D, requires_grad=True)

    def fn() -> Tensor:
        array, loss = tl.TensorArray(capacity=8), torch.zeros(())
        for x in xs.unbind(0):
            array.append(x)  # append
            loss = loss + array[: len(array)].pow(2).sum()
        return loss

    found = check(fn, {"append": 8 * B * D * FLOAT})
    (buffer,) = found.entries
    assert (buffer.held_by, buffer.count) == ("array", 1)


def test_a_convolution_and_dropout():
    conv, x = nn.Conv1d(3, 5, 2), torch.randn(B, 3, 7)

    def fn() -> Tensor:
        y = conv(x)
        y = nn.functional.dropout(y, 0.5)  # dropout
        y = y.relu()  # relu
        return y.sum()

    by_hand = {"dropout": B * 5 * 6 * FLOAT, "relu": B * 5 * 6 * FLOAT}  # the scaled mask; relu's output
    assert check(fn, by_hand).by_line().keys() == {Site(__file__, line(m), *about(m)) for m in by_hand}


def about(mark: str) -> tuple[str, str]:
    """Function and code of a site in `test_a_convolution_and_dropout`."""
    return "test_a_convolution_and_dropout.<locals>.fn", SOURCE[line(mark) - 1].strip()


# -- which line, who holds it


def test_a_view_counts_where_its_storage_was_made():
    x = torch.randn(B, D, requires_grad=True)

    def fn() -> Tensor:
        whole = 2 * x  # whole
        part = whole[0]
        return part.sin().sum()  # sine

    (entry,) = check(fn, {"whole": B * D * FLOAT}).entries
    assert (entry.shape, entry.saved_at and entry.saved_at.line) == ((B, D), line("sine"))


def test_the_body_of_a_scan_has_its_own_lines():
    W, xs = torch.randn(D, D, requires_grad=True), torch.randn(T, B, D)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ W)  # step
        return h, h

    def fn(checkpoints: int | None = None) -> Tensor:
        return tl.scan(body, torch.zeros(B, D), xs, checkpoints=checkpoints)[1].sum()  # loop

    element = B * D * FLOAT
    check(fn, {"step": T * element, "loop": element})
    found = check(lambda: fn(3), {"step": 2 * element, "loop": element})  # three carries, the first one included
    assert [(e.held_by, e.saved_at) for e in found.entries] == [("array", None)] * 2
    assert found.inputs == ()


def test_what_no_hook_sees_is_other():
    x = torch.randn(D, requires_grad=True)
    kept = []

    class Hiding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.big = x.exp()  # hidden
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return 2 * grads[0]

    def fn() -> Tensor:
        kept.append(3 * x)  # listed
        return Hiding.apply(x).sum()

    found = saved_residuals(fn)
    assert bytes_by_line(found) == {line("hidden"): D * FLOAT, line("listed"): D * FLOAT}
    assert {(entry.held_by, entry.saved_at) for entry in found.entries} == {("other", None)}


def test_what_only_an_array_holds():
    x, array = torch.randn(D, requires_grad=True), tl.TensorArray()

    def fn() -> Tensor:
        array.append(2 * x)  # waiting
        return x.sum()

    value, token = saved_residuals(fn).entries
    assert (value.site.line, value.operation, value.bytes) == (line("waiting"), "mul", D * FLOAT)
    assert (value.held_by, token.held_by, token.bytes) == ("array", "array", FLOAT)


def test_what_was_saved_by_a_graph_that_is_gone_does_not_count():
    x, w = torch.randn(D, requires_grad=True), torch.randn(D)

    def fn() -> Tensor:
        (x * w).exp()
        return (2 * x).sum()

    assert saved_residuals(fn) == Residuals((), ())


def test_arguments_are_passed():
    x = torch.randn(D, requires_grad=True)
    found = saved_residuals(lambda a, *, b: (a * b).sum(), x[1:], b=x.detach()[1:])
    assert [entry.shape for entry in found.inputs] == [(D,)]  # one storage, of the whole of x


def test_source_that_has_no_file():
    names: dict[str, Any] = {}
    exec("def fn(x):\n    y = 2 * x\n    return y.tanh().sum()\n", names)
    (entry,) = saved_residuals(names["fn"], torch.randn(D, requires_grad=True)).entries
    assert (str(entry.site), entry.site.code, entry.site.function) == ("<string>:3", "", "fn")


def test_paths_are_short_below_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    site = Site(str(tmp_path / "models" / "rnn.py"), 12, "f", "")
    assert str(site) == f"{tmp_path / 'models' / 'rnn.py'}:12"
    monkeypatch.chdir(tmp_path)
    assert str(site) == f"{Path('models') / 'rnn.py'}:12"


# -- as text and data


def test_a_table_has_one_row_for_what_differs_in_sizes_alone():
    site, at = Site("<stdin>", 3, "f", "K = torch.cat([K, x])"), Site("<stdin>", 4, "f", "(K ** 2).sum()")
    entries = tuple(Residual(site, at, "cat", (t, 8), "float32", t * 32, 1, "autograd") for t in (2, 1))
    weight = Residual(at, at, "input", (8, 8), "float32", 256, 1, "autograd")
    found = Residuals((*entries, Residual(site, None, "mul", (), "int64", 8, 1, "other")), (weight,))
    assert [" ".join(row.split()) for row in str(found).splitlines()] == [
        "104 bytes in 3 storages are kept for backward; besides 256 of inputs",
        "bytes count made at operation shape dtype saved at held by code",
        "96 2 <stdin>:3 cat 1..2x8 float32 <stdin>:4 autograd K = torch.cat([K, x])",
        "8 1 <stdin>:3 mul () int64 - other K = torch.cat([K, x])",
        "inputs:",
        "bytes count made at operation shape dtype saved at held by code",
        "256 1 <stdin>:4 input 8x8 float32 <stdin>:4 autograd (K ** 2).sum()",
    ]
    data = json.loads(json.dumps(found.as_dict()))
    assert data["bytes"] == 104
    assert data["entries"][0]["shape"] == [2, 8]
    where = {"file": "<stdin>", "line": 3, "function": "f", "code": site.code}
    assert data["entries"][0]["site"] == {**where, "module": "", "library": None}
    assert data["entries"][2]["saved_at"] is None


def test_nothing_saved():
    found = saved_residuals(lambda: torch.zeros(3).sum())
    assert found == Residuals((), ())
    assert str(found) == "0 bytes in 0 storages are kept for backward; besides 0 of inputs"


# -- other machinery of PyTorch's


def of_kind(kind: str, x: Tensor) -> Callable[[], Tensor]:
    def body(x: Tensor) -> Tensor:
        return x.sin().tanh().exp().sum()

    def offloaded() -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return body(2 * x)

    return {
        "checkpoint": lambda: checkpoint(body, 2 * x, use_reentrant=False),  # type: ignore[return-value]
        "reentrant checkpoint": lambda: checkpoint(body, 2 * x, use_reentrant=True),  # type: ignore[return-value]
        "save_on_cpu": offloaded,
        "no_grad": torch.no_grad()(lambda: body(2 * x)),
        "vmap": lambda: torch.vmap(lambda row: row.sin())(x.view(2, -1)).sum(),
        "compiled": torch.compile(lambda: body(2 * x), backend="aot_eager"),
    }[kind]


@pytest.mark.parametrize("kind", ["checkpoint", "reentrant checkpoint", "save_on_cpu", "no_grad", "vmap", "compiled"])
def test_bytes_are_those_that_saved_finds(kind: str):
    fn = of_kind(kind, torch.randn(D, requires_grad=True))
    fn()
    found = saved_residuals(fn)
    assert found.bytes == saved(fn).bytes
    assert all(site.file == __file__ for site in found.by_line())


def test_nothing_is_held_afterwards():
    x = torch.randn(D, requires_grad=True)
    with collector_off(), track() as tracker:
        saved_residuals(lambda: x.tanh().exp().sum())
        assert tracker.live == 0


def test_func_grad_is_refused():
    with pytest.raises(RuntimeError, match=r"saved_residuals: fn uses torch.func.*memory.growth and memory.track"):
        saved_residuals(lambda: torch.func.grad(lambda x: x.sin().sum())(torch.ones(3)))


def test_another_error_comes_through():
    with pytest.raises(ZeroDivisionError):
        saved_residuals(lambda: 1 // 0)


def test_a_result_in_place_of_a_function_is_refused():
    with pytest.raises(TypeError, match=r"saved_residuals: fn must be a function; got Tensor. Pass f, not f\(x\)"):
        saved_residuals(torch.ones(3))  # type: ignore[arg-type]
