"""Compiled loops under `torch.compile` and `torch.export`: one operation of the graph, with a fake and a gradient."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.in_graphs.operators import LOOP
from tensorloop.loop.compiled.in_graphs.step_text import from_text
from tests.support.devices import HERE

turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator(HERE).manual_seed(0)))[0]


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(HERE).manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


class Net(nn.Module):
    """A model whose loop captures its weights, a buffer and a number."""

    def __init__(self, compiled: bool = True, k: int | None = None) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4, dtype=torch.float64)
        self.scale = nn.Parameter(randn(4, seed=1).detach())
        self.register_buffer("turn", turn.contiguous())
        self.compiled, self.k = compiled, k

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        """(T, B, 3) -> the mean of a turned state, and all of them."""

        def body(state: Any, x: Tensor) -> Any:
            h, c = self.cell(x, state)
            return (h @ self.turn * self.scale, c + torch.tensor(0.5, dtype=c.dtype)), {"h": h, "none": None}

        zeros = xs.new_zeros(xs.shape[1], 4)
        (h, _), ys = tl.scan(body, (zeros, zeros), xs.sin(), reverse=True, compile=self.compiled, checkpoints=self.k)
        return h.mean(), ys["h"]


def results(net: Callable[..., Any], xs: Tensor, weights: Iterable[Tensor]) -> list[Any]:
    out, ys = net(xs)
    return [out, ys, *torch.autograd.grad(out + ys.cos().sum(), [xs, *weights])]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.extended("[2]")
def test_a_model_trains_in_one_graph(k: int | None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(k=k)
    weights = list(net.parameters())
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    for t in (5, 7, 3):  # the second call makes the length a symbol
        xs = randn(t, 2, 3, seed=t)
        with torch.no_grad():
            weights[0].mul_(1.1)
        plain = Net(compiled=False)
        plain.load_state_dict(net.state_dict())
        close(results(compiled, xs, weights), results(plain, xs, plain.parameters()))
    assert backend.frame_count == 2


def many_loops(x: Tensor, w: Tensor, b: Tensor, compiled: bool) -> Tensor:
    """Loops of many kinds; x is (7, 3, 4)."""
    ids = torch.tensor([[0], [2], [1], [1], [0], [3], [2]])
    transposed = w.t()
    (h, n), ys = tl.scan(
        lambda c, row: ((c[0] @ transposed + w[row], c[1] + row.sum()), (c[0].sum(-1), c[1])),
        (x[0], torch.zeros((), dtype=torch.int64)),
        ids,
        compile=compiled,
    )
    total = h.sin().sum() + (ys[0].sin() * ys[1][:, None]).sum() + n

    def in_place(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        z = h @ turn
        z += row
        z[:, 0] = b[0]
        return z, z

    _, ys = tl.scan(in_place, x[0], x.transpose(0, 1), dim=1, compile=compiled)
    ys.mul_(2)  # it is the caller's
    total = total + ys.cos().sum() + ys.shape[0]
    (h, same), first = tl.scan(
        lambda c, _: ((c[0] @ turn * c[1].sin(), c[1]), c[0]), (x[1], b), length=4, compile=compiled
    )
    total = total + (h * same).sum() + first.sin().sum()
    total = total + tl.fori_loop(2, 7, lambda i, h: (h @ turn) * i * 0.3 + b, x[2], compile=compiled).sin().sum()
    return total + tl.map(lambda r: (r[0] @ w).sin() + r[1] * b, (x, x * 2), compile=compiled).cos().sum()


def test_loops_of_many_kinds_in_one_graph() -> None:
    torch._dynamo.reset()
    given = randn(7, 3, 4), randn(4, 4, seed=1), randn(4, seed=2)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, _)

    out = torch.compile(lambda x, w, b: many_loops(x, w, b, True), fullgraph=True, backend=backend)(*given)
    assert sum(n.target is LOOP for n in graphs[0].graph.nodes) == 5
    expected = many_loops(*given, compiled=False)
    close(out, expected)
    close(torch.autograd.grad(out, given), torch.autograd.grad(expected, given))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 3


def dropped(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return nn.functional.dropout(h @ turn + x), h


def custom(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return Twice.apply(h) @ turn + x, h  # pyright: ignore[reportOperatorIssue]


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # by dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by dynamo too, which looks at every input
@pytest.mark.parametrize(
    ("body", "reason"),
    [(dropped, None), (custom, None)],
    ids=["dropout", "custom Function"],
)
def test_what_is_not_compiled_breaks_the_graph(body: Callable[..., Any], reason: str | None) -> None:
    """Outside of the graph a loop may be compiled all the same: then there is no `reason`."""
    torch._dynamo.reset()
    xs = randn(3, 2, 4)

    def loss(xs: Tensor, compiled: bool) -> Tensor:
        return tl.scan(body, torch.zeros_like(xs[0]), xs * 2, compile=compiled)[1].sin().sum()

    torch.manual_seed(0)
    with contextlib.nullcontext() if reason is None else pytest.warns(NotCompiledWarning, match=reason):
        out = torch.compile(loss, backend="aot_eager")(xs, True)
    torch.manual_seed(0)
    expected = loss(xs, False)
    close([out, *torch.autograd.grad(out, xs)], [expected, *torch.autograd.grad(expected, xs)])
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=reason):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(xs, True)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.extended("True")
def test_an_exported_program_runs_elsewhere(strict: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, xs = Net(), randn(5, 2, 3)
    program = export(net, (xs.detach(),), dynamic_shapes={"xs": {0: Dim("T")}}, strict=strict)
    assert [n.target for n in program.graph.nodes].count(LOOP) == 1
    again = program.module()
    plain = Net(compiled=False)
    plain.load_state_dict(net.state_dict())
    for t in (1, 8):
        xs = randn(t, 2, 3, seed=t)
        close(results(again, xs, again.parameters()), results(plain, xs, plain.parameters()))
    slope = [torch.autograd.grad(f(xs)[1].sin().sum(), xs, create_graph=True)[0] for f in (again, plain)]
    close(*(torch.autograd.grad(g.cos().sum(), xs)[0] for g in slope))
    if strict:
        torch.export.save(program, tmp_path / "net.pt2")
        torch.save((xs.detach(), plain(xs)[1].detach()), tmp_path / "given.pt")
        code = (
            "import sys, torch; from tensorloop import scan\n"
            "net = torch.export.load(sys.argv[1] + '/net.pt2').module()\n"
            "xs, ys = torch.load(sys.argv[1] + '/given.pt')\n"
            "torch.testing.assert_close(net(xs)[1], ys)\n"
        )
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True)


class Stops(nn.Module):
    """A loop that does not stand in a graph."""

    def forward(self, xs: Tensor, compiled: bool = True) -> Tensor:
        """(B, 4) -> (B, 4), turned three times."""
        return tl.fori_loop(0, 3, lambda i, h: (h @ turn) * (i / 3 + 1), xs, compile=compiled)


def test_export_unrolls_what_is_not_compiled() -> None:
    xs = randn(2, 4).detach()
    with pytest.warns(NotCompiledWarning, match="makes a float of i"):
        program = export(Stops(), (xs,))
    assert LOOP not in [n.target for n in program.graph.nodes]
    close(program.module()(xs), Stops()(xs, False))


def made(k: int | None = None) -> tuple[str, list[Tensor]]:
    """The step of a loop, as a graph has it, and its tensors."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    w, h, xs = randn(4, 4), randn(2, 4, seed=1), randn(5, 2, 4, seed=2)

    def run(w: Tensor, h: Tensor, xs: Tensor) -> Any:
        return tl.scan(lambda h, x: ((h @ turn + x @ w).tanh(), h), h, xs, compile=True, checkpoints=k)

    torch._dynamo.reset()
    torch.compile(run, fullgraph=True, backend=backend)(w, h, xs)
    (node,) = (n for n in graphs[0].graph.nodes if n.target is LOOP)
    shapes = {(5, 2, 4): xs, (2, 4): h}
    tensors = [shapes.get(tuple(x.meta["example_value"].shape)) for x in node.args[1]]
    names = [x.name for x in node.args[1]]
    rest = iter([w, turn] if "w" in names[2] else [turn, w])
    return node.args[0], [next(rest) if x is None else x for x in tensors]


# torch 2.15 looks itself, and hides the warning, but not from those to whom it is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.extended("[2]")
def test_the_operation_is_what_torch_expects_of_one(k: int | None) -> None:
    text, tensors = made(k)
    torch.library.opcheck(LOOP, (text, tensors, 5))
    with torch.no_grad():
        torch.library.opcheck(LOOP, (text, tensors, 5))


def test_the_operation_with_no_step_and_with_wrong_tensors() -> None:
    text, tensors = made()
    h, xs = tensors[:2]
    last, ys = torch.ops.tensorloop.loop(text, [h, xs[:0], *tensors[2:]], 0)
    close(last, h)
    assert ys.shape == (0, 2, 4)
    close(torch.autograd.grad(last.sin().sum(), h), (h.cos(),))
    with pytest.raises(
        ValueError, match=r"input 0 of a step must be torch.float64 \[2, 4\], got torch.float64 \[3, 4\]"
    ):
        torch.ops.tensorloop.loop(text, [randn(3, 4), *tensors[1:]], 5)
    with pytest.raises(ValueError, match=r"operations of aten and prims, not os.system"):
        from_text(text.replace("aten.tanh.default", "os.system"))
