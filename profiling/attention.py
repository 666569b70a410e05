"""Attention over packed rows and block masks beside padded SDPA, and an encoder layer packed against padded.

Rows have lengths uniform in 1..T. Every way takes the same rows and gives the same loss: the padded ones sum over
tokens alone. Gradients are compared in float64 first; if they differ, nothing is timed.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pages import plots, sentences
from running import harness
from running.script import Result, Script, Target
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from tensorloop.attention import attention
from tensorloop.packed import Dim, PackedTensor

HEADS, WIDTH, INNER = 4, 64, 1024  # heads, D of a head, the layer's hidden width
ROWS = {"causal": 16, "cross": 16, "encoder": 32}
WINDOW = 256
SIZES = {
    "quick": {"causal": [20], "cross": [20], "window": [300], "encoder": [20]},
    "short": {"causal": [256], "window": [1024], "encoder": [256]},
    "usual": {"causal": [16, 256, 1000], "cross": [16, 256, 1000], "window": [1024, 4096], "encoder": [64, 256, 1000]},
}
REPEATS, APART = 5, 1e-10
ENCODER = 0.6  # of the padded time
TITLES = {
    "causal": f"causal self-attention, B={ROWS['causal']}",
    "cross": f"attention to other rows, B={ROWS['cross']}",
    "window": f"one row, each token sees the last {WINDOW}",
    "encoder": f"encoder layer, B={ROWS['encoder']}",
}


class Trial(NamedTuple):
    """What is on the clock, and what its gradient is taken of."""

    loss: Callable[[], Tensor]
    leaves: list[Tensor]


@cache
def lengths(rows: int, T: int, seed: int = 0) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, T + 1, (rows,), generator=draw).tolist())


def tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def padded(values: Tensor, lens: tuple[int, ...]) -> Tensor:
    """(B, max, *F) of (N, *F), before the clock starts."""
    return torch.nn.utils.rnn.pad_sequence(list(values.detach().split(lens)), batch_first=True).requires_grad_()


def tokens(lens: tuple[int, ...]) -> Tensor:
    """(B, max) bool"""
    return torch.arange(max(lens)) < torch.tensor(lens)[:, None]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


# -- attention alone


def rows(workload: str, variant: str, T: int, dtype: torch.dtype) -> Trial:
    """Causal self-attention, or attention to rows of other lengths; the loss is the sum of squares."""
    causal = workload == "causal"
    q_lens = lengths(ROWS[workload], T)
    k_lens = q_lens if causal else lengths(ROWS[workload], T, seed=2)
    n, m = sum(q_lens), sum(k_lens)
    values = tensors([(n, HEADS, WIDTH), (m, HEADS, WIDTH), (m, HEADS, WIDTH)], dtype)
    if variant == "packed":
        dims = Dim("queries", q_lens), Dim("keys", k_lens)
        q, k, v = (PackedTensor(x, dim) for x, dim in zip(values, (dims[0], dims[1], dims[1]), strict=True))
        return Trial(lambda: attention(q, k, v, causal=causal).values.square().sum(), values)
    if variant == "sdpa row by row":

        def by_row() -> Tensor:
            parts = zip(values[0].split(q_lens), values[1].split(k_lens), values[2].split(k_lens), strict=True)
            outs = [sdpa(*(x[None] for x in part), is_causal=causal)[0] for part in parts]
            return torch.cat(outs).square().sum()

        return Trial(by_row, values)
    batch = [padded(x, lens) for x, lens in zip(values, (q_lens, k_lens, k_lens), strict=True)]
    real = tokens(q_lens)[:, :, None, None]
    options: dict[str, Any] = {"is_causal": True} if causal else {"attn_mask": tokens(k_lens)[:, None, None]}
    return Trial(lambda: (sdpa(*batch, **options) * real).square().sum(), batch)


def window(variant: str, T: int, dtype: torch.dtype) -> Trial:
    """One row of T tokens, each of which sees the WINDOW last ones."""
    values = tensors([(1, T, HEADS, WIDTH)] * 3, dtype)

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < WINDOW)

    if variant == "block mask":
        mask = create_block_mask(sees, None, None, T, T, device="cpu")
        return Trial(lambda: attention(*values, block_mask=mask).square().sum(), values)
    i = torch.arange(T)
    dense = sees(0, 0, i[:, None], i)
    return Trial(lambda: sdpa(*values, attn_mask=dense).square().sum(), values)


# -- an encoder layer


def weights(dtype: torch.dtype) -> list[Tensor]:
    D = HEADS * WIDTH
    drawn = tensors([(3 * D, D), (D, D), (INNER, D), (D, INNER)], dtype)
    return [x.detach().mul(D**-0.5).requires_grad_() for x in drawn]


def layer(x: Any, w: list[Tensor], attend: Callable[[Any, Any, Any], Any]) -> Any:
    """Pre-norm: the same code for packed and padded."""
    D = HEADS * WIDTH
    q, k, v = F.linear(F.layer_norm(x, (D,)), w[0]).unflatten(-1, (3, HEADS, WIDTH)).unbind(-3)
    x = x + F.linear(attend(q, k, v).flatten(-2), w[1])
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (D,)), w[2])), w[3])


def encoder(variant: str, T: int, dtype: torch.dtype) -> Trial:
    lens = lengths(ROWS["encoder"], T)
    (values,) = tensors([(sum(lens), HEADS * WIDTH)], dtype)
    w = weights(dtype)
    if variant == "packed":
        x = PackedTensor(values, list(lens))
        return Trial(lambda: layer(x, w, attention).values.square().sum(), [values, *w])
    batch, keys, real = padded(values, lens), tokens(lens)[:, None, None], tokens(lens)[..., None]
    attend = lambda q, k, v: sdpa(q, k, v, attn_mask=keys)  # noqa: E731
    return Trial(lambda: (layer(batch, w, attend) * real).square().sum(), [batch, *w])


VARIANTS = {
    "causal": ["packed", "padded sdpa", "sdpa row by row"],
    "cross": ["packed", "padded sdpa", "sdpa row by row"],
    "window": ["block mask", "sdpa, dense mask"],
    "encoder": ["packed", "padded"],
}


def trial(workload: str, variant: str, T: int, dtype: torch.dtype = torch.float32) -> Trial:
    if workload == "window":
        return window(variant, T, dtype)
    return encoder(variant, T, dtype) if workload == "encoder" else rows(workload, variant, T, dtype)


def gradients(workload: str, variant: str, T: int) -> tuple[float, list[Tensor]]:
    """The loss, and the gradients of tokens and weights, in float64."""
    loss_of, leaves = trial(workload, variant, T, torch.float64)
    loss = loss_of()
    grads = list(torch.autograd.grad(loss, leaves))
    if variant.startswith("padded"):
        first, other = lengths(ROWS[workload], T), lengths(ROWS[workload], T, seed=2)
        keys = other if workload == "cross" else first
        ragged = [first] if workload == "encoder" else [first, keys, keys]
        grads[: len(ragged)] = [g[tokens(lens)] for g, lens in zip(grads, ragged, strict=False)]
    return loss.item(), grads


def apart(workload: str, T: int) -> float:
    """The largest relative distance of any variant from the first one, losses and gradients."""
    (right, expected), *others = (gradients(workload, variant, T) for variant in VARIANTS[workload])
    worst = 0.0
    for loss, grads in others:
        worst = max(worst, abs(loss - right) / abs(right))
        for g, e in zip(grads, expected, strict=True):
            worst = max(worst, float((g - e).abs().max() / e.abs().max()))
    return worst


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    if cell["kind"] == "check":
        return {"apart": apart(cell["workload"], cell["T"])}
    loss_of, leaves = trial(cell["workload"], cell["variant"], cell["T"])
    if cell["kind"] == "memory":
        return harness.peak_of(loss_of, leaves)
    return harness.time_run(loss_of, leaves, 2, REPEATS)


def checks(args: Namespace) -> list[harness.Cell]:
    smallest = SIZES["quick"]
    return [{"kind": "check", "workload": w, "T": smallest[w][0], "at_most": APART} for w in SIZES[args.set]]


def cells(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": kind, "workload": workload, "variant": variant, "T": T}
        for workload, Ts in SIZES[args.set].items()
        for T in Ts
        for variant in VARIANTS[workload]
        for kind in ("time", "memory")
    ]


def figures(entries: Sequence[harness.Entry]) -> dict[tuple[str, str, int], dict[str, float]]:
    """(workload, variant, T) -> what was measured: seconds of forward and of both, bytes at the peak."""
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for entry in entries:
        cell = entry["cell"]
        for key in ("forward_s", "total_s", "peak_bytes"):
            if (value := harness.median(entry, key)) is not None:
                found.setdefault((cell["workload"], cell["variant"], cell["T"]), {})[key] = value
    return found


def ratio(entries: Sequence[harness.Entry], workload: str, T: int, key: str) -> float | None:
    """Ours over the padded or dense way, the second one of each workload."""
    found = figures(entries)
    ours, other = (found.get((workload, variant, T), {}).get(key) for variant in VARIANTS[workload][:2])
    return ours / other if ours and other else None


def text(entries: Sequence[harness.Entry]) -> str:
    """A table: forward, forward + backward and peak of each way, and the time against the first way's."""
    found, lines = figures(entries), []
    shown = set()
    for workload, variant, T in found:
        own = found[workload, variant, T]
        first = found.get((workload, VARIANTS[workload][0], T), {}).get("total_s")
        forward, total, peak = (own.get(key) for key in ("forward_s", "total_s", "peak_bytes"))
        columns = [
            "-" if forward is None else f"{forward * 1e3:.1f} ms",
            "-" if total is None else f"{total * 1e3:.1f} ms",
            "-" if total is None or not first else f"{total / first:.2f}",
            "-" if peak is None else f"{peak / 1e6:.1f} MB",
        ]
        title = "" if (workload, T) in shown else TITLES[workload]
        shown.add((workload, T))
        name = f"**{variant}**" if variant == VARIANTS[workload][0] else variant
        lines.append([title, str(T) if title else "", name, *columns])
    return harness.table(["", "T", "way", "forward", "both", "time / ours", "peak"], lines, text_columns=3)


def section(result: Result, picture: str) -> str:
    entries = result["entries"]
    return "\n\n".join(
        [
            f"{HEADS} heads of {WIDTH}, float32, medians of {REPEATS} runs. Rows have lengths uniform in 1..T; the "
            "padded ways pad them to the longest. *Peak* is the growth of resident memory over forward and backward.",
            text(entries),
            "\n".join(f"- {line}" for line in notes(entries)),
            f"![Time against the padded way]({picture})",
        ]
    )


def sizes(entries: Sequence[harness.Entry]) -> dict[str, list[int]]:
    """What was measured: workload -> rising T."""
    found = {(cell["workload"], cell["T"]) for cell in (entry["cell"] for entry in entries)}
    return {workload: Ts for workload in VARIANTS if (Ts := sorted(T for w, T in found if w == workload))}


def targets(result: Result) -> list[Target]:
    found = [
        (T, ratio(result["entries"], "encoder", T, "total_s")) for T in sizes(result["entries"]).get("encoder", [])
    ]
    return [Target(f"encoder layer, T={T}: time / padded", x, ENCODER) for T, x in found if x is not None]


def summary(result: Result) -> list[str]:
    """Packed rows beside padded ones, and where another way is faster."""
    found, ratios = figures(result["entries"]), {}
    for workload, variant, T in found:
        ours = found.get((workload, VARIANTS[workload][0], T), {}).get("total_s")
        other = found[workload, variant, T].get("total_s")
        if variant != VARIANTS[workload][0] and ours and other:
            ratios[f"{variant}, {TITLES[workload]}, T={T:,}"] = ours / other
    text = []
    for T in sizes(result["entries"]).get("encoder", [])[-1:]:
        time, peak = (ratio(result["entries"], "encoder", T, key) for key in ("total_s", "peak_bytes"))
        if time and peak:
            text.append(
                f"An encoder layer over packed rows of up to {T:,} tokens is {sentences.speed(time, 'a padded one')}, "
                f"with {sentences.share(peak)} of its memory."
            )
    return [*text, *sentences.winners(ratios)]


def notes(entries: Sequence[harness.Entry]) -> list[str]:
    """How attention alone does at the largest size, time and memory."""
    lines = []
    for workload, Ts in sizes(entries).items():
        T = Ts[-1]
        time, peak = (ratio(entries, workload, T, key) for key in ("total_s", "peak_bytes"))
        if workload != "encoder" and time and peak:
            lines.append(f"{TITLES[workload]}, T={T}: {time:.2f} of the time, {peak:.2f} of the memory of padded SDPA.")
    return lines


def draw(result: Result, path: Path) -> None:
    found, groups = figures(result["entries"]), {}
    for workload, Ts in sizes(result["entries"]).items():
        for T in Ts:
            times = {v: found.get((workload, v, T), {}).get("total_s") for v in VARIANTS[workload]}
            ours, other = VARIANTS[workload][0], times[VARIANTS[workload][1]]
            bars = [plots.Ratio(v, t / other, v == ours) for v, t in times.items() if t and other]
            groups[f"{TITLES[workload]}, T={T}"] = bars
    with plots.drawing(path, (8, 9)) as drawn:
        plots.ratios(drawn.subplots(), groups, "time relative to padded or dense attention (lower is faster)")


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 1},
    checks=checks,
    targets=targets,
    draw=draw,
    settings=lambda args: {"heads": HEADS, "width": WIDTH, "window": WINDOW, "rows": ROWS},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
