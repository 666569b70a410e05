"""What strips need of the tensors of a `Sight`, and where the gradients of that go.

Whatever is done to scores is differentiated as torch does it, over one strip at a time: what a strip needs of the
bias, of the table of relative positions and of captured tensors gets its gradient added where it came from.
"""

from typing import Any

from torch import Tensor

from tensorloop.attention.strips import Span, Strip
from tensorloop.kernels.scores import ScorePlaces, select_rows, widen
from tensorloop.kernels.sight import Sight


class StripTensors:
    """Says what a sight is for strips of queries like q, and collects the gradients of its tensors."""

    def __init__(self, sight: Sight, q: Tensor) -> None:
        self._sight, self._like = sight, q
        self._sums: list[Tensor | None] | None = None

    def take(self, strip: Strip) -> tuple[Sight, Any]:
        """The sight with what a strip needs of each tensor, and the places of its scores; None where not asked for."""
        if not self._sight.scored:
            return self._sight, None
        (b, h), (i, j) = strip.q.entries(strip.row, self._like.shape, self._like.device), self._positions(strip)
        places = ScorePlaces(b, h, i, j, len(i) == len(j) == 1)
        return self._take(strip, places), places

    def _positions(self, strip: Strip) -> tuple[Tensor, Tensor]:
        q, k = (x.positions(base, self._like.device) for x, base in zip((strip.q, strip.k), strip.bases, strict=True))
        return q, k

    def results(self) -> list[Tensor | None]:
        """Returns the gradients that were collected for `sight.tensors`, in their dtypes."""
        pairs = zip(self._gathered(), self._sight.tensors, strict=True)
        return [None if sums is None or x is None else sums.to(x.dtype) for sums, x in pairs]

    def _gathered(self) -> list[Tensor | None]:
        if self._sums is None:
            given = self._sight.tensors
            self._sums = [None if x is None else x.new_zeros(x.shape, dtype=widen(x.dtype)) for x in given]
        return self._sums

    def _take(self, strip: Strip, places: ScorePlaces) -> Sight:
        """The sight with what a strip needs of each tensor."""
        bias, queries, table, *given = self._sight.tensors
        if bias is not None:
            bias = bias[_index(bias, strip, places)]
        if queries is not None and table is not None:
            queries = strip.q.take_padded(queries).transpose(1, 2)
            table = table[_rows(table, places)]
        return self._sight.with_tensors((bias, queries, table, *given))

    def add(self, strip: Strip, places: ScorePlaces, grads: list[Tensor | None]) -> None:
        """Adds the gradients of what a strip was given where that came from."""
        for n, (sums, part) in enumerate(zip(self._gathered(), grads, strict=True)):
            if sums is None or part is None:
                continue
            if n == 1:
                strip.q.add_(sums, part.transpose(1, 2))
            elif n > 2:
                sums += part
            else:
                index: Any = _index(sums, strip, places) if n == 0 else _rows(sums, places)
                if all(isinstance(x, slice) for x in index):
                    sums[index] += part
                else:
                    sums.index_put_(index, part.to(sums.dtype), accumulate=True)


def _rows(table: Tensor, places: ScorePlaces) -> tuple[Any, ...]:
    """The index of what a strip needs of the table, (R', 1 or heads)."""
    heads = places.h[0] if table.shape[1] > 1 else places.h[0, :1] * 0
    return select_rows(table, places)[:, None], heads


def _index(bias: Tensor, strip: Strip, at: ScorePlaces) -> tuple[Any, ...]:
    """The index of what a strip needs of a bias, dims of 1 as they are: slices where it can be."""
    sizes = bias.shape
    if isinstance(strip.q, Span):
        batch = strip.q.batch if strip.row is None else slice(strip.row, strip.row + 1)
        places = zip((strip.q, strip.k), strip.bases, strict=True)
        tokens = [slice(x.tokens.start - base, x.tokens.stop - base) for x, base in places]  # pyright: ignore
        found = batch, strip.q.heads, *tokens
        return tuple(x if n > 1 else slice(None) for x, n in zip(found, sizes, strict=True))
    b, h, i, j = at[:4]
    found = b[..., None, None], h[..., None, None], i[:, None, :, None], j[:, None, None]
    return tuple(x if n > 1 else x.new_zeros(1, 1, 1, 1) for x, n in zip(found, sizes, strict=True))
