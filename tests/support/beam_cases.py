"""What the tests of beam search share: models of a few tokens, the plain search, and enumeration."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam, reference
from tensorloop.beam.length import find_bound
from tests.support.devices import HERE

BOS, EOS = 0, 1

Scores = Callable[[tuple[int, ...]], Sequence[float]]


class Table(NamedTuple):
    """A model whose next token depends on the last two: (B, V, V, V) log-probabilities by row, last but one, last."""

    logits: Tensor

    @classmethod
    def random(cls, rows: int, vocabulary: int, seed: int = 0, spread: float = 1.0, eos: float = 0.0) -> "Table":
        generator = torch.Generator(HERE).manual_seed(seed)
        logits = spread * torch.randn(rows, *[vocabulary] * 3, dtype=torch.float64, generator=generator)
        logits[..., EOS] += eos
        return cls(logits)

    @property
    def rows(self) -> int:
        return len(self.logits)

    def search(self, size: int, **options: Any) -> beam.Hypotheses:
        """Our search, with the table as context."""
        first = torch.as_tensor(options.get("bos_id", BOS), dtype=torch.int64)
        init = first if first.shape == (self.rows,) else torch.full((self.rows,), BOS if first.dim() else int(first))
        arguments: dict[str, Any] = {"bos_id": BOS, "eos_id": EOS, "context": self.logits} | options
        return beam.beam_search(table_step, init, batch_size=self.rows, beam_size=size, **arguments)

    def scores(self, row: int, bos: int = BOS) -> Scores:
        table = torch.log_softmax(self.logits[row], -1)

        def of(prefix: tuple[int, ...]) -> list[float]:
            last = (bos, bos, *prefix)[-2:]
            return table[last].tolist()

        return of


def table_step(before: Tensor, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(tokens))[:, None]
    return tokens, torch.log_softmax(logits[rows, before, tokens], -1)


Found = reference.Hypothesis


def plain_search(
    scores: Scores,
    size: int,
    steps: int,
    *,
    n_best: int | None = None,
    model: Any = None,
    longest: int | None = None,
    stop: str = "exact",
    eos: str = "always",
    eos_id: int | tuple[int, ...] = EOS,
    capped: str = "last",
) -> tuple[list[Found], int]:
    """The n best of one row and the steps taken, by the definition of the search; the models rank and bound as ours."""
    model = model or beam.Sum()
    return reference.beam_search(
        scores,
        size,
        steps,
        eos_id,
        n_best or size,
        final=functools.partial(final, model),
        may_end={"always": None, "top_k": size, "top_2k": 2 * size}[eos],
        stop=lambda pool, running, t: _stops(model, pool, running, t, longest, stop),
        capped=capped,
    )


def final(model: Any, total: float, length: int) -> float:
    return model.final(torch.tensor([[total]], dtype=torch.float64), torch.tensor([[length]])).item()


def _stops(model: Any, pool: Any, running: Any, t: int, longest: int | None, stop: str) -> bool:
    if stop == "exact":
        bound = find_bound(model, longest)
        most = max(bound(torch.tensor([[total]], dtype=torch.float64), t).item() for total, _ in running)
        return pool[-1].final >= most
    return stop == "first_n" or (stop == "hf" and pool[-1].final >= final(model, running[0][0], t))


def every_sequence(
    scores: Scores, vocabulary: int, steps: int, model: Any = None, eos_id: int | tuple[int, ...] = EOS
) -> list[Found]:
    """All that end within `steps`, eos counted, best first."""
    return reference.every_hypothesis(scores, vocabulary, steps, eos_id, functools.partial(final, model or beam.Sum()))


def rows_of(hyps: beam.Hypotheses) -> list[list[Found]]:
    """The result in the form of the references."""
    return [
        [
            Found(
                hyps.final[b, j].item(),
                hyps.scores[b, j].item(),
                tuple(hyps.tokens[b * hyps.n_best + j].tolist()),
                bool(hyps.finished[b, j]),
                int(hyps.ends[b, j]),
            )
            for j in range(hyps.n_best)
            if hyps.valid[b, j]
        ]
        for b in range(hyps.batch_size)
    ]


def assert_same(ours: Sequence[Found], theirs: Sequence[Found]) -> None:
    assert [x[2:] for x in ours] == [x[2:] for x in theirs]
    for x, y in zip(ours, theirs, strict=True):
        assert math.isclose(x.score, y.score, abs_tol=1e-9)
        assert math.isclose(x.final, y.final, abs_tol=1e-9)


class Recurrent(torch.nn.Module):
    """A decoder with a state, a context and weights: something to differentiate. It does not contract."""

    def __init__(self, vocabulary: int = 6, width: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator(HERE).manual_seed(seed)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))

        rotation = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
        self.turn = torch.nn.Parameter(rotation.to(dtype))
        self.embedding, self.readout, self.mix = (
            weight(vocabulary, width),
            weight(width, vocabulary),
            weight(width, width),
        )

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """(init_carry, context) from (B, width)."""
        return torch.sin(source @ self.mix), torch.cos(source @ self.mix)

    def step(self, h: Tensor, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sin(h @ self.turn + self.embedding[tokens]) + 0.3 * context[:, None]
        return h, torch.log_softmax(h @ self.readout, -1)

    def forced(self, h: Tensor, context: Tensor, tokens: tl.PackedTensor, rows: int, n: int, ended: Tensor) -> Tensor:
        """(rows, n) scores of given hypotheses, in a second pass of plain Python, token by token."""
        totals = []
        for i in range(rows * n):
            b, state, last, total = i // n, h[i // n].view(1, 1, -1), BOS, h.new_zeros(())
            given = tokens[i].tolist()
            for token in [*given, EOS] if bool(ended.flatten()[i]) else given:
                state, scores = self.step(state, torch.tensor([[last]]), context[b : b + 1])
                total, last = total + scores[0, 0, token], token
            totals.append(total)
        return torch.stack(totals).view(rows, n)
