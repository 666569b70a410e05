"""From a frame to the user's line: the innermost one that is in no package, PyTorch, this library or Python itself."""

import os
import sysconfig
import weakref
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import torch

from tensorloop.memory.counting.nodes import backward_code, current_node, module_code, sequence_number
from tensorloop.memory.counting.sites import PACKAGES, UNKNOWN, Site, site_at

BACKWARD = 1
"""Flag of a place: made while backward ran."""
OURS = 2
"""Flag of a place: made by an array or loop of this library, on behalf of the line."""

USER, SKIPPED, LIBRARY, PASSED, ENGINE, PACKAGE, MODULE = range(7)  # kinds of code
KEPT_NODES = 1 << 18


def _folder(path: str) -> str:
    return os.path.join(os.path.dirname(path), "")


_TORCH = _folder(torch.__file__)
_MEMORY = _folder(os.path.dirname(__file__))
_LIBRARY = _folder(os.path.dirname(os.path.dirname(__file__)))
_KERNELS = os.path.join("", "tensorloop_cuda", "")
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")


class Line:
    """Counts the bytes of one line that are alive now, and the most that ever were, over all its operations."""

    __slots__ = ("most", "now", "site")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.now = self.most = 0


class OperationBytes:
    """One operation of one line, in forward or in backward, with the bytes it made."""

    __slots__ = ("at_peak", "count", "epoch", "first", "flags", "func", "last", "line", "made", "now", "times")

    def __init__(self, line: Line, func: Any, flags: int) -> None:
        self.line, self.func, self.flags = line, func, flags
        self.made = self.now = self.count = 0
        self.times = self.first = self.last = 0  # storages made, bytes of the first and the last; of a cat the length along its dim
        self.at_peak = 0
        self.epoch = 0  # of the peak that `at_peak` belongs to; what is not of this epoch has not changed since


class Spot:
    """One instruction of the user's code, and of what it called a package's line or a part of a module, if any."""

    __slots__ = ("called", "line", "places")

    def __init__(self, line: Line, called: tuple[weakref.ref[torch.nn.Module], ...] = ()) -> None:
        self.line, self.called = line, called
        self.places: dict[tuple[int, int], OperationBytes] = {}


class _Code:
    """A code object, its kind and, of the user's code, the spots in it by offset."""

    __slots__ = ("code", "kind", "spots")

    def __init__(self, code: CodeType) -> None:
        self.code = code  # kept, so that no other can take its id
        if code is backward_code:
            self.kind = ENGINE
        else:
            self.kind = MODULE if code is module_code else kind_of_file(code.co_filename)
        if self.kind == LIBRARY and code.co_name == "__torch_function__":
            self.kind = PASSED  # an operation of the user's on its way through the library
        self.spots: dict[Any, Spot] = {}


def kind_of_file(file: str) -> int:
    """Whose source a file is: the user's, the library's, or one that is passed over."""
    if file.startswith(_MEMORY):
        return SKIPPED
    if file.startswith(_LIBRARY) or _KERNELS in file:
        return LIBRARY
    if file.startswith((_TORCH, "<frozen", "<eval_with_key", "<torch_package", "<__array_function__")):
        return SKIPPED
    if any(folder in file for folder in PACKAGES):
        return PACKAGE
    return SKIPPED if file.startswith(_PYTHON) else USER


class Finder:
    """Finds the user's spot behind an operation.

    In backward it is the spot whose forward operation the gradient is of. Autograd numbers its nodes in the order of
    the operations that made them: the number that was new when a spot ran is remembered, and the node that backward
    is at tells its own. So nothing is hung on a node. The last quarter of a million numbers at least are known; an
    older node, or one from before, gives the line that called backward. Each thread numbers its own nodes: one that
    another thread made can be taken for one of this thread with its number.
    """

    def __init__(self) -> None:
        self.lines: dict[Site, Line] = {}
        self._codes: dict[int, _Code] = {}
        self._nodes: dict[int, Spot] = {}
        self._older: dict[int, Spot] = {}
        self._names: dict[int, dict[int, str]] = {}  # of a module, by its id: the names of its parts, by theirs
        self._next = sequence_number()
        self._last = self._unknown = Spot(self._line(UNKNOWN))

    def start(self) -> None:
        """Nodes made from now on are those of the spots that are found."""
        self._next = sequence_number()

    def spot(self, frame: FrameType | None) -> tuple[Spot, int]:
        """The user's spot that a frame runs for, and flags."""
        if frame is not None and frame.f_code is backward_code and (of_node := self._of_node()) is not None:
            return of_node, BACKWARD  # an operation of PyTorch's own backward: most of them
        codes, flags, caller = self._codes, 0, False
        package: FrameType | None = None
        modules: list[Any] = []
        while frame is not None:
            code = frame.f_code
            known = codes.get(id(code))
            if known is None:
                known = codes[id(code)] = _Code(code)
            kind = known.kind
            if kind == SKIPPED:
                pass
            elif kind == USER:
                if package is not None or len(modules) > 1:
                    found = self._within(known, frame, package, modules)
                else:
                    found = known.spots.get(frame.f_lasti)
                    if found is None:
                        found = known.spots[frame.f_lasti] = Spot(self._line(_site_of(frame)))
                return found, flags if current_node() is None else flags | BACKWARD
            elif kind == MODULE:
                modules.append(frame.f_locals["self"])
            elif kind == PACKAGE:
                package = package or frame
            elif kind == ENGINE and not caller:
                if (found := self._of_node()) is not None:
                    return found, flags | BACKWARD
                caller, flags = True, 0
            elif kind == LIBRARY:
                flags = 0 if caller else OURS
            elif kind == PASSED:
                flags = 0
            frame = frame.f_back
        if (of_node := self._of_node()) is not None:
            return of_node, flags
        if package is None:
            return self._unknown, flags
        return self._within(codes[id(package.f_code)], package, None, []), flags

    def note(self, spot: Spot, number: int) -> None:
        """The node before `number` was made by `spot`; nodes made since the last call, by the spot before."""
        nodes = self._nodes
        nodes[number - 1] = spot
        for missed in range(max(self._next, number - 64), number - 1):
            nodes[missed] = spot if self._last is self._unknown else self._last
        self._next, self._last = number, spot
        if len(nodes) > KEPT_NODES:
            self._older, self._nodes = nodes, {}

    def _of_node(self) -> Spot | None:
        """The spot of the node that backward is at."""
        node = current_node()
        if node is None:
            return None
        number = node._sequence_nr()
        found = self._nodes.get(number)
        return self._older.get(number) if found is None else found

    def _within(self, known: _Code, frame: FrameType, package: FrameType | None, modules: list[Any]) -> Spot:
        """The spot of a frame that called an installed package, or a module with parts, innermost first."""
        modules = modules if len(modules) > 1 else []
        inner = (id(package.f_code), package.f_lasti) if package is not None else None
        key = frame.f_lasti, inner, *map(id, modules)
        found = known.spots.get(key)
        if found is None or any(ref() is not module for ref, module in zip(found.called, modules, strict=True)):
            library = None if package is None else _site_of(package)
            site = _site_of(frame, self._path(modules[::-1], frame) if modules else "", library)
            found = known.spots[key] = Spot(self._line(site), tuple(map(weakref.ref, modules)))
        return found

    def _path(self, modules: list[Any], frame: FrameType) -> str:
        """Names of modules, each called by the one before; the first by the module whose code the user's frame is.

        That module is asked of the frame in which it was called: `f_locals` of the user's own would keep his tensors.
        """
        outer: FrameType | None = frame
        while outer is not None and outer.f_code is not module_code:
            outer = outer.f_back
        caller = None if outer is None else outer.f_locals["self"]
        return ".".join(self._name(a, b) or type(b).__name__ for a, b in pairwise([caller, *modules]))

    def _name(self, outer: Any, inner: Any) -> str:
        """Returns the name by which a module holds a part of it; an empty string where it holds no such part."""
        if not isinstance(outer, torch.nn.Module):
            return ""
        name = self._names.get(id(outer), {}).get(id(inner), "")
        if not name or _part(outer, name) is not inner:  # an id may have been given anew
            names = self._names[id(outer)] = {id(part): name for name, part in outer.named_modules()}
            name = names.get(id(inner), "")
        return name

    def _line(self, site: Site) -> Line:
        return self.lines.setdefault(site, Line(site))


def _site_of(frame: FrameType, module: str = "", library: Site | None = None) -> Site:
    code = frame.f_code
    return site_at(code.co_filename, frame.f_lineno or 0, code.co_qualname, module, library)


def _part(outer: torch.nn.Module, name: str) -> torch.nn.Module | None:
    try:
        return outer.get_submodule(name)
    except AttributeError:
        return None
