"""How many faults the tests notice: breaks one line at a time in a copy of the library, and runs the tests near it.

    python profiling/mutations.py                     every room, 20 mutants of each: an hour on one core
    python profiling/mutations.py --only token undo   some rooms
    python profiling/mutations.py --show              the mutants, without running a test

A mutant is the library with one change of one line: a comparison turned or moved by one, an operator exchanged, a
condition negated, a number one higher, a statement left out. It is *caught* if a test fails, or hangs. Mutants are
drawn with a seed, so the same ones come back as long as the file is the same; results are kept as they come, and a run
goes on where the last one stopped. Those that survive are listed with their diff: each is a test to write, or a line
that could as well be another one. Whoever mends one says how in the results, as `since`.
"""

import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "profiling" / "results" / "mutations.json"
PATIENCE = 4  # a mutant that makes a loop endless is stopped after so many times what the tests take without it


class Room(NamedTuple):
    """Files that are broken, each with the tests that should notice; `wider`: those that are asked after them."""

    tests: dict[str, tuple[str, ...]]
    wider: tuple[str, ...] = ()


def _each(files: tuple[str, ...], *tests: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(files, tests)


ROOMS = {
    "token": Room(_each(("tensor_array/gradient.py", "tensor_array/buffer.py"), "tests/tensor_array")),
    "undo": Room(
        _each(
            ("loop/checkpoint/array_versions.py", "loop/checkpoint/writes.py"),
            "tests/checkpoint/test_replay.py",
            "tests/checkpoint/test_replay_world.py",
            "tests/loop/test_loop_row_arrays.py",
            "tests/loop/test_loop_in_place.py",
        ),
        ("tests/checkpoint", "tests/loop"),
    ),
    "schedules": Room(
        _each(
            ("schedule/spans.py", "schedule/online.py", "schedule/tables.py", "schedule/hierarchy.py"),
            "tests/checkpoint/test_schedule.py",
            "tests/checkpoint/test_schedule_online.py",
            "tests/checkpoint/test_schedule_hierarchy.py",
        ),
    ),
    "partition": Room(
        _each(
            ("compiler/divide/partition.py", "compiler/step.py"),
            "tests/compiled/test_compiled_values.py",
            "tests/compiled/test_compiled_explain.py",
        ),
        ("tests/compiled",),
    ),
    "compiled": Room(
        {
            "loop/compiled/run/array_memory.py": (
                "tests/compiled/test_compiled_arrays.py",
                "tests/compiled/test_compiled_array_checkpoints.py",
            ),
            "loop/compiled/run/open_end.py": ("tests/compiled/test_compiled_open_end.py",),
            "loop/compiled/run/python_condition.py": ("tests/compiled/test_compiled_conditions.py",),
        },
        ("tests/compiled",),
    ),
    "divide": Room(
        {
            "compiler/divide/saving.py": (
                "tests/compiled/test_compiled_discontinuous.py",
                "tests/compiled/test_compiled_explain.py",
            ),
            "compiler/divide/sums.py": (
                "tests/compiled/test_compiled_sums.py",
                "tests/compiled/test_compiled_values.py",
            ),
            "compiler/divide/all_steps.py": (
                "tests/compiled/test_compiled_values.py",
                "tests/compiler/test_operations.py",
            ),
        },
        ("tests/compiled",),
    ),
    "graph": Room(
        _each(
            ("compiler/graph/simplify.py", "compiler/graph/backward_step.py", "compiler/graph/capture.py"),
            "tests/compiled/test_compiled_values.py",
            "tests/compiled/test_compiled_missing.py",
            "tests/compiled/test_compiled_inputs.py",
        ),
        ("tests/compiled",),
    ),
    "emitter": Room(
        _each(
            (
                *("compiler/emitter/lower/movement.py", "compiler/emitter/lower/indexing.py"),
                *(
                    "compiler/emitter/write/fuse.py",
                    "compiler/emitter/write/nest.py",
                    "compiler/emitter/write/row_shares.py",
                ),
            ),
            "tests/compiler/test_operations.py",
            "tests/compiler/test_emitter_loops.py",
        ),
        ("tests/compiler", "tests/compiled"),
    ),
    "loops": Room(
        {
            "loop/rows_scan.py": ("tests/loop/test_loop_rows_ys.py",),
            "loop/attributes.py": ("tests/loop/test_module_state.py",),
            "loop/first_step.py": ("tests/loop/test_first_only.py",),
            "loop/checkpoint/adjoint.py": ("tests/loop/test_fixed_point.py",),
        },
        ("tests/loop", "tests/compiled"),
    ),
    "packed": Room(
        {
            "packed/rows/segments.py": ("tests/packed/rows/test_packed_ragged.py",),
            "packed/table/autograd.py": ("tests/packed/table/test_packed_autograd.py",),
            "packed/rows/windows.py": (
                "tests/packed/time/test_packed_time.py",
                "tests/packed/views/test_packed_channels.py",
            ),
        },
        ("tests/packed",),
    ),
    "attention": Room(
        {
            "attention/strips.py": tuple(
                f"tests/attention/test_{name}.py" for name in ("attention", "attention_scores", "trees")
            ),
            "kernels/scores.py": ("tests/attention/test_attention_scores.py", "tests/attention/test_past.py"),
        },
        ("tests/attention",),
    ),
    "views": Room(
        {
            **_each(
                ("packed/views/reordered.py", "packed/operations/shape.py", "packed/operations/regroup.py"),
                *(f"tests/packed/{name}.py" for name in ("views/test_packed_heads", "views/test_packed_time_first")),
                *("tests/packed/time/test_packed_images.py", "tests/packed/table/test_packed_operations.py"),
            ),
            **_each(
                ("packed/scores/scores.py", "packed/scores/score_ops.py"),
                *("tests/packed/scores/test_packed_scores.py", "tests/packed/scores/test_packed_relative.py"),
            ),
            **_each(("packed/rows/size.py", "packed/by_size.py"), "tests/packed/rows/test_packed_size.py"),
            "packed/operations/joins.py": ("tests/packed/operations/test_packed_joins.py",),
        },
        ("tests/packed", "tests/attention/test_sdpa_packed.py"),
    ),
    "masks": Room(
        {
            **_each(
                ("attention/masks.py", "attention/sdpa.py", "attention/multihead.py"),
                "tests/attention/test_sdpa_packed.py",
            ),
            "attention/one_query.py": ("tests/attention/test_one_query.py",),
        },
        ("tests/attention", "tests/packed"),
    ),
    "lanes": Room(
        _each(
            tuple(
                f"compiler/emitter/device/{name}.py"
                for name in ("kernel_body", "kernel_plan", "lane_product", "lane_walk", "lanes", "waits", "device_math")
            ),
            *(f"tests/compiler/test_device_{name}.py" for name in ("text", "waits", "math", "ptx")),
        ),
        ("tests/compiler",),
    ),
    "graphs": Room(
        _each(
            (
                *(f"compiler/targets/graphs/{name}.py" for name in ("graph_core", "recorded", "graph_target")),
                "compiler/targets/proved.py",
            ),
            *("--device", *(f"tests/device/test_{name}.py" for name in ("graphs", "graph_calls", "proved"))),
        ),
        ("--device", "tests/device"),
    ),
    "reads": Room(
        _each(
            (
                *(f"loop/compiled/look/{name}.py" for name in ("values_read", "number_read", "step_number")),
                *(f"loop/compiled/look/{name}.py" for name in ("differentiated", "autograd_calls")),
                "loop/compiled/run/stretches.py",
            ),
            *(f"tests/compiled/test_compiled_{name}.py" for name in ("answers", "functions", "gradients_taken")),
        ),
        ("tests/compiled",),
    ),
    "beam": Room(
        _each(
            ("beam/ancestry.py", "beam/pool.py", "beam/choose.py", "beam/decisions.py"),
            *(f"tests/beam/test_beam{name}.py" for name in ("", "_pool", "_choice", "_history", "_rows", "_ends")),
        ),
        ("tests/beam",),
    ),
    "hf": Room(
        {
            "hf/layers.py": ("tests/hf/test_train_cache.py", "tests/hf/test_looped.py"),
            "hf/hypotheses.py": ("tests/hf/test_search.py", "tests/hf/test_rollout.py"),
        },
        ("tests/hf",),
    ),
    "kernels": Room(
        {
            "kernels/cpu/segment_reductions.py": (
                "tests/kernels/test_kernels.py",
                "tests/kernels/test_kernel_infinities.py",
                "tests/packed/rows/test_packed_ragged.py",
            ),
            "kernels/cpu/edits.py": ("tests/risk/test_edit_distance.py",),
            "kernels/cpu/slots.py": ("tests/kernels/test_kernel_slots.py",),
        },
        ("tests/kernels", "tests/risk", "tests/packed/test_conformance_packed.py"),
    ),
}

_OTHER: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.FloorDiv: (ast.Mult,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}


class Mutant(NamedTuple):
    """One change of one file."""

    file: str
    line: int
    what: str
    place: int  # of the node that is changed, in the order of `ast.walk`
    change: Callable[[Any], None]

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.file}:{self.line} {self.what}"

    def apply(self, source: str) -> str:
        """The source with the change."""
        tree = ast.parse(source)
        self.change(next(node for i, node in enumerate(ast.walk(tree)) if i == self.place))
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """All mutants of a source."""
    tree = ast.parse(source)
    said = _messages(tree)
    for place, node in enumerate(ast.walk(tree)):
        if id(node) not in said:
            for what, change in _changes(node):
                yield Mutant(file, getattr(node, "lineno", 0), what, place, change)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """(what it is, what makes it of a copy of the node) for each change of one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in _OTHER.get(type(node.ops[0]), ()):
            yield f"{_name(node.ops[0])} -> {other.__name__}", lambda x, o=other: x.ops.__setitem__(0, o())
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
        for other in _OTHER.get(type(node.op), ()):
            yield f"{_name(node.op)} -> {other.__name__}", lambda x, o=other: setattr(x, "op", o())
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "condition negated", lambda x: setattr(x, "test", ast.UnaryOp(ast.Not(), x.test))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value} -> {node.value + 1}", lambda x: setattr(x, "value", x.value + 1)
    elif isinstance(node, (ast.FunctionDef, ast.For, ast.With, ast.Try)):
        for i, statement in enumerate(node.body):
            if _can_go(statement):
                text = ast.unparse(statement).splitlines()[0]
                yield f"without: {text}", lambda x, i=i: x.body.__setitem__(i, ast.Pass())


def _can_go(statement: ast.stmt) -> bool:
    """Whether the rest runs without a statement; what binds a new name is missed by whatever reads it."""
    if isinstance(statement, ast.Assign):
        bound = {x.id for target in statement.targets for x in ast.walk(target) if isinstance(x, ast.Name)}
        return bound <= {x.id for x in ast.walk(statement.value) if isinstance(x, ast.Name)} or all(
            isinstance(target, (ast.Attribute, ast.Subscript)) for target in statement.targets
        )
    return isinstance(statement, ast.AugAssign) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    )


def _name(operator: ast.AST) -> str:
    return type(operator).__name__


def _messages(tree: ast.Module) -> set[int]:
    """The ids of nodes in messages and annotations: no behaviour hangs on them."""
    outer = [node for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.Raise))]
    outer += [node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    return {id(x) for node in outer for x in ast.walk(node)}


def draw(room: Room, count: int, seed: int) -> list[Mutant]:
    """Some mutants of a room, spread over its files by their number."""
    found: list[Mutant] = []
    for file in room.tests:
        found += mutants(file, (HERE / "tensorloop" / file).read_text())
    unique = {mutant.key: mutant for mutant in found}
    keys = sorted(unique)
    return [unique[key] for key in random.Random(seed).sample(keys, min(count, len(keys)))]


def show(mutant: Mutant) -> str:
    """The lines that differ."""
    source = (HERE / "tensorloop" / mutant.file).read_text()
    before, after = ast.unparse(ast.parse(source)).splitlines(), mutant.apply(source).splitlines()
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


class Workshop:
    """A copy of the library and its tests, in which one file at a time is broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._limits: dict[tuple[str, ...], float] = {}
        for name in ("tensorloop", "cuda", "tests", "docs", "profiling"):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(HERE / name, folder / name, ignore=ignored)
        shutil.copy(HERE / "pyproject.toml", folder)
        for file in {file for room in ROOMS.values() for file in room.tests}:  # as a mutant is written, but whole
            copy = folder / "tensorloop" / file
            copy.write_text(ast.unparse(ast.parse(copy.read_text())) + "\n")

    def limit(self, tests: tuple[str, ...]) -> float:
        """How many seconds the tests may take: they are run once with the library as it is, and must pass."""
        if tests not in self._limits:
            begun = time.perf_counter()
            if not self._pass(tests, None):
                sys.exit(f"mutations: {' '.join(tests)} fail without any fault; mend that first")
            self._limits[tests] = PATIENCE * (time.perf_counter() - begun) + 60
        return self._limits[tests]

    def survives(self, mutant: Mutant, tests: tuple[str, ...]) -> bool:
        """Whether the tests pass with a mutant, in the time they may take."""
        limit = self.limit(tests)
        file = self.folder / "tensorloop" / mutant.file
        before = file.read_text()
        file.write_text(mutant.apply(before))
        try:
            return self._pass(tests, limit)
        finally:
            file.write_text(before)

    def _pass(self, tests: tuple[str, ...], limit: float | None) -> bool:
        paths = os.pathsep.join((str(self.folder), str(self.folder / "cuda")))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "default"},
                capture_output=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def score(results: dict[str, dict[str, Any]]) -> str:
    """A table by room: mutants, how many were caught, and how many of the rest nothing was done `since` about."""
    lines = ["| room | mutants | caught | score | left |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, found in results.items():
        caught = sum(not x["survived"] for x in found.values())
        left = sum(x["survived"] and "since" not in x for x in found.values())
        lines.append(f"| {name} | {len(found)} | {caught} | {caught / max(len(found), 1):.0%} | {left} |")
    return "\n".join(lines)


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """What earlier runs found."""
    return json.loads(path.read_text()) if path.exists() else {}


def run(args: Namespace) -> None:
    """Runs the mutants that no earlier run has."""
    results = read_results(args.out)
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        for name in args.only:
            room, found = ROOMS[name], results.setdefault(name, {})
            wanted = [mutant for mutant in draw(room, args.count, args.seed) if mutant.key not in found]
            for i, mutant in enumerate(wanted):
                survived = workshop.survives(mutant, room.tests[mutant.file])
                if survived and room.wider and not args.near:
                    survived = workshop.survives(mutant, room.wider)
                found[mutant.key] = {"survived": survived, "diff": show(mutant)}
                args.out.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{name} {i + 1}/{len(wanted)} {'SURVIVED' if survived else 'caught  '} {mutant.key}", flush=True)
    print(score(results))
    for name in args.only:
        for key, found in results[name].items():
            if found["survived"]:
                print(f"\n{key}\n{found['diff']}")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROOMS, default=list(ROOMS), help="rooms; all")
    parser.add_argument("--count", type=int, default=20, help="mutants of a room; %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; %(default)s")
    parser.add_argument("--near", action="store_true", help="run the tests near each file, none of those further off")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results, JSON")
    parser.add_argument("--show", action="store_true", help="print the mutants, run nothing")
    args = parser.parse_args()
    if not args.show:
        run(args)
        return
    for name in args.only:
        for mutant in draw(ROOMS[name], args.count, args.seed):
            print(f"{name} {mutant.key}\n{show(mutant)}\n")


if __name__ == "__main__":
    main()
