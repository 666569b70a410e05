"""RNN: beside nn.LSTM, nn.GRU and nn.RNN with the same weights, and beside the plain loop; cells of other kinds."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map

import tensorloop as tl
from tensorloop import reference

D = torch.float64
COMPILE = pytest.mark.parametrize("compile", [False, True])
RNN = tl.loop.RNN


class ProjectedLSTMCell(nn.LSTMCell):
    """h goes back projected, as in nn.LSTM with proj_size."""

    def __init__(self, input_size: int, hidden_size: int, proj_size: int) -> None:
        super().__init__(input_size, hidden_size, dtype=D)
        self.weight_hh = nn.Parameter(torch.zeros(4 * hidden_size, proj_size, dtype=D))
        self.weight_hr = nn.Parameter(torch.zeros(proj_size, hidden_size, dtype=D))

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        h, c = hx
        i, f, g, o = (input @ self.weight_ih.T + self.bias_ih + h @ self.weight_hh.T + self.bias_hh).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return (o.sigmoid() * c.tanh()) @ self.weight_hr.T, c


class Leaky(nn.Module):
    """(x, state) -> (y, state), with a state in a dict and outputs of another size."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(size + hidden, hidden, dtype=D), nn.Linear(hidden, 2, dtype=D)
        self.hidden = hidden

    def forward(self, x: Tensor, state: Any) -> Any:
        if state is None:
            state = {"h": x.new_zeros(len(x), self.hidden), "n": x.new_zeros(len(x))}
        h = torch.tanh(self.mix(torch.cat([x, state["h"]], -1))) + 0.5 * state["h"]
        return self.out(h), {"h": h, "n": state["n"] + 1}


def cells_of(layer: nn.RNNBase) -> Any:
    """Cells with the weights of torch's own layer, as RNN takes them."""
    kind = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell}.get(layer.mode, nn.RNNCell)
    layers = []
    for k in range(layer.num_layers):
        pair = []
        for suffix in ("", "_reverse")[: 1 + layer.bidirectional]:
            weights = {
                n[: -len(f"_l{k}{suffix}")]: p for n, p in layer.named_parameters() if n.endswith(f"_l{k}{suffix}")
            }
            size = weights["weight_ih"].shape[1]
            if layer.proj_size:
                cell: Any = ProjectedLSTMCell(size, layer.hidden_size, layer.proj_size)
            else:
                cell = kind(size, layer.hidden_size, dtype=D)
            cell.load_state_dict(weights)
            pair.append(cell)
        layers.append(tuple(pair) if layer.bidirectional else pair[0])
    return layers


def gradients(output: Tensor, state: Any, x: Tensor, module: nn.Module) -> list[Tensor]:
    """Of x, and of all parameters by their order."""
    total = output.sin().sum() + sum(s.cos().sum() for s in (state if isinstance(state, tuple) else (state,)))
    found = grad(total, [x, *module.parameters()])
    return [found[0], *sorted(found[1:], key=lambda g: (tuple(g.shape), float(g.sum())))]


LAYERS: list[tuple[str, Callable[..., nn.RNNBase], dict[str, Any]]] = [
    ("LSTM", nn.LSTM, {}),
    ("two layers, both directions", nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    ("projected", nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 2}),
    ("batch first", nn.GRU, {"num_layers": 2, "batch_first": True}),
    ("RNN", nn.RNN, {"bidirectional": True}),
]


@COMPILE
@pytest.mark.parametrize("lengths", [None, [6, 2, 4, 1, 6]])
@pytest.mark.parametrize(("kind", "options"), [x[1:] for x in LAYERS], ids=[x[0] for x in LAYERS])
def test_values_and_gradients_are_those_of_torch(
    kind: Callable[..., nn.RNNBase], options: dict[str, Any], lengths: Any, compile: bool
) -> None:
    theirs = kind(3, 4, dtype=D, **options)
    init = None
    if theirs.proj_size:
        init = lambda n: (torch.zeros(4, n, 2, dtype=D), torch.zeros(4, n, 4, dtype=D))  # noqa: E731
    ours = RNN(cells_of(theirs), batch_first=theirs.batch_first, compile=compile, init=init)
    x = torch.randn(5, 6, 3, dtype=D, requires_grad=True)
    x = x if theirs.batch_first else x.detach().transpose(0, 1).requires_grad_()
    given: Any = x
    if lengths is not None:
        given = pack_padded_sequence(x, torch.tensor(lengths, device="cpu"), theirs.batch_first, enforce_sorted=False)
    expected, state = theirs(given)
    if lengths is not None:
        expected, _ = pad_packed_sequence(expected, theirs.batch_first, total_length=6)
    found, last = ours(x, lengths=lengths)
    torch.testing.assert_close((found, last), (expected, state))
    torch.testing.assert_close(gradients(found, last, x, ours), gradients(expected, state, x, theirs))
    again, same = ours(x, last, lengths=lengths)
    given = (
        given
        if lengths is None
        else pack_padded_sequence(x, torch.tensor(lengths, device="cpu"), theirs.batch_first, enforce_sorted=False)
    )
    expected, state = theirs(given, state)
    torch.testing.assert_close(same, state)
    if lengths is None:
        torch.testing.assert_close(again, expected)


def plain(cell: nn.Module, state: Any) -> Callable[..., Any]:
    """The cell as the reference takes it."""

    def step(x: Tensor, s: Any) -> Any:
        out = cell(x, s)
        return out if isinstance(cell, Leaky) else (out[0] if isinstance(out, tuple) else out, out)

    return step


@COMPILE
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, Leaky])
def test_lengths_dones_and_states_are_those_of_each_row_alone(kind: Any, reverse: bool, compile: bool) -> None:
    T, B = 7, 4
    cells = [kind(3, 4).to(D) for _ in range(1 + reverse)]
    rnn = RNN(tuple(cells) if reverse else cells[0], compile=compile)
    x = torch.randn(T, B, 3, dtype=D, requires_grad=True)

    def random_state(draw: Callable[..., Tensor]) -> Any:
        h = draw(B, 4, dtype=D)
        return {nn.GRUCell: h, nn.LSTMCell: (h, draw(B, 4, dtype=D)), Leaky: {"h": h, "n": draw(B, dtype=D)}}[kind]

    fresh, begin = random_state(torch.zeros), random_state(torch.randn)
    dones = torch.rand(T, B) < 0.3
    given: Any = tree_map(lambda s: torch.stack([s] * len(cells)), begin)
    for lens, anew, state in itertools.product((None, [7, 1, 4, 2]), (None, dones), (None, given)):
        output, last = rnn(x, state, lengths=lens, dones=anew)
        first = fresh if state is None else begin
        both = [
            reference.rnn(plain(cell, first), x, first, lens or [T] * B, anew, fresh, k == 1)
            for k, cell in enumerate(cells)
        ]
        torch.testing.assert_close(output, torch.cat([y for y, _ in both], -1))
        expected = tree_map(lambda *s: torch.stack(s), *(s for _, s in both))
        torch.testing.assert_close(last, expected)
        parameters = list(rnn.parameters())
        ours = grad(output.sin().sum(), [x, *parameters])
        torch.testing.assert_close(ours, grad(torch.cat([y for y, _ in both], -1).sin().sum(), [x, *parameters]))
        if lens is not None:
            p, r = (None if y is None else tl.pack_padded(y.transpose(0, 1), lens) for y in (x, anew))
            packed, of_packed = rnn(p, state, dones=r)
            torch.testing.assert_close(packed.pad(max_len=T).transpose(0, 1), output)
            torch.testing.assert_close(of_packed, last)


def test_a_reset_goes_to_a_new_state_and_not_to_the_one_given() -> None:
    cell = nn.GRUCell(3, 4)
    x, begin = torch.randn(5, 2, 3), torch.randn(1, 2, 4)
    dones = torch.zeros(5, 2, dtype=torch.bool)
    dones[0, 0] = dones[3] = True
    found, _ = RNN(cell)(x, begin, dones=dones)
    plain_x, _ = RNN(cell)(x[3:])
    torch.testing.assert_close(found[3:], plain_x)
    torch.testing.assert_close(found[:3, 1], RNN(cell)(x[:3], begin)[0][:, 1])
    torch.testing.assert_close(found[:3, 0], RNN(cell)(x[:3])[0][:, 0])
    learned = nn.Parameter(torch.randn(4))
    rnn = RNN(cell, init=lambda n: learned.expand(1, n, 4))
    found, _ = rnn(x, begin, dones=dones)
    torch.testing.assert_close(found[3:], rnn(x[3:])[0])
    assert grad(found.sum(), learned)[0].abs().min() > 0


@COMPILE
def test_rows_without_steps_keep_their_state(compile: bool) -> None:
    rnn = RNN(nn.LSTMCell(3, 4), compile=compile)
    x, state = torch.randn(3, 3, 3), (torch.randn(1, 3, 4), torch.randn(1, 3, 4))
    output, last = rnn(x, state, lengths=[2, 0, 3])
    assert not output[:, 1].any()
    torch.testing.assert_close([s[:, 1] for s in last], [s[:, 1] for s in state])
    x[:, 1] = x[2, 0] = float("nan")
    torch.testing.assert_close(rnn(x, state, lengths=[2, 0, 3]), (output, last))


def test_no_steps() -> None:
    for cell in (nn.GRUCell(3, 4), Leaky(3, 4)):
        x = torch.zeros(0, 2, 3, dtype=next(cell.parameters()).dtype)
        output, last = RNN(cell)(x)
        assert output.shape == (0, 2, 4 if isinstance(cell, nn.GRUCell) else 2)
        assert not tree_leaves(last)[0].any()


def test_one_row_without_a_batch() -> None:
    theirs = nn.LSTM(3, 4, 2, bidirectional=True, dtype=D)
    ours, x = RNN(cells_of(theirs), batch_first=True), torch.randn(6, 3, dtype=D)
    expected = theirs(x)
    torch.testing.assert_close(ours(x), expected)
    torch.testing.assert_close(ours(x, expected[1])[0], theirs(x, expected[1])[0])
    dones = torch.tensor([0, 0, 0, 1, 0, 0]).bool()
    torch.testing.assert_close(ours(x, dones=dones)[0][3:], theirs(x[3:])[0])
    mixed = RNN([nn.GRUCell(3, 4, dtype=D), Leaky(4, 2)])
    assert [x.shape for x in tree_leaves(mixed(x)[1])] == [(4,), (2,), ()]


def test_dropout_is_between_layers_and_in_training_alone() -> None:
    a, b = nn.GRUCell(3, 50, dtype=D), nn.GRUCell(50, 4, dtype=D)
    rnn, x = RNN([a, b], dropout=0.5), torch.randn(4, 2, 3, dtype=D)
    torch.manual_seed(1)
    found, _ = rnn(x)
    torch.manual_seed(1)
    dropped = nn.functional.dropout(RNN(a)(x)[0], 0.5)
    torch.testing.assert_close(found, RNN(b)(dropped)[0])
    torch.testing.assert_close(rnn.eval()(x)[0], RNN(b)(RNN(a)(x)[0])[0])
    torch.testing.assert_close(RNN(a, dropout=1.0)(x)[0], RNN(a)(x)[0])


def test_a_projection_is_of_the_outputs() -> None:
    a, b = nn.GRUCell(3, 4, dtype=D), nn.GRUCell(2, 4, dtype=D)
    linear, x = nn.Linear(4, 2, dtype=D), torch.randn(4, 2, 3, dtype=D)
    rnn = RNN([a, b], proj=[linear, None])
    torch.testing.assert_close(rnn(x)[0], RNN(b)(linear(RNN(a)(x)[0]))[0])
    torch.testing.assert_close(rnn(x, lengths=[4, 2])[0][:2], rnn(x)[0][:2])
    assert RNN(a, proj=linear)(x)[0].shape == (4, 2, 2)
    assert "projs.0.weight" in rnn.state_dict()


def test_a_cells_own_names_stand_below_one_prefix() -> None:
    cell = nn.LSTMCell(3, 4)
    rnn = RNN([(nn.LSTMCell(3, 4), nn.LSTMCell(3, 4))])
    assert list(rnn.state_dict()) == [f"cells.{k}.{n}" for k in (0, 1) for n in cell.state_dict()]
    rnn.cells[0].load_state_dict(cell.state_dict())
    assert torch.equal(rnn.state_dict()["cells.0.weight_ih"], cell.weight_ih)
    other = copy.deepcopy(rnn)
    x = torch.randn(3, 2, 3)
    torch.testing.assert_close(other(x)[0], rnn(x)[0])


def test_states_that_differ_are_a_list() -> None:
    rnn, x = RNN([nn.GRUCell(3, 4, dtype=D), Leaky(4, 5)]), torch.randn(4, 2, 3, dtype=D)
    _, last = rnn(x)
    assert isinstance(last, list)
    assert last[0].shape == (2, 4)
    assert last[1]["n"].tolist() == [4, 4]
    assert rnn(x, last)[1][1]["n"].tolist() == [8, 8]


def test_checkpoints_keep_fewer_bytes() -> None:
    cell, x = nn.LSTMCell(3, 16, dtype=D), torch.randn(64, 2, 3, dtype=D)
    few, all_of_it = RNN(cell, checkpoints=4, compile=False), RNN(cell, compile=False)
    found = [grad(rnn(x)[1][0].sin().sum(), list(cell.parameters())) for rnn in (few, all_of_it)]
    torch.testing.assert_close(*found)
    kept = [tl.memory.saved_bytes(lambda rnn=rnn: rnn(x)[1][0].sum()) for rnn in (few, all_of_it)]
    assert kept[0] < kept[1] / 4


def test_auto_compiles_the_loops_of_a_cell_when_it_pays() -> None:
    from tensorloop.loop.compiled import auto

    auto._known.clear()
    rnn, x = RNN(nn.GRUCell(3, 4)), torch.randn(100, 2, 3)
    for _ in range(40):
        rnn(x)[0].sum().backward()
    assert {work.state for work in auto._known.values()} == {"compiled"}


def test_features_of_any_shape() -> None:
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3, padding=1, dtype=D)

        def forward(self, x: Tensor, h: Tensor | None) -> Tensor:
            h = x.new_zeros(len(x), 2, 4, 4) if h is None else h
            return torch.tanh(self.conv(torch.cat([x, h], 1)))

    rnn, x = RNN(cell := Grid()), torch.randn(5, 2, 1, 4, 4, dtype=D)
    expected, h = [], None
    for t in range(5):
        h = cell(x[t], h)
        expected.append(h)
    torch.testing.assert_close(rnn(x)[0], torch.stack(expected))


X = torch.randn(4, 2, 3)
CELL = nn.GRUCell(3, 4)


class NoNone(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return h + x


class Odd(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> Any:
        return x, h, h


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: RNN(3), TypeError, "RNN: cells must be modules, or pairs of them, got int 3"),  # pyright: ignore
    (lambda: RNN([]), ValueError, "cells must have one module in each layer, or a pair in each, got layers of []"),
    (lambda: RNN([CELL, (CELL, CELL)]), ValueError, "or a pair in each, got layers of [1, 2]"),
    (lambda: RNN([CELL, torch.tanh]), TypeError, "cells must be modules, or pairs of them, got"),  # pyright: ignore
    (lambda: RNN(CELL, proj=[CELL, CELL]), ValueError, "proj has 2 modules for 1 cells; give one or None for each"),
    (lambda: RNN(CELL, dropout=2), ValueError, "dropout must be a probability, from 0 to 1, got 2"),
    (
        lambda: RNN(CELL)(X[0, 0]),
        ValueError,
        "RNN: x must be (T, B, *F), or (B, T, *F) with batch_first, got shape (3,)",
    ),
    (lambda: RNN(CELL)([X]), TypeError, "x: expected a tensor, got list"),  # pyright: ignore
    (
        lambda: RNN(CELL)(X, torch.zeros(2, 4)),
        ValueError,
        "state must be (cells, B, *F) with (1, 2) first, got shape (2, 4)",
    ),
    (lambda: RNN(CELL)(X, [X, X]), ValueError, "state has 2 states for 1 cells; a list has one for each"),
    (lambda: RNN(CELL, init=lambda n: 3)(X), TypeError, "init(2) is int 3; expected tensors"),
    (lambda: RNN(CELL)(X, lengths=[5, 1]), ValueError, "lens[0] is 5, but x has 4 steps"),
    (lambda: RNN(CELL)(X[:, 0], lengths=[3]), TypeError, "lengths are for padded rows (T, B, *F), and x is one row"),
    (
        lambda: RNN(CELL)(tl.PackedTensor(X[:, 0], [1, 3]), lengths=[1, 3]),
        TypeError,
        "lengths are for padded rows (T, B, *F), and x is packed",
    ),
    (lambda: RNN(CELL)(X, dones=X[..., 0]), TypeError, "dones must be bools, got dtype torch.float32; compare them"),
    (
        lambda: RNN(CELL)(X, dones=torch.zeros(2, 4).bool()),
        ValueError,
        "dones must have one bool for each step of each row, as x has, got (2, 4)",
    ),
    (
        lambda: RNN(CELL)(tl.PackedTensor(X[:, 0], [1, 3]), dones=torch.zeros(4, 2).bool()),
        TypeError,
        "dones must be packed where x is, and nowhere else",
    ),
    (
        lambda: RNN(NoNone())(X),
        TypeError,
        "RNN: no state was given, and NoNone takes no None for it (TypeError: unsupported operand",
    ),
    (
        lambda: RNN(Odd())(X, X[:1]),
        TypeError,
        "a cell returned (*, *, *); expected a state like the one that it got, *",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
