"""Random steps: operations of all kinds one after another, some stored, some summed, some read as views."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.step import Step
from tensorloop.compiler.targets.cpu import emit, loop_threads
from tensorloop.compiler.targets.cpu.object_cache import Folder
from tests.support.recurrences import Given, assert_same, recurrence
from tests.support.team_races import assert_no_race

B, H = 5, 12

# (B, H), (B, H), an invariant (H, H) -> (B, H); nothing grows and nothing is cut off near a tie
STEPS = [
    lambda a, b, w: (a @ w).tanh(),
    lambda a, b, w: torch.addmm(b, a, w.t()).sin(),
    lambda a, b, w: a * b.sigmoid(),
    lambda a, b, w: torch.where(b > 0.1, a, -b),
    lambda a, b, w: torch.cat([a[:, 4:], b[:, :4]], 1),
    lambda a, b, w: a.roll(3, 1) * b.cos(),
    lambda a, b, w: torch.stack([c.sin() for c in (a + b).chunk(4, 1)]).sum(0).repeat(1, 4),
    lambda a, b, w: torch.stack([a, b], 2).reshape(B, 2 * H)[:, ::2] + b,
    lambda a, b, w: a.softmax(1) + b,
    lambda a, b, w: a - a.mean(1, keepdim=True) * b.amax(1, keepdim=True),
    lambda a, b, w: a.flip(1) * 0.5 + b.view(B, 3, 4).transpose(1, 2).reshape(B, H),
    lambda a, b, w: a.cumsum(1).tanh() + b,
    lambda a, b, w: torch.bmm(a.view(B, 3, 4), b.view(B, 4, 3)).sum(2, keepdim=True).tanh() + a.view(B, 3, 4).sin(),
    lambda a, b, w: a[:, :, None].mul(b[:, None, :]).sum(2).sin(),
    lambda a, b, w: torch.nn.functional.layer_norm(a, (H,), w[0], w[1]) + b,
    lambda a, b, w: a.gather(1, (b.abs() * 100).long() % H) + b,
    lambda a, b, w: b.scatter_add(1, (a.abs() * 100).long() % H, a).tanh(),
    lambda a, b, w: torch.nn.functional.pad(a[:, 2:-3], (4, 1), value=0.3) + b,
    lambda a, b, w: (a + w[2]).split([5, 7], 1)[1].sum(1, keepdim=True).cos() * b,
    lambda a, b, w: torch.slice_scatter(a, b[:, :3].exp().tanh(), 1, 2, 5),
]
MIXING = [
    lambda a, b, w: a - a.mean(0),
    lambda a, b, w: (a.t() @ b).tanh()[:B],
    lambda a, b, w: a.flip(0) + b,
    lambda a, b, w: torch.cat([b[1:], a[:1]], 0),
]


def drawn(seed: int, steps: Sequence[Callable[..., Tensor]]) -> tuple[Step, Given]:
    """A step of some of these, and what it is given."""
    draw = random.Random(seed)
    plan = [(draw.choice(steps), draw.random(), draw.random()) for _ in range(draw.randint(2, 9))]
    stores, adds = [{draw.randrange(len(plan) + 2) for _ in range(3)} for _ in "oa"]

    def body(invariants, slices, carry):
        pool: list[Tensor] = [*carry, *slices]
        for function, first, second in plan:
            a, b = (pool[int(len(pool) * (1 - n * n))] if n else pool[-1] for n in (first, second))
            pool.append(function(a, b, invariants[0]).reshape(B, H))
        chosen = [one for n, one in enumerate(pool) if n in stores]
        return {"carry": [pool[-1], pool[draw.randrange(len(pool))]], "outs": chosen, "sums": [pool[n] for n in adds]}

    torch.manual_seed(seed)
    given = (
        [torch.randn(H, H).double() / 3],
        [torch.randn(3, B, H).double()],
        [torch.randn(B, H).double() for _ in "ab"],
    )
    return recurrence(body, *given, reverse=seed % 2 == 1), given


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.extended("[1", "[2", "[3")
def test_a_random_step(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    rec, given = drawn(seed, STEPS + (MIXING if seed % 4 == 0 else []))
    core = emit(rec, folder=Folder(tmp_path_factory.getbasetemp() / "cache"))
    assert_same(core, rec, 3, *given, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(loop_threads, "parts", lambda rows, work: 3 if rows else 1)
    assert_same(core, rec, 3, *given, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.extended("[11", "[12", "[13")
def test_threads_do_a_random_step_together(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(Machine, "worth_sharing", lambda self, shared, barriers: True)
    rec, given = drawn(seed, STEPS + 5 * MIXING)
    core = emit(rec, folder=Folder(tmp_path_factory.getbasetemp() / "cache"))
    for count in (1, 2, 3) if core.text.barriers else ():
        assert_no_race(rec, count)
        monkeypatch.setattr(loop_threads, "together", lambda shared, barriers, steps, n=count: n)
        assert_same(core, rec, 3, *given, rtol=1e-9, atol=1e-9)
