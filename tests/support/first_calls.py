"""First calls of compiled loops in one fresh process: after which of them a module is there that none should load.

Run as a script it reads a pickled list of `Call`s and writes a `Found` as JSON. Torch's samples load these modules
themselves, so whoever has them writes the calls, and this file imports nothing but torch and the library.
"""

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import tensorloop as tl

ROOT = Path(__file__).parents[2]
FORBIDDEN = "sympy", "torch._dynamo", "torch._inductor", "torch.distributed", "torch.onnx"
STEPS = 2


class Call(NamedTuple):
    """A call of an operation: a function that can be pickled, its arguments, and which tensors of them have gradients.

    Without arguments it is a program of `PROGRAMS`; where not `looped` it is no loop.
    """

    name: str
    function: Callable[..., Any] | None = None
    args: Any = ()
    grads: Sequence[bool] = ()
    looped: bool = True


class Found(NamedTuple):
    """The first call that loads what is forbidden, with the module; which ran; those unlike eager ones."""

    loaded: tuple[str, str] | None
    ran: list[str]
    unlike: list[str]


def run(calls: Sequence[Call]) -> Found:
    """Runs calls in a fresh process."""
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(pickle.dumps([tuple(call) for call in calls]))
        file.flush()
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.support.first_calls", file.name],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    loaded, ran, unlike = json.loads(done.stdout.splitlines()[-1])
    return Found(loaded and tuple(loaded), ran, unlike)


def loaded_beyond(before: frozenset[str]) -> str | None:
    """A forbidden module, or one of its parts, that was not there before."""
    new = sorted(sys.modules.keys() - before)
    return next((name for name in new for top in FORBIDDEN if name == top or name.startswith(f"{top}.")), None)


def _is_alike(call: Call) -> bool:
    """Runs the call, and whether it gives what the eager loop gives, with its gradients."""
    if call.function is None:
        PROGRAMS[call.name]()
        return True
    return all(
        x.dtype is y.dtype and torch.allclose(x.to(y.dtype), y, 1e-3, 1e-4, equal_nan=True)
        for x, y in zip(_loop(call, "strict"), _loop(call, False), strict=True)
    )


def _loop(call: Call, compile: Literal[False, "strict"]) -> list[Tensor]:
    leaves, tree = tree_flatten(call.args)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def operation(tensors: Sequence[Tensor]) -> list[Tensor]:
        filled = list(leaves)
        for place, x in zip(places, tensors, strict=True):
            filled[place] = x
        args, kwargs = tree_unflatten(filled, tree)
        assert call.function is not None
        return [y for y in tree_flatten(call.function(*args, **kwargs))[0] if isinstance(y, Tensor)]

    def step(carry: list[Tensor], _: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        outs = operation(carry)
        total = sum((_real(y).double().mean() for y in outs if y.numel()), torch.zeros((), dtype=torch.float64))
        return [x * 0.5 + (0.01 * total).to(x.dtype) if _floats(x) else x.clone() for x in carry], outs

    init = [leaves[i].clone().requires_grad_(grad) for i, grad in zip(places, call.grads, strict=True)]
    torch.manual_seed(0)
    if not call.looped:
        return [y.detach() for y in operation(init)]
    last, outs = tl.scan(step, init, torch.arange(float(STEPS)), compile=compile)
    _backward([*last, *outs])
    return [x.detach() for x in (*last, *outs)] + [x.grad for x in init if x.grad is not None]


def _floats(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _backward(tensors: Sequence[Tensor]) -> None:
    losses = [_real(x).double().sum() for x in tensors if x.requires_grad]
    if losses:
        sum(losses, torch.zeros(())).backward()


# -- programs


def _lstm(checkpoints: int | None = None) -> None:
    cell = torch.nn.LSTMCell(3, 5)

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = cell(x, carry)
        return (h, c), h

    zeros = torch.zeros(2, 5)
    _, ys = tl.scan(step, (zeros, zeros), torch.randn(4, 2, 3), compile="strict", checkpoints=checkpoints)
    _backward([ys])


def _array(checkpoints: int | None = None) -> None:
    w = torch.randn(3, 3, requires_grad=True)

    def step(carry: tuple[Tensor, tl.TensorArray], x: Tensor) -> tuple[tuple[Tensor, tl.TensorArray], Tensor]:
        h, seen = carry
        h = torch.tanh(x @ w + (seen.stack() * torch.softmax(seen.stack() @ h, 0).unsqueeze(1)).sum(0))
        return (h, seen.append(h)), torch.nn.functional.layer_norm(h, (3,))

    init = torch.randn(3), tl.TensorArray().append(torch.randn(3))
    (_, seen), ys = tl.scan(step, init, torch.randn(4, 3), compile="strict", checkpoints=checkpoints)
    _backward([ys, seen.stack()])


def _in_place() -> None:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = h * 1
        y[1:] += x[1:].sigmoid()
        y[0].mul_(2).clamp_(-1, 1)
        y.masked_fill_(x > 1, 0.5).div_(3)
        return y, torch.zeros(4).index_add_(0, torch.tensor([0, 3]), y[:2]).copy_(x)

    h = torch.randn(4, requires_grad=True)
    _backward(list(tl.scan(step, h, torch.randn(4, 4), compile="strict")))


def _gru() -> None:
    cell, h = torch.nn.GRUCell(3, 5), torch.zeros(2, 5)
    last, _ = tl.scan(lambda h, x: (cell(x, h), None), h, torch.randn(4, 2, 3), compile="strict")
    _backward([last])


def _while() -> None:
    w = torch.randn(3, requires_grad=True)
    last = tl.while_loop(
        lambda h: (h.abs() > 0.1).any(), lambda h: h * torch.sigmoid(w), torch.ones(3), compile="strict"
    )
    _backward([last])


PROGRAMS: dict[str, Callable[[], None]] = {
    "an LSTM cell": _lstm,
    "an LSTM cell with checkpoints": lambda: _lstm(2),
    "an array in the carry": _array,
    "an array in the carry with checkpoints": lambda: _array(2),
    "writes in place": _in_place,
    "a GRU cell": _gru,
    "a while loop": _while,
}


def main(path: str) -> None:
    """Runs the calls of a file."""
    torch.set_num_threads(1)
    before, ran, unlike = frozenset(sys.modules), list[str](), list[str]()
    for fields in pickle.loads(Path(path).read_bytes()):
        call = Call(*fields)
        try:
            (unlike if not _is_alike(call) else ran).append(call.name)
        except (RuntimeError, TypeError):  # refused, or torch has no gradient
            if call.function is None:
                raise
        if (module := loaded_beyond(before)) is not None:
            print(json.dumps([[call.name, module], ran, unlike]))
            return
    print(json.dumps([None, ran, unlike]))


if __name__ == "__main__":
    main(sys.argv[1])
