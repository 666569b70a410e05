"""Tables and curves of loops over T: what several scripts make of their cells.

A cell of such a script has kind, workload, T and variant; labels are by workload and variant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from pages import names, plots
from running import harness
from running.script import Result

UNITS = {"time": ("total_s", 1e-3, "ms"), "memory": ("peak_bytes", 2**20, "MiB")}  # key, divided by, shown in
WHAT = {"time": "forward + backward", "memory": "peak memory"}

Labels = Mapping[str, Mapping[str, str]]


def find(result: Result, kind: str, workload: str, T: int, variant: str) -> harness.Entry | None:
    return first(result, kind=kind, workload=workload, T=T, variant=variant)


def first(result: Result, **wanted: object) -> harness.Entry | None:
    return next((e for e in result["entries"] if wanted.items() <= e["cell"].items()), None)


def value(result: Result, kind: str, workload: str, T: int, variant: str) -> float | None:
    """The median of a time cell in ms, of a memory cell in MiB; None where it was not measured or failed."""
    key, divisor, _ = UNITS[kind]
    median = harness.median(find(result, kind, workload, T, variant), key)
    return None if median is None else median / divisor


def of_kind(result: Result, kind: str) -> Iterator[harness.Entry]:
    return (entry for entry in result["entries"] if entry["cell"]["kind"] == kind)


def _loops(result: Result, workload: str) -> Iterator[harness.Cell]:
    cells = (entry["cell"] for entry in result["entries"])
    return (cell for cell in cells if cell["kind"] in UNITS and cell["workload"] == workload)


def sizes(result: Result, workload: str) -> list[int]:
    return sorted({cell["T"] for cell in _loops(result, workload)})


def variants(result: Result, workload: str) -> list[str]:
    return list(dict.fromkeys(cell["variant"] for cell in _loops(result, workload)))


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def with_ratio(x: float | None, peer: float | None, unit: str) -> str:
    relative = ratio(x, peer)
    return harness.digits(x, unit) if relative is None else f"{harness.digits(x, unit)} ({harness.digits(relative)}x)"


def cell_text(result: Result, kind: str, workload: str, T: int, variant: str, peer: str) -> str:
    """The figure, with its ratio to the peer's in brackets."""
    own = value(result, kind, workload, T, variant)
    if own is None:
        return harness.why_not(result, kind=kind, workload=workload, T=T, variant=variant)
    return with_ratio(own, value(result, kind, workload, T, peer), UNITS[kind][2])


def over_T(result: Result, kind: str, workload: str, labels: Labels, peer: str, letter: str = "T") -> str:
    """A line for each variant, a column for each size."""
    Ts = sizes(result, workload)
    rows = [
        [labels[workload][variant], *(cell_text(result, kind, workload, T, variant, peer) for T in Ts)]
        for variant in variants(result, workload)
    ]
    return harness.table([WHAT[kind], *(f"{letter}={T:,}" for T in Ts)], rows)


def checked(result: Result, labels: Labels) -> str:
    """How far losses and gradients were apart."""
    rows = [
        [f"{title(cell['workload'])}, T={cell['T']:,}", labels[cell["workload"]][variant], *figures]
        for cell, answers in ((entry["cell"], entry["raw"][0]) for entry in result["checks"])
        for variant, apart in answers.items()
        for figures in [[harness.digits(apart[x]) if x in apart else _why(apart) for x in ("loss", "gradient")]]
    ]
    return harness.table(["loop", "code", "loss", "gradient"], rows, text_columns=2)


def title(workload: str) -> str:
    """Without its sizes."""
    return names.TITLES[workload].split(", B=")[0]


def _why(answer: Mapping[str, object]) -> str:
    return "not installed" if "absent" in answer else "error"


def disagreements(checks: Sequence[harness.Entry], labels: Labels, bound: float) -> list[str]:
    """Losses or gradients that are further apart than the bound, and checks of ours that failed, a line each."""
    wrong = []
    for entry in checks:
        workload, answers = entry["cell"]["workload"], entry["raw"][0]
        where = f"{title(workload)}, T={entry['cell']['T']:,}"
        if "error" in answers:
            wrong.append(f"{where}: {answers['error']}")
            continue
        for variant, apart in answers.items():
            label = f"{where}, {labels[workload][variant]}"
            if "error" in apart:
                wrong.append(f"{label}: {apart['error']}")
            elif not {"absent", "failed"} & set(apart):
                # Not the other way round, so that NaN is caught.
                wrong += [f"{label}: {what} off by {x:.1e}" for what, x in apart.items() if not x <= bound]
    return wrong


def curves(
    result: Result, kind: str, workload: str, names: Mapping[str, tuple[str, int]], ours: Callable[[str], bool]
) -> list[plots.Curve]:
    """Those that have a name and style, as far as they were measured."""
    lines = []
    for variant, (label, style) in names.items():
        points = [(T, value(result, kind, workload, T, variant)) for T in sizes(result, workload)]
        kept = [(T, v) for T, v in points if v is not None and v > 0]
        if kept:
            Ts, values = zip(*kept, strict=True)
            lines.append(plots.Curve(label, Ts, values, style, ours(variant)))
    return lines
