"""Every operation that torch has samples for, in loops of one operation, compiled and not: what differs is a find.

    python tests/fuzz/operations.py                        # all of them; half an hour
    python tests/fuzz/operations.py sort topk --verbose    # those whose names begin so, and what is not compiled

Each operation runs in a child of its own, so that a crash or an endless loop is one more find. Ends with a table of
how many samples are compiled in which place, and the exit code 1 if there are finds.
"""

import argparse
import json
import os
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.support.operation_loops import PLACEMENTS, judged
from tests.support.operation_samples import OPERATIONS, Sample, samples_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
WITH_EXTRAS = (torch.float64, torch.complex64, torch.int64, torch.bool)
FINE = ("equal", "not compiled", "no eager result", "left out")


class Row(NamedTuple):
    """What became of a sample, as a child tells it."""

    dtype: str
    placement: str
    sample: str
    kind: str
    why: str = ""


Rows = Callable[[str, argparse.Namespace], Iterator[Row]]


def rows_of(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Runs all samples of an operation. The last row of a sample that ends the process is "begins"."""
    op = OPERATIONS[name]
    for dtype in DTYPES:
        said = str(dtype).removeprefix("torch.")
        if said not in options.dtypes or not op.supports_dtype(dtype, "cpu"):
            continue
        extras = dtype in WITH_EXTRAS
        try:
            samples = samples_of(name, dtype, options.most if extras else 2, extras)
        except Exception as error:
            yield Row(said, "-", "-", "no samples", f"{type(error).__name__}: {error}"[:200])
            continue
        for i, sample in enumerate(samples):
            for placement in options.placements:
                yield Row(said, placement, sample.name, "begins")
                yield from _judged_in(sample, placement, said, further=i == 0 and dtype is torch.float64)


def _judged_in(sample: Sample, placement: str, dtype: str, further: bool) -> Iterator[Row]:
    yield Row(dtype, placement, sample.name, *judged(sample, placement))
    if further:
        yield Row(dtype, placement, f"{sample.name} without gradients", *judged(sample, placement, grad=False))
        yield Row(dtype, placement, f"{sample.name} twice", *judged(sample, placement, second=True))


def in_a_child(name: str, options: argparse.Namespace, rows: Rows = rows_of) -> Iterator[Row]:
    """The same rows, and one where the process ends or takes too long."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        _be_the_child(rows(name, options), options, write)
    os.close(write)
    last, rest, ready = Row("-", "-", "-", "begins"), b"", True
    end = time.monotonic() + options.seconds
    while ready:
        ready = bool(select.select([read], [], [], max(0.0, end - time.monotonic()))[0])
        part = os.read(read, 65536) if ready else b""
        if not part:
            break
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            last = Row(*json.loads(line))
            if last.kind != "begins":
                yield last
    os.close(read)
    if not ready:
        os.kill(pid, signal.SIGKILL)
        yield last._replace(kind="out of time", why=f"{options.seconds} s for {name}")
    status = os.waitpid(pid, 0)[1]
    if ready and status:
        ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an exit code"
        yield last._replace(kind="crash", why=ended)


def _be_the_child(rows: Iterator[Row], options: argparse.Namespace, write: int) -> None:
    code = 1
    try:
        if not options.verbose:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # vmap says what it has no rule for
        for row in rows:
            os.write(write, (json.dumps(row) + "\n").encode())
        code = 0
    finally:
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of operations' names")
    parser.add_argument("--start", help="leaves out the operations before this one")
    parser.add_argument("--most", type=int, default=4, help="of torch's samples of an operation and dtype")
    parser.add_argument("--seconds", type=int, default=200, help="for an operation")
    parser.add_argument("--dtypes", nargs="*", default=[str(d).removeprefix("torch.") for d in DTYPES])
    parser.add_argument("--placements", nargs="*", default=PLACEMENTS)
    parser.add_argument("--rows", type=argparse.FileType("w"), help="a file for all rows, as lines of JSON")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(OPERATIONS)
    names = names[names.index(options.start) if options.start else 0 :]
    names = [n for n in names if not options.names or n.startswith(tuple(options.names))]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    finds, begin = 0, time.monotonic()
    for name in names:
        for row in in_a_child(name, options):
            counts[row.placement][row.kind] += 1
            finds += row.kind not in FINE
            if row.kind not in FINE or (options.verbose and row.kind not in ("equal", "left out")):
                print(f"{name:32} {row.dtype:9} {row.placement:6} {row.sample:24} {row.kind}: {row.why}", flush=True)
            if options.rows:
                print(json.dumps([name, *row]), file=options.rows, flush=True)
    _show(counts)
    print(f"{len(names)} operations, {finds} finds, {time.monotonic() - begin:.0f} s")
    return 1 if finds else 0


def _show(counts: dict[str, Counter[Any]]) -> None:
    kinds = sorted({kind for counter in counts.values() for kind in counter} - {"left out"})
    print(f"\n{'':10}" + "".join(f"{kind:>18}" for kind in kinds))
    for placement, counter in counts.items():
        print(f"{placement:10}" + "".join(f"{counter[kind]:18}" for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
