"""What all scripts here share: a command line, then checks, measurements, targets, tables and picture, in this order.

A script tells which cells there are, what a process does with one, and what the results say: a `Script`. The rest is
here. First come the checks: where values or gradients differ, nothing is timed and the exit status is 1. Then every
cell is measured, round by round, and what came out goes into one file, from which tables and picture are made.

Each script has sets of sizes: `quick` to see that it runs, `short` for `make bench`, `usual` without an option. The
short set has files of its own, so that its few figures never replace those of a usual run.

What a run has measured is in a file as soon as it is there (`partial.py`), never in the documents before all of it is.
A table is of one machine and one version (`captions.py`).
"""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pages import captions
from running import harness, worker
from running.harness import Cell, Entry
from running.partial import CannotResume, Partial

Answer = dict[str, Any]
Result = dict[str, Any]  # about, again, checks, entries, targets
Text = Callable[[Result, str], str]  # of the results and the address of the picture

SETS = {
    "quick": "a few steps of everything, once: to see that it runs; nothing is kept without --out",
    "short": "the set of `make bench`, about a minute; results go to profiling/results/short/",
    "full": "every size, and more rounds",
}
VERSIONS = """
import importlib.metadata, json, sys
of = importlib.metadata.packages_distributions()
print(json.dumps({name: importlib.metadata.version(of[name][0]) for name in sys.argv[1:]}))
"""


class Peer(NamedTuple):
    """Another library, in a Python of its own."""

    name: str
    """Its Python is given by --NAME-python, or by NAME_PYTHON in the environment."""
    packages: tuple[str, ...]
    """What that Python has to have, by the names that one imports."""
    runs: Callable[[Cell], bool]
    """Whether a cell is one of its."""
    script: Path | None = None
    """What runs its cells, where the script that asks cannot do so itself."""

    @property
    def variable(self) -> str:
        return f"{self.name.upper()}_PYTHON"

    def add_to(self, parser: ArgumentParser) -> None:
        default = os.environ.get(self.variable)
        parser.add_argument(f"--{self.name}-python", default=default, help=f"a Python with {', '.join(self.packages)}")

    def find(self, python: str | None) -> dict[str, str]:
        """The versions there; where the peer is missing, nothing, and its cells will say so."""
        os.environ.pop(self.variable, None)
        if not python:
            return {}
        try:
            command = [python, "-c", VERSIONS, *self.packages]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            print(f"{', '.join(self.packages)} left out: {python}: {said.strip().splitlines()[-1]}", file=sys.stderr)
            return {}
        os.environ[self.variable] = python  # processes of cells inherit it
        return json.loads(done.stdout)

    def answer(self, script: Path, cell: Cell) -> Answer:
        """The answer of a process of its own, of the Python that `find` found."""
        python = os.environ.get(self.variable)
        if not python:
            return {"absent": "not installed"}
        if self.script is None:
            return harness.spawn(script, cell, python)
        return harness.spawn(self.script, {"threads": harness.THREADS, "slow": harness.SLOW} | cell, python)


class Place(NamedTuple):
    """A file of this machine that cells need; its path stays out of commands and results."""

    name: str
    """Given by --NAME, or by NAME_STANDS in the environment, where its cells find it."""
    stands: str
    """What stands for it in the command: MODEL, PROGRAM."""
    about: str

    @property
    def variable(self) -> str:
        return f"{self.name}_{self.stands}".upper()

    @property
    def path(self) -> Path | None:
        value = os.environ.get(self.variable)
        return Path(value) if value else None

    def add_to(self, parser: ArgumentParser) -> None:
        default = os.environ.get(self.variable)
        parser.add_argument(f"--{self.name}", metavar=self.stands, default=default, help=self.about)

    def find(self, args: Namespace, parser: ArgumentParser) -> None:
        """Puts the path into the environment, which processes of cells inherit."""
        os.environ.pop(self.variable, None)
        if value := getattr(args, self.name):
            if not Path(value).is_file():
                parser.error(f"--{self.name}: there is no file {value}")
            os.environ[self.variable] = str(Path(value).absolute())


class Target(NamedTuple):
    """What was to be reached, and what came out."""

    what: str
    value: float | None
    """None: not measured."""
    bound: float | None = None
    """None: no target, but a figure that one wants to see with them."""
    least: bool = False
    """The bound is the least, not the most."""
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None or self.bound is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound

    def row(self) -> list[str]:
        """What, measured, bound, whether it holds."""
        unit = f" {self.unit}" if self.unit else ""
        value = "-" if self.value is None else f"{harness.digits(self.value)}{unit}"
        if self.bound is None:
            return [self.what, value, "-", ""]
        bound = f"at {'least' if self.least else 'most'} {harness.digits(self.bound)}{unit}"
        return [self.what, value, bound, {True: "met", False: "**missed**", None: "not measured"}[self.met]]


class OtherRun(Exception):
    """The results that a run would join are of another machine or another version."""


def target_text(targets: Sequence[Target]) -> list[str]:
    """How many are met, and a table; nothing where no figure has a bound."""
    if not any(target.bound is not None for target in targets):
        return []
    judged = [target.met for target in targets if target.met is not None]
    table = harness.table(["target", "measured", "bound", ""], [target.row() for target in targets])
    said = f" {sum(judged)} of {len(judged)} are met." if judged else ""
    return [f"**Targets.**{said}", table]


def differing(checks: Sequence[Entry]) -> list[str]:
    """Checks whose answer `apart` is above their `at_most`, and failed ones, a line each."""
    return [
        f"{' '.join(str(v) for v in entry['cell'].values())}: {raw}"
        for entry in checks
        for raw in entry["raw"]
        # Not the other way round, so that NaN is caught.
        if "absent" not in raw and not raw.get("apart", math.inf) <= entry["cell"]["at_most"]
    ]


def newly_failing(old: Result, entries: Sequence[Entry]) -> list[str]:
    """Cells that have nothing but errors now, and had figures before: a busy machine, or a bug; a line each."""
    had = [entry["cell"] for entry in old.get("entries", []) if any("error" not in raw for raw in entry["raw"])]
    failed = [entry for entry in entries if all("error" in raw for raw in entry["raw"])]
    return harness.failures([entry for entry in failed if json.loads(json.dumps(entry["cell"])) in had])


@dataclass(frozen=True)
class Script:
    """What makes one script another than the rest."""

    file: str
    text: str | None
    """Its docstring, for --help."""
    cells: Callable[[Namespace], list[Cell]]
    """What to measure; `args.set` is the set of sizes."""
    run_cell: Callable[[Cell], Answer]
    """What a process of its own does."""
    section: Text
    """Tables and picture, as the document has them."""
    rounds: Mapping[str, int]
    """How often each set of sizes is measured: quick, short, usual, and full where there is one."""
    checks: Callable[[Namespace], list[Cell]] = lambda args: []
    disagreements: Callable[[list[Entry]], list[str]] = differing
    targets: Callable[[Result], list[Target]] = lambda result: []
    draw: Callable[[Result, Path], None] | None = None
    summary: Callable[[Result], list[str]] = lambda result: []
    """What the figures say, where a peer wins: a few sentences, which come first."""
    brief: bool = False
    """The page has the date, the machine and the table alone."""
    page: tuple[str, str] | None = None
    """The document and its markers, where it is not the script's own in docs/benchmarks."""
    also: Sequence[tuple[str, str, Text]] = ()
    """Other documents that have a part of it: the document, its markers, and what stands there below the caption."""
    peers: Sequence[Peer] = ()
    places: Sequence[Place] = ()
    options: Callable[[ArgumentParser], object] = lambda parser: None
    group: Callable[[Cell], Hashable] = lambda cell: ""
    """Cells of one group are measured anew together; a run that leaves out others keeps what they had."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """What groups are called in captions, where that is not what they are called here."""
    settings: Callable[[Namespace], dict[str, Any]] = lambda args: {}
    """What else the results are to tell."""
    prepare: Callable[[], object] = lambda: None
    """Comes before a cell, in its process."""
    together: Callable[[Cell], bool] = lambda cell: False
    """Whether a cell runs in one process with others, each after the other."""
    beside: Callable[[str, Sequence[Cell]], bool] = lambda group, cells: False
    """Whether a group may stay that another machine has made, beside what a run of these cells finds."""

    @property
    def name(self) -> str:
        return Path(self.file).stem

    def main(self, given: Sequence[str] | None = None) -> int:
        """Measures, or measures nothing, and writes what there is to say; gives the exit status."""
        given = sys.argv[1:] if given is None else list(given)
        args = self.arguments(given)
        if args.cell:
            self.prepare()
            for cell in sys.stdin if args.cell == worker.MANY else [args.cell]:
                harness.answer(self.run_cell, cell)
            return 0
        try:
            return self.run(args, given)
        except (CannotResume, OtherRun) as error:
            print(error, file=sys.stderr)
            return 2
        finally:
            if args.passing:
                shutil.rmtree(args.out.parent)

    def run(self, args: Namespace, given: Sequence[str]) -> int:
        result = json.loads(args.out.read_text()) if args.set == "report" else self.measure(args, given)
        if not isinstance(result, dict):
            return result
        result["targets"] = [target._asdict() for part in self.parts(result) for target in self.targets_of(part)]
        harness.write_json(args.out, result)
        if args.set != "report":
            args.out.with_suffix(".partial.json").unlink(missing_ok=True)
        self.publish(result, args.out)
        for line in harness.failures(result["entries"]):
            print("no figure:", line, file=sys.stderr)
        print(self.whole_section(result, args.out.with_suffix(".png").name))
        return 0

    def arguments(self, given: Sequence[str]) -> Namespace:
        parser = ArgumentParser(description=self.text, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
        sets = parser.add_mutually_exclusive_group()
        for name in self.rounds:
            if name != "usual":
                sets.add_argument(f"--{name}", dest="set", action="store_const", const=name, help=SETS[name])
        text = "measure nothing: targets, tables and picture again, from --out"
        sets.add_argument("--report", dest="set", action="store_const", const="report", help=text)
        parser.add_argument("--resume", action="store_true", help="go on where the same command was stopped")
        parser.add_argument("--rounds", type=int, help=f"how often every cell is measured; {self.rounds['usual']}")
        parser.add_argument("--out", type=Path, help="the file of results, JSON; the rest goes beside it")
        self.options(parser)
        for source in (*self.peers, *self.places):
            source.add_to(parser)
        parser.add_argument("--cell", help=SUPPRESS)  # JSON: what a process of its own is to do
        parser.set_defaults(set="usual")
        args = parser.parse_args(given)
        if args.rounds is not None and args.rounds < 1:
            parser.error(f"--rounds is {args.rounds}; expected 1 or more")
        if not args.cell:
            for place in self.places:
                place.find(args, parser)
        args.passing = args.set == "quick" and args.out is None
        own = harness.results(self.name, short=args.set == "short")
        args.out = (args.out or (Path(tempfile.mkdtemp()) / "quick.json" if args.passing else own)).resolve()
        if args.set == "report" and not args.out.is_file():
            parser.error(f"--report: there is no {args.out}; measure first, or name another file by --out")
        if args.set == "report" and args.out == own and "partial" in json.loads(args.out.read_text()):
            parser.error(f"--report: {args.out} is of a run that was stopped; the documents are for whole ones")
        return args

    def measure(self, args: Namespace, given: Sequence[str]) -> Result | int:
        """The results, with those of groups that were left out as they were; where there are none, the exit status."""
        versions = {peer.name: peer.find(getattr(args, f"{peer.name}_python")) for peer in self.peers}
        rounds = args.rounds or self.rounds[args.set]
        about = harness.about(rounds, command=self.command(given), set=args.set, peers=versions, **self.settings(args))
        if about["load_at_start"] > 1:
            print(f"the machine's load is {about['load_at_start']}: somebody else is at work on it", file=sys.stderr)
        cells, file = self.cells(args), Path(self.file).resolve()
        old = json.loads(args.out.read_text()) if args.out.is_file() else {}
        self.refuse_to_mix(old, about, cells, args.out)
        partial = Partial(args.out, about, rounds)
        entries = partial.begin(cells, args.resume)
        if not entries:
            print("nothing to measure: what the options ask for needs others, see --help", file=sys.stderr)
            return 2
        try:
            checks = harness.measure(file, harness.unmeasured(self.checks(args)), 1, self.process)
            if wrong := self.disagreements([e for e in checks if not self.peer_failed(e)]):
                print("values or gradients disagree, so nothing is timed:", *wrong, sep="\n  ", file=sys.stderr)
                return 1
            harness.measure(file, entries, rounds, self.process, lambda: partial.keep(checks, entries))
        except KeyboardInterrupt:
            kept = not args.passing and any(entry["raw"] for entry in entries)
            where = f"; what was measured is in {partial.path}, and --resume goes on from there" if kept else ""
            print(f"stopped{where}", file=sys.stderr)
            return 130
        if lost := newly_failing(old, entries):
            print("no figure where there was one, so results and documents stay:", *lost, sep="\n  ", file=sys.stderr)
            print(f"{partial.path} has what was measured; --resume tries those again", file=sys.stderr)
            return 1
        return self.renewed(old, {"about": partial.about, "again": {}, "checks": checks, "entries": entries})

    def refuse_to_mix(self, old: Result, about: dict[str, Any], cells: Sequence[Cell], out: Path) -> None:
        """Raises OtherRun where rows would stay that another machine or another version has made."""
        strangers = captions.strangers(old, about, cells, self.group)
        if found := {name: why for name, why in strangers.items() if not self.beside(name, cells)}:
            rows = ", ".join(self.titles.get(name, name) for name in found)
            differs = "; ".join(sorted({text for texts in found.values() for text in texts}))
            raise OtherRun(
                f"{out} has rows of another machine or version that this run leaves out: {rows} ({differs}). A page is "
                "of one machine and one version: measure these rows too, or name another file by --out"
            )

    def renewed(self, old: Result, new: Result) -> Result:
        """The new results, and the old ones of groups that were not measured anew."""
        measured = {self.group(entry["cell"]) for entry in new["entries"]}
        kept = {
            key: [entry for entry in old.get(key, []) if self.group(entry["cell"]) not in measured]
            for key in ("checks", "entries")
        }
        whole = {key: kept[key] + new[key] for key in kept}
        still = {str(self.group(entry["cell"])) for entry in kept["entries"]}
        again = {group: about for group, about in old.get("again", {}).items() if group in still}
        if still <= again.keys():  # nothing is left of what the old caption speaks of
            return {"about": new["about"], "again": again, **whole}
        return {"about": old["about"], "again": again | {str(group): new["about"] for group in measured}, **whole}

    def peer_of(self, cell: Cell) -> Peer | None:
        return next((peer for peer in self.peers if peer.runs(cell)), None)

    def peer_failed(self, entry: Entry) -> bool:
        """Whether a peer's process failed: it has no figures then, and ours are as good without."""
        return self.peer_of(entry["cell"]) is not None and "error" in entry["raw"][0]

    def process(self, script: Path, cell: Cell) -> Answer:
        """A cell in the Python that it needs."""
        peer = self.peer_of(cell)
        if peer:
            return peer.answer(script, cell)
        return worker.ask(script, cell) if self.together(cell) else harness.spawn(script, cell)

    def command(self, given: Sequence[str]) -> str:
        """With peers found by the environment too, without paths of one machine, and as if it had never stopped."""
        places = [(f"--{peer.name}-python", "PYTHON", peer.variable) for peer in self.peers]
        places += [(f"--{place.name}", place.stands, place.variable) for place in self.places]
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--resume", action="store_true")
        for option, _, _ in places:
            parser.add_argument(option)
        _, own = parser.parse_known_args(given)
        found = [f"{option} {stands}" for option, stands, variable in places if os.environ.get(variable)]
        return " ".join([shlex.join(["python", f"profiling/{self.name}.py", *own]), *found])

    def parts(self, result: Result) -> list[Result]:
        """The results of each machine and version by themselves; there is one, but for files of older days."""
        return captions.runs(result, self.group)

    def targets_of(self, part: Result) -> list[Target]:
        """Where only some rows were measured, the targets that have figures."""
        found = self.targets(part)
        return found if part.get("whole", True) else [target for target in found if target.value is not None]

    def whole_section(self, result: Result, picture: str) -> str:
        """What the figures say, the tables, the targets, how it was measured; then the same of other runs."""
        first, *others = self.parts(result)
        text = [*self.summary(result), *self.tables_of(first, picture)]
        for part in others:
            tables = [block for block in self.tables_of(part, picture) if not block.startswith("![")]
            text += ["### Rows of another run", *tables]
        return "\n\n".join(text)

    def tables_of(self, part: Result, picture: str) -> list[str]:
        """The blocks of one run."""
        tables = self.section(part, picture).split("\n\n")
        if self.brief:
            return [captions.line(part), *tables]
        how = ["**How it was measured.**", captions.details(part, self.titles)]
        return [captions.line(part), *tables, *target_text(self.targets_of(part)), *how]

    def publish(self, result: Result, out: Path) -> None:
        document, marker = self.page or (f"docs/benchmarks/{self.name}.md", self.name)
        draw, first = self.draw, self.parts(result)[0]
        harness.publish(
            self.name,
            out,
            None if draw is None else lambda path: draw(first, path),
            [
                (document, marker, lambda picture: self.whole_section(result, picture)),
                *((page, mark, partial(self.part_of, text, first)) for page, mark, text in self.also),
            ],
        )

    def part_of(self, text: Text, part: Result, picture: str) -> str:
        """What another document has of a run."""
        return f"{captions.line(part)}\n\n{text(part, picture)}"
