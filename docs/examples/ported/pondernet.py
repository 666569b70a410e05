"""PonderNet (Banino, Balaguer & Blundell 2021): the answers of all steps, each by the probability of halting there."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import tensorloop as tl

ROWS, BITS, HIDDEN, PRIOR = 64, 8, 64, 0.2


class PonderNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(BITS, HIDDEN)
        self.out, self.halt = nn.Linear(HIDDEN, 1), nn.Linear(HIDDEN, 1)

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_zeros(len(x), HIDDEN), x.new_zeros(len(x))

    def step(self, x: Tensor, h: Tensor, going: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """State, log p(still going); log p(halts here), logit."""
        h = self.cell(x, h)
        halt = self.halt(h)[:, 0]
        return h, going + nn.functional.logsigmoid(-halt), going + nn.functional.logsigmoid(halt), self.out(h)[:, 0]


def before(net: PonderNet, x: Tensor, y: Tensor, steps: int) -> Tensor:
    h, going = net.start(x)
    halts, logits = [], []
    for _ in range(steps):
        h, going, halt, logit = net.step(x, h, going)
        halts.append(halt)
        logits.append(logit)
    return loss(torch.stack(halts), torch.stack(logits), y)


def after(net: PonderNet, x: Tensor, y: Tensor, steps: int) -> Tensor:
    def step(carry: tuple[Tensor, Tensor], _: None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        h, going, halt, logit = net.step(x, *carry)
        return (h, going), (halt, logit)

    _, (halts, logits) = tl.scan(step, net.start(x), length=steps, checkpoints=16, compile=True)
    return loss(halts, logits, y)


def loss(halts: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """The error expected, and how far halting is from a geometric distribution."""
    steps = torch.arange(len(halts)).to(halts)[:, None]
    prior = steps * torch.tensor(1 - PRIOR).log() + torch.tensor(PRIOR).log()
    errors = binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="none")
    return (halts.exp() * (errors + 0.01 * (halts - prior))).sum(0).mean()


def make(T: int) -> tuple[PonderNet, Tensor, Tensor, int]:
    x = torch.randint(-1, 2, (ROWS, BITS)).to(torch.get_default_dtype())
    return PonderNet(), x, (x == 1).sum(1).remainder(2).to(x), T
