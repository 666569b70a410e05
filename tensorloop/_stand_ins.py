"""Captures that lead to other captures: there a replay must not follow the outer graph, or a gradient counts twice.

A body may close over `w` and over `v = f(w)`. Differentiating one step with regard to both would also find w through v,
and the loop's node hands v's gradient on to f in any case. So v is replaced by a leaf in every torch function of such a
replay. Only captures with another capture among their ancestors need it (an embedding shared with the encoder, say).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tensorloop._active import here
from tensorloop._compile import runs_eagerly


def entangled(recorded: Sequence[Tensor]) -> list[Tensor]:
    """The captures above which, in the graph, there is another."""
    if len(recorded) < 2:
        return []
    leaves = {id(x) for x in recorded if x.grad_fn is None}
    nodes = {x.grad_fn for x in recorded if x.grad_fn is not None}
    return [x for x in recorded if x.grad_fn is not None and leads_to(x.grad_fn, leaves, nodes)]


def leads_to(start: Any, leaves: set[int], nodes: Collection[Any] = ()) -> bool:
    """Whether the graph below a node has one of these leaves, by id, or nodes."""
    visited, stack = {start}, [start]
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is None or below in visited:
                continue
            if below in nodes or id(getattr(below, "variable", None)) in leaves:
                return True
            visited.add(below)
            stack.append(below)
    return False


def stand_ins(replaced: dict[int, Tensor]) -> AbstractContextManager[object]:
    """Inside, every torch function gets the stand-ins for the tensors that have one."""
    return _standing_in(replaced) if replaced else nullcontext()


@contextmanager
def _standing_in(replaced: dict[int, Tensor]) -> Iterator[None]:
    outer, here.replaced = here.replaced, (*here.replaced, replaced)
    try:
        with _Replacing(replaced):
            yield
    finally:
        here.replaced = outer


class Replacing:
    """The stand-ins that are in use where a loop begins: its replays need them too, though they come later."""

    def __init__(self) -> None:
        self.replaced = here.replaced

    def of(self, x: Any) -> Any:
        """What stands for x there."""
        for replaced in reversed(self.replaced):
            x = replaced.get(id(x), x)
        return x

    @contextmanager
    def again(self) -> Iterator[None]:
        """Those of then, not those of now."""
        with ExitStack() as stack:
            for replaced in self.replaced:
                if not any(replaced is other for other in here.replaced):
                    stack.enter_context(stand_ins(replaced))
            yield


@runs_eagerly
class _Replacing(TorchFunctionMode):
    def __init__(self, replaced: dict[int, Tensor]) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: self._swap(x) for key, x in (kwargs or {}).items()}
        return func(*[self._swap(x) for x in args], **kwargs)

    def _swap(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.replaced.get(id(x), x)
        if type(x) in (tuple, list):
            return type(x)(self._swap(y) for y in x)
        return x


def escaped(outputs: Sequence[Tensor], nodes: set[Any], arguments: set[int]) -> bool:
    """Whether the graph of a step reaches one of `nodes`: a capture was used where no torch function saw it."""
    visited: set[Any] = set()
    stack = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in nodes:
            return True
        if node in visited:
            continue
        visited.add(node)
        stack += [below for below, _ in node.next_functions if below is not None]
    return False
