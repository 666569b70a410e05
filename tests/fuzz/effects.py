"""Random loops whose bodies do more than return values: `python tests/fuzz/effects.py --programs 20000`.

A body keeps state, catches errors, shares memory, asks for types or takes gradients; some only look as if they did.
Each program runs as a plain Python loop, and as loops of tensorloop that are compiled, checkpointed, and both. What
they give, gradients and the state that is left behind must be the plain loop's, or the loop is refused by name. Else
that is a find: "silent" (wrong without a word), "warned" (wrong beside a warning), "inner" (an error that is not ours
to raise), "crash" or "hang". Results are lines of JSON in `OUT/results-*.jsonl`; what is there is not run again.

    python tests/fuzz/effects.py --show 17        seed 17's program, as a file that can be run
    python tests/fuzz/effects.py --only 17        and what became of it
    python tests/fuzz/effects.py --table          the results in a folder by family
"""

import argparse
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # behind what PYTHONPATH names, so that another copy of the library can be tried

from tests.fuzz.run import bar, read  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for; 1 where there are finds."""
    asked = _parser().parse_args(arguments)
    if asked.show is not None:
        from tests.fuzz.effects_check import script
        from tests.fuzz.effects_programs import program

        print(script(program(asked.show).text()))
        return 0
    if asked.only is not None:
        return _one(asked)
    if asked.shard is not None:
        _shard(asked)
        return 0
    if not asked.table:
        ended_well = _run_shards(asked)
        return _sum_up(asked, ended_well)
    return _sum_up(asked, True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many seeds, from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--shards", type=int, default=1, help="processes beside each other")
    parser.add_argument("--out", type=Path, default=Path("build/effects"), help="folder of the results")
    parser.add_argument("--show", type=int, metavar="SEED", help="one seed's program")
    parser.add_argument("--only", type=int, metavar="SEED", help="one seed: its program, and what became of it")
    parser.add_argument("--table", action="store_true", help="of results that are there")
    parser.add_argument("--finds", type=int, default=0, metavar="N", help="print so many finds, with their programs")
    parser.add_argument("--seconds", type=float, default=20.0, help="after which a way to run a program is a hang")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plant", default="", help=argparse.SUPPRESS)  # for tests: see planted.py
    return parser


@functools.cache
def _prepare() -> None:
    """Readies this process for forks: modules are loaded, a loop has been compiled, little memory is to be copied."""
    import torch

    from tensorloop.loop.compiled.run.plan import plans
    from tests.fuzz import child, planted  # noqa: F401
    from tests.fuzz.effects_check import check

    torch.set_num_threads(1)
    check(_WARM)
    plans.clear()
    gc.collect()
    gc.freeze()


_WARM = """
w = make(3, seed=1, grad=True)
def body(h, x):
    return torch.tanh(h * w + x), h.sum()
def program(loops, report, **options):
    carry, ys = loops.scan(body, make(3, seed=2), make(4, 3, seed=3), **options)
    report(carry, ys, [w], lambda: [])
"""


def _work(seed: int, asked: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """What a child does for a seed."""

    def work() -> dict[str, Any]:
        from tests.fuzz.effects_check import WAYS, check
        from tests.fuzz.effects_programs import program
        from tests.fuzz.planted import loops_of

        drawn, loops = program(seed), loops_of(seed, asked.plant)
        found = check(drawn.text(), {name: (loops, options) for name, options in WAYS.items()}, asked.seconds)
        return {**drawn.said(), **found}

    return work


def _run(seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """What became of a seed's program in a process of its own, with what is known of it beside."""
    from tests.fuzz.child import apart
    from tests.fuzz.effects_programs import program

    begun = time.monotonic()
    found = {"seed": seed, **program(seed).said(), **apart(_work(seed, asked), 4 * asked.seconds + 10)}
    return found | {"seconds": round(time.monotonic() - begun, 3)}


def _one(asked: argparse.Namespace) -> int:
    from tests.fuzz.effects_programs import program

    _prepare()
    found = _run(asked.only, asked)
    print(program(asked.only).text())
    print("\n".join(f"# {line}" for line in (json.dumps(found), *found["finds"])))
    return int(bool(found["finds"]))


def _shard(asked: argparse.Namespace) -> None:
    """Runs every `shards`-th seed that has no result yet."""
    _prepare()
    done = {found["seed"] for found in read(asked.out)}
    with (asked.out / f"results-{asked.shard}.jsonl").open("a") as file:
        print(file=file)  # the last line may have been cut short
        for seed in _wanted(asked)[asked.shard :: asked.shards]:
            if seed not in done:
                print(json.dumps(_run(seed, asked)), file=file, flush=True)


def _wanted(asked: argparse.Namespace) -> Sequence[int]:
    return range(asked.seed, asked.seed + asked.programs)


def _run_shards(asked: argparse.Namespace) -> bool:
    """Starts the shards and shows how far they are; whether all ended well."""
    asked.out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "XDG_CACHE_HOME": str((asked.out / "cache").resolve()),
        "MALLOC_PERTURB_": "165",  # memory that nobody wrote to is not zeros
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    command = [sys.executable, "-W", "ignore", __file__, f"--programs={asked.programs}", f"--seed={asked.seed}"]
    command += [
        f"--shards={asked.shards}",
        f"--out={asked.out}",
        f"--plant={asked.plant}",
        f"--seconds={asked.seconds}",
    ]
    shards = [subprocess.Popen([*command, f"--shard={i}"], env=environment) for i in range(asked.shards)]
    try:
        with bar(asked.programs) as tell:
            while any(shard.poll() is None for shard in shards):
                time.sleep(1)
                tell(_counted(_results(asked)))
            tell(_counted(_results(asked)))
    except KeyboardInterrupt:
        for shard in shards:
            shard.terminate()
        raise
    return all(shard.returncode == 0 for shard in shards)


def _results(asked: argparse.Namespace) -> list[dict[str, Any]]:
    found = {x["seed"]: x for x in read(asked.out)}
    return [found[seed] for seed in sorted(found) if asked.table or seed in _wanted(asked)]


def _counted(found: list[dict[str, Any]]) -> Counter[str]:
    return Counter(x["outcome"] for x in found) + Counter({"programs": len(found)})


def _sum_up(asked: argparse.Namespace, ended_well: bool) -> int:
    from tests.fuzz.effects_programs import program

    found = _results(asked)
    finds = [x for x in found if x["finds"]]
    for x in finds[: asked.finds]:
        print(f"seed {x['seed']}", program(x["seed"]).text(), *x["finds"], sep="\n", end="\n\n")
    print("\n".join(table(found)))
    pure = [x for x in found if x["pure"]]
    for way in ("compile", "checkpoints"):
        refused = [x["seed"] for x in pure if x["ways"].get(way) == "refused"]
        print(f"{way}: {len(refused)} of {len(pure)} pure programs are refused: {refused[:8]}")
    print(f"{len(found)} programs, {len(finds)} finds; {dict(_counted(found))}")
    return int(bool(finds) or not ended_well)


def table(found: list[dict[str, Any]]) -> list[str]:
    """For each family, what became of its programs in each way, and seeds of finds in which it is alone."""
    from tests.fuzz.effects_check import FINDS, VERDICTS
    from tests.fuzz.effects_families import PURE_FAMILIES

    lines = []
    for family in sorted({name for x in found for name in x["families"]}):
        own = [x for x in found if family in x["families"]]
        alone = [x for x in own if not {*x["families"]} - {family} - PURE_FAMILIES]
        lines.append(f"{family}: {len(own)} programs, {len(alone)} of them with nothing else")
        for way in ("compile", "checkpoints", "both"):
            counts = Counter(x["ways"].get(way, x["outcome"]) for x in own)
            seeds = [x["seed"] for x in alone if x["ways"].get(way, x["outcome"]) in FINDS]
            said = " ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
            lines.append(f"    {way:12} {said}; alone {len(seeds)} finds {seeds[:5]}")
    return lines


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
