"""CUDA graphs for the pretended device: what a stream is given to do is recorded, and replayed in the same memory.

Operations run while they are recorded, to know what comes of them; on a device they do not. So all memory that they
change is put back at the end, and what they made is poisoned: there, and before each replay. What a device refuses
while it records is refused, and an error ends the recording for good.
"""

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tensorloop._torch.dispatch import MemoryMode

WITHOUT_LAUNCH = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "set_", "record_stream"}
CUDA = torch.device("cuda").type
_pools = itertools.count(1)
_recording: dict[tuple[int, int], "Recorder"] = {}  # by the stream whose turn it is: (device, stream)
_lock = threading.Lock()
watches: list[Any] = []  # the one of `pretended`, once it has started
here = threading.local()  # `recorder` of this thread, while it records


# What computes products: cuBLAS does, with memory that torch takes for each of its handles, one a thread, and streams.
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addmm_", "addmv_")}
_workspaces: dict[tuple[int, tuple[int, int]], "Workspace"] = {}
modelled = [False]  # whether they are followed, for which each launch is told


class Workspace:
    """Memory of cuBLAS's, in the pool of whoever recorded when it was taken, or in that of all work: None."""

    def __init__(self, pool: Any) -> None:
        self.pool, self.dropped = pool, False


@contextlib.contextmanager
def workspaces() -> Iterator[None]:
    """Follows cuBLAS's memory while it is open: a graph that has lost it is not replayed."""
    modelled[0] = True
    watches[0].listen()
    try:
        yield
    finally:
        drop_workspaces()
        modelled[0] = False
        watches[0].listen()


def computes_product() -> None:
    """The current thread computes a product on its current stream."""
    recorder, key = getattr(here, "recorder", None), (threading.get_ident(), place(torch.cuda.current_stream()))
    if key not in _workspaces:
        _workspaces[key] = Workspace(None if recorder is None else recorder.graph.shares)
    if recorder is not None:
        recorder.graph.workspaces.append(_workspaces[key])


def drop_workspaces() -> None:
    """As torch's own of that name, which any library may ask for."""
    while _workspaces:
        _workspaces.popitem()[1].dropped = True


class Draws:
    """What a graph draws from which generators; `native/device.h` says how.

    While a thread records or replays one, draws of its are the graph's.
    """

    def __init__(self) -> None:
        library = watches[0].library
        for name in ("draws_make", "draws_of"):
            getattr(library, name).restype = ctypes.c_void_p
        self.library, self.handle = library, ctypes.c_void_p(library.draws_make())
        weakref.finalize(self, library.draws_drop, self.handle).atexit = False

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        before = self.library.draws_of(self.handle)
        try:
            yield
        finally:
            self.library.draws_of(ctypes.c_void_p(before))


class Operation(NamedTuple):
    """An operation with the memory that it found, and the results that it is to write anew: None where it did that."""

    run: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[Tensor | None]


def refuse(text: str) -> None:
    raise RuntimeError(f"CUDA error: {text}")


def refuse_if_lost() -> None:
    if watches[0].is_lost():
        refuse("an illegal memory access was encountered")


def same_memory(x: Tensor) -> Tensor:
    """The tensor as another object, which shares its memory and nothing else."""
    if x.is_conj() or x.is_neg():
        return x
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    )


def poison(x: Tensor) -> None:
    """What nobody would take for a result."""
    if x.is_floating_point() or x.is_complex():
        x.fill_(torch.nan)
    else:
        x.fill_(True if x.dtype is torch.bool else torch.iinfo(x.dtype).max)


def of_device(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.device.type == CUDA]


def number_of(generator: Any) -> Any:
    """What tells generators apart: a mode is given other objects of Python than the caller's."""
    return None if generator is None else generator._cdata


def place(stream: Any) -> tuple[int, int]:
    return stream.device_index, stream.stream_id


class Recorder(MemoryMode):
    """Writes down what its thread, and autograd for it, does on tensors of a device.

    On a device nobody sees that something records: so it is of the modes that may be around a compiled loop.
    """

    def __init__(self, graph: "Graph", mode: str) -> None:
        super().__init__()
        self.graph, self.mode, self.stream = graph, mode, place(torch.cuda.current_stream())
        self.known: dict[int, tuple[Tensor, Tensor | None]] = {}  # memory from before, by address, and what was in it
        self.error: BaseException | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.error is not None:
            refuse("operation failed due to a previous error during capture")
        before, here.recorder = getattr(here, "recorder", None), self
        try:
            return self.recorded(func, args, kwargs)
        except BaseException as error:
            self.error = error
            raise
        finally:
            here.recorder = before

    def recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = of_device((args, kwargs))
        schema = func._schema
        self.check(func, schema, args, kwargs, given)
        with unseen():
            for x in given:
                self.know(x)
            if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
                for x in self.written(schema, args, kwargs):
                    self.keep(x)
        with self.graph.draws.in_thread():
            found = func(*args, **kwargs)
        self.graph.asked += 1
        made = of_device(found)
        aliases = [r.alias_info for r in schema.returns]
        views = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        with unseen():
            new = [x for x in made if self.is_new(x)]
            self.graph.fresh += map(same_memory, new)
            if not views and (made or given) and func._schema.name.partition("::")[2] not in WITHOUT_LAUNCH:
                theirs = {id(x) for x in given}
                results = [None if id(x) in theirs else same_memory(x) for x in made]
                args, kwargs = tree_map(self.argument, (args, kwargs))
                self.graph.tape.append(Operation(func, args, kwargs, results))
        return found

    def argument(self, x: Any) -> Any:
        """A number of the host is read when the operation is recorded, and never again."""
        if not isinstance(x, Tensor):
            return x
        return same_memory(x) if x.device.type == CUDA else x.clone()

    def check(self, func: Any, schema: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        if given and place(torch.cuda.current_stream(given[0].device)) != self.stream:
            refuse("a stream that does not record was given work of one that does")
        generator = kwargs.get("generator")
        known = {number_of(g) for g in (None, *torch.cuda.default_generators, *self.graph.generators)}
        if torch.Tag.nondeterministic_seeded in func.tags and number_of(generator) not in known:
            refuse("a generator that is not registered with the graph")
        hosts = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.device.type == "cpu"]
        to = torch.device(kwargs.get("device") or CUDA)
        moves = schema.name in ("aten::copy_", "aten::_to_copy") and (given or to.type == CUDA)
        if moves and (hosts or to.type == "cpu") and not (hosts and all(x.is_pinned() for x in hosts)):
            refuse("operation not permitted when stream is capturing: a copy of memory that is not pinned")

    def written(self, schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
        pairs = zip(schema.arguments, args, strict=False)
        named = [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        return of_device([x for a, x in (*pairs, *named) if a.alias_info is not None and a.alias_info.is_write])

    def is_new(self, x: Tensor) -> bool:
        """Whether it lies in memory that has not been seen before, which is noted."""
        return self.know(x, new=True)

    def know(self, x: Tensor, new: bool = False) -> bool:
        memory = x.untyped_storage()
        if memory.data_ptr() in self.known or memory.nbytes() == 0:
            return False
        whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory)
        self.known[memory.data_ptr()] = whole, whole if new else None
        return True

    def keep(self, x: Tensor) -> None:
        """Copies memory from before that is about to be changed."""
        if (found := self.known.get(x.untyped_storage().data_ptr())) is not None and found[1] is None:
            self.known[x.untyped_storage().data_ptr()] = found[0], found[0].clone()

    def end(self) -> None:
        with unseen():
            for whole, before in self.known.values():
                if before is not None and before is not whole:
                    whole.copy_(before)
            for x in self.graph.fresh:
                poison(x)
        self.graph.outside = [whole for whole, before in self.known.values() if before is not whole]


@contextlib.contextmanager
def launched(stream: int, words: Sequence[int], again: Callable[[], None]) -> Iterator[None]:
    """A launch by the driver, done inside: where this thread records, it is written down with the memory that it has.

    A kernel does not say what it writes: of memory from before all is put back that torch's operations have met.
    """
    recorder = getattr(here, "recorder", None)
    if recorder is None:
        yield
        return
    if recorder.error is not None:
        refuse("operation failed due to a previous error during capture")
    if stream != recorder.stream[1]:
        refuse("a stream that does not record was given work of one that does")
    with unseen(), _disable_current_modes():
        held = [x for x, _ in recorder.known.values() if any(lies_in(x, word) for word in words)]
        for x in held:
            recorder.keep(x)
    with _disable_current_modes():
        yield
    recorder.graph.asked += 1
    recorder.graph.tape.append(Operation(lambda *_: again(), held, {}, []))


def lies_in(memory: Tensor, word: int) -> bool:
    return memory.data_ptr() <= word < memory.data_ptr() + memory.nbytes


class Graph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape: list[Operation] = []
        self.fresh: list[Tensor] = []  # memory that was made while it recorded
        self.outside: list[Tensor] = []  # memory from before, which it reads and writes
        self.generators: list[torch.Generator] = []
        self.asked = 0  # operations while it recorded
        self.recorder: Recorder | None = None
        self.ended, self.shares = False, (0, 0)
        self.workspaces: list[Workspace] = []
        self.draws = Draws()
        weakref.finalize(self, drop_workspaces).atexit = False  # as `reset` does

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        refuse_if_lost()
        stream = torch.cuda.current_stream()
        if stream.stream_id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if getattr(here, "recorder", None) is not None or place(stream) in _recording:
            refuse("operation not permitted when stream is capturing: another capture is under way")
        if self.recorder is not None or self.ended:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        self.shares = graph_pool_handle() if pool is None else pool
        self.recorder = here.recorder = Recorder(self, capture_error_mode)
        self.recorder.__enter__()
        with _lock:
            _recording[self.recorder.stream] = self.recorder
        watches[0].listen()

    def capture_end(self) -> None:
        recorder = self.recorder
        if recorder is None:
            raise RuntimeError("capture_end() without capture_begin()")
        self.recorder = here.recorder = None
        with _lock:
            del _recording[recorder.stream]
        watches[0].listen()
        recorder.__exit__(None, None, None)
        recorder.end()
        self.draws.library.draws_recorded(self.draws.handle)
        refuse_if_lost()
        if recorder.error is not None:
            refuse("operation failed due to a previous error during capture")
        if place(torch.cuda.current_stream()) != recorder.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self.ended = True
        # Who lets memory go that the graph uses has a graph that writes into someone else's.
        holders: dict[int, int] = {}
        for x in tensors_of(self):
            holders[x.untyped_storage().data_ptr()] = holders.get(x.untyped_storage().data_ptr(), 0) + 1
        self.holders = holders

    def replay(self) -> None:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        refuse_if_lost()
        if getattr(here, "recorder", None) is not None:
            refuse("a replay while another graph is recorded")
        self.draws.library.draws_replayed(self.draws.handle)
        with watches[0].one_launch("graph"), torch.no_grad(), _disable_current_modes():
            self.check_memory()
            for x in self.fresh:
                poison(x)
            with self.draws.in_thread():
                for run, args, kwargs, results in self.tape:
                    made = of_device(run(*args, **kwargs))
                    for x, new in zip(results, made, strict=True):
                        if x is not None:
                            x.copy_(new)

    def check_memory(self) -> None:
        if any(x.dropped and x.pool != self.shares for x in self.workspaces):
            refuse("an illegal memory access was encountered: cuBLAS's memory that the graph uses was let go")
        for x in self.outside:
            memory = x.untyped_storage()
            if torch._C._storage_Use_Count(memory._cdata) <= self.holders[memory.data_ptr()] + 1:
                refuse("an illegal memory access was encountered: memory that the graph uses was let go")

    def reset(self) -> None:
        self.tape, self.fresh, self.outside, self.ended = [], [], [], False
        drop_workspaces()  # as torch 2.12 and newer do, those of all streams

    def pool(self) -> Any:
        return self.shares


def tensors_of(graph: Graph) -> list[Tensor]:
    """All objects by which a graph holds memory, each once."""
    held = [*graph.outside, *graph.fresh]
    for operation in graph.tape:
        held += of_device((operation.args, operation.kwargs, operation.results))
    return list({id(x): x for x in held}.values())


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_pools)


def is_current_stream_capturing() -> bool:
    return place(torch.cuda.current_stream()) in _recording


def any_recording() -> bool:
    return bool(_recording)


def forbids_waiting() -> bool:
    """Whether this thread may not wait now: it records, or another one does so for all threads."""
    if getattr(here, "recorder", None) is not None:
        return True
    return any(recorder.mode == "global" for recorder in [*_recording.values()])


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What the pretended device does for itself: nobody counts it, nothing refuses it, no autograd."""
    before, here.recorder = getattr(here, "recorder", None), None
    silent, here.silent = getattr(here, "silent", False), True
    try:
        with torch.no_grad():
            yield
    finally:
        here.recorder, here.silent = before, silent
