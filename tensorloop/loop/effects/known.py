"""What is known of code that nobody follows: whose it is, which calls in C change nothing, and which change something.

What stands in no table counts as a change. Names of the standard library, NumPy and torch, each fact once.
"""

import _queue
import _random
import array
import collections
import functools
import io
import itertools
import re
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tensorloop.loop.effects.operands import words

# Whose Python code is left to those who look at torch's operations, or is known to change nothing that lasts.
LIBRARIES = words("torch tensorloop numpy optree sympy numba llvmlite _pytest pytest hypothesis")
_NOT_TRUSTED = ("torch.optim", "torch.random", "torch.utils.data", "torch.utils.tensorboard")
_STANDARD = words(
    "re typing enum abc _py_abc inspect warnings dataclasses functools types numbers importlib "
    "importlib._bootstrap importlib._bootstrap_external linecache tokenize operator copyreg "
    "collections.abc traceback re._compiler re._parser reprlib"
)
# What only writes or waits, so that loops with checkpoints may do it: no step reads what they note.
_WRITERS = frozenset({"logging", "tqdm", "warnings", "threading", "concurrent"})
_COMPILED = ("__compiled_fn", "__resume_at", "torch_dynamo_resume")  # names in code of torch.compile's
_NAMED_TUPLES = "namedtuple_"  # what a module is called in which a named tuple's `__new__` is made, for any library
_IMPORTS = frozenset({"importlib._bootstrap", "importlib._bootstrap_external"})

PLAIN = (int, float, complex, bool, str, bytes, type(None), tuple, frozenset, range, slice)
OWNERS = (list, dict, set, collections.deque, _random.Random, io.StringIO, io.BytesIO, _queue.SimpleQueue)
# What holds its elements, or its state, itself; subclasses too.
PURE_KINDS = (
    *(types.MappingProxyType, types.CodeType, type({}.keys()), type({}.values()), type({}.items()), type(...)),
    *(types.FunctionType, types.MethodType, type(NotImplemented), property, types.GenericAlias),
    *(re.Pattern, re.Match, types.UnionType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
_READS = {
    list: "copy count index",
    dict: "copy get items keys values",
    set: "copy union intersection difference symmetric_difference isdisjoint issubset issuperset",
    collections.deque: "copy count index",
    _random.Random: "getstate",  # which torch.compile asks for
    bytearray: "decode hex find count index startswith endswith split strip lower upper copy",
    array.array: "tolist count index tobytes",
    object: "__getattribute__ __getitem__ __len__ __contains__ __eq__ __ne__ __hash__ __repr__ __str__ __format__ "
    "__dir__ __lt__ __le__ __gt__ __ge__ __bool__ __index__ __iter__ __reduce_ex__ __init_subclass__ __sizeof__ "
    "__class__ __init__ __new__ __enter__ __exit__",
}
READS = {kind: frozenset(names.split()) for kind, names in _READS.items()}
WRITES = words("append extend add write writelines put put_nowait appendleft update insert flush")

_BUILT_IN = types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType
OUTSIDE = frozenset({"print", "input", "open", "exec", "breakpoint"})
_PURE_MODULES = words(
    "builtins math cmath _operator _functools itertools _warnings _abc _struct _collections _stat _sre "
    "_typing _string _json _weakref _codecs"
)
_PURE_OF = {
    "posix": "fspath getpid getcwd stat lstat get_terminal_size cpu_count",
    "nt": "fspath getpid getcwd stat lstat get_terminal_size cpu_count",
    "sys": "exception _getframemodulename getrefcount getsizeof _getframe intern getrecursionlimit exc_info gettrace",
    "_thread": "get_ident",
    "_bisect": "bisect bisect_left bisect_right",
    "_pickle": "dumps loads",
}
_NOT_PURE = frozenset({"pack_into", "register", "register_error"})
_PURE_OF = {module: frozenset(names.split()) for module, names in _PURE_OF.items()}
# Functions that change their first argument.
CHANGES_FIRST = words(
    "setitem delitem iadd isub imul iconcat ior iand ixor itruediv ifloordiv imod ipow ilshift irshift "
    "imatmul heappush heappop heapify heapreplace heappushpop _heapreplace_max _heappop_max _heapify_max "
    "insort insort_left insort_right _count_elements copyto put place putmask fill_diagonal "
    "put_along_axis"
)
TAKING = frozenset({"heappop", "heapreplace", "heappushpop"})  # those that return what was in it
CHANGING_ARRAYS = words(
    "fill sort put resize itemset partition setfield byteswap setflags __setitem__ __iadd__ __isub__ "
    "__imul__ __itruediv__ __setstate__"
)
# Functions in C that call what they are given.
CALLING = words(
    "map filter reduce sorted min max accumulate starmap groupby takewhile dropwhile filterfalse iter "
    "defaultdict sort Thread Timer"
)
# Calls whose result is new, though the collector does not see it.
MAKERS = words("dict bytearray array copy fromkeys zeros ones empty full arange linspace astype")

PLACES = frozenset({"data_ptr", "untyped_storage", "is_set_to", "_is_alias_of"})  # what says where a tensor lies
SEEDS = words("manual_seed manual_seed_all set_state set_rng_state graphsafe_set_state set_offset")
TORCHS_STATE = words(  # what is torch's own; grad modes are looked at elsewhere
    "seed seed_all set_default_dtype set_default_device set_default_tensor_type set_deterministic "
    "use_deterministic_algorithms set_float32_matmul_precision set_printoptions set_anomaly_enabled"
)
OF_MODULES = words(
    "train eval to cpu cuda half float double bfloat16 type apply zero_grad requires_grad_ "
    "load_state_dict add_module register_module register_buffer register_parameter register_forward_hook "
    "register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook share_memory "
    "to_empty append extend insert pop update clear compile set_extra_state set_submodule"
)


# What says something about a tensor that does not depend on its numbers.
QUERIES = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, Tensor.is_contiguous, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.ndimension, Tensor.nelement, Tensor.__hash__),
}
# Functions whose results have as many elements as numbers in tensors say; and those where a size, or where to cut, may
# be a tensor: an integer of no dims among their arguments, or any behind the first.
_SIZED_BY_NUMBERS = words(
    "nonzero argwhere unique unique_consecutive unique_dim _unique_impl _unique_consecutive_impl _unique2 "
    "_return_counts _return_output masked_select bincount one_hot boolean_dispatch"
)
_TAKE_SIZES = words(
    "zeros ones empty full rand randn randint randperm eye arange linspace logspace tril_indices triu_indices "
    "new_zeros new_ones new_empty new_full view reshape expand broadcast_to repeat tile unflatten resize_ narrow "
    "split chunk unfold topk pad"
)
_CUT_BY_TENSORS = frozenset({"repeat_interleave", "tensor_split"})


def tells_numbers(function: Any, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
    """Whether Python may go another way for other numbers in tensors, after a call of torch."""
    name = getattr(function, "__name__", "")
    if name in _SIZED_BY_NUMBERS or (name == "where" and len(args) + len(kwargs) < 3):
        return True
    if name in _TAKE_SIZES or name in _CUT_BY_TENSORS or name == "__getitem__":
        given = list(_flat((*args, *kwargs.values())))
        tensors = [x for x in (given if name in _TAKE_SIZES else given[1:] or given) if isinstance(x, Tensor)]
        bounds = [(x.start, x.stop, x.step) for x in given if isinstance(x, slice)]
        if name not in _CUT_BY_TENSORS:
            tensors = [*filter(_is_size if name in _TAKE_SIZES else _is_mask, tensors)]
        if tensors or any(isinstance(x, Tensor) for x in _flat(bounds)):
            return True
    if out is None or isinstance(out, Tensor) or function in QUERIES or name == "__get__":
        return False
    return not (isinstance(out, (tuple, list)) and all(isinstance(x, Tensor) for x in out))


def _is_size(x: Tensor) -> bool:
    return not x.dim() and not (x.is_floating_point() or x.is_complex())


def _is_mask(x: Tensor) -> bool:
    return x.dtype in (torch.bool, torch.uint8)


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (tuple, list)):
        for y in x:
            yield from _flat(y)
    else:
        yield x


def above(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame, and those that led to it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: types.FrameType) -> str:
    """The name of the module whose code a frame runs."""
    return frame.f_globals.get("__name__") or ""


@functools.lru_cache(4096)
def is_trusted(name: str, writers: bool = False) -> bool:
    """Whether the code of a module is not followed; `writers` says whether that goes for what only writes."""
    root = name.partition(".")[0]
    if name in _STANDARD or (writers and root in _WRITERS) or name.startswith(_NAMED_TUPLES):
        return True
    return root in LIBRARIES and not name.startswith(_NOT_TRUSTED)


def only_writes(name: str) -> bool:
    """Whether the code of a module is trusted only where it may write."""
    return is_trusted(name, True) and not is_trusted(name)


def is_of_library(frame: types.FrameType, writers: bool) -> bool:
    """Whether the standard library runs here for a library that is trusted, as torch's logging does."""
    if module_of(frame) in ("weakref", "_weakrefset") and "__init__.<locals>" in frame.f_code.co_qualname:
        return True  # it is called when an object dies, and forgets it
    if module_of(frame) == "torch.random":  # followed for the user, not for loops that read and set states themselves
        caller = next((x for x in above(frame) if not module_of(x).startswith("torch.")), None)
        return caller is not None and module_of(caller).startswith("tensorloop.")
    for at in above(frame):
        if not _is_standard(module_of(at)):
            break
        if writers and module_of(at).partition(".")[0] in _WRITERS:
            return True
    else:
        return False
    if at is frame:
        return False
    # What torch.compile makes of a function has that function's globals.
    return module_of(at).partition(".")[0] in LIBRARIES or is_compiled(at.f_code)


def is_compiled(code: types.CodeType) -> bool:
    """Whether torch.compile has made a code."""
    return any(x.startswith(_COMPILED) for x in (code.co_name, *code.co_names))


_imported: Any = getattr(
    sys.modules.get("importlib._bootstrap"), "_module_locks", True
)  # not empty while something is imported


def imports(frame: types.FrameType | None) -> bool:
    """Whether a module is imported here: what its code does is done once."""
    return bool(_imported) and any(module_of(x) in _IMPORTS for x in above(frame))


def restores(frame: types.FrameType | None) -> bool:
    """Whether torch sets the state of a generator that it puts back: `fork_rng` and `torch.utils.checkpoint` do."""
    of_torch = itertools.takewhile(lambda x: module_of(x).startswith("torch."), above(frame))
    return any(x.f_code.co_name == "fork_rng" or module_of(x) == "torch.utils.checkpoint" for x in of_torch)


def users(frame: types.FrameType) -> types.FrameType:
    """The innermost frame that is neither a trusted library's nor the standard library's."""
    return next((x for x in above(frame) if not _is_library(module_of(x))), frame)


def _is_library(name: str) -> bool:
    return is_trusted(name) or _is_standard(name) or name.partition(".")[0] in LIBRARIES


def _is_standard(name: str) -> bool:
    return name != "__main__" and name.partition(".")[0] in sys.stdlib_module_names


def is_pure(module: str, name: str) -> bool:
    """Whether a function in C changes nothing but by what it is given."""
    pure = module in _PURE_MODULES and name not in _NOT_PURE
    return pure or name in _PURE_OF.get(module, ()) or name == "_jit_internal"


@functools.lru_cache(4096)
def reads(kind: type, name: str) -> bool:
    """Whether a method in C of such an object only reads it."""
    return any(issubclass(kind, base) and name in names for base, names in READS.items())


def is_torchs(kind: Any) -> bool:
    """Whether a type is torch's or this library's, whose objects others look after."""
    module = kind.__module__ or ""
    return module.partition(".")[0] in ("torch", "tensorloop") and is_trusted(module)


def class_with(kind: type, name: str) -> type | None:
    """The class of which an attribute is."""
    return next((base for base in kind.__mro__ if name in base.__dict__), None)


def of_type(kind: type, name: str, default: Any = None) -> Any:
    """An attribute of a type, as it stands in its class."""
    base = class_with(kind, name)
    return default if base is None else base.__dict__[name]


def dict_of(x: Any) -> Any:
    """The `__dict__` of an object that has one: no code of its class runs."""
    kind = type(x)
    if is_proxy(kind) or issubclass(kind, threading.local):
        return getattr(x, "__dict__", None)
    return object.__getattribute__(x, "__dict__") if kind.__dictoffset__ else None


def is_proxy(kind: type) -> bool:
    """Whether an object stands for another one."""
    return kind.__name__ in ("ProxyType", "CallableProxyType", "weakproxy", "weakcallableproxy")


@functools.lru_cache(4096)
def in_python(kind: type, name: str) -> bool:
    """Whether a method is written in Python, so that its code is followed."""
    return type(of_type(kind, name)) is types.FunctionType


def is_torch_function(function: Any) -> bool:
    """Whether a function is torch's own: below another's, which it may hand to `__torch_function__`, all may change."""
    if type(function) is types.FunctionType:
        return function.__module__ == "torch" or function.__module__.startswith("torch.")
    return type(function) in _BUILT_IN
