"""The looped transformer: depth row by row, training, two processes that give what one gives; packed rows there too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tensorloop as tl
from docs.examples import looped
from tensorloop import hf
from tests.support.processes import found_by, run_together

WORLD = 2
ROWS = 6  # of a process


def _model(checkpoints: int | None = 3) -> looped.Looped:
    torch.manual_seed(1)
    return looped.make_model(16, 1, checkpoints=checkpoints).double()


def _batches(rank: int | None = None) -> list[looped.Batch]:
    """Of one process, or of all."""
    generator = torch.Generator().manual_seed(2)
    rows = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    return [looped.Batch(*(x[rows] for x in looped.make_batch(WORLD * ROWS, generator))) for _ in range(3)]


def _train(model: nn.Module, batches: list[looped.Batch]) -> list[Tensor]:
    sgd = torch.optim.SGD(model.parameters(), 0.3)
    losses = []
    for batch in batches:
        loss, _ = looped.compute_loss(model, batch)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.detach())
    return losses


def test_each_row_is_what_it_is_alone_and_checkpoints_change_no_gradient():
    (batch, *_) = _batches()
    model = _model()
    logits, expected, steps = model(batch.ids, batch.ends.double())
    assert len(set(steps.tolist())) > 2
    alone = [model(batch.ids[b : b + 1], batch.ends[b : b + 1].double()) for b in range(len(batch.ids))]
    for found, parts in zip((logits, expected, steps), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(parts), rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(looped.compute_loss(m, batch)[0], list(m.parameters())) for m in (model, _model(None))]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


def test_the_answers_have_all_the_probability_there_is():
    """An answer is a mean of states: where they are all alike it is that state, stopped by the gate or by max_steps."""
    model = _model()
    model.max_steps = 3
    object.__setattr__(model.norm, "forward", torch.ones_like)
    batch = _batches()[0]
    logits, expected, steps = model(batch.ids, batch.ends.double())
    assert steps.max() == 3
    torch.testing.assert_close(logits, model.head(torch.ones(len(steps), 16).double()))
    stop = torch.sigmoid(model.gate(torch.ones(16).double()))
    torch.testing.assert_close(expected, torch.stack([((1 - stop) ** torch.arange(n)).sum() for n in steps.tolist()]))


def test_it_learns():
    generator = torch.Generator().manual_seed(3)
    batch = looped.make_batch(8, generator)
    model = _model()
    losses = _train(model, [batch] * 25)
    assert losses[-1] < 0.6 * losses[0]
    assert model.gate.weight.grad is not None
    assert model.gate.weight.grad.abs().sum() > 0


# -- two processes


def _of_all(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x / WORLD


def _full(x: Tensor | None) -> Tensor:
    assert x is not None
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def _wrap(model: nn.Module, kind: str) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in getattr(getattr(model, "model", None), "layers", ()):  # a loop's layers stay with the loop
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_looped(rank: int) -> Any:
    found = {}
    for kind in ("ddp", "fsdp2"):
        model = _model()
        losses = _train(_wrap(model, kind), _batches(rank))
        found[kind] = [_of_all(x) for x in losses], [_full(x) for x in model.parameters()]
    return found


def _llama() -> Any:
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).double()


def _rows(rank: int) -> tl.PackedTensor:
    generator = torch.Generator().manual_seed(rank)
    lens = [[4, 1, 3], [0, 0, 0]][rank]  # one process has nothing
    return tl.PackedTensor(torch.randint(11, (sum(lens),), generator=generator), lens)


def _packed_loss(model: nn.Module, ids: tl.PackedTensor) -> Tensor:
    return hf.packed_forward(model, ids).values.log_softmax(-1)[:, 0].sum()


def run_packed(rank: int) -> Any:
    found = {}
    for kind in ("ddp", "fsdp2"):
        model = _llama()
        wrapped = _wrap(model, kind)
        _packed_loss(wrapped, _rows(rank)).backward()
        found[kind] = [_full(x.grad) for x in model.parameters()]
    return found


def _completions_loss(model: nn.Module, rank: int, chunk_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 10)
    lens = [[4, 0, 3, 2, 1, 5], [0] * 6][rank]
    tokens = tl.PackedTensor(torch.randint(11, (sum(lens),), generator=generator), lens)
    prompts = tl.PackedTensor(torch.arange(2, 8), [3, 2, 1])
    return hf.completion_logprobs(model, prompts, tokens, group=2, chunk_size=chunk_size).sum()


def run_completions(rank: int) -> Any:
    found = {}
    for kind in ("ddp", "fsdp2", "fsdp2, head"):
        model = _llama()
        if "head" in kind:  # whose processes must call it equally often
            fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (WORLD,)))
        _completions_loss(_wrap(model, kind), rank, 4).backward()
        found[kind] = [_full(x.grad) for x in model.parameters()]
    return found


PROGRAMS: list[Callable[[int], Any]] = [train_looped, run_packed, run_completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("looped")
    run_together(folder, PROGRAMS, 120)
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.extended
def test_two_processes_have_the_losses_of_one(folder: Path, kind: str):
    model = _model()
    expected = _train(model, _batches())
    for found in found_by(folder, train_looped):
        losses, weights = found[kind]
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weights, [x.detach() for x in model.parameters()], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.extended("fsdp2")
def test_packed_rows_give_the_gradients_of_one_process_to_one_without_tokens_too(folder: Path, kind: str):
    model = _llama()
    (_packed_loss(model, _rows(0)) / WORLD).backward()
    for found in found_by(folder, run_packed):
        torch.testing.assert_close(found[kind], [x.grad for x in model.parameters()], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2, head"])
@pytest.mark.extended("fsdp2")
def test_completions_in_chunks_give_the_gradients_of_one_process(folder: Path, kind: str):
    model = _llama()
    loss = _completions_loss(model, 0, 512) + _completions_loss(model, 1, 512)
    (loss / WORLD).backward()
    for found in found_by(folder, run_completions):
        torch.testing.assert_close(found[kind], [x.grad for x in model.parameters()], rtol=1e-12, atol=1e-12)
