"""What of torch compiles: each operation that torch has samples of, in a loop of its own, forward and backward.

    python tests/fuzz/coverage.py                   # all operations and dtypes, then the page: an hour or two
    python tests/fuzz/coverage.py --quick           # a few of them; nothing is kept
    python tests/fuzz/coverage.py --page ROWS ...   # runs nothing: the page from files that --rows has written
    python tests/fuzz/coverage.py --only fft sort --dtypes float32 --show     # prints what is not native

An operation counts once for each dtype and direction, as its worst sample does. Operations whose results have no fixed
shape are left out, and what torch itself has no kernel or gradient for. Each runs in a process of its own, so that a
crash is a row like others.
"""

import argparse
import json
import platform
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import tensorloop as tl
from tests.fuzz.operations import Row, in_a_child
from tests.support.operation_loops import disagreement, loop_of, outcome, placed
from tests.support.operation_samples import OPERATIONS, Sample, has_gradients, samples_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage.md"
BEGIN, END = "<!-- coverage:begin -->", "<!-- coverage:end -->"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)
QUICK = ("tanh", "sort", "nn.functional.max_pool2d", "nonzero")
DIRECTIONS = "forward", "backward"
# from the best to the worst; what is behind "no fixed shape" is not counted
KINDS = ("native", "called out", "step by step", "refused", "wrong", "crash")
LEFT_OUT = ("no fixed shape", "torch has none")
# Torch's samples of what draws set a seed at each call, which no body does.
for _module in [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal.") and m]:
    if hasattr(_module, "wrapper_set_seed"):
        setattr(_module, "wrapper_set_seed", lambda operation, *args, **kwargs: operation(*args, **kwargs))  # noqa: B010
_NO_SHAPE = ("DynamicOutputShapeException", "DataDependentOutputException")


# -- one sample


def rows_of(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """All of an operation; a row's placement is the direction, for all stands in the carry."""
    op = OPERATIONS[name]
    for dtype in DTYPES:
        said = str(dtype).removeprefix("torch.")
        if said not in options.dtypes or not op.supports_dtype(dtype, "cpu"):
            continue
        try:
            samples = samples_of(name, dtype, options.most, extras=False)
        except Exception:
            continue
        for sample in samples:
            if sample.name.endswith("in place"):
                continue
            grad = has_gradients(op, dtype) and any(sample.grads)
            yield Row(said, DIRECTIONS[grad], sample.name, "begins")
            for direction, (kind, why) in zip(DIRECTIONS, judged(sample, grad), strict=False):
                yield Row(said, direction, sample.name, kind, why)


def judged(sample: Sample, grad: bool) -> list[tuple[str, str]]:
    """(kind, why) of the forward pass and, where there are gradients, of the backward one."""
    count = 1 + grad
    if not _has_shape(sample):
        return [("no fixed shape", "")]
    where = placed(len(sample.grads), "carry") or placed(0, "closed")
    assert where is not None
    try:
        expected = outcome(sample, where, False, grad, False)
    except Exception as error:
        if grad:
            return judged(sample, False)
        return [("torch has none", _said(error))]
    try:
        found = outcome(sample, where, "strict", grad, False)
    except Exception as error:
        refused = "not compiled:" in str(error)
        kind = "refused" if refused else "wrong"
        if grad and refused:
            return [*judged(sample, False), (kind, _said(error))]
        return [(kind, _said(error))] * count
    why = disagreement(sample, where, found, expected, grad)
    if why:
        return [("wrong", why)] * count
    return _ways(sample, where, grad)[:count]


def _has_shape(sample: Sample) -> bool:
    """Whether the operation gives tensors, whose shapes its arguments' shapes say."""
    tensors = [step.detach().clone() for step in sample.steps[0]]
    try:
        if not any(isinstance(x, Tensor) for x in tree_leaves(sample.function(*tensors))):
            return False
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            sample.function(*(mode.from_tensor(x) for x in tensors))
    except Exception as error:
        return type(error).__name__ not in _NO_SHAPE
    return True


def _ways(sample: Sample, where: Any, grad: bool) -> list[tuple[str, str]]:
    """How the two passes run, as `tl.explain` says."""
    given = [sample.one(i).detach().requires_grad_(g and grad) for i, g in enumerate(sample.grads)]
    base = torch.ones(3, dtype=torch.float64, requires_grad=grad)
    text = tl.explain(*loop_of(sample, where, given, base)).text
    found = []
    for part in re.split(r"^(?=forward:|backward:)", text, flags=re.MULTILINE)[1:]:
        called = part.partition("  of these by torch, between native pieces of each step:\n")[2]
        lacking = re.search(r"not native: (.*)", part)
        if called:
            lines = " ".join(re.findall(r"^    (?!each costs)(\S.*)", called.partition("\n  ")[0], re.MULTILINE))
            names = {re.sub(r"^\d+ x | \[.*", "", name) for name in re.split(r",\s+(?![^\[]*\])", lines)}
            found.append(("called out", ", ".join(sorted(names))))
        elif "torch, step by step" in part:
            found.append(("step by step", lacking[1] if lacking else ""))
        else:
            found.append(("native", ""))
    return found


def _said(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r" \(/[^)]*\)|; with compile=True.*|^not compiled: ", "", text)[:200]


# -- all of them

Found = dict[str, dict[str, dict[str, tuple[str, str]]]]  # operation, dtype, direction -> (kind, why)


def worst(rows: Iterable[Row]) -> dict[str, dict[str, tuple[str, str]]]:
    """Of an operation's samples, by dtype and direction; kinds that are left out give way to every other one."""
    order = (*LEFT_OUT, *KINDS)
    found: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for row in rows:
        kind = row.kind if row.kind in order else "crash"
        before = found[row.dtype].get(row.placement)
        if before is None or order.index(before[0]) < order.index(kind):
            found[row.dtype][row.placement] = kind, row.why
    return dict(found)


def run(names: Sequence[str], options: argparse.Namespace) -> Found:
    """Each operation in a process of its own; keeps what is known as it goes."""
    found: Found = {}
    sorted_, init = tl.scan(lambda h, x: (h + x.sort()[0], h), torch.ones(3), torch.ones(2, 3), compile="strict")
    assert sorted_.shape == init[0].shape  # a loop here, so that no child has to import what compiles it
    bar = tqdm(names, unit="operation", dynamic_ncols=True, disable=None)
    for name in bar:
        bar.set_description(name)
        found[name] = worst(in_a_child(name, options, rows_of))
        if options.rows:
            options.rows.write_text(json.dumps(found, indent=0))
        if options.show:
            for dtype, of in found[name].items():
                for direction, (kind, why) in of.items():
                    if kind not in ("native", *LEFT_OUT):
                        tqdm.write(f"{name:40} {dtype:9} {direction:8} {kind}: {why}")
    return found


# -- the page


def page_of(found: Found, about: str) -> str:
    """Shares of all kinds, and a table of what is not native."""
    counts: dict[tuple[str, str], Counter[str]] = {(str(d)[6:], way): Counter() for d in DTYPES for way in DIRECTIONS}
    together: Counter[str] = Counter()
    for dtypes in found.values():
        for dtype, directions in dtypes.items():
            for direction, (kind, _) in directions.items():
                if kind not in LEFT_OUT:
                    counts[dtype, direction][kind] += 1
                    together[kind] += 1
    lines = [about, "", f"| dtype | direction | operations | {' | '.join(KINDS)} |"]
    lines += ["| --- | --- | ---: |" + " ---: |" * len(KINDS)]
    for (dtype, direction), counter in [*counts.items(), (("all", ""), together)]:
        if total := sum(counter.values()):
            shares = (f"{100 * counter[kind] / total:.1f} %" if counter[kind] else "0" for kind in KINDS)
            lines.append(f"| {dtype} | {direction} | {total} | {' | '.join(shares)} |")
    lines += ["", "What is not native:", "", "| operation | direction | dtypes | what becomes of it |"]
    lines += ["| --- | --- | --- | --- |"]
    for name, dtypes in sorted(found.items()):
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for dtype, directions in dtypes.items():
            for direction, (kind, why) in directions.items():
                if kind not in ("native", *LEFT_OUT):
                    said = re.sub(r"^\w+: not compiled: ", "", why).replace("|", "/").replace("<", "&lt;")
                    groups[direction, f"{kind}: {said}" if said else kind].append(dtype)
        lines += [f"| `{name}` | {way} | {', '.join(of)} | {text} |" for (way, text), of in groups.items()]
    return "\n".join(lines)


def publish(found: Found, page: Path) -> None:
    """Puts the tables in the place of those that the page has."""
    samples = sum(kind not in LEFT_OUT for of in found.values() for d in of.values() for kind, _ in d.values())
    about = f"Of torch {torch.__version__}, on {platform.machine()}: {len(found)} operations, {samples} cases."
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{page_of(found, about)}\n\n{END}{after}")


def main(given: Sequence[str] | None = None) -> int:
    """Runs what is asked for; gives 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of operations' names; nothing is kept")
    parser.add_argument("--quick", action="store_true", help="a few operations, to see that it runs; nothing is kept")
    parser.add_argument("--page", nargs="+", type=Path, help="runs nothing: the page from files of rows")
    parser.add_argument("--dtypes", nargs="+", default=[str(d).removeprefix("torch.") for d in DTYPES])
    parser.add_argument("--most", type=int, default=2, help="samples of an operation and dtype")
    parser.add_argument("--seconds", type=int, default=300, help="for an operation")
    parser.add_argument("--rows", type=Path, help="a file for what was found, JSON")
    parser.add_argument("--show", action="store_true", help="prints what is not native as it comes")
    parser.add_argument("--verbose", action="store_true", help="lets operations print their warnings")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    names = [n for n in OPERATIONS if n.startswith(tuple(options.only)) or not options.only]
    if options.page:
        found: Found = defaultdict(dict)
        for path in options.page:
            for name, dtypes in json.loads(path.read_text()).items():
                found[name].update(dtypes)
    else:
        found = run(QUICK if options.quick else names, options)
    if options.page or not (options.only or options.quick or options.rows):
        publish(found, PAGE)
    else:
        print(page_of(found, ""))
    return int(any(k in ("wrong", "crash") for of in found.values() for d in of.values() for k, _ in d.values()))


if __name__ == "__main__":
    sys.exit(main())
