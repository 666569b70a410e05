"""HTML: a page that stands alone, the same in a notebook, tables, bars. No scripts, nothing loaded from elsewhere."""

from collections.abc import Sequence
from html import escape

# Everything below one class, so that a notebook's own page stays as it is.
_STYLE = """
.tensorloop { font: 15px/1.5 Helvetica, Arial, DejaVu Sans, sans-serif; color: #222; background: #fff }
.tensorloop { max-width: 960px; padding: 0 1em }
.tensorloop h1 { font-size: 1.5em } .tensorloop h2 { font-size: 1.15em; margin-top: 1.8em }
.tensorloop table { border-collapse: collapse; font-size: 13px }
.tensorloop td, .tensorloop th { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right }
.tensorloop td.text, .tensorloop th.text { text-align: left }
.tensorloop code, .tensorloop pre, .tensorloop td.text { font-family: monospace; font-size: 13px }
.tensorloop pre { background: #f4f4f4; padding: .8em; overflow-x: auto }
.tensorloop svg, .tensorloop img { max-width: 100%; height: auto }
.tensorloop .guilty { border-left: 5px solid #a84300; padding: .1em 1em; margin: 1em 0; background: #faf3ee }
.tensorloop .fast { font-weight: bold }
"""


def fragment(body: Sequence[str]) -> str:
    """Returns the HTML that a notebook shows."""
    return f'<div class="tensorloop"><style>{_STYLE}</style>\n' + "\n".join(body) + "\n</div>"


def document(title: str, body: Sequence[str]) -> str:
    """A whole page below a heading."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>body { margin: 2em auto; max-width: 960px }</style></head>\n<body>\n"
        + fragment([f"<h1>{escape(title)}</h1>", *body])
        + "\n</body>\n</html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """Columns numbered in `texts` are text, the others figures and stand to the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if i in texts else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    inner = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f"<table>\n<tr>{row(head, 'th')}</tr>\n{inner}\n</table>"


def bars(values: Sequence[int], shown: int = 24) -> str:
    """A bar for each of the first `shown` numbers, as long as it is large."""
    most = max([1, *values])
    cell = "height:.6em;background:#4878a8;width:{:.4g}em"
    rows = [
        f"<tr><td>{i}</td><td class=text><div style='{cell.format(20 * n / most)}' title={n}></div></td>"
        f"<td>{n}</td></tr>"
        for i, n in enumerate(values[:shown])
    ]
    more = f"<p>{len(values) - shown} more rows</p>" if len(values) > shown else ""
    return f"<table>\n<tr><th>row</th><th></th><th>length</th></tr>\n{''.join(rows)}\n</table>{more}"
