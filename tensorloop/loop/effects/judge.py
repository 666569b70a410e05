"""Follows the Python of one step: asked before each instruction that may store, call, or read what was stored.

Functions in Python are followed into their frames; of those in C it is known by name and by what they are given whether
they may change what outlives the step.
"""

import functools
import types
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from tensorloop._common import pytree
from tensorloop._common.arguments import describe
from tensorloop._torch.overrides import unseen
from tensorloop._torch.transforms import storage
from tensorloop.loop.effects import known
from tensorloop.loop.effects.instructions import InstructionCheck, begins_at, checks_of
from tensorloop.loop.effects.notes import ELEMENTS, GONE, Undone
from tensorloop.loop.effects.operands import EMPTY, NEW, UNKNOWN, operands, words
from tensorloop.loop.effects.reads import NOBODY
from tensorloop.loop.effects.stores import Effect as Effect
from tensorloop.loop.effects.stores import Stores

_BUILT_IN = (types.BuiltinFunctionType, types.MethodWrapperType)
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_HARMLESS = words(
    "itemgetter attrgetter weakref ReferenceType _tuplegetter GenericAlias _GenericAlias TypeVar _SpecialGenericAlias"
)
_ATTRIBUTES = types.GetSetDescriptorType, types.MemberDescriptorType
_GENERATORS = 0x2A0  # flags of codes whose frames go on later: generators, coroutines, both
_ARGS, _KEYWORDS = 4, 8  # flags of codes that take *args and **kwargs
_STAND_INS = {"SymInt": int, "SymBool": bool, "SymFloat": float}
_Frame = types.FrameType


class Judge(Stores):
    """Follows one step."""

    def starts(self, frame: _Frame) -> dict[int, InstructionCheck]:
        """The checks of a frame that begins or goes on; none where its code is not followed."""
        code = frame.f_code
        writers = self.writers()
        if known.is_trusted(known.module_of(frame), writers):
            return {}
        if known.is_of_library(frame, writers) or known.imports(frame):
            return {}
        if self.paths is not None and not self.paths.meets(code):
            return {}
        if code.co_flags & _GENERATORS and id(frame) not in self.begun:
            if frame.f_lasti > begins_at(code):
                self.refuse(frame.f_back or frame, f"takes the next of {code.co_name}, a generator begun before")
            self.begun[id(frame)] = frame
        if code.co_flags & _KEYWORDS:
            place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & _ARGS)
            found = frame.f_locals.get(code.co_varnames[place])
            if type(found) is dict:
                self.made.add(id(found))
        self.kept.begins(frame)
        table = checks_of(code, self.notes is not None or self.kept is not NOBODY)
        return table if self.paths is None else self.paths.left_of(code, table)

    def before(self, frame: _Frame, check: InstructionCheck) -> None:
        """Asks before one instruction."""
        if check.after_maker and id(frame) in self._makes:
            self._makes.discard(id(frame))
            if (x := operands(frame, 1)[0]) is not UNKNOWN:
                self.made.add(id(x))
        if check.method is not None:
            self._counts = check.counts
            getattr(self, check.method)(frame, check.argument, *(operands(frame, check.n) if check.n else ()))

    # -- calls

    def call(self, frame: _Frame, names: tuple[str, ...] | None, *found: Any) -> None:
        """Judges CALL, and CALL_KW, which has the names on top."""
        if names is None:
            *found, names = found  # pyright: ignore[reportAssignmentType]
        # Up to 3.12 NULL lies below the callable; else come a method and its object, from 3.13 on also one and NULL.
        f, *args = found[1:] if found[0] is EMPTY else (found[0], *found[2:]) if found[1] is EMPTY else found
        self.called(frame, f, args, names if isinstance(names, tuple) else ())

    def call_ex(self, frame: _Frame, has_keywords: int, f: Any, *found: Any) -> None:
        """Judges CALL_FUNCTION_EX."""
        args, kwargs = found[-2 if has_keywords else -1], found[-1] if has_keywords else None
        if type(args) is not tuple:
            self.taken(frame, args)
            args = args if type(args) is list else ()
        kwargs = kwargs if type(kwargs) is dict else {}
        self.called(frame, f, [*args, *kwargs.values()], tuple(kwargs))

    def called(self, frame: _Frame, f: Any, args: list[Any], names: tuple[str, ...] = ()) -> None:
        """Judges one call; `names` are those of the last of `args`."""
        if f is UNKNOWN or f is NEW:
            return self.refuse(frame, "calls what cannot be seen in this Python")
        kind = type(f)
        if kind is types.MethodType:
            return self.called(frame, f.__func__, [f.__self__, *args], names)
        if kind is types.FunctionType:
            return self._in_python(frame, f, args)
        if kind is functools.partial:
            return self.called(frame, f.func, [*f.args, *args, *f.keywords.values()], (*names, *f.keywords))
        if kind is functools._lru_cache_wrapper:  # its function is followed, and a kept result is what that gave
            if isinstance(self.notes, Undone):
                self.refuse(frame, f"calls {_name_of(f)}, which keeps it")
            self.cached.add(id(getattr(f.__wrapped__, "__code__", None)))
            return None
        if isinstance(f, type):
            return self._makes_one(frame, f, args)
        if isinstance(f, _BUILT_IN):
            owner = f.__self__
            if kind is types.BuiltinFunctionType and (owner is None or isinstance(owner, types.ModuleType)):
                return self._of_module(frame, f, args, names)
            if type(owner).__name__.startswith("pybind11") and args:  # which keeps its own record there
                owner, args = args[0], args[1:]
            return self._of(frame, owner, f.__name__, args)
        if isinstance(f, _DESCRIPTORS):
            if not args and not issubclass(f.__objclass__, known.PLAIN) and not known.reads(f.__objclass__, f.__name__):
                return self.refuse(frame, f"hands on {f.__objclass__.__name__}.{f.__name__}")
            return self._of(frame, args[0], f.__name__, args[1:]) if args else None
        if known.in_python(kind, "__call__") or known.is_torchs(kind) or kind.__name__ in _HARMLESS:
            self.kept.whole(f, kind.__name__ not in _HARMLESS)
            if self.notes is not None:
                self._scripted(f, args)
                self._arguments(frame, "", args)
            return None
        if kind.__name__ in ("ufunc", "_ArrayFunctionDispatcher"):
            return self._of_numpy(frame, f, args, names)
        if kind.__module__ == "operator" or kind.__name__ == "methodcaller":
            _, (name, *given) = f.__reduce__()
            return self._of(frame, args[0], name, given) if args else None
        return self.refuse(frame, f"calls {_name_of(f)}, which may change what is outside")

    def _in_python(self, frame: _Frame, f: Any, args: list[Any]) -> None:
        module, name = f.__module__ or "", f.__name__
        if module == "pdb":
            return self.refuse(frame, f"calls pdb.{name}()")
        if self.notes is not None and known.only_writes(module):
            self.kept.complete = False
            for x in args:
                self._handed_on(frame, x)
                writes = known.only_writes(type(x).__module__) and not self.is_new(x)
                if writes and type(held := known.dict_of(x)) is dict:
                    self.notes.keep_all(held)
        if not known.is_trusted(module) or (args and _is_function(args[0])):
            return None
        self._torchs_state(frame, f"{module}.{name}()", name)
        of_torch = module.partition(".")[0] in ("torch", "tensorloop")  # tensors that it is given show in its calls
        self.kept.given("", [x for x in args if isinstance(x, nn.Module)] if of_torch else args)
        if name in known.OF_MODULES and args and isinstance(args[0], nn.Module) and not self.is_new(args[0]):
            same = name in ("train", "eval") and args[0].training is (name == "train" and all(args[1:]))
            if not same and not isinstance(args[0], (nn.ModuleList, nn.ModuleDict)):
                self.refuse(frame, f"calls {name}() of a module from outside")
        elif self.notes is not None:
            self._arguments(frame, "", args)

    def _scripted(self, f: Any, args: list[Any]) -> None:
        """Notes what TorchScript may change: it calls no function that a watch would see."""
        modules = dict(f.named_modules()) if isinstance(f, nn.Module) else {}
        with unseen():
            found = list[tuple[str, Tensor]]()
            for path, module in modules.items():
                if isinstance(module, torch.jit.ScriptModule):
                    found += [(f"its buffer {name}", x) for name, x in module.named_buffers(path, recurse=False)]
            if isinstance(f, torch.jit.ScriptFunction):
                tensors = [x for x in pytree.leaves(args) if isinstance(x, Tensor) and not self.is_new(x)]
                found += [(describe(x), x) for x in tensors]
            self.scripted += [(name, x, x.clone()) for name, x in found]

    def changed_by_script(self) -> str | None:
        """Names a tensor that TorchScript has changed."""
        with unseen():
            changed = (not torch.allclose(x, was, 0, 0, equal_nan=True) for _, x, was in self.scripted)
            return next((name for (name, _, _), differs in zip(self.scripted, changed, strict=True) if differs), None)

    def _torchs_state(self, frame: _Frame, said: str, name: str) -> None:
        seeds = name in known.SEEDS and not self.writers() and not known.restores(frame)
        if name in known.TORCHS_STATE or seeds:
            self.refuse(frame, f"calls {said}")

    def _of_module(self, frame: _Frame, f: Any, args: list[Any], names: tuple[str, ...]) -> None:
        module, name = getattr(f, "__module__", None) or "", f.__name__
        if module == "builtins":
            return self._built_in(frame, name, args, names)
        if module.partition(".")[0] == "torch":
            self._torchs_state(frame, f"{name}()", name)
            return self._arguments(frame, "", args) if self.notes is not None else None
        if module.startswith("numpy"):
            return self._of_numpy(frame, f, args, names)
        if module.startswith(("_operator", "_heapq", "_bisect", "_collections")) and name in known.CHANGES_FIRST:
            if name in known.TAKING:
                self.reads(frame, args[0])
            if not self._as_instruction(frame, name, args):
                self.changes(frame, args[0], "changes", f"__{name}__" if module == "_operator" else "__setitem__")
            return None
        if known.is_pure(module, name):
            return self._arguments(frame, name, args)
        return self.refuse(frame, f"calls {name if name in known.OUTSIDE else f'{module}.{name}'}()")

    def _built_in(self, frame: _Frame, name: str, args: list[Any], names: tuple[str, ...]) -> None:
        if name in ("setattr", "delattr", "next") and not args:
            return self.refuse(frame, f"hands on {name}")
        if self._as_instruction(frame, name, args):
            return None
        if name == "print" and self.writers():
            given = dict(zip(names, args[len(args) - len(names) :], strict=True))
            self.kept.complete = False  # it is to be done as often as the step
            return None if given.get("file") is None else self._of(frame, given["file"], "write", [])
        if name in known.OUTSIDE:
            return self.refuse(frame, f"calls {name}()")
        self.kept.complete &= name not in ("globals", "eval", "dir", "vars", "locals")
        if name in ("isinstance", "issubclass") and len(args) > 1:
            self.number(frame, args[0], args[1])
        elif name == "vars" and args:
            self.note_dict(args[0])
        elif name == "iter" and args and not hasattr(type(args[0]), "__next__"):
            self.makes(frame)
        return self._arguments(frame, name, args)

    def _as_instruction(self, frame: _Frame, name: str, args: list[Any]) -> bool:
        """Judges a function that sets or gets as an instruction does; whether nothing is left to judge."""
        n = len(args)
        if name in ("setattr", "delattr", "__setattr__", "__delattr__") and n > 1:
            self.attribute(frame, args[0], args[1], args[2] if n > 2 else GONE)
        elif name in ("setitem", "__setitem__") and n == 3:
            self.item(frame, *args)
        elif name == "requires_grad_" and isinstance(args[0], Tensor):
            self.attribute(frame, args[0], "requires_grad", args[1] if n > 1 else True)
        elif name in ("__set__", "__delete__") and type(args[0]) in _ATTRIBUTES:
            self.attribute(frame, args[1], args[0].__name__, args[2] if n > 2 else GONE)
        else:
            if name in ("getattr", "hasattr", "__getattribute__") and n > 1 and type(args[1]) is str:
                self.read_attr(frame, args[1], args[0])
            return False
        return True

    def read_attr(self, frame: _Frame, name: str, owner: Any) -> None:
        """Judges LOAD_ATTR."""
        if name == "__class__":
            self.number(frame, owner, None)
        elif name == "__dict__":
            self.note_dict(owner)
        else:
            self.attribute_read(frame, owner, name)

    def _of_numpy(self, frame: _Frame, f: Any, args: list[Any], names: tuple[str, ...]) -> None:
        """A function of NumPy's: it may write to what it is given as `out`."""
        outs = list(args[f.nin : len(args) - len(names)]) if hasattr(f, "nin") else []
        outs += [x for x, name in zip(args[len(args) - len(names) :], names, strict=True) if name == "out"]
        if f.__name__ in known.CHANGES_FIRST:
            outs += args[:1]
        for x in outs:
            if x is not None and not self.is_new(x):
                self.changes(frame, x, "writes to")
        if f.__name__ in known.MAKERS:
            self.makes(frame)
        self._arguments(frame, "", args)

    def _makes_one(self, frame: _Frame, kind: Any, args: list[Any]) -> None:
        """An object of a class is made: it may take from iterators."""
        if kind is type and len(args) == 1:
            self.number(frame, args[0], None)
        elif not known.is_torchs(kind):
            self._arguments(frame, kind.__name__, args)

    def _arguments(self, frame: _Frame, name: str, args: list[Any]) -> None:
        """Judges the arguments of a C function: read, taken from where they are iterators, called where it calls."""
        self.kept.given(name, args)
        if name in known.MAKERS:
            self.makes(frame)
        for x in args:
            self.taken(frame, x) if name else self.reads(frame, x)
            if name in known.CALLING:
                self._handed_on(frame, x)

    def _handed_on(self, frame: _Frame, x: Any) -> None:
        if callable(x) and not isinstance(x, (types.FunctionType, type)):
            self.called(frame, x, [])  # C calls C, which no event tells

    def _of(self, frame: _Frame, owner: Any, name: str, args: list[Any]) -> None:
        """A method in C."""
        kind = type(owner)
        if self._as_instruction(frame, name, [owner, *args]):
            return None
        if isinstance(owner, Tensor):
            if name in known.PLACES:
                self.memory(frame, owner)
            return self._arguments(frame, "", args) if self.notes is not None else None
        if not (self.notes is not None and name in known.WRITES):
            self.kept.given(name, [owner])
        if isinstance(owner, type):  # dict.fromkeys, int.from_bytes
            of_torch = (owner.__module__ or "").partition(".")[0] == "torch" or _is_function(owner)
            return None if of_torch else self._arguments(frame, name, args)
        if known.is_torchs(kind):
            if isinstance(owner, torch.Generator):
                users = name in known.SEEDS and owner is not torch.default_generator
                if users and self.generators is not None and id(owner) not in self.generators:
                    self.generators[id(owner)] = owner, owner.get_state()
                self._torchs_state(frame, f"{name}() of a torch.Generator", name)
            return None
        if isinstance(owner, known.PLAIN) or kind in known.PURE_KINDS:
            return self._arguments(frame, name, args)
        writes = self.notes is not None and name in known.WRITES
        if writes and (self.is_new(owner) or self.notes.writes(owner, ELEMENTS, 0)):  # pyright: ignore[reportOptionalMemberAccess]
            return self._arguments(frame, name, args)
        if isinstance(owner, ContextVar):
            return self.context(frame, owner, name)
        if known.reads(kind, name):
            self.reads(frame, owner)
            return self._arguments(frame, name, args)
        if kind.__module__ == "numpy":
            if name in known.CHANGING_ARRAYS and not self.is_new(owner):
                self.changes(frame, owner, f"calls {name}() of")
            elif name in known.MAKERS:
                self.makes(frame)
            return None
        if kind.__name__ in ("lock", "RLock", "_RLock"):
            return None
        if self.owns(owner) or id(owner) in self.made or (kind is types.GeneratorType and self.is_new(owner)):
            return self._arguments(frame, name, args)
        if self.notes is not None and not self.notes.refuses:
            self.reads(frame, owner)
        return self.refuse(frame, f"calls {name}() of a {kind.__name__} from outside", name == "setdefault")

    # -- types

    def is_class(self, frame: _Frame, _: Any, subject: Any, kind: Any, names: Any) -> None:
        """Judges MATCH_CLASS."""
        self.kept.complete &= isinstance(subject, known.PLAIN) or self.is_new(subject)  # attributes of it are read
        self.number(frame, subject, kind)

    def number(self, frame: _Frame, x: Any, kind: Any) -> None:
        """Judges that Python asks what stands for a number for its type: the answer is the number's, or none."""
        stands_for = _stands_for(x)
        if stands_for is None:
            return
        try:
            same = kind is not None and isinstance(x, kind) == issubclass(stands_for, kind)
        except TypeError:
            return
        if not same:
            self.refuse(frame, "asks for the type of a number that the loop gives")

    def memory(self, frame: _Frame, x: Tensor) -> None:
        """Judges that it is asked where a tensor lies: those of the carry have memory of their own in a replay.

        Packages ask it for their kernels.
        """
        if self.notes is None or "-packages" in known.users(frame).f_code.co_filename:
            return
        with unseen():
            given = [y for y in pytree.leaves(self.given_here) if isinstance(y, Tensor) and y.layout is torch.strided]
            if x.layout is torch.strided and storage(x)._cdata in {storage(y)._cdata for y in given}:
                self.refuse(frame, "asks where a tensor that the loop gives is in memory")

    def identity(self, frame: _Frame, _: Any, a: Any, b: Any) -> None:
        """Judges `a is b`: a plan, and a step that runs again, give each tensor of a carry memory of its own."""
        self.kept.compared(a, b)
        plain = any(type(x) in (bool, type(None)) for x in (a, b))
        if not plain and any(_stands_for(x) is not None for x in (a, b)):
            self.refuse(frame, "asks whether a number that the loop gives is the same object")
        if a is not b and all(isinstance(x, Tensor) and not self.is_new(x) for x in (a, b)):
            self.refuse(frame, "asks whether two tensors that it was given are the same")


def _stands_for(x: Any) -> Any:
    """The type of the number that something stands for."""
    if type(x).__name__ == "NumberRead":
        return x.__class__
    return _STAND_INS.get(type(x).__name__) if known.is_torchs(type(x)) else None


def _is_function(x: Any) -> bool:
    """Whether something is a custom Function, whose code is followed where it runs."""
    return isinstance(x, type) and issubclass(x, torch.autograd.Function)


def _name_of(f: Any) -> str:
    name = getattr(f, "__name__", None)
    return f"{name}()" if isinstance(name, str) else f"a {type(f).__name__}"
