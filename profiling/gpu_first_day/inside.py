"""A stage in a process of its own, which `command.py` starts: one item after the other, each kept when it is done.

python profiling/gpu_first_day/inside.py STAGE FOLDER SECONDS [--rehearse] [--only WORD ...]
"""

import importlib
import sys
import time
import traceback
from argparse import ArgumentParser
from pathlib import Path

import torch
from compiled_loops import gpu_counts
from gpu_first_day.kept import ABSENT, ERROR, Kept, Row
from gpu_first_day.world import Items, World, short

LOST = 3  # the exit status of a process whose device takes no more work: another one goes on
NEEDED = 15  # seconds that an item is given at least
LOSSES = ("CUDA error", "illegal memory", "device-side assert", "unspecified launch failure", "AcceleratorError")


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("stage")
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    world = World(args.folder, args.rehearse, time.monotonic() + args.seconds, args.only)
    kept = Kept.of(args.folder, args.stage)
    kept.processes += 1
    kept.save()
    module = importlib.import_module(f"gpu_first_day.{args.stage}")
    why = begin(world)
    items: Items = module.items(world)
    kept.names = list(items)
    for name in [name for name in kept.left if not world.only or any(word in name for word in world.only)]:
        if why and name not in getattr(module, "ANYWHERE", ()):
            kept.begin(name)
            kept.end({ABSENT: why})
            continue
        if world.left() < min(NEEDED, args.seconds / 2):
            break
        kept.begin(name)
        row = answer(items, name)
        kept.end(row | {"process": kept.processes})
        print(f"{args.stage}: {name}: {row.get(ERROR) or row.get(ABSENT) or row.get('said') or 'done'}", flush=True)
        if any(word in str(row.get(ERROR, "")) for word in LOSSES):
            return LOST
    kept.save()
    return 0


def begin(world: World) -> str:
    """The device; or why there is none."""
    if world.rehearsed:
        if why := gpu_counts.pretend():
            return why
    elif not torch.cuda.is_available():
        return "torch sees no CUDA device"
    torch.set_default_device("cuda")
    return ""


def answer(items: Items, name: str) -> Row:
    start = time.perf_counter()
    try:
        row = items[name]()
    except Exception as error:
        row = {ERROR: short(error), "where": traceback.format_exc().strip().splitlines()[-6:]}
    return row | {"seconds": round(time.perf_counter() - start, 2)}


if __name__ == "__main__":
    sys.exit(main())
