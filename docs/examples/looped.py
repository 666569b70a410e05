"""A looped transformer: a block of Llama's layers again and again, as often as each row asks for.

The task: every node of a small forest points to its parent, roots to themselves; name the root above a node. How many
steps that takes, differs from row to row and is written nowhere. A gate says after each step with what probability a
row is ready; rows that are leave the batch, and backward keeps a few states and not all.

    python -m docs.examples.looped

Sources: Graves 2016 (adaptive computation time), Dehghani et al. 2019 (universal transformers), Geiping et al. 2025
(recurrent depth, sampled in training).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

import tensorloop as tl

NODES, ROOTS = 8, 2
PONDER = 0.01  # what a step costs


class Batch(NamedTuple):
    ids: Tensor  # (B, NODES + 1): the parent of each node, then the node asked about
    roots: Tensor  # (B,): the answers
    ends: Tensor  # (B,) in (0, 1): a row stops when the probability that it goes on has fallen to this


class State(NamedTuple):
    hidden: Tensor  # (B, L, D)
    answer: Tensor  # (B, D): the last token's states so far, each by the probability of stopping there
    going: Tensor  # (B,): the probability that the row is not ready yet
    steps: Tensor  # (B,): the steps it takes, expected


class Looped(nn.Module):
    """Layers, a gate, and a loop of unknown depth around them."""

    def __init__(self, config: LlamaConfig, checkpoints: int | None = 4, max_steps: int = 24) -> None:
        super().__init__()
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        self.rotary = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(width)
        self.gate, self.head = nn.Linear(width, 1), nn.Linear(width, config.vocab_size)
        nn.init.constant_(self.gate.bias, -1.0)  # at first a step is the last with probability 1/4
        self.checkpoints, self.max_steps = checkpoints, max_steps

    def forward(self, ids: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, V), the steps expected (B,), and those taken (B,)."""
        tokens = self.embed(ids)
        places = self.rotary(tokens, torch.arange(ids.shape[1], device=ids.device)[None])

        def goes_on(state: State, row: tuple[Tensor, Tensor]) -> Tensor:
            return state.going > row[1]

        def step(state: State, row: tuple[Tensor, Tensor]) -> State:
            tokens, ends = row
            h: Any = state.hidden + tokens
            for layer in self.layers:
                h = layer(h, position_embeddings=places)
            h = self.norm(h)
            going = state.going * torch.sigmoid(-self.gate(h[:, -1])[:, 0])
            weight = state.going - torch.where(going > ends, going, 0)  # the last step has all that is left
            return State(h, state.answer + weight[:, None] * h[:, -1], going, state.steps + state.going)

        none = tokens.new_zeros(len(ids))
        end, steps = tl.while_loop(
            goes_on,
            step,
            State(torch.zeros_like(tokens), torch.zeros_like(tokens[:, -1]), none + 1, none),
            context=(tokens, ends),
            max_steps=self.max_steps,
            compact=True,
            return_steps=True,
            checkpoints=self.checkpoints,
        )
        cut = torch.where(end.going > ends, end.going, 0)  # of rows that max_steps stopped
        return self.head(end.answer + cut[:, None] * end.hidden[:, -1]), end.steps, steps


def make_model(width: int = 64, layers: int = 2, **options: Any) -> Looped:
    """A small one."""
    config = LlamaConfig(
        vocab_size=NODES,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    config._attn_implementation = "sdpa"  # which only whole models choose by themselves
    return Looped(config, **options)


def make_batch(rows: int, generator: torch.Generator, end: float | None = None) -> Batch:
    """Random forests. `ends` are drawn, so that depth has the gate's distribution; `end=0.5` is its median."""
    order = torch.rand(rows, NODES, generator=generator).argsort(1)  # parents come before children
    parents = (torch.rand(rows, NODES, generator=generator) * torch.arange(NODES)).long()
    parents[:, :ROOTS] = torch.arange(ROOTS)
    above = parents.clone()
    for _ in range(NODES):
        above = above.gather(1, above)
    table = torch.zeros_like(order).scatter_(1, order, order.gather(1, parents))
    place = torch.randint(NODES, (rows, 1), generator=generator)
    ids = torch.cat([table, order.gather(1, place)], 1)
    ends = torch.rand(rows, generator=generator) if end is None else torch.full((rows,), end)
    return Batch(ids, order.gather(1, above.gather(1, place))[:, 0], ends)


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and the steps that each row took."""
    logits, expected, steps = model(batch.ids, batch.ends.to(next(model.parameters()).dtype))
    return cross_entropy(logits, batch.roots) + PONDER * expected.mean(), steps


def main(updates: int = 1500) -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    for update in range(updates):
        loss, steps = compute_loss(model, make_batch(64, generator))
        adam.zero_grad()
        loss.backward()
        adam.step()
        if update % 100 == 99:
            test = make_batch(256, generator, end=0.5)
            with torch.no_grad():
                logits, _, taken = model(test.ids, test.ends)
            right = (logits.argmax(1) == test.roots).float().mean()
            print(
                f"{update + 1}: loss {loss:.3f}, {steps.float().mean():.1f} steps; "
                f"{right:.0%} right in {taken.float().mean():.1f}, at most {int(taken.max())}"
            )


if __name__ == "__main__":
    main()
