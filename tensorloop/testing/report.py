"""What `same_loop` found: a text that a person reads, a table in a notebook, a bool that a test asserts."""

from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from tensorloop._common.html import fragment, table


class RunCost(NamedTuple):
    """One way to run, and what it costs; bytes and milliseconds are None where it failed, and `remark` says why."""

    name: str
    bytes: int | None
    milliseconds: float | None
    remark: str = ""


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


@dataclass
class LoopReport:
    """The findings of `tl.testing.same_loop`, as a text, as a table in a notebook, and as a bool: whether all is equal.

    Args:
        differences: list of str, what differs, by result: empty where the port is the same.
        first: str, the first step and the variables of the loop that differ; "" where that is not known.
        dtype: str, in which the loops were compared.
        compared: str, what was compared.
        cases: dict from a size ("T = 0") to "same", "the original fails: ..." or what differs.
        runs: list of `RunCost`, the original and each way of the port: name, bytes kept for backward, milliseconds of
            processor time forward and backward, remark (why it is not compiled).

    Example:
        >>> report = tl.testing.same_loop(lambda x: x.cumsum(0), lambda x: x.cumsum(0), torch.ones(5, 2))
        >>> report.same, report.differences
        (True, [])
    """

    differences: list[str] = field(default_factory=list)
    first: str = ""
    dtype: str = ""
    compared: str = ""
    cases: dict[str, str] = field(default_factory=dict)
    runs: list[RunCost] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.same

    def __repr__(self) -> str:
        lines = [self._headline()]
        lines += [f"  first: {self.first}"] if self.first else []
        lines += [f"  {text}" for text in self.differences]
        if self.cases:
            lines.append("sizes: " + "; ".join(f"{name}: {_short(text)}" for name, text in self.cases.items()))
        if self.runs:
            head, rows = self._table()
            widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
            for row in (head, *rows):
                cells = [row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:-1], widths[1:-1], strict=True))]
                lines.append("  ".join([*cells, row[-1]]).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        body = [f"<p>{escape(self._headline())}</p>"]
        if self.differences:
            texts = [*([f"first: {self.first}"] if self.first else []), *self.differences]
            body.append(f'<div class="guilty"><pre>{escape(chr(10).join(texts))}</pre></div>')
        if self.cases:
            body.append(table(["size", "found"], [list(case) for case in self.cases.items()], (0, 1)))
        if self.runs:
            head, rows = self._table()
            body.append(table(head, rows, (0, len(head) - 1)))
        return fragment(body)

    def _headline(self) -> str:
        if not self.compared:
            return "not compared"
        return f"{'same' if self.same else 'NOT the same'}: {self.compared}, compared in {self.dtype}"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        whole = self.runs[0].milliseconds

        def cells(run: RunCost) -> list[str]:
            kept = "" if run.bytes is None else f"{run.bytes:,}"
            if run.milliseconds is None:
                return [run.name, kept, "", "", run.remark]
            ratio = f"{run.milliseconds / whole:.2f}" if whole else ""
            return [run.name, kept, f"{run.milliseconds:.2f}", ratio, run.remark]

        return ["run", "bytes kept", "ms", "of original", ""], [cells(run) for run in self.runs]
