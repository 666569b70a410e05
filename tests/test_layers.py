"""Imports point down: which module may import which, held against the source of every module."""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tensorloop"

# A module -> the modules of tensorloop it may import. `__init__` is the facade; it loads the side modules
# lazily, which test_public_names.py holds.
ALLOWED: dict[str, set[str]] = {
    "__init__": {
        "attention",
        "beam",
        "cuda",
        "loop",
        "memory",
        "packed",
        "regroup",
        "risk",
        "schedule",
        "tensor_array",
        "testing",
    },
    "loop": {
        "_active",
        "_advice",
        "_carry",
        "_checks",
        "_compile",
        "_no_steps",
        "_packed_base",
        "_packed_steps",
        "_parallel",
        "_progress",
        "_steps",
        "_xs",
        "packed",
        "replay",
        "schedule",
        "tensor_array",
    },
    "replay": {
        "_active",
        "_again",
        "_engine",
        "_leaving",
        "_modes",
        "_plan",
        "_progress",
        "_record",
        "_reversal",
        "_steps",
        "schedule",
        "tensor_array",
    },
    "_record": {
        "_active",
        "_again",
        "_asked",
        "_captures",
        "_checks",
        "_closures",
        "_fingerprints",
        "_in_place",
        "_leaving",
        "_modes",
        "_plan",
        "_progress",
        "_snapshots",
        "_stand_ins",
        "_steps",
        "_tape",
        "_watched",
        "_world",
        "schedule",
        "tensor_array",
    },
    "_plan": {"_checks", "schedule"},
    "_engine": set(),
    "_reversal": {"_array_buffer", "_engine", "_modes", "_snapshots", "_stand_ins", "schedule", "tensor_array"},
    "_again": {"_modes", "_snapshots", "_stand_ins", "_tape"},
    "_snapshots": {"_tape", "_world"},
    "_captures": {"_active", "_array_buffer", "_checks", "_compile", "_held", "_in_place", "_stand_ins", "_tape"},
    "_in_place": {"_modes"},
    "_closures": set(),
    "_held": set(),
    "_asked": {"_captures", "_checks", "_modes", "_snapshots", "_steps", "tensor_array"},
    "_tape": {"_array_buffer", "_array_grad", "_holes", "tensor_array"},
    "_stand_ins": {"_active", "_compile"},
    "_world": {"_modes"},
    "schedule": set(),
    "_no_steps": {"_carry", "_fake", "_steps", "_tree", "_ys", "tensor_array"},
    "_parallel": {"_advice", "_carry", "_checks", "_fake", "_packed_base", "_tree", "_ys", "tensor_array"},
    "_advice": set(),
    "_steps": {
        "_active",
        "_advice",
        "_carry",
        "_checks",
        "_cuts",
        "_modes",
        "_rows",
        "_tree",
        "_xs",
        "_ys",
        "tensor_array",
    },
    "_rows": {"_active", "_array_buffer", "_cuts", "_modes", "_packed_base", "_packed_index", "tensor_array"},
    "_cuts": {
        "_active",
        "_array_buffer",
        "_array_grad",
        "_array_rows",
        "_array_slots",
        "_modes",
        "_packed_base",
        "tensor_array",
    },
    "_xs": {"_advice", "_checks", "_modes", "_tree", "_ys", "tensor_array"},
    "_ys": {"_array_buffer", "_carry", "_modes", "_packed_base", "_tree", "tensor_array"},
    "_carry": {"_packed_base", "_tree", "tensor_array"},
    "_progress": set(),
    "_fake": {"_dispatch"},
    "_tree": set(),
    "tensor_array": {
        "_active",
        "_advice",
        "_array_buffer",
        "_array_grad",
        "_array_slots",
        "_checks",
        "_compile",
        "_holes",
        "_modes",
        "_to",
    },
    "_array_buffer": {"_active", "_array_grad", "_array_rows", "_checks", "_modes"},
    "_array_rows": {"_modes"},
    "_active": set(),
    "_array_slots": {"_array_grad", "_modes"},
    "_array_grad": {"_modes", "kernels"},
    "_checks": {"_modes"},
    "_compile": set(),
    "_modes": set(),
    "_to": set(),
    "_holes": set(),
    "testing": {"_dispatch", "_packed_base", "memory"},
    "memory": {
        "memory._growth",
        "memory._measure",
        "memory._process",
        "memory._report",
        "memory._residuals",
        "memory._saved",
        "memory._sites",
        "memory._storages",
        "memory._timeline",
        "memory._track",
    },
    "_dispatch": set(),
    "reference": set(),
    "_attention": {"_attention_strips", "_modes"},
    "_attention_gpu": {"_attention_strips", "_modes", "_packed_dim"},
    "_attention_strips": set(),
    "_packed_autograd": {"_checks", "_packed_base"},
    "_packed_base": {"_checks", "_packed_dim", "_packed_size", "_packed_types", "_tree"},
    "_packed_dim": {"_active", "_checks", "_compile", "_modes"},
    "_packed_facts": {"_packed_base", "_packed_ops"},
    "_packed_heads": {"_packed_base", "_packed_time_first", "attention"},
    "_packed_index": {"_checks", "_packed_base", "_packed_dim", "_ragged"},
    "_packed_interop": {"_checks", "_packed_base", "_packed_dim", "_ragged"},
    "_packed_ops": {"_packed_autograd", "_packed_base", "_packed_refused", "_ragged"},
    "_packed_methods": {"_packed_base", "_packed_ops", "_packed_types"},
    "_packed_norms": {"_packed_base", "_packed_ops", "_packed_reduce"},
    "_packed_pieces": {"_checks", "_packed_base", "_packed_dim", "_packed_index", "_packed_ops", "_ragged"},
    "_packed_reduce": {"_packed_base", "_packed_dim", "_packed_ops", "_ragged", "_ragged_reduce"},
    "_packed_refused": {"_packed_base"},
    "_packed_rnn": {"_packed_base", "_packed_interop", "_packed_ops", "_ragged"},
    "_packed_shape": {
        "_packed_base",
        "_packed_dim",
        "_packed_index",
        "_packed_ops",
        "_packed_size",
        "_packed_time_first",
    },
    "_packed_size": set(),
    "_packed_sort": {"_checks", "_packed_base", "_packed_ops", "_packed_reduce", "_ragged"},
    "_packed_steps": {
        "_carry",
        "_checks",
        "_modes",
        "_packed_autograd",
        "_packed_base",
        "_packed_dim",
        "_ragged",
        "_rows",
        "_tree",
        "_xs",
        "_ys",
        "packed",
    },
    "_packed_types": set(),
    "_packed_time_first": {"_packed_base", "_ragged"},
    "_ragged": {"_compile", "_modes", "kernels"},
    "attention": {
        "_attention",
        "_attention_gpu",
        "_attention_strips",
        "_checks",
        "_compile",
        "_packed_autograd",
        "_packed_base",
        "_packed_dim",
        "tensor_array",
    },
    "cuda": set(),
    "kernels": {"_compile", "kernels._memory"},
    "kernels._compiled": set(),
    "kernels._memory": set(),
    "kernels._pointers": {"kernels._compiled"},
    "kernels._threads": set(),
    "kernels.cpu_moves": {
        "kernels._compiled",
        "kernels._memory",
        "kernels._pointers",
        "kernels._threads",
        "kernels.eager_moves",
        "kernels.moves",
    },
    "kernels.cpu_rows": {"kernels._compiled", "kernels._memory", "kernels._pointers", "kernels._threads"},
    "kernels.cpu_segments": {"kernels._compiled", "kernels._memory", "kernels._threads"},
    "kernels.eager": set(),
    "kernels.eager_moves": {"kernels.moves"},
    "kernels.moves": set(),
    "packed": {
        "_checks",
        "_packed_autograd",
        "_packed_base",
        "_packed_dim",
        "_packed_facts",
        "_packed_index",
        "_packed_interop",
        "_packed_methods",
        "_packed_norms",
        "_packed_ops",
        "_packed_pieces",
        "_packed_reduce",
        "_packed_refused",
        "_packed_rnn",
        "_packed_shape",
        "_packed_sort",
        "_ragged",
    },
    "regroup": {"_checks", "_compile", "_modes", "kernels", "kernels.moves"},
    "_watched": {"_active", "_captures"},
    "_beam_arrays": {"_active", "_array_buffer", "_beam_attention", "_beam_lineage", "_checks", "tensor_array"},
    "_beam_choice": {"_checks", "kernels", "kernels.eager_beam"},
    "_beam_doubt": set(),
    "_beam_length": {"_checks"},
    "_beam_lineage": {"_active", "kernels"},
    "_beam_log": {"_beam_choice", "_beam_doubt", "_beam_length", "kernels", "kernels.eager_beam"},
    "_beam_result": {
        "_beam_doubt",
        "_beam_lineage",
        "_beam_log",
        "_beam_show",
        "kernels",
        "kernels.eager_beam",
        "packed",
        "tensor_array",
    },
    "_beam_show": set(),
    "_ragged_reduce": {"_compile", "_ragged", "kernels"},
    "_risk_bleu": {"_checks", "_compile", "_risk_edits", "_risk_rows"},
    "_risk_edits": {"_checks", "_compile", "_risk_rows", "kernels", "packed"},
    "_risk_rows": {"_checks", "packed"},
    "_keywords": set(),
    "beam": {
        "_active",
        "_beam_arrays",
        "_beam_choice",
        "_beam_length",
        "_beam_lineage",
        "_beam_log",
        "_beam_result",
        "_beam_scores",
        "_carry",
        "_checks",
        "_compile",
        "_cuts",
        "_keywords",
        "_modes",
        "_progress",
        "_steps",
        "_tree",
        "kernels.eager_beam",
        "loop",
        "packed",
        "schedule",
        "tensor_array",
    },
    "kernels.cpu_edits": {
        "kernels._compiled",
        "kernels._memory",
        "kernels._threads",
        "kernels.cpu_rows",
        "kernels.eager_edits",
    },
    "kernels.cpu_slots": {
        "kernels._compiled",
        "kernels._memory",
        "kernels._pointers",
        "kernels._threads",
        "kernels.eager",
    },
    "kernels.eager_edits": {"kernels.eager"},
    "risk": {"_checks", "_keywords", "_risk_bleu", "_risk_edits"},
    "_beam_attention": {
        "_active",
        "_array_buffer",
        "_array_grad",
        "_attention",
        "_attention_strips",
        "_modes",
        "kernels",
    },
    "_beam_scores": {"_checks", "_modes"},
    "kernels.cpu_beam": {
        "kernels._compiled",
        "kernels._memory",
        "kernels._pointers",
        "kernels._threads",
        "kernels.eager_beam",
    },
    "kernels.eager_beam": set(),
    "kernels.cpu_attend": {
        "kernels._compiled",
        "kernels._memory",
        "kernels._pointers",
        "kernels._threads",
        "kernels.cpu_segments",
    },
    "memory.__main__": {"memory._command"},
    "memory._accumulate": {"_dispatch", "memory._nodes"},
    "memory._advice": set(),
    "memory._allocator": {"memory._finder", "memory._sites"},
    "memory._charts": {"memory._growth", "memory._sites"},
    "memory._command": {
        "memory._html",
        "memory._measure",
        "memory._page",
        "memory._process",
        "memory._report",
        "memory._shown",
        "memory._sites",
        "memory._target",
    },
    "memory._exponents": set(),
    "memory._finder": {"memory._nodes", "memory._sites"},
    "memory._growth": {"memory._exponents", "memory._sites"},
    "memory._holders": {"memory._storages"},
    "memory._html": {"memory._charts", "memory._growth", "memory._page", "memory._svg"},
    "memory._located": {"_compile", "memory._accumulate", "memory._finder", "memory._nodes", "memory._storages"},
    "memory._measure": {
        "_progress",
        "memory._advice",
        "memory._exponents",
        "memory._finder",
        "memory._growth",
        "memory._located",
        "memory._nodes",
        "memory._report",
        "memory._sites",
        "memory._storages",
    },
    "memory._nodes": set(),
    "memory._page": set(),
    "memory._picture": {"memory._charts"},
    "memory._process": {"loop", "memory._shown", "memory._timeline"},
    "memory._report": {"memory._charts", "memory._growth", "memory._html", "memory._picture", "memory._shown"},
    "memory._residuals": {
        "memory._charts",
        "memory._finder",
        "memory._holders",
        "memory._located",
        "memory._nodes",
        "memory._page",
        "memory._picture",
        "memory._saved",
        "memory._shown",
        "memory._sites",
        "memory._storages",
        "memory._svg",
    },
    "memory._saved": {"_dispatch", "memory._storages"},
    "memory._shown": {"memory._page", "memory._sites"},
    "memory._sites": set(),
    "memory._storages": {"_compile", "_dispatch", "memory._nodes"},
    "memory._svg": {"memory._charts"},
    "memory._target": set(),
    "memory._timeline": {"memory._charts", "memory._page", "memory._shown"},
    "memory._track": {
        "memory._allocator",
        "memory._charts",
        "memory._finder",
        "memory._located",
        "memory._page",
        "memory._picture",
        "memory._shown",
        "memory._sites",
        "memory._svg",
    },
    "_leaving": {"_captures", "_checks"},
    "_fingerprints": {"_array_buffer", "_captures", "_modes", "_steps", "tensor_array"},
}
ON_THE_SIDE = {"memory", "testing", "reference"}
THIRD_PARTY = {"torch", "tqdm", "matplotlib"}  # tqdm where progress=True asks for it, matplotlib where one draws
COMPILERS = {"numba", "llvmlite", "numpy", "tensorloop_cuda"}  # where kernels are


def modules() -> dict[str, str]:
    """Dotted names below tensorloop (`tensor_array`, `kernels.cpu`; a package is `kernels`) -> source."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path.read_text()
    return found


def imported_names(source: str) -> Iterator[str]:
    """Dotted names that a source imports anywhere, in functions too: `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (base + alias.name for alias in node.names)


def violations(module: str, source: str, known: set[str]) -> list[str]:
    """What is wrong with the imports of one module, a line each; `known` are the modules there are."""
    if module not in ALLOWED:
        return [f"{module}: unknown module; add it to ALLOWED in {Path(__file__).name}, with what it may import"]
    wrong = []
    for name in imported_names(source):
        if name.startswith("."):
            wrong.append(f"{module} imports {name}; write the import with its full name")
            continue
        top, *inner = name.split(".")
        if top != "tensorloop":
            compilers = COMPILERS if module == "cuda" or module.startswith("kernels.") else set()
            if top not in sys.stdlib_module_names | THIRD_PARTY | compilers:
                wrong.append(f"{module} imports {name}, which is neither the standard library nor torch")
            continue
        prefixes = [".".join(inner[:n]) for n in range(len(inner), 0, -1)]
        target = next((prefix for prefix in prefixes if prefix in known), "__init__")
        if target not in ALLOWED[module]:
            wrong.append(f"{module} imports {target}; it may import {sorted(ALLOWED[module]) or 'nothing'}")
    return wrong


def test_imports_point_down():
    sources = modules()
    wrong = [line for name, source in sources.items() for line in violations(name, source, set(sources))]
    assert not wrong, "\n".join(wrong)


def test_the_table_names_the_modules_there_are():
    assert set(ALLOWED) == set(modules())


def test_the_allowed_graph_has_no_cycle():
    tuple(graphlib.TopologicalSorter(ALLOWED).static_order())


def test_library_code_may_not_import_the_side():
    for module, allowed in ALLOWED.items():
        if module not in ON_THE_SIDE | {"__init__"}:
            assert not allowed & ON_THE_SIDE, module


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import tensorloop.memory", "_checks imports memory"),
        ("from tensorloop import memory", "_checks imports memory"),
        ("from tensorloop.tensor_array import TensorArray", "_checks imports tensor_array"),
        ("import tensorloop.reference as spec", "_checks imports reference"),
        ("from . import _modes", "_checks imports ._modes; write the import with its full name"),
        ("from ._modes import level", "_checks imports ._modes.level; write"),
        ("def late():\n    from tensorloop import TensorArray", "_checks imports __init__"),
        ("import tensorloop", "_checks imports __init__"),
        ("import numba", "_checks imports numba"),
        ("from numba import njit", "_checks imports numba.njit"),
    ],
)
def test_a_wrong_import_is_reported(source: str, message: str):
    known = set(ALLOWED)
    assert [line.startswith(message) for line in violations("_checks", source, known)] == [True]


def test_right_imports_pass():
    source = "import math\nimport torch.utils\nfrom tensorloop import _modes\nimport tensorloop._modes"
    assert violations("_checks", source, set(ALLOWED)) == []


def test_an_unknown_module_is_reported():
    (line,) = violations("surprise", "import torch", {"surprise"})
    assert "unknown module" in line
    assert "add it to ALLOWED" in line
