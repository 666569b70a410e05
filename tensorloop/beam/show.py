"""Hypotheses as text and as a table, and the lattice as a picture."""

from typing import Any

from tensorloop._common import html


def write_text(hyps: Any, names: Any, rows: int) -> str:
    """A line for each hypothesis."""
    size, n = hyps.batch_size, hyps.n_best
    lines = [f"Hypotheses({size} rows, {n} best)"]
    for b in range(min(rows, size)):
        lines.append(f"row {b}: {_describe_row(hyps, b)}")
        lines += [f"  {score:>9.4f}  {line}" for score, line in _write_lines(hyps, b, names)]
    if size > rows:
        lines.append(f"... {size - rows} more rows")
    return "\n".join(lines)


def write_html(hyps: Any, rows: int = 10) -> str:
    """A table for a notebook."""
    cells = [
        (f"{b} ({_describe_row(hyps, b)})" if j == 0 else "", f"{score:.4f}", line)
        for b in range(min(rows, hyps.batch_size))
        for j, (score, line) in enumerate(_write_lines(hyps, b, None))
    ]
    more = hyps.batch_size - rows
    table = html.table(("row", "score", "tokens"), cells, (0, 2))
    return html.fragment([table, *([f"<p>{more} more rows</p>"] if more > 0 else [])])


def _describe_row(hyps: Any, b: int) -> str:
    stopped = hyps.stopped[b]
    gap = "" if stopped == "exact" else f", gap {float(hyps.gap[b]):.3g}"
    return f"{stopped}{gap}, coverage {float(hyps.coverage[b]):.3g}"


def _write_lines(hyps: Any, b: int, names: Any) -> list[tuple[float, str]]:
    out = []
    several = len(set(hyps.ends[hyps.finished].tolist())) > 1
    for j in range(hyps.n_best):
        if bool(hyps.valid[b, j]):
            tokens = hyps.tokens[b * hyps.n_best + j].tolist()
            tail = "" if bool(hyps.finished[b, j]) else " ..."
            if several and not tail:
                tail = f" [{_name_token(int(hyps.ends[b, j]), names)}]"
            out.append(
                (
                    float(hyps.scores[b, j].detach()),
                    (" ".join(_name_token(t, names) for t in tokens) or "(empty)") + tail,
                )
            )
    return out


def _name_token(token: int, names: Any) -> str:
    if names is None:
        return str(token)
    return str(names(token) if callable(names) else names[token])


def draw(lattice: Any, row: int, ax: Any, names: Any) -> Any:
    """Steps from left to right, hypotheses from the best down; ends are shaded, what was dropped is grey."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Lattice.draw needs matplotlib: pip install matplotlib") from error
    steps = int(lattice.steps[row])
    tokens, parents, scores = (x[:steps, row].tolist() for x in (lattice.tokens, lattice.backpointers, lattice.scores))
    size = lattice.tokens.shape[2]
    if ax is None:
        _, ax = plt.subplots(figsize=(min(2 + 0.8 * steps, 16), 1 + 0.45 * size))
    lens, places = (x[row].tolist() for x in lattice.ends)
    bold, ends = _find_kept(parents, lens, places), {(n - 1, k) for n, k in zip(lens, places, strict=True)}
    for t in range(steps):
        for k in range(size):
            if scores[t][k] == float("-inf"):
                continue
            strong = (t, k) in bold
            colour, width = ("black", 1.8) if strong else ("0.75", 0.8)
            fill = "gold" if (t, k) in ends else "white"
            start = parents[t][k] if t else 0
            ax.plot([t, t + 1], [start, k], color=colour, linewidth=width, zorder=2 if strong else 1)
            ax.text(
                t + 1, k, _name_token(tokens[t][k], names), ha="center", va="center", color=colour, zorder=3,
                bbox={"boxstyle": "round,pad=0.2", "facecolor": fill, "edgecolor": colour},
            )  # fmt: skip
    ax.set(xlabel="step", ylabel="hypothesis", xlim=(-0.3, steps + 0.6), ylim=(size - 0.5, -0.7), yticks=range(size))
    ax.set_xticks(range(steps + 1))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax


def _find_kept(parents: Any, lens: Any, places: Any) -> set[tuple[int, int]]:
    """(step, place) of every hypothesis that leads to one of those returned."""
    found = set()
    for length, place in zip(lens, places, strict=True):
        for t in range(length - 1, -1, -1):
            found.add((t, place))
            place = parents[t][place]
    return found
