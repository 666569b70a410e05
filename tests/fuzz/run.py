"""Random programs of loops, compiled and not: `python tests/fuzz/run.py --programs 20000`.

A program is the text that `programs.program` makes of a seed. It runs in a process of its own, eagerly and compiled,
with the same values and with others; what differs is a find, and so is a crash or a hang. Results are lines of JSON in
`OUT/results-*.jsonl`; what is there is not run again.

    python tests/fuzz/run.py --only 17            what seed 17 gives, and its program as a file that can be run
    python tests/fuzz/run.py --source 17          its program alone
    python tests/fuzz/triage.py build/fuzz        finds in groups
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # behind what PYTHONPATH names, so that another copy of the library can be tried


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for; 1 where there are finds."""
    asked = _parser().parse_args(arguments)
    if asked.source is not None:
        from tests.fuzz.check import script
        from tests.fuzz.programs import program

        print(script(program(asked.source)))
        return 0
    if asked.only is not None:
        return _one(asked)
    if asked.shard is not None:
        _shard(asked)
        return 0
    return _all(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many seeds, from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--shards", type=int, default=1, help="processes beside each other")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder of the results")
    parser.add_argument("--only", type=int, help="one seed: what it gives, and its program")
    parser.add_argument("--source", type=int, help="one seed's program")
    parser.add_argument("--guarded", action="store_true", help="every address of native code is checked, if it can be")
    parser.add_argument("--device", action="store_true", help="on a pretended CUDA device; TENSORLOOP_PTX=1: kernels")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="only the seeds that were finds there")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plant", default="", help=argparse.SUPPRESS)  # for tests: SEED:crash, SEED:hang, SEED:wrong
    return parser


def _one(asked: argparse.Namespace) -> int:
    from tests.fuzz.check import script
    from tests.fuzz.child import apart, prepare
    from tests.fuzz.programs import program

    prepare(asked.device)
    print(script(program(asked.only)))
    found = apart(_work(asked.only, asked))
    print("\n".join(f"# {line}" for line in (json.dumps(found), *found["finds"])))
    return int(bool(found["finds"]))


def _work(seed: int, asked: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """What a child does for a seed."""

    def work() -> dict[str, Any]:
        from tests.fuzz.check import check
        from tests.fuzz.planted import plant
        from tests.fuzz.programs import program

        with plant(seed, asked.plant):
            found = check(program(seed), guard_of(asked.guarded)).to_json()
        return found if not asked.guarded else with_violations(found)

    return work


def guard_of(guarded: bool) -> Callable[[], Any]:
    """What compiled calls run in."""
    if not guarded:
        return contextlib.nullcontext
    from tensorloop.compiler.targets.cpu.guarded import on

    return on


def with_violations(found: dict[str, Any]) -> dict[str, Any]:
    """A result with what guarded loops noticed."""
    from tensorloop.compiler.targets.cpu.guarded import violations

    lines = [f"memory: {line}" for line in violations]
    return found | {"finds": lines + found["finds"], "outcome": "different"} if lines else found


def _shard(asked: argparse.Namespace) -> None:
    """Runs every `shards`-th seed that has no result yet."""
    from tests.fuzz.child import apart, prepare

    prepare(asked.device)
    done = {found["seed"] for found in read(asked.out)}
    with (asked.out / f"results-{asked.shard}.jsonl").open("a") as file:
        print(file=file)  # the last line may have been cut short
        for seed in wanted(asked)[asked.shard :: asked.shards]:
            if seed not in done:
                begun = time.monotonic()
                found = {"seed": seed, **apart(_work(seed, asked))}
                found["seconds"] = round(time.monotonic() - begun, 3)
                print(json.dumps(found), file=file, flush=True)


def wanted(asked: argparse.Namespace) -> Sequence[int]:
    """The seeds to run."""
    if asked.again is None:
        return range(asked.seed, asked.seed + asked.programs)
    return sorted({found["seed"] for found in read(asked.again) if found["finds"]})


def read(out: Path) -> Iterator[dict[str, Any]]:
    """The results in a folder; a line that was cut short is left out."""
    for path in sorted(out.glob("results-*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def _all(asked: argparse.Namespace) -> int:
    """Starts the shards, shows how far they are, and sums up."""
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.device:
        _share_device(asked.out / "cache")
    environment = os.environ | {
        "XDG_CACHE_HOME": str((asked.out / "cache").resolve()),
        "MALLOC_PERTURB_": "165",  # memory that nobody wrote to is not zeros
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    given = sys.argv[1:] if asked else []
    command = [sys.executable, __file__, *given]
    shards = [subprocess.Popen([*command, f"--shard={i}"], env=environment) for i in range(asked.shards)]
    try:
        _watch(asked, shards)
    except KeyboardInterrupt:
        for shard in shards:
            shard.terminate()
        raise
    return _sum_up(asked, all(shard.returncode == 0 for shard in shards))


def _share_device(cache: Path) -> None:
    """Lets the shards find the device that is built: that takes a minute."""
    from tests.device import built

    cache.mkdir(exist_ok=True)
    if not (link := cache / built.folder().name).exists():
        link.symlink_to(built.folder())


def _watch(asked: argparse.Namespace, shards: list[subprocess.Popen[bytes]]) -> None:
    with bar(len(wanted(asked))) as tell:
        while any(shard.poll() is None for shard in shards):
            time.sleep(1)
            tell(_counted(asked))
        tell(_counted(asked))


def _counted(asked: argparse.Namespace) -> Counter[str]:
    seeds = {*wanted(asked)}
    found = {x["seed"]: x for x in read(asked.out) if x["seed"] in seeds}
    outcomes = Counter(x["outcome"] for x in found.values())
    outcomes["compiled"] = sum(bool(x.get("compiled")) for x in found.values())
    outcomes["programs"] = len(found)
    return outcomes


@contextlib.contextmanager
def bar(count: int) -> Iterator[Callable[[Counter[str]], None]]:
    """A bar of tqdm, where that is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _: None
        return
    with tqdm(total=count, disable=None, unit="program", mininterval=1) as bar:

        def tell(counts: Counter[str]) -> None:
            bar.n = counts["programs"]
            bar.set_postfix({k: v for k, v in counts.items() if k != "programs"}, refresh=True)

        yield tell


def _sum_up(asked: argparse.Namespace, ended_well: bool) -> int:
    counts = _counted(asked)
    programs = counts.pop("programs")
    compiled = counts.pop("compiled")
    finds = sum(counts[kind] for kind in ("different", "crash", "hang", "failed"))
    share = 100 * compiled / max(1, programs)
    print(f"{programs} programs, {share:.0f} % of them compiled, {finds} finds; {dict(counts)}")
    if finds:
        print(f"python tests/fuzz/triage.py {asked.out}  # the finds in groups")
    return int(bool(finds) or not ended_well)


if __name__ == "__main__":
    sys.exit(main())
