"""Random numbers of a step: which operations may draw them before the loop, and from which generators.

Only what draws the same number of values whatever the values of its arguments may.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from tensorloop.compiler.place import generator_of
from tensorloop.loop.compiled.look.chosen_numbers import CHOOSE

_aten = torch.ops.aten
# Of these only shapes, dtypes and layouts of tensor arguments matter.
_FRESH = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal.float_float", "bernoulli.p"),
}
_IN_PLACE = {
    *("bernoulli_.float", "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"),
}


def _bernoulli(u: Tensor, p: Tensor) -> Tensor:
    return (u < p.detach()).to(p.dtype)


def _scaled(z: Tensor, mean: Any, std: Any) -> Tensor:
    mean, std = (x.detach() if isinstance(x, Tensor) else x for x in (mean, std))
    return z * std + mean


def _shifted(z: Tensor, mean: Tensor, *_: Any) -> Tensor:
    return z + mean.detach()


def _chosen(drawn: Tensor, p: Tensor, count: int, replacement: bool = False, **_: Any) -> Tensor:
    return CHOOSE(p.detach(), drawn, count, replacement)


def _draw_to_choose(into: Tensor, generator: Generator | None, args: Sequence[Any]) -> Tensor:
    if _puts_back(args):
        return into.uniform_(0, 1, generator=generator)
    return into.exponential_(1, generator=generator)


def _raced(args: Sequence[Any], out: Tensor) -> Tensor:
    """Where a choice is put back each has a number of its own; else each of p has one, and the first ones win."""
    return out.new_empty(out.shape, dtype=torch.float64) if _puts_back(args) else torch.empty_like(args[0])


def _puts_back(args: Sequence[Any]) -> bool:
    return args[1] > 1 and len(args) > 2 and args[2]


# What torch draws in these, and what it makes of that and the arguments: (into, generator, args), (drawn, *args).
_MADE: dict[Any, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    _aten.bernoulli.default: (lambda into, g, args: into.uniform_(0, 1, generator=g), _bernoulli),
    _aten.normal.Tensor_Tensor: (lambda into, g, args: into.normal_(0, 1, generator=g), _scaled),
    _aten.normal.float_Tensor: (lambda into, g, args: into.normal_(0, 1, generator=g), _scaled),
    _aten.multinomial.default: (_draw_to_choose, _chosen),
    _aten.normal.Tensor_float: (lambda into, g, args: into.normal_(0, *args[1:2], generator=g), _shifted),
}


def never_draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
    """Whether an operation that may draw does not, for its dropout is none."""
    if func is not _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return False
    return (args[3] if len(args) > 3 else (kwargs or {}).get("dropout_p", 0.0)) == 0.0


def may_draw_ahead(func: Any) -> bool:
    """Whether an operation that draws may do so ahead."""
    name = func._schema.name.split("::")[1]
    return func in _MADE or not {name, f"{name}.{func._overloadname}"}.isdisjoint(_FRESH | _IN_PLACE)


@dataclasses.dataclass
class DrawOp:
    """One operation of a step that draws. `example` is like what it gives."""

    number: int
    example: Tensor
    fill: Callable[[Tensor], Any]  # draws into a contiguous tensor
    made: Callable[..., Tensor] | None = None  # of what was drawn and the operation's arguments


def draw_op(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor, number: int) -> DrawOp:
    """What draws the same as an operation did; it holds no tensor of the step's but `out`."""
    generator = kwargs.get("generator")
    if func in _MADE:
        draw, made = _MADE[func]
        numbers = [None if isinstance(x, Tensor) else x for x in args]
        example = _raced(args, out) if func is _aten.multinomial.default else torch.empty_like(out)
        return DrawOp(number, example, lambda into: draw(into, generator, numbers), made)
    inplace = func._schema.name.endswith("_")
    if inplace and out.is_contiguous():
        rest = args[1:]
        return DrawOp(number, out, lambda into: func(into, *rest, **kwargs))
    like = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else None for x in args]

    def fill(into: Tensor) -> None:
        made = [x if one is None else _like(*one) for x, one in zip(rest, like, strict=True)]
        into.copy_(func(*made, **kwargs))

    rest = [None if isinstance(x, Tensor) else x for x in args]
    return DrawOp(number, out, fill)


def _like(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


class Generators:
    """The generators that a step draws from, and the states that they had before."""

    def __init__(self, *, watched: bool, device: torch.device | None = None) -> None:
        self.seen: list[Generator] = []
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self.watched, self._drew = watched, False
        self.index(torch.default_generator)
        if watched:  # whoever sets the state of the one sets that of the others, as a rule
            self.index(generator_of(device))

    def index(self, generator: Generator | None, of: torch.device | None = None) -> int:
        """The number of one, by default of a device's own."""
        generator = generator_of(of) if generator is None else generator
        for k, g in enumerate(self.seen):
            if g is generator:
                return k
        self.seen.append(generator)
        state = generator.get_state()
        self._before.append(state)
        self._after.append(state)
        return len(self.seen) - 1

    def drew(self, k: int) -> None:
        """Notes the state behind a draw."""
        self._drew = True
        if self.watched:
            self._after[k] = self.seen[k].get_state()

    def moved(self) -> bool:
        """Whether one has another state than after the last draw: the body sets it."""
        pairs = zip(self.seen, self._after, strict=True)
        return self.watched and any(not torch.equal(g.get_state(), state) for g, state in pairs)

    def restore(self) -> None:
        """Puts them back to where they were before draws."""
        if not self._drew:
            return
        for g, state in zip(self.seen, self._before, strict=True):
            g.set_state(state)
