"""The decoder of Tacotron 2 (Shen et al. 2018): seven tensors of state as attributes, set anew by each step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import tensorloop as tl

ROWS, TEXT, WIDTH, MELS, ATTENTION = 4, 40, 64, 20, 32
STATE = (
    "attention_hidden",
    "attention_cell",
    "decoder_hidden",
    "decoder_cell",
    "attention_weights",
    "attention_weights_cum",
    "attention_context",
)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prenet = nn.ModuleList([nn.Linear(MELS, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.attention_rnn = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.decoder_rnn = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.query, self.keys = nn.Linear(WIDTH, ATTENTION, bias=False), nn.Linear(WIDTH, ATTENTION, bias=False)
        self.location = nn.Conv1d(2, ATTENTION, 15, padding=7, bias=False)
        self.energy = nn.Linear(ATTENTION, 1, bias=False)
        self.to_mel, self.to_gate = nn.Linear(2 * WIDTH, MELS), nn.Linear(2 * WIDTH, 1)

    def initialize_decoder_states(self, memory: Tensor) -> None:
        rows, steps, _ = memory.shape
        for name in STATE[:4] + STATE[6:]:
            setattr(self, name, memory.new_zeros(rows, WIDTH))
        self.attention_weights = self.attention_weights_cum = memory.new_zeros(rows, steps)
        self.memory, self.processed_memory = memory, self.keys(memory)

    def decode(self, frame: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for layer in self.prenet:
            frame = dropout(layer(frame).relu(), 0.5)  # in training and after it
        self.attention_hidden, self.attention_cell = self.attention_rnn(
            torch.cat([frame, self.attention_context], 1), (self.attention_hidden, self.attention_cell)
        )
        before = self.location(torch.stack([self.attention_weights, self.attention_weights_cum], 1)).mT
        energy = self.energy(torch.tanh(self.query(self.attention_hidden)[:, None] + before + self.processed_memory))
        self.attention_weights = energy[..., 0].softmax(1)
        self.attention_weights_cum = self.attention_weights_cum + self.attention_weights
        self.attention_context = (self.attention_weights[:, None] @ self.memory)[:, 0]
        self.decoder_hidden, self.decoder_cell = self.decoder_rnn(
            torch.cat([self.attention_hidden, self.attention_context], 1), (self.decoder_hidden, self.decoder_cell)
        )
        found = torch.cat([self.decoder_hidden, self.attention_context], 1)
        return self.to_mel(found), self.to_gate(found), self.attention_weights


def before(decoder: Decoder, memory: Tensor, frames: Tensor) -> Tensor:
    torch.manual_seed(1)
    decoder.initialize_decoder_states(memory)
    mels, gates, alignments = [], [], []
    for frame in frames:
        mel, gate, weights = decoder.decode(frame)
        mels += [mel]
        gates += [gate]
        alignments += [weights]
    return loss(torch.stack(mels), torch.stack(gates), torch.stack(alignments), frames)


def by_hand(decoder: Decoder, memory: Tensor, frames: Tensor) -> Tensor:
    torch.manual_seed(1)
    decoder.initialize_decoder_states(memory)

    @tl.loop.pure  # what it sets it takes off again
    def step(state: dict[str, Tensor], frame: Tensor) -> Any:
        vars(decoder).update(state)
        found = decoder.decode(frame)
        return {name: vars(decoder).pop(name) for name in STATE}, found

    init = {name: vars(decoder).pop(name) for name in STATE}
    _, (mels, gates, alignments) = tl.scan(step, init, frames, checkpoints=16, compile=True)
    return loss(mels, gates, alignments, frames)


def after(decoder: Decoder, memory: Tensor, frames: Tensor) -> Tensor:
    torch.manual_seed(1)
    decoder.initialize_decoder_states(memory)
    mels, gates, alignments = tl.carrying(decoder).map(decoder.decode, frames, checkpoints=16, compile=True)
    return loss(mels, gates, alignments, frames)


def loss(mels: Tensor, gates: Tensor, alignments: Tensor, frames: Tensor) -> Tensor:
    return (mels[:-1] - frames[1:]).square().mean() + gates.square().mean() + alignments.square().mean()


def make(T: int) -> tuple[Decoder, Tensor, Tensor]:
    return Decoder(), torch.randn(ROWS, TEXT, WIDTH), torch.randn(T, ROWS, MELS)
