"""`RNN`: layers of any recurrent cell, with the interface of `nn.LSTM`. Each cell and direction is one `tl.scan`.

Rows with `lengths` are packed for the loops and padded again. A reset is a choice at each step between the state and
the one that a new row begins with, which is the loop's context: so it loses the same rows as the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tensorloop import packed
from tensorloop._common import arguments, pytree
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.scope import without_numbers
from tensorloop._torch.fake import MadeUpNumbers, fake_tensors, quiet_fakes
from tensorloop.loop.api import scan
from tensorloop.loop.compiled.front import Compile, check_compile
from tensorloop.loop.effects.follow import without_effects
from tensorloop.loop.options import Plan
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.table.base import is_packed

Cells = nn.Module | tuple[nn.Module, nn.Module] | Sequence[nn.Module | Sequence[nn.Module]]


class RNN(nn.Module):
    """Runs layers of any recurrent cell over time, as `nn.LSTM` does with its own.

        rnn = tl.loop.RNN(nn.LSTMCell(16, 32))
        rnn = tl.loop.RNN([nn.GRUCell(16, 32), nn.GRUCell(32, 32)], dropout=0.1)  # two layers
        rnn = tl.loop.RNN([(MyCell(16, 32), MyCell(16, 32)), (MyCell(64, 32), MyCell(64, 32))])  # both directions
        output, state = rnn(x)  # x: (T, B, F)
        output, state = rnn(x, state, lengths=lengths, dones=dones)

    A cell is a module with `cell(x, state) -> state` or `cell(x, state) -> (y, state)` for x (B, *F). A state is a
    tensor or a tree of tensors with B leading rows, such as the (h, c) of an LSTM. Where the cell returns a state
    alone, y is its first tensor.

    Args:
        cells: a module for one layer, a list of modules for one layer each. A tuple of two in place of a module is a
            layer of both directions, the backward one second; their outputs are concatenated along the last dim.
        proj: a module for the outputs of a cell, or a list with one or None for each cell. It is applied to all steps
            at once and is not fed back: a cell that feeds its projected h back, as nn.LSTM with `proj_size`, has it
            inside. None (default): outputs are the cells' own.
        dropout: float, default 0.0: the probability of zeros in the outputs of each layer but the last, in training.
        batch_first: bool, default False. True: x is (B, T, F), and so is the output; states are not.
        init: `init(B) -> state`, the state with which rows begin where none is given, and go on after a reset, in the
            layout of `state`. None (default): zeros, of the shapes that a cell returns where its state is None; if it
            makes something else of None, such as a learned state, give that here.
        compile: a `tl.loop.Compile`, as in `tl.scan`. "auto" (default) compiles the loops of a cell once they have done
            work that makes it pay.
        checkpoints: a `tl.loop.Plan`, as in `tl.scan`; None (default) keeps what all steps save for backward.

    Attributes:
        cells: a ModuleList of all cells, layer by layer, forward before backward: `rnn.cells[0]` loads the state_dict
            of a first cell, whose names are `cells.0.*` in that of the RNN.
        projs: a ModuleList of what projects their outputs; empty without `proj`.

    Gradient: as the Python loop's, to x, state and parameters.
    Cost: one scan for each cell. With `lengths` or packed x a step has the rows that are not over; x is copied into
    that order and back.

    Raises:
        TypeError: cells that are no modules; a cell that takes no None, where no state is given; one that returns
            something else than it should.
        ValueError: shapes, lengths or states that do not fit x and the cells.

    Source: the interface is that of torch.nn.LSTM; resets are those of recurrent PPO.

    Example:
        >>> rnn = tl.loop.RNN([torch.nn.LSTMCell(3, 4), torch.nn.LSTMCell(4, 4)])
        >>> output, (h, c) = rnn(torch.randn(5, 2, 3), lengths=[5, 2])
        >>> output.shape, h.shape, output[2:, 1].any().item()
        (torch.Size([5, 2, 4]), torch.Size([2, 2, 4]), False)
    """

    @named("RNN")
    def __init__(
        self,
        cells: Cells,
        *,
        proj: nn.Module | Sequence[nn.Module | None] | None = None,
        dropout: float = 0.0,
        batch_first: bool = False,
        init: Callable[[int], Any] | None = None,
        compile: Compile = "auto",
        checkpoints: Plan = None,
    ) -> None:
        super().__init__()
        layers = _layers_of(cells)
        self.directions = len(layers[0])
        self.cells = nn.ModuleList(cell for layer in layers for cell in layer)
        given = [] if proj is None else [proj] if isinstance(proj, nn.Module) else [*proj]
        if given and len(given) != len(self.cells):
            raise WrongValue(f"proj has {len(given)} modules for {len(self.cells)} cells; give one or None for each")
        self.projs = nn.ModuleList(nn.Identity() if module is None else module for module in given)
        if not 0 <= dropout <= 1:
            raise WrongValue(f"dropout must be a probability, from 0 to 1, got {dropout}")
        self.dropout, self.batch_first = dropout, arguments.as_bool(batch_first, "batch_first")
        check_compile(compile)
        self.init, self.options = init, {"compile": compile, "checkpoints": checkpoints}
        self._states: dict[Any, Any] = {}  # of cells that were asked for a state, on `meta`

    @named("RNN")
    def forward(
        self,
        x: "Tensor | packed.PackedTensor",
        state: Any = None,
        *,
        lengths: Tensor | Sequence[int] | Dim | None = None,
        dones: "Tensor | packed.PackedTensor | None" = None,
    ) -> tuple[Any, Any]:
        """Runs all layers over x.

        Args:
            x: (T, B, *F), with `batch_first` (B, T, *F); (T, F) for one row without B; or packed rows.
            state: the first states. Their layout is that of the state returned. None (default): see `init`.
            lengths: the steps of each row, (B,) int64 or a sequence of ints, in any order; 0 is allowed. None
                (default): all have T. Packed x has its own.
            dones: bool, the shape of x without *F; packed where x is. Where it is true a new episode begins: before
                that step the state goes back to that of `init`, as in recurrent PPO, whatever `state` is. The backward
                direction goes back after that step. None (default): nowhere.

        Returns:
            output: the outputs y of the last layer, in the layout of x; 0 behind the end of a row, packed for packed x.
            state: of each cell the state at the last step of each row, its first one in the backward direction. It has
                the structure of a cell's state, with the cells as first dim, (layers * directions, B, *F), in the order
                of `cells`. Where the states of cells differ in shape, or are lists, it is a list of one for each cell.

        Example:
            >>> rnn = tl.loop.RNN(torch.nn.GRUCell(3, 4))
            >>> dones = torch.tensor([[False], [False], [True], [False]])  # an episode of two steps, then another
            >>> output, h = rnn(torch.ones(4, 1, 3), dones=dones)
            >>> torch.equal(output[:2], output[2:]), torch.equal(h[0], output[-1])
            (True, True)
        """
        if single := not is_packed(x) and isinstance(x, Tensor) and x.dim() == 2:
            x = x.unsqueeze(1)
            dones = dones.unsqueeze(1) if isinstance(dones, Tensor) else dones
            state = pytree.mapped(lambda s: s.unsqueeze(1), state) if state is not None else None
        turned = self.batch_first and not single and not is_packed(x)
        xs: Any = _steps_first(x, "x", turned)
        anew = None if dones is None else _steps_first(dones, "dones", turned)
        steps = None if is_packed(xs) else len(xs)
        _check_dones(anew, xs)
        if lengths is not None:
            if steps is None or single:
                raise WrongType(f"lengths are for padded rows (T, B, *F), and x is {'one row' if single else 'packed'}")
            dim = lengths if isinstance(lengths, Dim) else Dim(None, lengths)
            xs, anew = (None if y is None else packed.pack_padded(y.transpose(0, 1), dim) for y in (xs, anew))
        finals: list[Any] = []
        rows = _rows_of(xs)
        firsts = None if state is None else self._each(state, "state", rows)
        fresh = None if self.init is None else self._each(self.init(rows), f"init({rows})", rows)
        for k in range(0, len(self.cells), self.directions):
            ys = []
            for i in range(k, k + self.directions):
                needed = firsts is None or anew is not None
                begin = fresh[i] if fresh is not None else self._zeros(i, xs) if needed else None
                final, y = self._run(i, xs, begin if firsts is None else firsts[i], anew, begin)
                ys.append(y)
                finals.append(final)
            xs = ys[0] if self.directions == 1 else torch.cat(ys, -1)
            if self.dropout and k + self.directions < len(self.cells):
                xs = nn.functional.dropout(xs, self.dropout, self.training)
        if lengths is not None:
            xs = xs.pad(max_len=steps).transpose(0, 1)
        final = _joined(finals)
        if single:
            return xs.squeeze(1), pytree.mapped(lambda s: s.squeeze(0 if isinstance(final, list) else 1), final)
        return xs.transpose(0, 1) if turned else xs, final

    def _run(self, i: int, xs: Any, first: Any, dones: Any, fresh: Any) -> tuple[Any, Any]:
        """(the last state, all outputs) of one cell; `fresh`: the state after a reset."""
        cell, reverse = self.cells[i], i % self.directions == 1

        def step(state: Any, x: Any) -> tuple[Any, Any]:
            return _taken_apart(cell(x, state), state)

        def step_anew(state: Any, given: Any, fresh: Any) -> tuple[Any, Any]:
            x, done = given
            tree, leaves = pytree.taken_apart(state)
            pairs = zip(pytree.leaves(fresh), leaves, strict=True)
            chosen = [torch.where(done[(..., *[None] * (s.dim() - 1))], new, s) for new, s in pairs]
            return step(tree.unflatten(chosen), x)

        if dones is None:
            final, ys = scan(step, first, xs, reverse=reverse, **self.options)
        else:
            dones = _one_step_earlier(dones) if reverse else dones
            final, ys = scan(step_anew, first, (xs, dones), reverse=reverse, context=fresh, **self.options)
        if not self.projs:
            return final, ys
        proj = self.projs[i]
        return final, ys._with(proj(ys.values)) if is_packed(ys) else proj(ys)

    def _each(self, state: Any, what: str, rows: int) -> list[Any]:
        """A state of all cells as one for each."""
        count, listed = len(self.cells), isinstance(state, list)
        if listed and len(state) != count:
            raise WrongValue(f"{what} has {len(state)} states for {count} cells; a list has one for each")
        for path, s in pytree.leaves_with_paths(state):
            if not isinstance(s, Tensor):
                raise WrongType(f"{what}{path} is {arguments.describe(s)}; expected tensors")
            begin = (rows,) if listed else (count, rows)
            if tuple(s.shape[: len(begin)]) != begin:
                said = "(B, *F)" if listed else "(cells, B, *F)"
                raise WrongValue(f"{what}{path} must be {said} with {begin} first, got shape {tuple(s.shape)}")
        return state if listed else [pytree.mapped(lambda s, k=k: s[k], state) for k in range(count)]

    def _zeros(self, i: int, xs: Any) -> Any:
        """Zeros as the first state of a cell."""
        cell, values = self.cells[i], xs.values if is_packed(xs) else xs
        rows, x = _rows_of(xs), values.new_empty(2, *values.shape[1 if is_packed(xs) else 2 :])
        if isinstance(cell, nn.RNNCellBase):
            zeros = [values.new_zeros(rows, cell.hidden_size) for _ in range(2)]  # two, for compiled loops
            return tuple(zeros) if isinstance(cell, nn.LSTMCell) else zeros[0]
        kind = i, x.shape, x.dtype, x.device, torch.is_autocast_enabled(x.device.type)
        if kind not in self._states:
            self._states[kind] = _state_of(cell, x)
        return pytree.mapped(
            lambda s: torch.zeros((rows, *s.shape[1:]), dtype=s.dtype, device=x.device), self._states[kind]
        )


def _layers_of(cells: Any) -> list[list[nn.Module]]:
    """Each layer's cells, one for each direction."""
    several = isinstance(cells, Sequence | nn.ModuleList) and not isinstance(cells, tuple)
    given: list[Any] = [*cells] if several else [cells]
    layers = [[*layer] if isinstance(layer, Sequence | nn.ModuleList) else [layer] for layer in given]
    for cell in (cell for layer in layers for cell in layer):
        if not isinstance(cell, nn.Module):
            raise WrongType(f"cells must be modules, or pairs of them, got {arguments.describe(cell)}")
    if not layers or {len(layer) for layer in layers} not in ({1}, {2}):
        sizes = [len(layer) for layer in layers]
        raise WrongValue(f"cells must have one module in each layer, or a pair in each, got layers of {sizes}")
    return layers


def _steps_first(x: Any, what: str, turned: bool) -> Any:
    """x with its steps first, or packed."""
    if is_packed(x):
        return x
    arguments.dense_tensor(x, what)
    if x.dim() < 2:
        raise WrongValue(f"{what} must be (T, B, *F), or (B, T, *F) with batch_first, got shape {tuple(x.shape)}")
    return x.transpose(0, 1) if turned else x


def _rows_of(xs: Any) -> int:
    return len(xs._dim) if is_packed(xs) else xs.shape[1]


def _check_dones(dones: Any, xs: Any) -> None:
    if dones is None:
        return
    if is_packed(dones) != is_packed(xs):
        raise WrongType("dones must be packed where x is, and nowhere else; tl.pack_padded and pad() change them")
    if dones.dtype != torch.bool:
        raise WrongType(f"dones must be bools, got dtype {dones.dtype}; compare them, as in dones != 0")
    if is_packed(xs):
        if not dones._dim.same(xs._dim):
            raise describe_difference(xs._dim, dones._dim, "dones")
        dones, xs = dones.values[:, None], xs.values[:, None]
    if dones.shape != xs.shape[:2]:
        raise WrongValue(f"dones must have one bool for each step of each row, as x has, got {tuple(dones.shape)}")


def _one_step_earlier(dones: Any) -> Any:
    """For the backward direction, which resets after the first step of an episode: so never at the end of a row."""
    values = dones.values if is_packed(dones) else dones
    values = torch.cat([values[1:], torch.zeros_like(values[:1])])
    if not is_packed(dones):
        return values
    dim = dones._dim
    return dones._with(values & (dim._positions + 1 < dim._lens.index_select(0, dim._row_ids)))


def _taken_apart(out: Any, state: Any) -> tuple[Any, Any]:
    """(state, y) of what a cell returned."""
    like = pytree.Tree(state)
    if like.flatten(out) is not None:
        return out, pytree.leaves(out)[0]
    if isinstance(out, tuple) and len(out) == 2 and like.flatten(out[1]) is not None:
        return out[1], out[0]
    raise WrongType(
        f"a cell returned {pytree.structure(out)}; expected a state like the one that it got, "
        f"{pytree.structure(state)}, or (y, state)"
    )


def _state_of(cell: nn.Module, x: Tensor) -> Any:
    """The state that a cell makes of None, on `meta`: by a call on tensors without numbers."""
    with quiet_fakes(), fake_tensors(MadeUpNumbers(True)) as fake, torch.no_grad(), without_numbers():
        try:
            state = without_effects(cell, fake(x), None)
        except Exception as error:
            raise WrongType(
                f"no state was given, and {type(cell).__name__} takes no None for it ({type(error).__name__}: "
                f"{error}); give state=, or RNN(init=), such as lambda B: torch.zeros(1, B, 32) for one cell"
            ) from error
        if isinstance(state, tuple) and len(state) == 2:  # (y, state), if it does not go in as a state
            try:
                again = without_effects(cell, fake(x), state)
            except Exception:
                again = None
            state = state if pytree.Tree(state).flatten(again) is not None else state[1]
        return pytree.mapped(lambda s: torch.empty(s.shape, dtype=s.dtype, device="meta"), state)


def _joined(finals: list[Any]) -> Any:
    """The states of all cells as one, where they are alike."""
    tree, first = pytree.taken_apart(finals[0])
    parts = [tree.flatten(final) for final in finals]
    kinds = [(s.shape, s.dtype) for s in first]
    if isinstance(finals[0], list) or any(p is None or [(s.shape, s.dtype) for s in p] != kinds for p in parts):
        return finals
    return tree.unflatten([torch.stack(same) for same in zip(*parts, strict=True)])  # pyright: ignore[reportArgumentType]
