"""Every operation that torch has samples for, in loops of one operation, compiled and not.

python tests/fuzz/operations.py                 # all of them; minutes
python tests/fuzz/operations.py sort topk -v    # those whose names begin so, and what is not compiled
"""

import argparse
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.support.operation_loops import PLACEMENTS, judged
from tests.support.operation_samples import OPERATIONS, samples_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


def cases(name: str, options: Any) -> Iterator[tuple[Any, ...]]:
    op = OPERATIONS[name]
    for dtype in DTYPES:
        said = str(dtype).removeprefix("torch.")
        if (options.dtypes and said not in options.dtypes) or not op.supports_dtype(dtype, "cpu"):
            continue
        main = dtype in (torch.float64, torch.int64, torch.bool, torch.complex64)
        try:
            samples = samples_of(name, dtype, options.most if main else 2, extras=main)
        except Exception as error:
            yield said, "-", "-", "no samples", f"{type(error).__name__}: {error}"[:200]
            continue
        for i, sample in enumerate(samples):
            for placement in options.placements:
                yield said, placement, sample.name, sample, (i == 0 and dtype is torch.float64)


def run_one(name: str, options: Any, write: int) -> None:
    def tell(*row: Any) -> None:
        os.write(write, (json.dumps(row) + "\n").encode())

    for said, placement, at, sample, first in cases(name, options):
        if isinstance(sample, str):
            tell(said, placement, at, sample, first)
            continue
        tell(said, placement, at, "begins", "")
        tell(said, placement, at, *judged(sample, placement))
        if first:
            tell(said, placement, at + " without gradients", *judged(sample, placement, grad=False))
            tell(said, placement, at + " twice", *judged(sample, placement, second=True))


def in_a_child(name: str, options: Any) -> Iterator[list[Any]]:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(read)
            run_one(name, options, write)
            code = 0
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    os.close(write)
    at, rest, end = ["-"] * 3, b"", time.monotonic() + options.seconds
    while True:
        ready, _, _ = select.select([read], [], [], max(0, end - time.monotonic()))
        part = os.read(read, 65536) if ready else b""
        if not part:
            break
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            row = json.loads(line)
            at = row[:3]
            if row[3] != "begins":
                yield row
    if not ready:
        os.kill(pid, signal.SIGKILL)
        yield [*at, "out of time", f"{options.seconds} s for {name}"]
    os.close(read)
    status = os.waitpid(pid, 0)[1]
    if ready and status:
        yield [*at, "crash", f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "exit code 1"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of operations' names")
    parser.add_argument("--start", help="leaves out the operations before this one")
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--dtypes", nargs="*")
    parser.add_argument("--placements", nargs="*", default=PLACEMENTS)
    parser.add_argument("--rows", type=argparse.FileType("w"))
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in OPERATIONS if not options.names or n.startswith(tuple(options.names))]
    names = names[names.index(options.start) if options.start else 0 :]
    count: Counter[tuple[str, str]] = Counter()
    failures = 0
    begin = time.monotonic()
    for name in names:
        for row in in_a_child(name, options):
            count[row[1], row[3]] += 1
            if options.rows:
                options.rows.write(json.dumps([name, *row]) + "\n")
            bad = row[3] not in ("equal", "not compiled", "no eager result")
            failures += bad
            if bad or (options.v and row[3] != "equal"):
                print(f"{name:32} " + " | ".join(row), flush=True)
        if options.rows:
            options.rows.flush()
    for key, n in sorted(count.items()):
        print(*key, n)
    print(f"{len(names)} operations, {failures} failures, {time.monotonic() - begin:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
