"""`Checkpoints(check=True)`: whether each step that is run again gives, bit for bit, what it gave in the forward pass.

A fingerprint of a tensor is the sum of its entries, as integers of its bits, each times an odd number of its own, so
that a change of one entry always shows. Of an array it is that of its length and last slot. A generator counts where
the step has moved it: one that stood still may be in any state when the step is run again.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import Misuse
from tensorloop._torch import transforms
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.loop import Loop
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.internals import store_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_DEPTH = 4  # how far into objects


class Checked:
    """The steps of a loop, held against what they gave when they ran first."""

    def __init__(self, loop: Loop, captures: Captures, every: bool) -> None:
        self.loop, self.captures, self.every = loop, captures, every
        self.found: dict[int, dict[str, Any]] = {}  # by step
        self.factors: dict[torch.device, Tensor] = {}

    def step(self, t: int, state: list[Any], row: list[Any]) -> tuple[list[Any], Any]:
        """Runs a step of the loop, and refuses one that differs from what it gave before."""
        if not self.every and t not in self.found:
            return self.loop.step(t, state, row)
        before = dict(self._generators()) if self.every else None
        new, y = self.loop.step(t, state, row)
        with torch.no_grad():
            now = self._fingerprints(t, new, y, before)
        if t not in self.found:
            self.found[t] = now
            return new, y
        was = self.found[t]
        differ = [name for name in {**was, **now} if name not in was or name not in now or was[name] != now[name]]
        if differ:
            raise Misuse(
                f"step {t} did not repeat itself in backward; what differs from the forward pass: "
                f"{', '.join(differ)}. A body must depend on nothing that changes in between: a module's mode, an "
                f"object or a number that it closes over or carries, random numbers of others than torch"
            )
        return new, y

    def note(self, t: int, new: list[Any], y: Any) -> None:
        """This step is to repeat itself, though not all are."""
        if not self.every:
            with torch.no_grad():
                self.found[t] = self._fingerprints(t, new, y, None)

    def _fingerprints(self, t: int, new: list[Any], y: Any, before: dict[str, Any] | None) -> dict[str, Any]:
        loop = self.loop
        leaves = [(f"carry{path}", x) for path, x in zip(loop.carry.tree.paths, new, strict=False)]
        if (ys := loop.outputs) is not None:
            values = ys.leaves_of(y, t)
            assert ys.tree is not None
            leaves += [(f"y{path}", x) for path, x in zip(ys.tree.paths, values, strict=True)]
        found = {name: self._of(x) for name, x in leaves}
        if before is None:
            return found
        first = {_user(key): state for key, (_, state) in self.captures.generators.items()}
        for name, state in self._generators():
            if not _equal(state, before.get(name, first.get(name))):
                found[name.partition("#")[0]] = self._of(state)
        return found

    def _of(self, x: Any, depth: int = 0) -> Any:
        if isinstance(x, Tensor):
            return self._of_tensor(x)
        if isinstance(x, TensorArray):
            store = store_of(x)
            if not isinstance(store, Buffer) or not store.length:
                return len(x)
            last = store.waiting[-1] if store.waiting else store.block.data[store.length - 1]
            return store.length, self._of_tensor(last)
        if isinstance(x, _PLAIN):
            return type(x), repr(x)
        parts: Any = getattr(x, "__dict__", None)
        if isinstance(x, dict):
            parts = x
        elif isinstance(x, list | tuple | set):
            parts = dict(enumerate(x))
        if depth == _DEPTH or not isinstance(parts, dict):
            return type(x)
        return type(x), [(str(key), self._of(value, depth + 1)) for key, value in parts.items()]

    def _of_tensor(self, x: Tensor) -> Any:
        shape = tuple(x.shape)
        if transforms.is_fake(x) or not x.numel():
            return shape
        x = x.detach()
        x = x.to_dense() if x.layout is not torch.strided else x
        x = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        x = torch.view_as_real(x) if x.is_complex() else x
        bits = x.reshape(-1).view(_INTEGERS[x.itemsize]).to(torch.int64)
        factors = self.factors.get(x.device)
        if factors is None or len(factors) < len(bits):
            factors = self.factors[x.device] = torch.arange(1, 2 * len(bits), 2, device=x.device)
        return shape, int(bits.mul_(factors[: len(bits)]).sum())

    def _generators(self) -> Iterator[tuple[str, Any]]:
        """(name, state) of every generator that there is."""
        yield "torch's generator", torch.get_rng_state()
        if torch.cuda.is_initialized():
            for i, state in enumerate(torch.cuda.get_rng_state_all()):
                yield f"torch's generator of cuda:{i}", state
        for key, (generator, _) in self.captures.generators.items():
            yield _user(key), generator.get_state()
        if "random" in sys.modules:
            yield "Python's random", sys.modules["random"].getstate()
        if "numpy.random" in sys.modules:
            kind, keys, *rest = sys.modules["numpy.random"].get_state()
            yield "NumPy's random", (kind, keys.tobytes(), *rest)


def _user(key: int) -> str:
    return f"a torch.Generator of the body's#{key}"


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return transforms.equal(a, b)
    return a == b
