"""Which folder of the library may import which, and by which modules: the tables that `test_rooms.py` holds it to."""

# A room, a folder or a single file -> those it may import, by their face (`__init__`) or by a door.
ROOMS = {
    "hf": {"beam", "loop", "attention", "packed", "tensor_array", "schedule"},
    "beam": {"loop", "attention", "packed", "tensor_array", "kernels", "schedule"},
    "risk": {"packed", "kernels"},
    "distributed": {"loop", "packed"},
    "ordering": {"kernels"},
    "loop": {"compiler", "packed", "tensor_array", "kernels", "schedule"},
    "compiler": set(),
    "attention": {"packed", "tensor_array", "kernels"},
    "packed": {"kernels"},
    "tensor_array": {"kernels"},
    "compat": {"loop"},
    "regroup": {"kernels"},
    "kernels": {"cuda"},
    "schedule": set(),
    "cuda": set(),
    "_common": set(),
    "_torch": set(),
}

_SHARED = ("custom_functions", "edge_walks", "lengths", "operations", "place", "refused", "step", "trace", "verify")
# What loops use of the compiler: the contracts, and its stages in the order in which a plan goes through them.
_OF_THE_COMPILER = (
    *_SHARED,
    *("graph.backward_step", "graph.capture", "graph.complex_pairs"),
    *("divide.all_steps", "divide.partition", "divide.saving", "divide.sums", "targets.choose"),
    "targets.graphs",
)
# A module that others may import although it is not the face of its room -> the rooms that do.
DOORS = {
    "packed.table.base": {"attention", "distributed", "loop"},  # what a packed tensor is, without its operations
    "packed.table.autograd": {"attention", "loop"},
    "packed.operations.index": {"loop"},
    "packed.rows.dim": {"attention", "beam", "loop"},
    "packed.tensor": {"beam", "risk"},
    "packed.rows.segments": {"loop"},
    "packed.rows.size": {"hf"},
    "packed.table.layout": {"attention"},
    "tensor_array.array": {"attention", "beam", "loop"},
    "tensor_array.block": {"attention", "beam", "loop"},
    "tensor_array.buffer": {"attention", "beam", "loop"},
    "tensor_array.gradient": {"attention", "beam"},
    "tensor_array.internals": {"attention", "beam", "hf", "loop"},
    "tensor_array.keys": {"loop"},
    "tensor_array.sequential_reads": {"loop"},
    "tensor_array.slot_list": {"loop"},
    "tensor_array.store": {"beam", "loop"},
    "loop.internals": {"beam", "compat"},
    # A recurrence or scan of one rank, which those of several are made of.
    **{f"loop.{name}": {"distributed"} for name in ("associative", "called", "linear", "recurrences", "slabs")},
    "attention.engine": {"beam"},
    **{f"compiler.{name}": {"loop"} for name in _OF_THE_COMPILER},
    "schedule.spans": {"loop"},  # what a schedule costs, in closed form
    "kernels.moves": {"regroup"},
    "kernels.scores": {"attention", "beam"},
    "kernels.sight": {"attention", "beam", "packed"},
    "kernels.lattices": {"packed"},
    "kernels.eager.recurrence": {"loop"},
    # numba is always there, and orderings are found on the CPU: their kernels have no second form in torch operations
    "kernels.cpu.graphs": {"ordering"},
    "kernels.cpu.graph_walks": {"ordering"},
    "kernels.cpu.slabs": {"ordering"},
    "kernels.cpu.swaps": {"ordering"},
}
# What all stages of the compiler share: a step, the operations, what a graph may hold.
CONTRACTS = {f"compiler.{name}" for name in _SHARED}
_OF_MACHINE_CODE = {*CONTRACTS, "compiler.emitter.lowered", "compiler.targets.given", "compiler.targets.target"}
_EMITTER = ("compiler.emitter.ir", "compiler.emitter.lower", "compiler.emitter.write")
# A room inside a room -> what it may import of that one: its files, and the rooms beside it or inside.
INNER = {
    "loop.checkpoint": {"loop.advice", "loop.effects", "loop.known_reads", "loop.loop"},
    "loop.compiled": {
        *("loop.advice", "loop.known_reads", "loop.loop", "loop.rows_loop", "loop.checkpoint", "loop.effects"),
        *("loop.compiled.look", "loop.compiled.run"),
    },
    "loop.compiled.look": {
        *("loop.loop", "loop.packed_scan", "loop.slices", "loop.stopped_rows", "loop.checkpoint"),
        *("loop.compiled.pays", "loop.effects", "loop.known_reads"),
    },
    "loop.compiled.run": {
        *("loop.advice", "loop.carry", "loop.loop", "loop.outputs", "loop.rows_loop", "loop.checkpoint"),
        *("loop.compiled.pays", "loop.compiled.look", "loop.effects", "loop.known_reads"),
    },
    "loop.compiled.in_graphs": {
        *("loop.outputs", "loop.checkpoint", "loop.compiled.front", "loop.compiled.look", "loop.compiled.run"),
    },
    "compiler.graph": CONTRACTS,
    "compiler.divide": CONTRACTS,
    "compiler.emitter.ir": CONTRACTS,
    "compiler.emitter.lower": {*CONTRACTS, "compiler.emitter.ir"},
    "compiler.emitter.write": {*CONTRACTS, "compiler.emitter.ir", "compiler.emitter.lower"},
    "compiler.emitter.device": {*CONTRACTS, *_EMITTER},
    "compiler.targets": {*CONTRACTS, *_EMITTER[:2], *(f"compiler.targets.{name}" for name in ("cpu", "graphs", "ptx"))},
    "compiler.targets.cpu": {*_OF_MACHINE_CODE, *_EMITTER},
    "compiler.targets.graphs": {
        *(*CONTRACTS, *_EMITTER[:2], "compiler.divide", "compiler.graph", "compiler.targets.ptx"),
        *(f"compiler.targets.{name}" for name in ("eager", "proved", "target")),
    },
    "compiler.targets.ptx": {
        *(*_OF_MACHINE_CODE, "compiler.emitter.lower", "compiler.emitter.device"),
        *("compiler.targets.cpu", "compiler.targets.eager", "compiler.targets.proved"),
    },
    "packed.table": {"packed.rows"},
    "packed.scores": {"packed.rows", "packed.table"},
    "packed.views": {"packed.table", "packed.scores"},
    "packed.other_layouts": {"packed.rows", "packed.table"},
    "packed.operations": {"packed.rows", "packed.table", "packed.scores", "packed.views", "packed.other_layouts"},
    "packed.time": {"packed.rows", "packed.table", "packed.views", "packed.operations"},
    "packed.static": {"packed.table", "packed.tensor"},
    "packed.loaders": {"packed.rows", "packed.table", "packed.other_layouts", "packed.tensor"},
    **{name: set[str]() for name in ("loop.effects", "memory.counting", "packed.rows")},
    "memory.report": {"memory.counting"},
    "memory.scaling": {"memory.counting", "memory.report"},
    "kernels.eager": {"kernels.lattices", "kernels.moves", "kernels.scores", "kernels.sight"},
    "kernels.cpu": {"kernels.memory", "kernels.moves", "kernels.scores", "kernels.sight", "kernels.eager"},
}


def _of(room: str, names: str) -> list[str]:
    return [f"{room}.{name}" for name in names.split()]


# Their doors, for all in the room around.
INNER_DOORS = {
    *_of(
        "loop.checkpoint", "adjoint dependence foresight in_order leaving measure node options snapshots user_functions"
    ),
    *_of("loop.compiled", "around auto explain front in_graphs.in_graph pays"),
    *_of("loop.compiled.look", "autocast carried_arrays draws frame judged look operation_log padded_rows"),
    *_of("loop.compiled.look", "second_look template values_read"),
    *_of("loop.effects", "caught fetches follow judge known notes reads"),
    *_of("loop.compiled.run", "array_plan blocks looped plan program python_condition results rows_apart stretches"),
    *("compiler.divide.partition", "compiler.graph.core_operations"),
    *_of("compiler.emitter.ir", "code failures kernels machine strided_arrays vector_math"),
    *_of("compiler.emitter.lower", "calling convolution growing indexing lowering matrices movement numbers pointwise"),
    *_of("compiler.emitter.lower", "reductions special"),
    *_of("compiler.emitter.write", "bounds element_by_element elements factorings function fuse matrices row_shares"),
    *_of("compiler.emitter.write", "scratch step_loop units walk_body"),
    *_of("compiler.emitter.device", "devices kernel piece"),
    *_of(
        "compiler.targets",
        "eager given proved target cpu.host cpu.object_cache cpu.cpu_target ptx.driver ptx.ptx_target",
    ),
    "compiler.targets.graphs.graph_target",
    *(f"memory.counting.{name}" for name in ("allocator", "finder", "holders", "located", "nodes", "saved", "sites")),
    *_of("packed.rows", "alignments dim segment_reduce segments size windows"),
    *_of("packed.table", "aliases assign autograd base dispatch entries fallback heads_as_rows layout made_by_size"),
    *_of("packed.table", "any_order operations pointwise refusals row types untaken"),
    *_of("packed.scores", "between by_rows relative score_ops score_parts score_shapes scores"),
    *_of("packed.views", "parts reordered"),
    *_of("packed.operations", "features index joins losses norms padding pieces reduce regroup rnn shape sort"),
    *("packed.operations.transducer", "packed.operations.writes"),
    *_of("packed.time", "convolution images pooling resampling spectrum statistics"),
    *("packed.static.static", "packed.loaders.batches", "packed.loaders.sampler"),
    *_of("packed.other_layouts", "einops interop tree"),
    "memory.counting.storages",
    *(f"memory.report.{name}" for name in ("charts", "exponents", "figures", "growth", "html", "picture")),
    *("memory.report.result", "memory.report.timeline", "memory.scaling.measure"),
    *(f"kernels.eager.{name}" for name in ("beam", "edits", "past", "segment_reductions", "slots")),
}
# What is loaded by name when it is first needed: module -> what it gives to `import_module` or `late`, as written.
LATE_DOORS = {
    "__init__": {"f'{__name__}.{name}'"},
    "_common.moved": {"new"},
    "_common.saved": {"f'tensorloop.{_HOMES[name]}'", "'packed.tensor'"},
    "_common.faces": {"f'tensorloop.{home_of[name]}'", "f'tensorloop.{home}'"},
    "kernels": {"f'tensorloop.kernels.{backend}.{module}'"},
    **{
        "packed.table.made_by_size": {"'packed.table.pointwise'"},
        "packed.table.entries": {"'packed.table.entry_rules'"},
    },
    "packed.rows.size": {"'packed.by_size'", "'packed.table.heads_as_rows'"},
    "loop.linear": {"'distributed.recurrence'"},
    "loop.associative": {"'distributed.prefixes'"},
    "packed.views.reordered": {"'attention.sdpa'", "'attention.multihead'"},
    "tensor_array.array": {"'tensor_array.show'"},
    "cuda": {"PACKAGE"},  # tensorloop_cuda
    "memory.named_function": {"name"},  # a user's own module
}
# tqdm where progress=True asks for it, matplotlib where one draws, pymetis where METIS is asked for
THIRD_PARTY = {"torch", "tqdm", "matplotlib", "pymetis"}
COMPILERS = {"numba", "llvmlite", "numpy"}  # where kernels are
MODELS = {"transformers"}  # in the room for them, which comes with an extra
EMITTER = {"llvmlite"}  # where machine code is made; numba brings it
KEPT = {"next_functions": "_torch/graph", "_version": "_torch/versions"}  # what one module reads for all
PRIVATE = ("torch._C", "torch._functorch", "torch._dynamo", "torch._subclasses", "torch._higher_order_ops")
