"""Beam search beside Hugging Face's `generate`, a loop that reorders by copying, and training by a second pass.

    python profiling/beam.py                        # some 15 minutes
    python profiling/beam.py --hf-python PATH       # a Python that has transformers, numba and torch of this version
    python profiling/beam.py --only g2p --g2p PATH  # a step of minimum risk on a trained model, the others as they were

What all ways find comes first: tokens and scores of both searches, and gradients in float64 of what is trained. Where
they differ, nothing is timed. Bytes are counted (`tensorloop.memory`): what is alive at the end of the forward pass.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pages import plots, sentences
from running import harness
from running.script import Peer, Place, Result, Script, Target
from whole_models import beam_g2p
from whole_models import beam_models as models

from tensorloop import memory

STEPS = {"quick": [8], "short": [64], "usual": [64, 256]}
T = {"quick": [4], "short": [64], "usual": [16, 32, 64, 128]}
RUNS = {"quick": 1, "short": 3, "usual": 5}
STEP_RUNS = {"quick": 1, "short": 10, "usual": 20}
G2P_RUNS = {"quick": 1, "short": 5, "usual": 10}
SPEED = {64: 1.6, 256: 1.3}  # times Hugging Face's tokens a second, at least
OUTSIDE = 0.07  # of the time is not the model's, at most
HELD, WANTED, QUARTER, STEP = {"gru": 206, "attends": 266}, 150, 0.25, 0.6
DECODERS = {"gru": "a GRU decoder", "attends": "a decoder that attends to its past"}
WAYS = {
    "copies": "a loop that copies",
    "search": "beam_search",
    "lean": "beam_search, linear_log_softmax",
    "checkpoints": "beam_search, checkpoints",
}


def checkpoints_of(steps: int) -> int:
    """Few enough that what they keep is not what counts."""
    return max(2, round(steps**0.5 / 2))


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    return {"speed": speed, "held": held, "step": step, "g2p": g2p, "check": check}[cell["kind"]](cell)


def speed(cell: harness.Cell) -> dict[str, Any]:
    steps = cell["steps"]
    model = models.gpt2(steps)
    ours = models.Stepper(model)
    found: dict[str, Any] = {"total_s": [], "model_s": []}
    with torch.no_grad():
        for _ in range(cell["runs"] + 1):
            clock = models.Clock()
            run = models.generate if cell["way"] == "HF" else models.searched
            begun = time.perf_counter()
            run(model if cell["way"] == "HF" else ours, steps, clock)
            found["total_s"].append(time.perf_counter() - begun)
            found["model_s"].append(clock.seconds)
    return {name: times[1:] for name, times in found.items()}


def loss(cell: harness.Cell, model: models.Recurrent) -> torch.Tensor:
    if cell["way"] == "copies":
        return models.by_hand(model, cell["T"])
    return models.by_search(model, cell["T"], checkpoints_of(cell["T"]) if cell["way"] == "checkpoints" else None)


def held(cell: harness.Cell) -> dict[str, Any]:
    model = models.Recurrent(torch.float32, cell["decoder"] == "attends", cell["way"] == "lean")
    times = harness.time_run(lambda: loss(cell, model), list(model.parameters()), 1, cell["runs"])
    return {"held_bytes": memory.saved_bytes(lambda: loss(cell, model)), **times}


def step(cell: harness.Cell) -> dict[str, Any]:
    model = models.Short()
    with torch.no_grad():
        hyps = model.search()
    run = dict(zip(STEP_WAYS, (model.through_search, model.second_pass, lambda: model.forced(hyps)), strict=True))
    return harness.time_run(run[cell["way"]], list(model.parameters()), 3, cell["runs"])


def g2p(cell: harness.Cell) -> dict[str, Any]:
    return beam_g2p.timed(words(torch.float32), cell["runs"])


def words(dtype: torch.dtype) -> beam_g2p.Words:
    assert MODEL.path is not None
    return beam_g2p.Words(MODEL.path, dtype)


def check(cell: harness.Cell) -> dict[str, Any]:
    """How far what the ways find is apart, relative to the largest number."""
    if cell["what"] == "speed":
        model = models.gpt2(cell["steps"])
        with torch.no_grad():
            (tokens, scores), (same, ours) = (
                models.generate(model, cell["steps"], models.Clock()),
                models.searched(models.Stepper(model), cell["steps"], models.Clock()),
            )
        apart = float((scores - ours).abs().max() / scores.abs().max())
        return {"apart": apart if torch.equal(tokens, same) else 1.0}
    if cell["what"] == "step":
        short = models.Short(torch.float64)
        return {"apart": apart_by([short.through_search(), short.second_pass()], list(short.parameters()))}
    if cell["what"] == "g2p":
        spoken = words(torch.float64)
        return {"apart": apart_by([way() for way in spoken.ways().values()], spoken.parameters)}
    model = models.Recurrent(torch.float64, cell["what"] == "attends")
    losses = []
    for way in WAYS:
        model.lean = way == "lean"
        losses.append(loss({"way": way, "T": 9}, model))
    return {"apart": apart_by(losses, list(model.parameters()))}


def apart_by(losses: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> float:
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    apart = max(float((x - losses[0]).detach().abs() / losses[0].detach().abs()) for x in losses)
    for found in grads[1:]:
        for x, y in zip(found, grads[0], strict=True):
            apart = max(apart, float((x - y).abs().max() / y.abs().max()))
    return apart


STEP_WAYS = ("through the search", "a second pass", "the second pass without its search")
CHECKS = {"speed": 1e-5, "gru": 1e-10, "attends": 1e-10, "step": 1e-5, "g2p": 1e-10}
KINDS = ("speed", "held", "step", "g2p")
G2P_WAYS = {
    "search": "through the search",
    "packed": "a second pass on packed rows, `tl.scan`",
    "padded": "a second pass in plain PyTorch, padded, `torch.cat`",
}
MODEL = Place("g2p", "MODEL", "a model.pt of `python -m docs.examples.g2p train`, for a step of minimum risk on it")


def kinds(args: Namespace) -> list[str]:
    """What to measure: with a model all, without one all but what needs it."""
    return [kind for kind in args.only or KINDS if kind != "g2p" or MODEL.path]


def checks(args: Namespace) -> list[harness.Cell]:
    found = [{"kind": "check", "what": what, "steps": 12, "at_most": most} for what, most in CHECKS.items()]
    return [cell for cell in found if group(cell) in kinds(args)]


def cells(args: Namespace) -> list[harness.Cell]:
    runs = {"runs": RUNS[args.set]}
    found: dict[str, list[harness.Cell]] = {
        "speed": [{"way": way, "steps": n, **runs} for n in STEPS[args.set] for way in ("search", "HF")],
        "held": [
            {"decoder": decoder, "way": way, "T": t, **runs}
            for decoder in DECODERS
            for t in T[args.set]
            for way in WAYS
        ],
        "step": [{"way": way, "runs": STEP_RUNS[args.set]} for way in STEP_WAYS],
        "g2p": [{"model": beam_g2p.digest(MODEL.path), "runs": G2P_RUNS[args.set]}] if MODEL.path else [],
    }
    return [{"kind": kind, **cell} for kind in kinds(args) for cell in found[kind]]


def of_transformers(cell: harness.Cell) -> bool:
    """Both searches: they run the same model."""
    return cell["kind"] == "speed" or cell.get("what") == "speed"


def section(result: Result, picture: str) -> str:
    tables = [
        f"B = {models.ROWS}, K = {models.BEAMS}, a vocabulary of {models.WORDS}.",
        f"**Search.** A transformer of {models.LAYERS} layers of width {models.WIDTH} with random weights, the same in "
        "both. Both searches return the same tokens. *Outside* is the share of the time that is not the model's.",
        harness.table(["tokens", "way", "time", "tokens / s", "outside", "against HF"], speeds(result), 2),
        "**Training.** Bytes alive at the end of the forward pass, counted, and the time of forward and backward "
        f"(H = {models.HIDDEN}). With checkpoints sqrt(T) / 2 carries are kept.",
        harness.table(["decoder", "way", *(f"T = {t}" for t in sizes(result, "T"))], helds(result), 2),
        f"**A step of minimum risk**, {models.Short.ROWS} rows, {models.Short.BEAMS} hypotheses each that end on their "
        "own:",
        harness.table(["way", "forward", "forward + backward"], trained(result)),
        *on_a_model(result),
        f"![Bytes held over T]({picture})",
    ]
    return "\n\n".join(tables)


def summary(result: Result) -> list[str]:
    """Against `generate`, and what checkpoints leave of the bytes; where another way is faster."""
    text, ratios = [], {}
    for steps in sizes(result, "steps"):
        ours, theirs = (
            harness.figure(result, "total_s", kind="speed", way=way, steps=steps) for way in ("search", "HF")
        )
        if ours and theirs:
            ratios[f"`generate` for {steps} tokens"] = ours / theirs
    if ratios:
        name, ratio = list(ratios.items())[-1]
        text.append(f"`beam_search` is {sentences.speed(ratio, name)}, with the same model and the same tokens.")
    for decoder, title in DECODERS.items():
        for T in sizes(result, "T"):
            ours, theirs, kept = (
                harness.figure(result, key, kind="held", decoder=decoder, way=way, T=T)
                for key, way in (("total_s", "search"), ("total_s", "copies"), ("held_bytes", "search"))
            )
            if ours and theirs:
                ratios[f"training {title} by a loop that copies, T={T}"] = ours / theirs
    for T in sizes(result, "T")[-1:]:
        kept, copied = (
            harness.figure(result, "held_bytes", kind="held", decoder="attends", way=way, T=T)
            for way in ("search", "copies")
        )
        if kept and copied:
            text.append(
                f"Training a decoder that attends to its past through {T} steps of search holds "
                f"{sentences.share(kept / copied)} of what a loop with copies holds."
            )
    return [*([" ".join(text)] if text else []), *sentences.winners(ratios)]


def sizes(result: Result, key: str) -> list[int]:
    """Rising steps or T that were measured."""
    return sorted({entry["cell"][key] for entry in result["entries"] if key in entry["cell"]})


def speeds(result: Result) -> list[list[str]]:
    lines = []
    for steps in sizes(result, "steps"):
        for way, title in (("search", "**`beam_search`**"), ("HF", "`generate`")):
            total, model = (
                harness.figure(result, key, kind="speed", way=way, steps=steps) for key in ("total_s", "model_s")
            )
            other = harness.figure(result, "total_s", kind="speed", way="HF", steps=steps)
            if not total or not model or not other:
                why = harness.why_not(result, kind="speed", way=way, steps=steps)
                lines.append([str(steps), title, why, "", "", ""])
                continue
            rate = f"{models.ROWS * steps / total:,.0f}"
            lines.append(
                [str(steps), title, f"{total:.2f} s", rate, f"{1 - model / total:.1%}", f"{other / total:.2f}x"]
            )
    return lines


def helds(result: Result) -> list[list[str]]:
    lines = []
    for decoder, title in DECODERS.items():
        for way, name in WAYS.items():
            row = []
            for t in sizes(result, "T"):
                held, total = (
                    harness.figure(result, key, kind="held", decoder=decoder, way=way, T=t)
                    for key in ("held_bytes", "total_s")
                )
                found = held and total and f"{held / 2**20:.1f} MiB, {total:.2f} s"
                row.append(found or harness.why_not(result, kind="held", decoder=decoder, way=way, T=t))
            lines.append([title if way == "copies" else "", name, *row])
    return lines


def trained(result: Result) -> list[list[str]]:
    lines = []
    for way in STEP_WAYS:
        forward, total = (harness.figure(result, key, kind="step", way=way) for key in ("forward_s", "total_s"))
        why = harness.why_not(result, kind="step", way=way)
        lines.append([way, *(f"{x * 1e3:.1f} ms" if x else why for x in (forward, total))])
    return lines


def on_a_model(result: Result) -> list[str]:
    """A sentence and a table of minimum risk on a trained model; how to get one, where there was none."""
    model = next((entry["cell"]["model"] for entry in result["entries"] if entry["cell"]["kind"] == "g2p"), None)
    if model is None:
        return [
            "On a trained model of the example g2p it was not measured: `python -m docs.examples.g2p train` makes one, "
            "and `--only g2p --g2p runs/g2p/full/model.pt` adds its rows."
        ]
    lines = []
    for way, name in G2P_WAYS.items():
        spent = g2p_seconds(result, way)
        lines.append([name, f"{spent * 1e3:.1f} ms" if spent else harness.why_not(result, kind="g2p")])
    return [
        f"The same on a trained model of the example g2p, {beam_g2p.WORDS} words, {beam_g2p.BEAMS} hypotheses each; "
        "the risk is the edits to the nearest reference. Both second passes begin with a search without gradient. "
        f"Time of the processor, in one thread; the SHA-256 of model.pt begins with {model}.",
        harness.table(["way", "forward + backward"], lines),
    ]


def g2p_seconds(result: Result, way: str) -> float | None:
    return harness.figure(result, f"{way}_s", kind="g2p")


def targets(result: Result) -> list[Target]:
    found = []
    for steps in sizes(result, "steps"):
        ours, other = (
            harness.figure(result, "total_s", kind="speed", way=way, steps=steps) for way in ("search", "HF")
        )
        model = harness.figure(result, "model_s", kind="speed", way="search", steps=steps)
        if ours and other and model:
            what = f"{steps} tokens: speed / `generate`'s"
            found.append(Target(what, other / ours, SPEED.get(steps), least=True))
            found.append(Target(f"{steps} tokens: share of the time outside the model", 1 - model / ours, OUTSIDE))
    last = max(sizes(result, "T"), default=0)
    for decoder, title in DECODERS.items():
        _, ours, lean, kept = (
            harness.figure(result, "held_bytes", kind="held", decoder=decoder, way=way, T=last) for way in WAYS
        )
        if ours and lean and kept:
            if last == 128:
                found.append(Target(f"{title}, T={last}: held", ours / 2**20, HELD[decoder], unit="MiB"))
            if (decoder, last) == ("gru", 128):
                found.append(Target(f"{title}, T={last}: with linear_log_softmax", lean / 2**20, WANTED, unit="MiB"))
            found.append(Target(f"{title}, T={last}: held with checkpoints / without", kept / ours, QUARTER))
    one, two, _ = (harness.figure(result, "total_s", kind="step", way=way) for way in STEP_WAYS)
    if one and two:
        found.append(Target("a step of minimum risk: time / search and second pass", one / two, STEP))
    for way in ("packed", "padded"):
        one, two = g2p_seconds(result, "search"), g2p_seconds(result, way)
        if one and two:
            found.append(Target(f"the same on a model of g2p: time / search and {way} second pass", one / two, STEP))
    return found


def draw(result: Result, path: Path) -> None:
    with plots.drawing(path, (12, 4.5)) as drawn:
        for axes, (decoder, title) in zip(drawn.subplots(1, 2), DECODERS.items(), strict=True):
            lines = []
            for style, (way, name) in enumerate(WAYS.items()):
                held = [
                    (t, harness.figure(result, "held_bytes", kind="held", decoder=decoder, way=way, T=t))
                    for t in sizes(result, "T")
                ]
                points = [(t, x / 2**20) for t, x in held if x]
                if points:
                    ours = way != "copies"
                    lines.append(plots.Curve(name, [t for t, _ in points], [x for _, x in points], style, ours))
            plots.curves(axes, lines, "MiB held after forward", title)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=KINDS, help="what to measure anew; the rest stays")


def group(cell: harness.Cell) -> str:
    kind = cell["kind"] if cell["kind"] != "check" else cell["what"]
    return "held" if kind in DECODERS else kind


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 3},
    checks=checks,
    targets=targets,
    draw=draw,
    peers=[Peer("hf", ("transformers",), of_transformers)],
    places=[MODEL],
    options=options,
    group=group,
    settings=lambda args: {
        "rows": models.ROWS,
        "beams": models.BEAMS,
        "words": models.WORDS,
        "hidden": models.HIDDEN,
    },
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
