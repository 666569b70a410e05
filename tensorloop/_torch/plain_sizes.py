"""Torch's formulas in Python without sympy and dynamo, where every size is a number.

Private names of torch, tried with 2.13: the functions of `torch.fx.experimental.symbolic_shapes` that are in `_SIZES`,
`torch._compile._disable_dynamo`, and the modules in `_FORMULAS`, which import both when they run: two seconds in each
process. They ask the one whether a size is a symbol and what is known of it, and the other not to trace them. A process
that has loaded neither has no symbols and traces nothing, so that the answers are those below. What else is imported,
or by others, or in another thread, is imported.
"""

import builtins
import sys
import threading
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

_FORMULAS = frozenset(
    {"torch", "torch._decomp.decompositions", "torch._meta_registrations", "torch._prims", "torch._prims_common"}
    | {"torch._refs", "torch._refs.linalg", "torch._refs.nn.functional", "torch._refs.special"}
)


def _equal(a: Any, b: Any) -> bool:
    """Compares numbers, and lists with tuples of them."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


def _same(size: Any) -> Any:
    return size


_SIZES = SimpleNamespace(
    **dict.fromkeys(
        ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true"), bool
    ),
    guard_int=_same,
    guarding_hint_or_throw=_same,
    has_guarding_hint=lambda size: True,
    is_nested_int=lambda size: False,
    sym_and=lambda *conditions: all(conditions),
    sym_eq=_equal,
    sym_or=lambda *conditions: any(conditions),
)


class _NoSymbol:
    """A class without instances, in the place of sympy's."""


_NOTHING: tuple[Any, Container[Any]] = None, ()


class _Imports:
    """`__import__` while formulas run in some threads."""

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), Counter[int]()
        self._imports, self._there = builtins.__import__, False
        self._untraced: list[Any] = []  # functions that dynamo was asked not to trace
        dynamo = SimpleNamespace(disable=self._disable)
        # Module -> what an import statement gets, which binds that or takes names from it, and who has to ask.
        self._answers: Mapping[str, tuple[Any, Container[Any]]] = {
            "sympy": (SimpleNamespace(Basic=_NoSymbol), _FORMULAS),
            "torch._dynamo": (SimpleNamespace(_dynamo=dynamo), {"torch._compile"}),
            "torch.fx.experimental.symbolic_shapes": (_SIZES, _FORMULAS),
            "torch.utils._sympy.functions": (SimpleNamespace(Max=max), _FORMULAS),
        }

    def _disable(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._untraced.append(function)
        return function

    def __call__(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
    ) -> Any:
        """Answers a formula of this thread; imports for all others."""
        answer, askers = self._answers.get(name, _NOTHING)
        if (
            (globals or {}).get("__name__") in askers
            and self._threads[threading.get_ident()]
            and name not in sys.modules
            and all(hasattr(answer, one) for one in fromlist or ())
        ):
            return answer
        return self._imports(name, globals, locals, fromlist, level)

    def enter(self) -> None:
        """Begins to answer this thread."""
        with self._lock:
            if not self._there:
                self._imports, builtins.__import__, self._there = builtins.__import__, self, True
            self._threads[threading.get_ident()] += 1

    def leave(self) -> None:
        """Ends it; after the last thread everything is as it was found."""
        with self._lock:
            self._threads[threading.get_ident()] -= 1
            self._threads += Counter()  # without zeros
            if self._threads:
                return
            if builtins.__import__ is self:  # else another's is around it, and asks it as long as that stays
                builtins.__import__, self._there = self._imports, False
            while self._untraced:  # dynamo, once it is loaded, is asked again
                vars(self._untraced.pop()).pop("__dynamo_disable", None)


_imports = _Imports()


@contextmanager
def plain_sizes() -> Iterator[None]:
    """Inside, torch's formulas load neither sympy nor dynamo: all sizes are numbers."""
    _imports.enter()
    try:
        yield
    finally:
        _imports.leave()
