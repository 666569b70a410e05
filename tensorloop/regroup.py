"""Many tensors to many tensors: named columns of some inputs, put together anew.

The map is linear with entries 0 and 1, and so is its transpose: forward and backward are the same kernel with another
table, to any order. Backward pulls: it writes each column of each gradient once, as the sum of the copies that forward
made of it, so nothing is added twice, nothing is left out, and the sums come in a fixed order.

The same operation elsewhere: `permute_multi_embedding` in FBGEMM, `KeyedTensor.regroup` in TorchRec.
"""

import difflib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.arguments import as_int, dense_tensor, describe
from tensorloop._common.errors import Fact, WrongType, WrongValue
from tensorloop._common.saved import saved
from tensorloop._torch import transforms
from tensorloop._torch.eager_only import called_eagerly, runs_eagerly
from tensorloop.kernels import find
from tensorloop.kernels.moves import Move, Moves

Keys = tuple[tuple[str, ...], ...]
Lengths = tuple[tuple[int, ...], ...]

_unsafe_view = torch.ops.aten._unsafe_view.default

KEPT_PLANS = 128  # plans that `regroup` remembers; the one longest unused goes first


@called_eagerly
def regroup(
    values: Sequence[Tensor],
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
) -> list[Tensor]:
    """Joins named columns of many tensors into new groups: one tensor for each group, its columns side by side.

    Args:
        values: sequence of tensors (*B, W), of one dtype, device and batch (*B); W and strides may differ. `values[i]`
            holds the columns of `keys[i]` in order.
        keys: for each tensor a sequence of the names that it holds. A name stands in one place only.
        lengths: for each tensor a sequence of ints, how many columns each of its keys has; 0 is a length. They sum to
            W.
        groups: for each output a sequence of keys. A key may be in any number of groups, or several times in one, or in
            none.

    Returns:
        A list of `len(groups)` tensors (*B, sum of their keys' lengths), contiguous, never a view.

    Gradient: any order, forward mode, and `torch.func` transforms. A key's gradient is the sum over its copies; that of
    a key that nobody asked for is 0. The same bits in every run.

    Cost: one pass over the outputs, and one over the inputs in backward; nothing is saved. The plan is made once for
    each set of names and lengths and remembered (the last 128 of them); `RegroupPlan` keeps one and skips the search.

    Raises:
        TypeError: an argument of another type or structure; tensors of unequal dtype.
        ValueError: keys and lengths that disagree, a name in two places, an unknown key; tensors that do not fit them,
            or of unequal batch or device.

    Example:
        >>> values = [torch.tensor([[1, 2, 3]]), torch.tensor([[4]])]
        >>> tl.regroup(values, [["a", "b"], ["c"]], [[1, 2], [1]], [["c", "a"], ["b", "c"]])
        [tensor([[4, 1]]), tensor([[2, 3, 4]])]
    """
    try:
        plan = _plan(_names(keys, "keys"), _numbers(lengths), _names(groups, "groups"))
        _check_values(values, plan)
    except Fact as fact:
        raise fact.named("regroup") from fact.__cause__
    return _apply(plan, values)


@saved("keys", "lengths", "groups")
@runs_eagerly
class RegroupPlan:
    """A plan of `regroup` for given keys, lengths and groups, worked out once.

        plan = tl.RegroupPlan(keys, lengths, groups)  # once
        outs = plan(values)                           # at each step

    A plan holds names and numbers, no tensors: it serves any device, dtype and batch, and can be pickled.

    Args:
        keys: for each input tensor a sequence of the names that it holds. A name stands in one place only.
        lengths: for each input tensor a sequence of ints, how many columns each of its keys has.
        groups: for each output a sequence of keys, as for `regroup`.

    Attributes:
        keys, lengths, groups: the arguments, as tuples.
        moves: what goes where, as tuples (input, output, start in the input, start in the output, length).

    Raises:
        TypeError: an argument of another type or structure.
        ValueError: keys and lengths that disagree, a name in two places, an unknown key.

    Example:
        >>> plan = tl.RegroupPlan([["a", "b"], ["c"]], [[1, 2], [1]], [["c", "a"]])
        >>> plan([torch.tensor([[1, 2, 3]]), torch.tensor([[4]])])
        [tensor([[4, 1]])]
    """

    def __init__(
        self, keys: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
    ) -> None:
        try:
            self.keys, self.lengths = _names(keys, "keys"), _numbers(lengths)
            self.groups = _names(groups, "groups")
            self._map = _map_of(self.keys, self.lengths, self.groups)
        except Fact as fact:
            raise fact.named("RegroupPlan") from fact.__cause__

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves: which columns of which input go where; keys without columns are not among them.

        Example:
            >>> plan = tl.RegroupPlan(keys=[["a", "b"]], lengths=[[2, 3]], groups=[["b"]])
            >>> len(plan.moves)
            1
        """
        return self._map.table

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Regroups tensors by this plan, as `regroup` does.

        Args:
            values: sequence of tensors (*B, W), one for each list of `keys`.

        Returns:
            A list of tensors (*B, width), one for each group.
        """
        try:
            _check_values(values, self)
        except Fact as fact:
            raise fact.named("RegroupPlan") from fact.__cause__
        return _apply(self, values)

    def __repr__(self) -> str:
        into, out = self._map.sources, self._map.targets
        return f"RegroupPlan({len(into)} tensors {into} -> {len(out)} tensors {out}, {len(self.moves)} moves)"


@lru_cache(maxsize=KEPT_PLANS)
def _plan(keys: Keys, lengths: Lengths, groups: Keys) -> RegroupPlan:
    plan = RegroupPlan.__new__(RegroupPlan)
    plan.keys, plan.lengths, plan.groups = keys, lengths, groups
    plan._map = _map_of(keys, lengths, groups)
    return plan


def _apply(plan: RegroupPlan, values: Sequence[Tensor]) -> list[Tensor]:
    moves = plan._map
    if not moves.targets:
        return []
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in values)
    if recorded or transforms.maybe_level() is not None or transforms.forward_mode():
        return list(_route(moves, values))
    return list(_Route.forward(moves, *values))


class _Route(torch.autograd.Function):
    """Tensors of widths `moves.sources` to tensors of widths `moves.targets`; its gradient is itself, transposed."""

    @staticmethod
    def forward(moves: Moves, *values: Tensor) -> tuple[Tensor, ...]:
        batch = values[0].shape[:-1]
        rows = [_as_rows(x) for x in values]
        out = find("regroup_sums" if moves.sums else "regroup", *values)(rows, moves)
        if len(batch) == 1:
            return tuple(out)
        # No views: autograd would refuse to change them in place.
        return tuple(_unsafe_view(x, (*batch, width)) for x, width in zip(out, moves.targets, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.moves = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        given = [grad for grad in grads if grad is not None]
        if not given or not any(wanted):
            return (None,) * (1 + len(wanted))
        moves = ctx.moves.transposed.between([grad is not None for grad in grads], wanted)
        found = iter(_route(moves, given))
        return (None, *(next(found) if want else None for want in wanted))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        given = [tangent for tangent in tangents if tangent is not None]
        moves = ctx.moves.between([x is not None for x in tangents[1:]], [True] * len(ctx.moves.targets))
        return _route(moves, given)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        moves, *values = args
        batched = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(values, in_dims[1:], strict=True)
        ]
        return _Route.apply(moves, *batched), (0,) * len(moves.targets)


# What `apply` comes to outside of transforms, without its look at the signature, which takes 30 us.
_beneath: Any = super(torch.autograd.Function, _Route)
_apply_plainly: Callable[..., tuple[Tensor, ...]] = _beneath.apply


def _route(moves: Moves, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`_Route`, recorded. The batches of `autograd.grad(is_grads_batched=True)` know no Functions, but torch's own."""
    if transforms.maybe_level() is not None:
        return _Route.apply(moves, *values)
    if any(map(transforms.is_legacy_batched, values)):
        return _Route.forward(moves, *values)
    return _apply_plainly(moves, *values)


def _as_rows(x: Tensor) -> Tensor:
    """(*B, W) as (B, W); a view where the strides allow it."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _map_of(keys: Keys, lengths: Lengths, groups: Keys) -> Moves:
    """Checks that the arguments fit each other, and lays out the moves."""
    places = _places_of(keys, lengths)
    table, widths = [], []
    for g, group in enumerate(groups):
        width = 0
        for k, key in enumerate(group):
            if key not in places:
                raise WrongValue(f"groups[{g}][{k}] is {key!r}, which is not among the keys{_hint(key, places)}")
            i, start, length = places[key]
            table.append(Move(i, g, start, width, length))
            width += length
        widths.append(width)
    return Moves([sum(some) for some in lengths], widths, table)


def _places_of(keys: Keys, lengths: Lengths) -> dict[str, tuple[int, int, int]]:
    """(input, first column, columns) of each key."""
    if len(keys) != len(lengths):
        raise WrongValue(f"keys name {len(keys)} tensors, but lengths has {len(lengths)} lists; give one for each")
    places: dict[str, tuple[int, int, int]] = {}
    for i, (names, widths) in enumerate(zip(keys, lengths, strict=True)):
        if len(names) != len(widths):
            raise WrongValue(f"keys[{i}] has {len(names)} keys, but lengths[{i}] has {len(widths)}; give one for each")
        start = 0
        for k, (key, width) in enumerate(zip(names, widths, strict=True)):
            if key in places:
                other = places[key][0]
                where = f"in keys[{other}] already" if other != i else f"twice in keys[{i}]"
                raise WrongValue(f"keys[{i}][{k}] is {key!r}, which is {where}; each key names one place")
            places[key] = i, start, width
            start += width
    return places


def _hint(key: str, places: dict[str, tuple[int, int, int]]) -> str:
    near = difflib.get_close_matches(key, places, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    some = ", ".join(map(repr, list(places)[:5]))
    return f" ({some}{', ...' if len(places) > 5 else ''})"


def _names(lists: Sequence[Sequence[str]], what: str) -> Keys:
    """Lists of strings as tuples of tuples. A string is a sequence of strings, too, and never what was meant."""
    if isinstance(lists, str) or not isinstance(lists, Sequence):
        raise WrongType(f"{what} must be a list of lists of strings, got {describe(lists)}")
    for i, some in enumerate(lists):
        if isinstance(some, str) or not isinstance(some, Sequence):
            raise WrongType(f"{what}[{i}] must be a list of strings, got {describe(some)}")
        for k, key in enumerate(some):
            if not isinstance(key, str):
                raise WrongType(f"{what}[{i}][{k}] must be a string, got {describe(key)}")
    return tuple(map(tuple, lists))


def _numbers(lists: Sequence[Sequence[int]]) -> Lengths:
    if isinstance(lists, str) or not isinstance(lists, Sequence):
        raise WrongType(f"lengths must be a list of lists of ints, got {describe(lists)}")
    found = []
    for i, some in enumerate(lists):
        if isinstance(some, str) or not isinstance(some, Sequence):
            raise WrongType(f"lengths[{i}] must be a list of ints, got {describe(some)}")
        found.append(tuple(as_int(n, f"lengths[{i}][{k}]") for k, n in enumerate(some)))
        if found[-1] and min(found[-1]) < 0:
            k = next(k for k, n in enumerate(found[-1]) if n < 0)
            raise WrongValue(f"lengths[{i}][{k}] is {found[-1][k]}; a length is 0 or more")
    return tuple(found)


def _check_values(values: Sequence[Tensor], plan: RegroupPlan) -> None:
    """Refuses tensors that do not fit the plan or each other."""
    if isinstance(values, Tensor) or not isinstance(values, Sequence):
        raise WrongType(f"values must be a list of tensors, got {describe(values)}")
    widths = plan._map.sources
    if len(values) != len(widths):
        raise WrongValue(f"values has {len(values)} tensors, but keys name {len(widths)}")
    if not values:
        if plan._map.targets:
            raise WrongValue(f"values is empty, so the batch of the {len(plan.groups)} groups is unknown")
        return
    first = values[0]
    for i, (x, width) in enumerate(zip(values, widths, strict=True)):
        dense_tensor(x, f"values[{i}]")
        if not x.dim() or x.shape[-1] != width:
            raise WrongValue(
                f"values[{i}] has shape {tuple(x.shape)}, expected (*B, {width}): "
                f"lengths[{i}] of its keys sum to {width}"
            )
        if x.dtype is not first.dtype:
            raise WrongType(f"values[{i}] has dtype {x.dtype}, but values[0] has {first.dtype}; convert one")
        if x.device != first.device:
            raise WrongValue(f"values[{i}] is on {x.device}, but values[0] is on {first.device}; move one")
        if x.shape[:-1] != first.shape[:-1]:
            raise WrongValue(
                f"values[{i}] has the batch {tuple(x.shape[:-1])}, but values[0] has {tuple(first.shape[:-1])}"
            )
