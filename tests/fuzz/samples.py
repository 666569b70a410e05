"""Operations of torch, called with the arguments of torch's own tests."""

import itertools
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.draw import Draw
from tests.fuzz.scope import Scope

MOST = 40  # samples that are looked at, of an operation's
LARGEST = 200
# parts of names: random, of other classes of tensors, of several solutions, or of values that are not defined
_LEFT_OUT = (
    "_refs|fft|linalg.lu|linalg.ldl|lobpcg|empty|sparse|multinomial|geqrf|ctc_loss|linalg.eig|svd|pca|tensorinv|"
    "jiterator|rand|normal|__getitem__|native_dropout_backward|stft|cauchy|exponential|geometric|bernoulli|uniform|"
    "item|tolist|nonzero|unique|embedding_bag|quantile|logdet|ormqr|lu"
)


@cache
def operations() -> dict[str, tuple[str, Any]]:
    """What op_db has, by name: (as a program calls it, torch's information)."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {}
    for info in op_db:
        call = _call_of(info)
        if call is None or re.search(_LEFT_OUT, info.name) or torch.float64 not in info.dtypes:
            continue
        found.setdefault(f"{info.name}.{info.variant_test_name}", (call, info))
    return dict(sorted(found.items()))


def _call_of(info: Any) -> str | None:
    """The text that calls an operation, if there is one."""
    for text in (f"torch.{info.name}", f"torch.Tensor.{info.name}"):
        try:
            if eval(text) is not None and callable(eval(text)):
                return text
        except (AttributeError, SyntaxError):
            continue
    return None


def sampled(scope: Scope) -> str | None:
    """A call with one of torch's samples, whose tensors come from outside of the body or from what it has."""
    draw = scope.draw
    call, info = operations()[draw.choice([*operations()])]
    torch.manual_seed(draw.randrange(1000))
    dtype = scope.dtype if scope.dtype in info.dtypes else torch.float64
    try:
        samples = itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), MOST)
        chosen = draw.choice(list(samples))
    except Exception:
        return None
    try:
        first = _argument(scope, chosen.input, varied=True)
        rest = [_argument(scope, x) for x in chosen.args]
        named = [f"{k}={_argument(scope, x)}" for k, x in sorted(chosen.kwargs.items())]
    except TypeError:
        return None
    text = f"{call}({', '.join([first, *rest, *named])})"
    return f"{scope.fresh()} = {_taken(draw, text, scope, call)}"


def _taken(draw: Draw, text: str, scope: Scope, call: str) -> str:
    """Of a result that is several, one."""
    values = dict(scope.values)
    try:
        exec(f"found = {text}", values)
    except Exception:
        return text
    found = values["found"]
    return f"{text}[{draw.randrange(len(found))}]" if isinstance(found, tuple | list) and len(found) else text


def _argument(scope: Scope, x: Any, varied: bool = False) -> str:
    """An argument as text; TypeError where it has none."""
    if isinstance(x, Tensor):
        return _tensor(scope, x, varied)
    if x is None or isinstance(x, bool | int | str):
        return repr(x)
    if isinstance(x, float):
        return repr(x) if x == x and abs(x) != float("inf") else f'float("{x}")'
    if isinstance(x, complex):
        return repr(x)
    if isinstance(x, torch.dtype | torch.memory_format | torch.layout | torch.device):
        return f'torch.device("{x}")' if isinstance(x, torch.device) else str(x)
    if isinstance(x, torch.Size):
        return repr(tuple(x))
    if isinstance(x, slice):
        return repr(x)
    if type(x) in (tuple, list):
        inner = ", ".join(_argument(scope, y, varied) for y in x)
        return f"({inner},)" if type(x) is tuple else f"[{inner}]"
    raise TypeError


def _tensor(scope: Scope, x: Tensor, varied: bool) -> str:
    if x.layout is not torch.strided or x.numel() > LARGEST or x.is_complex():
        raise TypeError
    if not x.is_floating_point():
        return f"torch.tensor({x.tolist()}, dtype={x.dtype})"
    fitting = [
        name for name in scope.tensors if scope.example(name).shape == x.shape and scope.example(name).dtype == x.dtype
    ]
    if fitting and scope.draw.chance(0.5):
        return scope.draw.choice(fitting)
    low, high = (round(float(x.min()), 1), round(float(x.max()), 1)) if x.numel() else (-1.0, 1.0)
    if low < 0:
        low, high = max(low, -2.0), min(high, 2.0)
    name = scope.source(x.shape, dtype=x.dtype, low=low, high=max(high, low + 0.1))
    if varied and scope.draw.chance(0.4) and scope.tensors:
        number = scope.draw.choice(scope.tensors)
        if scope.example(number).is_floating_point():
            return f"({name} * (1 + 0.1 * {number}.mean().to({name}.dtype)))"
    return name
