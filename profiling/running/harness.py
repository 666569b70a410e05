"""What every profiling script shares: one fresh process a cell, clocks, peak memory, results, tables.

A *cell* is one configuration (a dict that JSON can hold, with a `kind`). A script measures its cells by
running itself once for each of them with `--cell JSON`, round after round over all cells, so that a noisy
minute on the machine hits all of them alike and never one of them alone. A process answers in one JSON line.

Time and memory are never measured in the same process: glibc's malloc keeps freed blocks of growing sizes,
and resident memory then says more about malloc than about the loop. A fixed MALLOC_MMAP_THRESHOLD_ gives
every block of 64 KiB or more back at once, so memory cells run under it; it costs time, so time cells do not.
"""

import datetime
import gc
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from running import resident
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
THREADS = 2
TIMEOUT_S = 600
ENVIRONMENT = {  # kind of cell -> variables of its process
    "memory": {"MALLOC_MMAP_THRESHOLD_": "65536"},
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"},  # what is freed is given out again
}

Cell = dict[str, Any]
Entry = dict[str, Any]  # {"cell": Cell, "raw": [the answer of each round]}


def spawn(script: Path, cell: Cell, python: str = sys.executable) -> dict[str, Any]:
    """The answer of a fresh process; whatever stops it is an answer too, as {"error": text}."""
    # Whatever is installed, a process measures the checkout that its script is in.
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "profiling"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | ENVIRONMENT.get(cell["kind"], {})
    command, limit = [python, str(script), "--cell", json.dumps(cell)], cell.get("limit_s", TIMEOUT_S)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": f"exit status {done.returncode}: {last_line(done.stderr)}"}
    try:
        return json.loads(lines[-1])
    except ValueError:
        return {"error": f"no answer: {lines[-1][:200]}"}


def last_line(said: str) -> str:
    """What a process that failed has to say, in a line."""
    return (said.strip().splitlines() or ["no message"])[-1]


def answer(run_cell: Callable[[Cell], dict[str, Any]], cell: str) -> None:
    """The other side of `spawn`: carries out a cell and prints its answer, or its error."""
    torch.set_num_threads(THREADS)
    try:
        result = run_cell(json.loads(cell))
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(result), flush=True)


def measure(
    script: Path,
    entries: list[Entry],
    rounds: int,
    process: Callable[[Path, Cell], dict[str, Any]] = spawn,
    keep: Callable[[], object] = lambda: None,
) -> list[Entry]:
    """Every cell once a round; every other round goes backwards, so that neighbours change places.

    `keep` is called after each. Rounds that entries have answers of are not measured again.
    """
    done = sum(len(entry["raw"]) for entry in entries)
    total = rounds * len(entries)
    with tqdm(total=total, initial=done, unit="cell", dynamic_ncols=True, disable=done == total) as bar:
        for number in range(rounds):
            for entry in entries if number % 2 == 0 else entries[::-1]:
                if len(entry["raw"]) > number:
                    continue
                bar.set_description(" ".join(str(v) for v in list(entry["cell"].values())[:4]))
                entry["raw"].append(process(script, entry["cell"]))
                keep()
                bar.update()
    return entries


def unmeasured(cells: Sequence[Cell]) -> list[Entry]:
    return [{"cell": cell, "raw": []} for cell in cells]


def seconds(run: Callable[[], object], runs: int, warmups: int = 3) -> list[float]:
    """Each run's time, its results dropped on the clock, after the warm-ups. Slow runs are fewer, but three."""
    found = []
    gc.collect()
    while len(found) < warmups + runs and (len(found) < warmups + 3 or sum(found) < SLOW / 5):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found[warmups:]


SLOW = 10.0  # seconds spent on one cell after which one timed run is enough


def time_run(loss_of: Callable[[], Tensor], leaves: Sequence[Tensor], warmups: int, repeats: int) -> dict[str, Any]:
    """Seconds of forward and of forward + backward, a value for each run after the warm-ups.

    Dropping the graph is part of the cost and on the clock; collecting Python's garbage before a run is not.
    Runs that take seconds are not repeated: what they are compared with takes milliseconds.
    """
    forward, total, loss_value = [], [], 0.0
    for _ in range(warmups + repeats):
        if len(total) > warmups and sum(total) > SLOW:
            break
        gc.collect()
        start = time.perf_counter()
        loss = loss_of()
        middle = time.perf_counter()
        grads = torch.autograd.grad(loss, leaves)
        end_of_backward = time.perf_counter()
        loss_value = loss.item()
        resume = time.perf_counter()
        del loss
        total.append(time.perf_counter() - resume + end_of_backward - start)
        forward.append(middle - start)
        del grads
    return {
        "loss": loss_value,
        "warmup_s": total[:warmups],
        "forward_s": forward[warmups:],
        "total_s": total[warmups:],
    }


def peak_of(
    loss_of: Callable[[], Tensor], leaves: Sequence[Tensor], warm_up: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Bytes by which resident memory grows, at its highest, over one warm forward + backward (Linux, glibc).

    The kernel's high-water mark (VmHWM) is reset after a first run, or `warm_up` in its place, and after freed memory
    went back.
    """
    if warm_up is None:
        torch.autograd.grad(loss_of(), leaves)
    else:
        warm_up()
    before = resident.settle()
    loss = loss_of()
    grads = torch.autograd.grad(loss, leaves)
    peak = resident.high_water() - before
    value = loss.item()
    del loss, grads
    return {"loss": value, "peak_bytes": peak}


def median(entry: Entry | None, key: str) -> float | None:
    """The median over the rounds of each round's median; None where there is no figure."""
    values = [raw[key] for raw in entry["raw"] if key in raw] if entry else []
    values = [statistics.median(v) if isinstance(v, list) else v for v in values]
    return statistics.median(values) if values else None


def figure(result: dict[str, Any], key: str, **cell: Any) -> float | None:
    """The median of the first entry whose cell has these settings; None where there is none."""
    for entry in result["entries"]:
        if cell.items() <= entry["cell"].items():
            return median(entry, key)
    return None


def milliseconds(result: dict[str, Any], key: str, **cell: Any) -> float | None:
    """`figure`, of seconds."""
    value = figure(result, key, **cell)
    return value and value * 1e3


def about(rounds: int, **settings: Any) -> dict[str, Any]:
    """Where, when, with what and by which command a result was made."""
    import tensorloop

    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return {
        "command": shlex.join(["python", str(name), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "tensorloop": tensorloop.__version__,
        },
        "threads": THREADS,
        "load_at_start": round(os.getloadavg()[0], 2),
        "rounds": rounds,
        **settings,
    }


def machine() -> dict[str, Any]:
    """Processor, cores, memory and system, without the machine's name."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def failures(entries: Sequence[Entry]) -> list[str]:
    """Cells that gave an error instead of figures, a line each."""
    return [
        f"{' '.join(str(v) for v in entry['cell'].values())}: {raw['error']}"
        for entry in entries
        for raw in entry["raw"]
        if "error" in raw
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table; the first columns are text, the others are figures and stand to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        left = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        right = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        return f"| {' | '.join([*left[:text_columns], *right[text_columns:]])} |"

    rule = ["-" * w if i < text_columns else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(line(row) for row in [header, rule, *rows])


def digits(x: float | None, unit: str = "") -> str:
    """Three significant digits, without an exponent where the number is of an ordinary size; "-" for None."""
    if x is None:
        return "-"
    text = f"{x:.3g}" if x < 1000 and (x >= 1e-3 or x == 0) else f"{x:,.0f}" if x >= 1000 else f"{x:.1e}"
    return f"{text} {unit}".strip()


def why_not(result: dict[str, Any], **cell: Any) -> str:
    """What stands in a table where the first entry whose cell has these settings has no figure."""
    for entry in result["entries"]:
        if cell.items() <= entry["cell"].items():
            if any("absent" in raw for raw in entry["raw"]):
                return "not installed"
            errors = [raw["error"] for raw in entry["raw"] if "error" in raw]
            return "wrong" if any(error.startswith("wrong") for error in errors) else "error" if errors else "-"
    return "-"


def write_json(path: Path, value: object) -> None:
    """All of it or nothing: killed at any moment, the file holds what it held, or the new value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(beside, path)


def publish(
    name: str, out: Path, draw: Callable[[Path], None] | None, pages: Sequence[tuple[str, str, Callable[[str], str]]]
) -> None:
    """Picture and tables: of the project's own results into the documents, of others beside `out`.

    A page is a document, the markers in it, and its text for a given address of the picture; the first one goes
    beside `out`.
    """
    if out != results(name):
        if draw is not None:
            draw(out.with_suffix(".png"))
        out.with_suffix(".md").write_text(pages[0][2](out.with_suffix(".png").name) + "\n")
        return
    picture = ROOT / "docs" / "images" / f"{name}.png"
    if draw is not None:
        draw(picture)
    for document, marker, text in pages:
        path = ROOT / document
        address = Path(os.path.relpath(picture, path.parent)).as_posix()
        if not replace_between(path, marker, text(address)):
            lacks = f"<!-- {marker}:begin --> and <!-- {marker}:end -->"
            print(f"{document} is unchanged: it lacks the lines {lacks}", file=sys.stderr)


def results(name: str, short: bool = False) -> Path:
    """The project's own results of a script; those of its short set have a folder of their own."""
    folder = ROOT / "profiling" / "results"
    return (folder / "short" if short else folder) / f"{name}.json"


def replace_between(path: Path, name: str, text: str) -> bool:
    """Puts text between `<!-- name:begin -->` and `<!-- name:end -->`; False where the file lacks them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    old = path.read_text() if path.exists() else ""
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        return False
    head, tail = old[: old.index(begin) + len(begin)], old[old.index(end) :]
    path.write_text(f"{head}\n{text.strip()}\n{tail}")
    return True
