"""One row of NaN, or of infinities, changes no bit of what kernels give for the others."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tensorloop import kernels
from tensorloop.kernels import cases
from tensorloop.kernels.sight import Sight
from tests.support.cuda_cases import kernel
from tests.support.devices import HERE

POISON = [torch.nan, torch.inf, -torch.inf]
LENS = [3, 0, 70, 1, 2]  # of packed rows
B = 3  # rows of a batch

# Kernels that are given no numbers that could be poisoned, and why.
WITHOUT: dict[str, str] = {
    **dict.fromkeys(("edit_distance", "edit_cost", "edit_paths"), "of tokens, which are integers"),
    **dict.fromkeys(("beam_trace", "beam_chosen", "beam_ancestors"), "of numbers of hypotheses, which are integers"),
    "beam_pool": "its answer is one of all rows: whether NaN is among them, which the search refuses",
}


class Rows(NamedTuple):
    """A tensor, and the row of each of its places along a dim."""

    x: Tensor
    dim: int
    rows: Tensor

    @classmethod
    def of(cls, x: Tensor, dim: int = 0) -> "Rows":
        return cls(x, dim, torch.arange(x.shape[dim]))

    @classmethod
    def packed(cls, x: Tensor, lens: list[int]) -> "Rows":
        return cls(x, 0, torch.arange(len(lens)).repeat_interleave(torch.tensor(lens)))

    def spoilt(self, b: int, poison: float) -> Tensor:
        return self.x.index_fill(self.dim, (self.rows == b).nonzero()[:, 0], poison)

    def without(self, b: int) -> Tensor:
        return self.x.index_select(self.dim, (self.rows != b).nonzero()[:, 0])


class Case(NamedTuple):
    """What has rows, and what runs the kernel over it."""

    given: list[Rows]
    run: Callable[..., list[Rows]]  # of the kernel and the tensors


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(HERE).manual_seed(sum(shape)))


def segments(operation: str) -> Case:
    args = cases.arguments(operation, LENS, 5, numbers)
    places = [n for n, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]

    def rows(x: Tensor) -> Rows:
        return Rows.of(x) if len(x) == len(LENS) else Rows.packed(x, LENS)

    def run(kernel: Any, *tensors: Tensor) -> list[Rows]:
        some = list(args)
        for n, x in zip(places, tensors, strict=True):
            some[n] = x
        found = kernel(*some)
        return [rows(x) for x in (found if isinstance(found, tuple) else (found,))]

    return Case([rows(args[n]) for n in places], run)


def gathered() -> Case:
    index = torch.tensor([2, 0, 2, 1])
    return Case([Rows.of(numbers(B, 5))], lambda kernel, x: [Rows(kernel(x, index), 0, index)])


def regrouped(moves: Any) -> Case:
    given = [Rows.of(numbers(B, n)) for n in moves.sources]
    return Case(given, lambda kernel, *x: [Rows.of(y) for y in kernel(list(x), moves)])


def recurrence() -> Case:
    given = [Rows.of(numbers(B, n, 5)) for n in (70, 70, 1)]
    return Case(given, lambda kernel, a, b, h: [Rows.of(kernel(a, b, h, 1, False))])


def matrices() -> Case:
    given = [Rows.of(numbers(B, 9, 5, 5)), Rows.of(numbers(B, 9, 5)), Rows.of(numbers(B, 1, 5))]
    return Case(given, lambda kernel, a, b, h: [Rows.of(kernel(a, b, h, 1, False))])


def slots(writes: bool) -> Case:
    pos, where = torch.tensor([1, 0, 1]), torch.tensor([True, True, False])

    def run(kernel: Any, buffer: Tensor, x: Tensor) -> list[Rows]:
        buffer = buffer.clone()
        taken = kernel(buffer, pos, x, where) if writes else kernel(buffer, pos, where)
        return [Rows.of(buffer, 1), *([] if writes else [Rows.of(taken)])]

    return Case([Rows.of(numbers(2, B, 5), 1), Rows.of(numbers(B, 5))], run)


def alignments(kind: str, gradient: bool) -> Case:
    lens, given = [2, 6, 0, 4], torch.tensor([0, 2, 8, 8, 12])
    tokens = torch.arange(len(lens)) % 3 + 1
    rest = (given, torch.full((4,), 2)) if kind == "rnnt" else (given, tokens, torch.arange(5), 0)
    values = numbers(12, 2 if kind == "rnnt" else 4).log_softmax(-1)

    def run(grad: Any, x: Tensor, upstream: Tensor) -> list[Rows]:
        forward = kernel("cpu" if "cpu" in grad.__module__ else "eager", f"{kind}_loss") if gradient else grad
        losses, alpha = forward(x, *rest)
        if not gradient:
            return [Rows.of(losses)]
        return [Rows.packed(grad(upstream, x, *rest, losses, alpha), lens)]

    return Case([Rows.packed(values, lens), Rows.of(numbers(4))], run)


def best() -> Case:
    keys, scores = numbers(B, 2), numbers(B, 2, 9)
    return Case([Rows.of(keys), Rows.of(scores)], lambda kernel, *x: [Rows.of(y) for y in kernel(*x, 2, 8)])


def past(gradient: bool, backend: str) -> Case:
    sight = Sight(0.5, window=4, first=torch.tensor([0, 2, 5]), softcap=3.0)
    q, k, v, upstream = numbers(B, 2, 4, 8), numbers(7, B, 2, 8), numbers(7, B, 2, 8), numbers(B, 2, 4, 8)

    def run(found: Any, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> list[Rows]:
        forward = kernel(backend, "past_attend") if gradient else found
        out, lse = forward(q, k, v, sight)
        if not gradient:
            return [Rows.of(out), Rows.of(lse)]
        of_k, of_v = torch.zeros_like(k), torch.zeros_like(v)
        of_q, _ = found(upstream, q, k, v, out, lse, sight, of_k, of_v)
        return [Rows.of(of_q), Rows.of(of_k, 1), Rows.of(of_v, 1)]

    return Case([Rows.of(q), Rows.of(k, 1), Rows.of(v, 1), Rows.of(upstream)], run)


def hypotheses() -> Case:
    sight = Sight(0.5, causal=False, first=torch.tensor([0, 2, 5]))
    shared, own = torch.arange(12).view(4, B) % 2, torch.arange(18).view(3, B, 2) % 2
    given = [Rows.of(numbers(B, 2, 4, 8)), *(Rows.of(numbers(2, B, 2, 8), 1) for _ in range(2))]
    given += [Rows.of(numbers(7, B, 2, 2, 8), 1) for _ in range(2)]

    def run(kernel: Any, q: Tensor, k0: Tensor, v0: Tensor, k: Tensor, v: Tensor) -> list[Rows]:
        return [Rows.of(x) for x in kernel(q, [k0, v0], [k, v], shared, own, sight)]

    return Case(given, run)


def find_case(operation: str, backend: str) -> Case:
    if operation.startswith("segment_") or operation in ("pack_rows", "pad_rows", "spread_rows"):
        return segments(operation)
    if operation.startswith(("ctc", "rnnt")):
        return alignments(operation.split("_")[0], operation.endswith("grad"))
    return {
        "gather_rows": gathered,
        "regroup": lambda: regrouped(cases.some_moves()),
        "regroup_sums": lambda: regrouped(cases.some_moves().transposed),
        "linear_recurrence": recurrence,
        "matrix_recurrence": matrices,
        "write_rows": lambda: slots(True),
        "take_rows": lambda: slots(False),
        "beam_best": best,
        "past_attend": lambda: past(False, backend),
        "past_attend_grad": lambda: past(True, backend),
        "beam_attend": hypotheses,
    }[operation]()


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but that all NaN are alike."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0))


def changed(case: Case, kernel: Any) -> Iterator[tuple[int, float]]:
    """The rows whose poison changes something of others."""
    plain = case.run(kernel, *(part.x.clone() for part in case.given))
    for b in range(max(len(part.rows.unique()) for part in case.given) + 1):
        for poison in POISON:
            found = case.run(kernel, *(part.spoilt(b, poison) for part in case.given))
            if not all(same(x.without(b), y.without(b)) for x, y in zip(plain, found, strict=True)):
                yield b, poison


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("operation", [name for name in kernels.TABLE if name not in WITHOUT])
def test_one_row(operation: str, backend: str) -> None:
    assert not list(changed(find_case(operation, backend), kernel(backend, operation)))


def test_a_kernel_that_mixes_rows_is_seen() -> None:
    assert list(
        changed(segments("segment_sum"), lambda x, offsets: kernel("eager", "segment_sum")(x, offsets) + x.sum())
    )
