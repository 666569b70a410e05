"""The text that makes a tensor outside of a loop: random values or those on an edge, plain or as a view of others."""

from collections.abc import Sequence

import torch

from tests.fuzz.draw import Draw

EDGES = {"zeros": 3, "ones": 2, "ties": 3, "whole": 3, "large": 0.2, "infinite": 0.2}
USUAL = (-1.0, 1.0)


def made(draw: Draw, dims: Sequence[str], dtype: torch.dtype, between: tuple[float, float], wants: bool) -> str:
    """A call of `make` or `edge`; the seed may change with the call."""
    seed = f"seed={draw.randrange(1000)}" + (" + 1000 * call" if draw.chance(0.7) else "")
    options = [seed]
    if between != USUAL:
        options += [f"low={between[0]!r}", f"high={between[1]!r}"]
    edge = between == USUAL and draw.chance(0.25)
    if edge:
        options.append(f'kind="{draw.among(EDGES)}"')
    if dtype is not torch.float64:
        options.append(f"dtype={dtype}")
    if wants:
        options.append("grad=call % 2 == 0" if draw.chance(0.05) else "grad=True")
    return f"{'edge' if edge else 'make'}({', '.join([*dims, *options])})"


def view_of(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Which kind of view an input is; mostly none."""
    if not draw.chance(0.2):
        return ""
    many, whole = float(len(shape) > 1), float(bool(shape and min(shape)))
    kinds = {"neg": 1, "zero": 0.5, "slice": 1.5, "transpose": 3 * many, "expand": 2 * whole}
    if dtype.is_complex:
        kinds["conj"] = 3
    return draw.among(kinds)


def seen(view: str, dims: Sequence[str]) -> tuple[list[str], str]:
    """(the dims of what a view is of, how it follows from that)"""
    if view == "transpose":
        return [*dims[:-2], dims[-1], dims[-2]], ".transpose(-1, -2)"
    if view == "expand":
        return ["1", *dims[1:]], f".expand({', '.join(dims)})"
    if view == "slice":
        return ["2", *dims], "[1]"
    return [*dims], {"conj": ".conj()", "neg": "._neg_view()"}[view]
