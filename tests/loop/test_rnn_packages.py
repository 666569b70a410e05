"""RNN over cells with the interfaces of torchrecurrent and ncps: beside layers that loop in Python.

Stand-ins of ours have the interfaces. Where a package is installed, all of its cells run too.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import tensorloop as tl

D = torch.float64


class Single(nn.Module):
    """(x, h) -> h; None is 0."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight = nn.Parameter(torch.randn(2 * hidden, inputs + hidden) * 0.5)

    def zeros(self, x: Tensor) -> Any:
        return x.new_zeros(len(x), self.hidden)

    def forward(self, inp: Tensor, state: Any = None) -> Any:
        return self.moved(inp, self.zeros(inp) if state is None else state)

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (torch.cat([x, h], -1) @ self.weight.T).chunk(2, -1)
        return a.sigmoid(), b.tanh()

    def moved(self, x: Tensor, h: Any) -> Any:
        gate, new = self.gates(x, h)
        return gate * h + (1 - gate) * new


class Double(Single):
    """(x, (h, c)) -> (h, c)"""

    def zeros(self, x: Tensor) -> Any:
        return super().zeros(x), super().zeros(x)

    def moved(self, x: Tensor, h: Any) -> Any:
        gate, new = self.gates(x, h[0])
        c = h[1] * gate + new
        return gate * c.tanh(), c


class DecoupledSingle(Single):
    """(x, h) -> (y, h): two tensors, as the state of Double is."""

    def moved(self, x: Tensor, h: Any) -> Any:
        gate, new = self.gates(x, h)
        return gate * new, gate * h + (1 - gate) * new


class DecoupledDouble(Double):
    """(x, (h, c)) -> (y, (h, c))"""

    def moved(self, x: Tensor, h: Any) -> Any:
        out = super().moved(x, h)
        return out[0] * out[1], out


class Layers(nn.Module):
    """Layers of these, as a package has them: a loop over steps in Python."""

    def __init__(self, kind: Any, inputs: int, hidden: int, num_layers: int = 1) -> None:
        super().__init__()
        self.cells = nn.ModuleList(kind(hidden if k else inputs, hidden) for k in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None] * len(self.cells)
        ys = []
        for y in x:
            for k, cell in enumerate(self.cells):
                out = cell(y, states[k])
                coupled = type(cell) in (Single, Double)
                states[k] = out if coupled else out[1]
                y = out if type(cell) is Single else out[0]
            ys.append(y)
        return torch.stack(ys)


KINDS: dict[str, Any] = {
    kind.__name__: lambda *a, kind=kind, **options: Layers(kind, *a, **options)
    for kind in (Single, Double, DecoupledSingle, DecoupledDouble)
}
if find_spec("torchrecurrent"):
    package = import_module("torchrecurrent")
    names = {name[:-4] for name in dir(package) if name.endswith("Cell")}
    # Layers of tauGRU give their cells a second, earlier state; those of RHN are not there.
    KINDS |= {f"torchrecurrent.{n}": getattr(package, n) for n in sorted(names - {"tauGRU"}) if hasattr(package, n)}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_layers_of_its_cells_are_its_own(name: str, compile: bool) -> None:
    layer = KINDS[name](4, 4, num_layers=2).to(D)
    x = torch.randn(6, 3, 4, dtype=D, requires_grad=True)
    if name.endswith("MCLSTM"):  # whose inputs are shares of a mass
        x = x.detach().softmax(-1).requires_grad_()
    expected = layer(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    rnn = tl.loop.RNN(list(layer.cells), compile="strict" if compile else False)
    found, _ = rnn(x)
    torch.testing.assert_close(found, expected)
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    ours, theirs = (grad(y.sin().sum(), wanted, allow_unused=True, materialize_grads=True) for y in (found, expected))
    torch.testing.assert_close(ours, theirs)
    short, _ = rnn(x, lengths=[6, 2, 4])
    torch.testing.assert_close(short[:2], expected[:2])
    torch.testing.assert_close(short[:, 0], expected[:, 0])


class AtOne(nn.Module):
    """ncps' CfC cells take a timespan too, and no None."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return self.cell(x, h, 1.0)


class ClosedForm(nn.Module):
    """(x, h, ts) -> (y, h), as ncps' CfC cell."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.Linear(4 + 5, 15)

    def forward(self, x: Tensor, h: Tensor, ts: float) -> Any:
        a, b, gate = self.lines(torch.cat([x, h], 1)).chunk(3, 1)
        gate = torch.sigmoid(gate * ts)
        h = a.tanh() * (1 - gate) + gate * b.tanh()
        return h[:, :2], h


def timed() -> dict[str, tuple[Any, int]]:
    """Cells (x, h) -> (y, h) with the length of h."""
    found: dict[str, tuple[Any, int]] = {"ClosedForm": (AtOne(ClosedForm()), 5)}
    if find_spec("ncps"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cells, AutoNCP = import_module("ncps.torch"), import_module("ncps.wirings").AutoNCP
            wiring = AutoNCP(10, 2)
            found["CfCCell"] = AtOne(cells.CfCCell(4, 5)), 5
            found["WiredCfCCell"] = AtOne(cells.WiredCfCCell(4, wiring)), 10
            ltc = AutoNCP(10, 2)
            ltc.build(4)
            found["LTCCell"] = cells.LTCCell(ltc), 10
    return found


TIMED = timed()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", TIMED)
def test_cells_without_a_state_of_their_own(name: str, compile: bool) -> None:
    cell, size = TIMED[name][0].to(D), TIMED[name][1]
    x = torch.randn(6, 3, 4, dtype=D, requires_grad=True)
    h, ys = torch.zeros(3, size, dtype=D), []
    for step in x:
        y, h = cell(step, h)
        ys.append(y)
    rnn = tl.loop.RNN(cell, init=lambda n: torch.zeros(1, n, size, dtype=D), compile="strict" if compile else False)
    found, last = rnn(x)
    torch.testing.assert_close((found, last[0]), (torch.stack(ys), h))
    wanted = [x, *(p for p in cell.parameters() if p.requires_grad)]
    ours, theirs = (
        grad(y.sin().sum(), wanted, allow_unused=True, materialize_grads=True) for y in (found, torch.stack(ys))
    )
    torch.testing.assert_close(ours, theirs)
