"""The model: a bidirectional LSTM reads the letters, an LSTM with two attentions writes the phones.

At every step the decoder attends to the letters and to all of its own earlier states. These live in a TensorArray
that grows by a slot a step and is read back as a prefix. In plain PyTorch that is a ``torch.cat`` a step, O(T^2) bytes
held for backward; here it is O(T).

A step is written once for all its uses. Training and greedy decoding call it with tensors (B, F), a beam search with
(B, K, F), for K hypotheses of each word; what belongs to the word, its letters' states and masks, stays (B, ...).

Words of unequal length come packed, and nothing computes on padding: not the encoder, not the decoder, whose batch
shrinks as words end, not the output layer nor the loss. Only the letters' states are padded, once a batch, as slots to
attend to.

Ending. There is no maximum length. The score of the end grows by ``END_SLOPE`` with every phone beyond the number
of letters, in training and decoding alike, so the model learns to write "W" (eight phones) against it. The
readout is a tanh, in [-1, 1]. So before that growth no score exceeds the end's by more than
D = max_k |W_k - W_end|_1 + |b_k - b_end|, and a greedy row of n letters ends after at most n + D / END_SLOPE + 1
phones, trained or not (``G2P.longest``). Finite weights imply an end.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tensorloop import PackedTensor, TensorArray, scan, while_loop

END_SLOPE = 0.25

Rows = TypeVar("Rows", Tensor, PackedTensor)


@dataclass(frozen=True)
class Config:
    """Sizes. ``hidden`` is the decoder's width; each direction of the encoder has half of it.

    A model that is ``backwards`` writes the last phone first. Nothing in it differs but what it learns: whoever gives
    it phones or takes them turns them around.
    """

    letters: int
    phones: int
    embed: int = 128
    hidden: int = 256
    dropout: float = 0.3
    backwards: bool = False

    @property
    def eos_id(self) -> int:
        return self.phones

    @property
    def bos_id(self) -> int:
        return self.phones + 1


class Masks(NamedTuple):
    """Dropout masks (B, F), each the same at every time step."""

    embedded: Tensor
    encoded: Tensor  # between the encoder's layers
    lower: Tensor
    upper: Tensor
    readout: Tensor

    def of_rows(self, rows: list[int]) -> "Masks":
        """The masks of these rows of the batch."""
        return Masks(*(mask[rows] for mask in self))


class Context(NamedTuple):
    """What stays the same while a batch of words is decoded. Every leaf has B leading rows."""

    memory: Tensor  # (B, S, H): the letters' states
    mask: Tensor  # (B, S): 0 for a letter, -inf for padding
    lens: Tensor  # (B,): letters
    masks: Masks | None  # None when decoding


class Carry(NamedTuple):
    """What goes from one decoder step to the next. In a beam search B is B, K."""

    lower: tuple[Tensor, Tensor]  # h, c (B, H)
    upper: tuple[Tensor, Tensor]
    feed: Tensor  # (B, H): the last readout, fed back
    past: TensorArray  # t + 1 slots (B, H): the initial state and the upper state after every phone

    @property
    def t(self) -> int:
        """How many phones have been written."""
        return len(self.past) - 1


class Written(NamedTuple):
    """What greedy decoding carries: the decoder's state, the last phone of each row, and all phones."""

    carry: Carry
    tokens: Tensor  # (B,)
    phones: TensorArray  # a slot (B,) a step


def of_words(x: Tensor, like: Tensor) -> Tensor:
    """What belongs to words, (B, *F), beside what belongs to their hypotheses, (B, K, *F): (B, 1, *F)."""
    return x if x.dim() == like.dim() else x[:, None]


def attend(query: Tensor, slots: Tensor, mask: Tensor | None = None) -> Tensor:
    """Dot attention of query (B, H) over slots (T, B, H): (B, H). ``mask`` (B, T) is added to the scores.

    The same for query (B, K, H) over slots (T, B, K, H), or (T, B, 1, H) that all K share.
    """
    scores = torch.einsum("...h,t...h->...t", query, slots) * query.shape[-1] ** -0.5
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return torch.einsum("...t,t...h->...h", weights, slots)


class Cell(nn.Module):
    """An LSTM cell. ``extra`` (B, 4H) is added to the gates: the part of an input that is looked up."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs + hidden, 4 * hidden)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor], extra: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h, c = state
        gates = self.linear(torch.cat((x, h), -1))
        if extra is not None:
            gates = gates + extra
        forget_in_out, new = gates.split((3 * h.shape[-1], h.shape[-1]), -1)
        f, i, o = torch.sigmoid(forget_in_out).chunk(3, -1)
        c = f * c + i * torch.tanh(new)
        return o * torch.tanh(c), c


class G2P(nn.Module):
    """Letters in, log-probabilities of phones out, by teacher forcing (``forward``) or step by step."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.hidden
        if width % 2:
            raise ValueError(f"G2P: hidden must be even (two directions of half of it), got {width}")
        self.embed = nn.Embedding(config.letters, config.embed)
        self.encoder = nn.ModuleList(
            nn.LSTM(inputs, width // 2, bidirectional=True, batch_first=True) for inputs in (config.embed, width)
        )
        self.bridge = nn.Linear(width, 4 * width)
        self.token_gates = nn.Embedding(config.phones + 2, 4 * width)
        self.lower = Cell(width, width)
        self.upper = Cell(width, width)
        self.queries = nn.Linear(width, 2 * width, bias=False)
        self.readout = nn.Linear(3 * width, width)
        self.output = nn.Linear(width, config.phones + 1)
        nn.init.normal_(self.token_gates.weight, std=0.1)
        with torch.no_grad():
            for cell in (self.lower, self.upper):
                cell.linear.bias[:width] = 1.0  # remember at first: the forget gate starts open

    def masks(self, rows: int) -> Masks:
        """Random dropout masks for a batch of so many rows."""
        config, keep = self.config, 1 - self.config.dropout
        widths = (config.embed, *(4 * [config.hidden]))
        return Masks(*(self.output.weight.new_empty(rows, n).bernoulli_(keep).div_(keep) for n in widths))

    def encode(self, letters: PackedTensor, masks: Masks | None = None) -> tuple[Context, Carry]:
        """letters (B, S*) int64 to the decoder's context and its first carry.

        A model in training mode draws ``masks`` where none are given.
        """
        if masks is None and self.training:
            masks = self.masks(len(letters.lens))
        states: PackedTensor = self.embed(letters)
        first, second = self.encoder
        states, _ = first(states if masks is None else states * masks.embedded[:, None])
        states, _ = second(states if masks is None else states * masks.encoded[:, None])
        mean = states.mean(1)
        h_lower, c_lower, h_upper, c_upper = self.bridge(mean).chunk(4, 1)
        lower, upper = (torch.tanh(h_lower), c_lower), (torch.tanh(h_upper), c_upper)
        carry = Carry(lower, upper, torch.zeros_like(mean), TensorArray().append(upper[0]))
        # The one place with slots behind the ends of words: a step attends to all words at once.
        mask = PackedTensor(states.values.new_zeros(len(states.values)), letters.dims[0]).pad(float("-inf"))
        return Context(states.pad(), mask, letters.lens, masks), carry

    def step(self, carry: Carry, tokens: Tensor, context: Context) -> Carry:
        """One step after ``tokens`` (B,) or (B, K) int64, bos_id at first; the new ``feed`` is the readout.

        A step appends to ``carry.past``: a carry is used once.
        """
        masks, memory = context.masks, of_words(context.memory, carry.feed[..., None])
        past = carry.past[:]
        lower = self.lower(carry.feed, carry.lower, self.token_gates(tokens))
        upper = self.upper(lower[0] if masks is None else lower[0] * of_words(masks.lower, lower[0]), carry.upper)
        top = upper[0] if masks is None else upper[0] * of_words(masks.upper, upper[0])
        to_letters, to_past = self.queries(top).chunk(2, -1)
        letters = attend(to_letters, memory.movedim(-2, 0), of_words(context.mask, to_letters))
        feed = torch.tanh(self.readout(torch.cat((top, letters, attend(to_past, past)), -1)))
        return Carry(lower, upper, feed, carry.past.append(upper[0]))

    def scores(self, readout: Rows, beyond: Rows) -> Rows:
        """Log-probabilities (..., V) of readout (..., H), packed or a step's; V is phones and eos.

        ``beyond`` (...) counts the phones before beyond the number of letters, below 0 where they are fewer.
        """
        logits = self.output(readout)
        end = logits[..., -1:] + END_SLOPE * beyond.clamp(min=0)[..., None]
        all_scores: Any = torch.cat((logits[..., :-1], end), -1)
        return all_scores.log_softmax(-1)

    def write(self, carry: Carry, tokens: Tensor, context: Context) -> tuple[Carry, Tensor]:
        """A step of decoding after ``tokens``: the next carry and the log-probabilities (..., V) of what comes next.

        Raises FloatingPointError when these are not finite, as no end would then be chosen.
        """
        beyond = carry.t - of_words(context.lens, tokens)
        carry, masks = self.step(carry, tokens, context), context.masks
        readout = carry.feed if masks is None else carry.feed * of_words(masks.readout, carry.feed)
        scores = self.scores(readout, beyond)
        if not bool(scores.isfinite().all()):
            raise FloatingPointError(f"the scores of step {carry.t - 1} are not finite; are the weights damaged?")
        return carry, scores

    def forward(
        self, letters: PackedTensor, phones: PackedTensor, masks: Masks | None = None, compile: bool = False
    ) -> PackedTensor:
        """Log-probabilities (B, T*, V) of each phone given the true ones before it; phones (B, T*) end with eos.

        With ``compile`` the decoder's loop runs as a native function, made once for each number of rows and letters.
        """
        context, carry = self.encode(letters, masks)
        time = phones.dims[0]
        # The start takes the place of the end that rolls in from the row before.
        given = phones.values.roll(1).index_fill_(0, phones.offsets[:-1], self.config.bos_id)

        def read_on(carry: Carry, tokens: Tensor, context: Context) -> tuple[Carry, Tensor]:
            carry = self.step(carry, tokens, context)
            return carry, carry.feed

        _, readouts = scan(read_on, carry, PackedTensor(given, time), context=context, compile=compile)
        if context.masks is not None:
            readouts = readouts * context.masks.readout[:, None]
        return self.scores(readouts, PackedTensor(phones.positions, time) - letters.lens[:, None])

    def longest(self, letters: int) -> int:
        """The most phones (eos not counted) that greedy decoding can write for a word of so many letters."""
        weight, bias = self.output.weight.detach().double(), self.output.bias.detach().double()
        spread = (weight - weight[-1]).abs().sum(1) + (bias - bias[-1]).abs()
        return letters + int(spread.max() / END_SLOPE) + 1


@torch.no_grad()
def greedy(model: G2P, letters: PackedTensor) -> list[list[int]]:
    """The best phone at every step until every row has ended: phone ids of each row, without eos.

    letters (B, S*) int64. A row's phones do not depend on its batch. Raises RuntimeError for a model
    in training mode, and FloatingPointError when the scores are not finite, as no end would then be chosen.
    """
    if model.training:
        raise RuntimeError("greedy: model is in training mode, where dropout is random; call model.eval() first")
    eos_id = model.config.eos_id

    def runs(written: Written, context: Context) -> Tensor:
        return written.tokens != eos_id

    def write(written: Written, context: Context) -> Written:
        carry, scores = model.write(written.carry, written.tokens, context)
        tokens = scores.argmax(1)
        return Written(carry, tokens, written.phones.append(tokens))

    context, carry = model.encode(letters)
    first = Written(carry, torch.full_like(letters.lens, model.config.bos_id), TensorArray())
    rows = while_loop(runs, write, first, context=context, compact=True).phones.stack().T.tolist()
    return [row[: row.index(eos_id)] for row in rows]
