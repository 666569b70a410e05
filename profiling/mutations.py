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

from faults.rooms import ROOMS, Room

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "profiling" / "results" / "mutations.json"
PATIENCE = 4  # a mutant that makes a loop endless is stopped after so many times what the tests take without it


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
