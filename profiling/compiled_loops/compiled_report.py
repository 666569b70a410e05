"""What compiled.py makes of its figures: targets, tables, a picture."""

from pathlib import Path

from pages import plots, sentences
from running import harness
from running.script import Result, Target

PEER = Path(__file__).resolve().parents[1] / "peers" / "jax_compiled.py"
TITLES = {
    "W2s": "LSTM, B=4, H=32",
    "W2": "LSTM, B=32, H=256",
    "RNNs": "tanh RNN + where, B=4, H=32",
    "RNN": "tanh RNN + where, B=32, H=256",
    "W1": "slice by slice, 10 x 5 numbers",
    "W3": "decoder that attends to its past, B=8, D=64",
    "W4": "loop of unknown length, B=64, D=256",
    "rk4": "Runge-Kutta",
    "ln_rnn": "LayerNorm RNN",
    "memory": "attention over a memory",
    "crf": "CRF, logsumexp",
    "gru": "GRU",
    "min_gru": "minGRU",
    "iir": "IIR filter",
    "kalman": "Kalman filter",
    "adam": "Adam as a scan",
    "viterbi": "Viterbi",
    "hmm": "HMM, forward",
    "s5": "S5, complex diagonal",
    "ode": "adaptive ODE solver",
    "bn_rnn": "RNN normed over rows, B=64, H=512",
    "one_row": "RNN of one row, H=1024",
    "kf": "Kalman filter of 8 states by Cholesky, B=32",
    "root_kf": "Kalman filter of 8 states by QR, B=32",
    "ekf": "extended Kalman filter by solve, B=32",
    "lqr": "LQR of 8 states by solve",
    "gp": "Gaussian process by sequential inference, B=16",
}
USUAL = {"T": 512, "iir": 4096, "W1": 10000, "lqr": 256}
SIZES: dict[str, tuple[tuple[int, int], ...]] = {  # (T, threads)
    **{name: ((USUAL.get(name, 512), 1),) for name in TITLES},
    "W2s": ((1024, 1), (1024, 2)),
    "RNNs": ((1024, 1), (1024, 2)),
    "W2": ((512, 2),),
    "RNN": ((512, 2),),
    "W3": ((1024, 1),),
    "bn_rnn": ((64, 1), (64, 2)),
    "one_row": ((512, 1), (512, 2)),
    "W4": ((100, 2), (1000, 2), (10000, 2)),
}
WAYS = {
    "compiled": "compiled",
    "compiled_k32": "compiled, K=32",
    "eager": "eager",
    "eager_k32": "eager, K=32",
    "lax_scan": "lax.scan",
    "eqx_k32": "Equinox, K=32",
    "nn_lstm": "nn.LSTM",
    "nn_gru": "nn.GRU",
    "torch_scan": "torch's scan",
}
CHECKPOINTED = ("W2s", "W2", "W4", "ode")
MODULES = {"W2s": "nn_lstm", "W2": "nn_lstm", "gru": "nn_gru"}
MEMORY_WAYS = ("compiled", "compiled_k32", "eager", "eqx_k32")
OTHER_BOUNDS = ("W2s", "W2", "RNNs", "RNN", "W3", "W4", "kf", "root_kf", "ekf", "lqr", "gp")  # beside lax.scan
# workload, way, peer, bound: time of the way at most bound times that of the peer
BOUNDS = [
    ("W2s", "compiled", "lax_scan", 0.3),
    ("W2s", "compiled", "nn_lstm", 1.0),
    ("W2s", "compiled_k32", "eqx_k32", 0.3),
    ("W2", "compiled", "lax_scan", 0.5),
    ("W2", "compiled", "nn_lstm", 0.85),
    ("RNNs", "compiled", "lax_scan", 0.4),
    ("RNN", "compiled", "lax_scan", 0.7),
    *((w, "compiled", "lax_scan", 0.3) for w in ("kf", "root_kf", "ekf")),
    *((w, "compiled", "lax_scan", 0.5) for w in ("lqr", "gp")),
    *((w, "compiled", "lax_scan", 1.0) for w in TITLES if w not in OTHER_BOUNDS),
    ("W3", "compiled", "eager", 0.7),
    *((w, "compiled", "eager", 1.0) for w in TITLES if w != "W3"),
]


def ways(workload: str) -> list[str]:
    """How a workload is run, apart from the memory."""
    found = ["compiled", "eager", "lax_scan"]
    if workload in CHECKPOINTED:
        found += ["compiled_k32", "eqx_k32"] + (["eager_k32"] if workload == "W4" else [])
    if workload in MODULES:
        found.append(MODULES[workload])
    if workload in ("W2s", "RNNs"):
        found.append("torch_scan")
    return [way for way in WAYS if way in found]


def rows(result: Result) -> list[tuple[str, int, int]]:
    """(workload, T, threads) of what was measured."""
    timed = [entry["cell"] for entry in result["entries"] if entry["cell"]["kind"] == "time"]
    found = {(cell["workload"], cell["T"], cell["threads"]) for cell in timed}
    return sorted(found, key=lambda row: (list(TITLES).index(row[0]), row[1:]))


def time_of(result: Result, row: tuple[str, int, int], way: str) -> float | None:
    """Milliseconds."""
    w, T, threads = row
    return harness.milliseconds(result, "total_s", kind="time", workload=w, T=T, threads=threads, variant=way)


def title(row: tuple[str, int, int]) -> str:
    w, T, threads = row
    return f"{TITLES[w]}, {'N' if w == 'W4' else 'T'}={T:,}" + (", 2 threads" if threads > 1 else "")


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def targets(result: Result) -> list[Target]:
    """Ratios of medians, then what a plan costs."""
    found = []
    for w, way, peer, bound in BOUNDS:
        for row in rows(result):
            if row[0] == w and peer in ways(w):
                value = ratio(time_of(result, row, way), time_of(result, row, peer))
                found.append(Target(f"{title(row)}: {WAYS[way]} / {WAYS[peer]}", value, bound))
    for row in rows(result):
        if row[0] == "W4":
            value = ratio(time_of(result, row, "compiled_k32"), time_of(result, row, "eqx_k32"))
            what = f"{title(row)}: {WAYS['compiled_k32']} / {WAYS['eqx_k32']}"
            found.append(Target(what, value, 0.6 if row[1] == 10000 else 1.0))
        if row[0] == "W1" and row[1] == 10000:
            found.append(Target(f"{title(row)}: time", time_of(result, row, "compiled"), 5, unit="ms"))
    found += [
        Target(what, harness.milliseconds(result, key, kind=kind), bound, unit="ms")
        for what, kind, key, bound in (
            ("key of a call, LSTM, again and again", "parts", "key_alone_s", 0.3),
            ("the plan of a new body", "plan", "new_s", 500),
            ("the plan of a body whose code is on disk", "plan", "kept_s", 150),
            ("key of a call, LSTM, between passes that fill the caches", "parts", "key_s", 0.3),
        )
    ]
    for w in ("W2s", "W2", "W4"):
        peaks = [harness.figure(result, "peak_bytes", kind="memory", workload=w, variant=v) for v in MEMORY_WAYS]
        found.append(Target(f"{TITLES[w]}: peak memory / eager", ratio(peaks[0], peaks[2]), 1.0))
        found.append(Target(f"{TITLES[w]}, K=32: peak memory / Equinox, K=32", ratio(peaks[1], peaks[3]), 1.0))
    return [target for target in found if target.value is not None]


def section(result: Result, picture: str) -> str:
    shown = rows(result)
    table = [[title(row), *(_shown(result, row, way) for way in WAYS)] for row in shown]
    parts = [
        f"Milliseconds of forward + backward, float32, medians of {result['about']['runs']} runs in each of "
        f"{result['about']['rounds']} rounds. K=32 keeps 32 carries. `(eager)`: not compiled, so it ran as the eager "
        "loop. lax.scan is jitted, and computes x W in the loop, as the body is written.",
        harness.table(["", *WAYS.values()], table),
        f"![Forward + backward, beside lax.scan]({picture})",
        *_parts(result),
    ]
    return "\n\n".join(parts)


def summary(result: Result) -> list[str]:
    """The small LSTM beside everything, then where a peer is faster, or needs less memory."""
    lstm, ratios = ("W2s", 1024, 1), {}
    ours, eager, jax, module = (time_of(result, lstm, way) for way in ("compiled", "eager", "lax_scan", "nn_lstm"))
    text = []
    if ours and eager and jax and module:
        text.append(
            f"A compiled LSTM (B=4, H=32, T=1,024) takes {harness.digits(ours)} ms forward and backward on the CPU. "
            f"The eager loop takes {harness.digits(eager)} ms, lax.scan {harness.digits(jax)} ms, nn.LSTM "
            f"{harness.digits(module)} ms."
        )
    for row in rows(result):
        for way in ("eager", "lax_scan", "nn_lstm", "nn_gru", "torch_scan"):
            ratios[f"{WAYS[way]}, {title(row)}"] = ratio(time_of(result, row, "compiled"), time_of(result, row, way))
        checkpointed = (time_of(result, row, way) for way in ("compiled_k32", "eqx_k32"))
        ratios[f"{WAYS['eqx_k32']}, {title(row)}"] = ratio(*checkpointed)
    memory = {}
    for w in ("W2s", "W2", "W4"):
        peaks = [harness.figure(result, "peak_bytes", kind="memory", workload=w, variant=v) for v in MEMORY_WAYS]
        memory[f"eager, {TITLES[w]}"], memory[f"Equinox, K=32, {TITLES[w]}"] = ratio(*peaks[::2]), ratio(*peaks[1::2])
    return [*text, *sentences.winners(ratios), *sentences.winners(memory, "memory")]


def _shown(result: Result, row: tuple[str, int, int], way: str) -> str:
    w, T, threads = row
    cell = {"kind": "time", "workload": w, "T": T, "threads": threads, "variant": way}
    value = time_of(result, row, way)
    if way not in ways(w) or value is None:
        return "-" if way not in ways(w) else harness.why_not(result, **cell)
    eagerly = any(
        "not_compiled" in raw
        for entry in result["entries"]
        for raw in entry["raw"]
        if cell.items() <= entry["cell"].items()
    )
    return f"{harness.digits(value)}{' (eager)' if eagerly else ''}"


def _parts(result: Result) -> list[str]:
    """The parts of a call, and of making a plan."""
    names = {"loops_s": "loops", "products_s": "operations over all steps", "key_s": "key", "all_s": "all"}
    values = {text: harness.milliseconds(result, key, kind="parts") for key, text in names.items()}
    if not all(values.values()):
        return []
    values["rest"] = values["all"] - sum(v for text, v in values.items() if text != "all" and v)  # pyright: ignore[reportOperatorIssue]
    order = ("loops", "operations over all steps", "key", "rest", "all")
    plan = {"first_s": "the first plan of a process", "new_s": "a new body", "kept_s": "its code on disk"}
    times = [[text, harness.digits(harness.milliseconds(result, key, kind="plan"))] for key, text in plan.items()]
    return [
        "The parts of the LSTM of B=4, one thread, in milliseconds; rest is Python, autograd and the loss.",
        harness.table(list(order), [[harness.digits(values[name]) for name in order]], 0),
        harness.table(["making a plan, forward + backward", "ms"], times),
    ]


def draw(result: Result, path: Path) -> None:
    groups = {}
    for row in rows(result):
        base = time_of(result, row, "lax_scan") or time_of(result, row, "eager")
        found = [(way, time_of(result, row, way)) for way in WAYS]
        groups[title(row)] = [
            plots.Ratio(WAYS[way], t / base, way.startswith("compiled")) for way, t in found if t and base
        ]
    height = sum(1.6 + len(group) for group in groups.values()) * 0.19 + 1
    with plots.drawing(path, (8, height)) as drawn:
        plots.ratios(drawn.subplots(), groups, "time relative to lax.scan (lower is faster)")
