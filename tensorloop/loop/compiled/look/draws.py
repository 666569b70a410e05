"""Random numbers of a step: which operations may draw them before the loop, and from which generators.

Only what draws the same number of values whatever the values of its arguments may.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from tensorloop.compiler.place import HOST, generator_of
from tensorloop.loop.compiled.look.call_watch import refusal
from tensorloop.loop.compiled.look.chosen_numbers import CHOOSE, WITHIN, choose_unchecked

_aten = torch.ops.aten
# Of these only shapes, dtypes and layouts of tensor arguments matter.
_FRESH = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal.float_float", "bernoulli.p", "native_dropout"),
}
_IN_PLACE = {
    *("bernoulli_.float", "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"),
}


def _bernoulli(u: Tensor, p: Tensor, *, within: Any = WITHIN) -> Tensor:
    sure = within(p.detach(), 0.0, 1.0, "bernoulli expects all probabilities to be between 0 and 1")
    return _reached(torch.where(u < sure, 1.0, 0.0).to(p.dtype), p)


def _scaled(z: Tensor, mean: Any, std: Any, *, within: Any = WITHIN) -> Tensor:
    start = mean.detach() if isinstance(mean, Tensor) else mean
    spread = within(std.detach(), 0.0, math.inf, "normal expects all elements of std >= 0.0")
    return _reached(z * spread + start, mean, std)


def _shifted(z: Tensor, mean: Tensor, *_: Any) -> Tensor:
    return _reached(z + mean.detach(), mean)


def _reached(drawn: Tensor, *arguments: Any) -> Tensor:
    """Returns what was drawn, with a gradient of zero for each argument that has one."""
    for x in arguments:
        if isinstance(x, Tensor):
            drawn = torch.where(torch.ones_like(drawn, dtype=torch.bool), drawn, x**0)
    return drawn


def _unchecked(x: Tensor, *_: Any) -> Tensor:
    return x.clone()


def _chosen(
    drawn: Tensor, p: Tensor, count: int, replacement: bool = False, *, choose: Any = CHOOSE, **_: Any
) -> Tensor:
    return choose(p.detach(), drawn, count, replacement)


def _dropped(mask: Tensor, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    scale = 1.0 if train is False else 0.0 if p == 1 else 1 / (1 - p)
    return x * mask * scale, mask


def _draw_to_choose(into: Tensor, generator: Generator | None, args: Sequence[Any]) -> Tensor:
    if _puts_back(args):
        return into.uniform_(0, 1, generator=generator)
    return into.exponential_(1, generator=generator)


def _raced(args: Sequence[Any], out: Tensor) -> Tensor:
    """Returns memory for draws: one for each choice if choices are put back, else for each of p, whose first win."""
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


# The same for a next step that there may not be: what is wrong with its arguments is no error yet.
UNCHECKED: dict[Any, Callable[..., Tensor]] = {
    _bernoulli: partial(_bernoulli, within=_unchecked),
    _scaled: partial(_scaled, within=_unchecked),
    _chosen: partial(_chosen, choose=choose_unchecked),
}

# Attention, and which of its arguments is `dropout_p`.
_DROPOUT = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}


def never_draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
    """Whether an operation that may draw does not, for its dropout is none."""
    place = _DROPOUT.get(func)
    return place is not None and (args[place] if len(args) > place else (kwargs or {}).get("dropout_p", 0.0)) == 0.0


def check_draw(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device, *, known_length: bool
) -> None:
    """Refuses what draws elsewhere than on the device of its loop, and what draws ahead would be other numbers there.

    A device has kernels that draw and compare at once, in an order of their own.
    """
    if not known_length:
        raise refusal(
            "random numbers are drawn in a loop of unknown length",
            "draw them before the loop and index them by the step",
        )
    where = kwargs.get("device") or next((x.device for x in args if isinstance(x, Tensor)), HOST)
    if where.type != device.type:
        raise refusal(f"random numbers are drawn on {where} in a loop on {device}", f"draw them on {device}")
    joint = func is _aten.bernoulli.default or (func is _aten.multinomial.default and _puts_back(args))
    if joint and device != HOST:
        cure = "compare with torch.rand_like(p)"
        raise refusal(f"{func._schema.name.split('::')[1]}() draws by the values of a tensor, on {device}", cure)


def may_draw_ahead(func: Any) -> bool:
    """Whether an operation that draws may do so ahead."""
    name = func._schema.name.split("::")[1]
    return func in _MADE or not {name, f"{name}.{func._overloadname}"}.isdisjoint(_FRESH | _IN_PLACE)


@dataclasses.dataclass
class DrawOp:
    """One operation of a step that draws. `example` is like what it gives."""

    number: int
    example: Tensor
    fill: Callable[[Tensor, Generator | None], Any]  # draws into a contiguous tensor, from this in place of its own
    made: Callable[..., Any] | None = None  # of what was drawn and the operation's arguments
    source: int = 0  # which of a step's generators it draws from


def draw_op(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor, number: int) -> DrawOp:
    """Returns an operation that draws again as this one did; it holds no tensor of the step's but `out`."""
    generator = kwargs.get("generator")
    like = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else None for x in args]
    rest = [None if isinstance(x, Tensor) else x for x in args]

    def source(g: Generator | None) -> Generator | None:
        return generator if generator is None or g is None else g

    def again(g: Generator | None) -> Any:
        """Runs the operation on tensors that are like those that it had."""
        given = (x if one is None else _like(*one) for x, one in zip(rest, like, strict=True))
        return func(*given, **_with(kwargs, source(g)))

    if func in _MADE:
        draw, made = _MADE[func]
        example = _raced(args, out) if func is _aten.multinomial.default else torch.empty_like(out)
        return DrawOp(number, example, lambda into, g: draw(into, source(g), rest), made)
    if func is _aten.native_dropout.default:
        example = torch.empty_like(out[1])
        return DrawOp(number, example, lambda into, g: into.copy_(again(g)[1]), _dropped)
    if func._schema.name.endswith("_") and out.is_contiguous():
        more = args[1:]
        return DrawOp(number, out, lambda into, g: func(into, *more, **_with(kwargs, source(g))))
    return DrawOp(number, out, lambda into, g: into.copy_(again(g)))


def _with(kwargs: dict[str, Any], generator: Generator | None) -> dict[str, Any]:
    return {**kwargs, "generator": generator} if "generator" in kwargs else kwargs


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
        """Returns the number of a generator, by default of a device's own."""
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
        """Whether a generator has another state than after the last draw: the body sets it."""
        pairs = zip(self.seen, self._after, strict=True)
        return self.watched and any(not torch.equal(g.get_state(), state) for g, state in pairs)

    def restore(self) -> None:
        """Puts the generators back to where they were before draws."""
        if not self._drew:
            return
        for g, state in zip(self.seen, self._before, strict=True):
            g.set_state(state)
