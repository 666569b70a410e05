"""The likeliest labels of a CTC model, frame by frame: `tl.beam_search` over alignments, which merge where they agree.

A hypothesis is an alignment, a symbol for each frame. What it has said so far is its prefix. Alignments of one prefix
go on alike if their last symbols are the same too, because a symbol that lasts is said once. These two are the key:
alignments in which they are equal become one, whose probability is the sum of theirs. After the last frame the last
symbol does not matter any more, so all alignments of the same labels meet before they end.

A language model and an automaton over labels depend on the prefix alone, so the key determines their states as well.

Source: Graves 2012 (prefix search); Hannun et al. 2014 (1408.2873), frame by frame with a language model.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tensorloop as tl

BLANK = 0


class Prefix(NamedTuple):
    """What an alignment has said, (B, K) each. Frames are (B, T, V) log-probabilities, a row's end comes as token V."""

    frame: Tensor  # how many frames have been read
    labels: Tensor  # (B, K, T + 1): what was said, then blanks
    said: Tensor  # how many labels
    last: Tensor  # the symbol of the last frame; a blank when all have been read

    @classmethod
    def empty(cls, frames: Tensor) -> "Prefix":
        nothing = torch.zeros(len(frames), dtype=torch.int64, device=frames.device)
        return cls(nothing - 1, nothing[:, None].repeat(1, frames.shape[1] + 1), nothing, nothing)

    def follow(self, symbol: Tensor, lens: Tensor) -> tuple["Prefix", Tensor]:
        """The prefix after one frame more, and whether that said a label. The first symbol comes before all frames."""
        says = (symbol != BLANK) & (symbol != self.last)
        labels = self.labels.scatter(2, self.said[..., None], symbol.where(says, BLANK)[..., None])
        frame = self.frame + 1
        return Prefix(frame, labels, self.said + says, symbol.where(frame < lens[:, None], BLANK)), says

    def scores(self, frames: Tensor, lens: Tensor) -> Tensor:
        """(B, K, V + 1): of the symbols of the next frame, or of the end after the last."""
        row, over = torch.arange(len(frames), device=frames.device)[:, None], self.frame >= lens[:, None]
        symbols = frames[row, self.frame.clamp(max=frames.shape[1] - 1)]
        end = torch.zeros_like(over, dtype=frames.dtype).masked_fill(~over, -torch.inf)
        return torch.cat([symbols.masked_fill(over[..., None], -torch.inf), end[..., None]], 2)

    def says_new(self, symbols: int) -> Tensor:
        """(B, K, V) bool: which symbols would say a label."""
        every = torch.arange(symbols, device=self.last.device)
        return (every != BLANK) & (every != self.last[..., None])

    @property
    def key(self) -> Tensor:
        """(B, K, T + 2): all that the future of an alignment depends on."""
        return torch.cat([self.labels, self.last[..., None]], 2)


class Automaton:
    """Which labels may follow which, beginning in node 0.

    `go` (N, V) int64: the node after a label, -1 where it must not come. `ends` (N,) bool: whether labels may end.
    """

    def __init__(self, go: Tensor, ends: Tensor) -> None:
        self.go, self.ends = go, ends
        # (N, V): how many frames it takes at least to an end, by node and the symbol of the last frame.
        symbols = torch.arange(go.shape[1])
        self.needed = torch.where(ends, 0.0, torch.inf)[:, None].repeat(1, len(symbols))
        for _ in range(2 * len(go)):  # a blank before each label at most
            after = 1 + self.needed[go.clamp(min=0), symbols].masked_fill(go < 0, torch.inf)
            after[:, BLANK] = 1 + self.needed[:, BLANK]
            lasts = (symbols == symbols[:, None]) & (symbols != BLANK)  # what lasts leads nowhere
            self.needed = torch.minimum(self.needed, after[:, None].masked_fill(lasts, torch.inf).amin(2))

    def bars(self, node: Tensor, new: Tensor, left: Tensor) -> Tensor:
        """(B, K, V + 1) bool: after what no end can be reached. `new` as `says_new`; so many frames are left."""
        following = torch.where(new, self.go[node], node[..., None])
        needed = self.needed[following.clamp(min=0), torch.arange(new.shape[2])]
        return torch.cat([(following < 0) | (needed >= left[..., None]), ~self.ends[node][..., None]], 2)


def containing(phrase: Sequence[int], symbols: int) -> Automaton:
    """Labels that have `phrase` in them somewhere. A node is how much of it the last labels are."""
    go = torch.zeros(len(phrase) + 1, symbols, dtype=torch.int64)
    for node in range(len(phrase)):
        for label in range(1, symbols):
            seen = [*phrase[:node], label]
            go[node, label] = next(n for n in range(len(seen), -1, -1) if seen[len(seen) - n :] == [*phrase[:n]])
    go[-1] = len(phrase)  # once is enough
    return Automaton(go, torch.arange(len(go)) == len(phrase))


def lexicon(words: Sequence[Sequence[int]], symbols: int, separator: int | None = None) -> Automaton:
    """One of these words, as a trie; with a separator, one or more of them with that label in between."""
    go, ends = [[-1] * symbols], [False]
    for word in words:
        node = 0
        for label in word:
            if go[node][label] < 0:
                go[node][label] = len(go)
                go.append([-1] * symbols)
                ends.append(False)
            node = go[node][label]
        ends[node] = True
        if separator is not None:
            go[node][separator] = 0
    return Automaton(torch.tensor(go), torch.tensor(ends))


class LanguageModel(nn.Module):
    """The probabilities of the next label; that of BLANK is the end's."""

    def __init__(self, labels: int, width: int) -> None:
        super().__init__()
        self.embed, self.cell, self.out = (
            nn.Embedding(labels, width),
            nn.GRUCell(width, width),
            nn.Linear(width, labels),
        )

    def forward(self, h: Tensor, label: Tensor) -> Tensor:
        """The next state (..., width)."""
        return self.cell(self.embed(label).flatten(0, -2), h.flatten(0, -2)).view_as(h)

    def scores(self, h: Tensor) -> Tensor:
        return self.out(h).log_softmax(-1)


class Search:
    """A search over the labels of frames, of a language model's too, that an automaton takes."""

    def __init__(
        self, model: LanguageModel | None = None, weight: float = 0.3, automaton: Automaton | None = None
    ) -> None:
        self.model, self.weight, self.automaton = model, weight, automaton

    def __call__(self, log_probs: tl.PackedTensor, size: int, **options: Any) -> tl.beam.Hypotheses:
        """The likeliest labels of (B, T*, V), best first: `labels_of` reads them off."""
        frames, lens = log_probs.pad(), log_probs.lens
        h = (
            frames.new_zeros(len(frames))
            if self.model is None
            else self.model(
                self.model.out.weight.new_zeros(len(frames), self.model.cell.hidden_size), torch.zeros_like(lens)
            )
        )
        return tl.beam_search(
            self.step,
            (Prefix.empty(frames), h, torch.zeros_like(lens)),
            batch_size=len(frames),
            beam_size=size,
            bos_id=BLANK,
            eos_id=frames.shape[2],
            context=(frames, lens),
            merge=lambda carry: carry[0].key,
            **options,
        )

    def step(self, carry: Any, symbol: Tensor, context: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        """A frame more: what stands beside the prefix changes where a label is said."""
        prefix, h, node = carry
        prefix, says = prefix.follow(symbol, context[1])
        scores = prefix.scores(*context)
        new = prefix.says_new(scores.shape[2] - 1)
        if self.model is not None:
            label = symbol.where(says, BLANK)
            h = torch.where(says[..., None], self.model(h, label), h)
            guess = self.weight * self.model.scores(h)
            scores = scores + torch.cat([guess.masked_fill(~new, 0), guess[..., BLANK:1]], 2)
        if self.automaton is not None:
            node = torch.where(says, self.automaton.go[node, symbol.where(says, BLANK)], node)
            scores = scores.masked_fill(self.automaton.bars(node, new, context[1][:, None] - prefix.frame), -torch.inf)
        return (prefix, h, node), scores


def labels_of(hyps: tl.beam.Hypotheses) -> tl.PackedTensor:
    """(B * n_best, U*): each symbol once where it lasts, without blanks."""
    symbols = hyps.tokens
    first = tl.PackedTensor(symbols.positions == 0, symbols.lens)
    kept = (symbols != BLANK) & ((symbols != symbols.roll(1, 1)) | first)
    return tl.PackedTensor(symbols[kept], kept.sum(1))
