"""Block masks: honoured block by block on the CPU, forward and backward, padded and packed."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tensorloop import reference
from tensorloop.attention import attention, blocks, engine, gpu
from tensorloop.kernels.sight import Sight
from tensorloop.packed import PackedTensor
from tensorloop.testing import assert_matches_reference
from tests.support import attention_cases as cases
from tests.support.attention_cases import block_mask, dense_mask, tensors

T = len(cases.DOCUMENTS)
MODS = [cases.causal, cases.window, cases.documents, cases.by_head, cases.by_row]
each_mod = pytest.mark.parametrize("mod", MODS, ids=lambda mod: mod.__name__)


@pytest.fixture(params=["flash", "matmul"], autouse=True)
def strip_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "matmul":
        monkeypatch.setattr(engine, "_has_flash", lambda q: False)
    return request.param


def made_for(mod: Callable[..., Tensor], B: int, H: int) -> dict[str, int | None]:
    return {"B": B if mod is cases.by_row else None, "H": H if mod is cases.by_head else None}


def both(mod: Callable[..., Tensor], B: int, H: int, n: int, m: int, size: int) -> tuple[Any, Any]:
    """(ours by a block mask, the definition by a dense one)"""
    mask = block_mask(mod, T=n, S=m, size=size, **made_for(mod, B, H))
    sees = dense_mask(mod, B, H, n, m)
    return functools.partial(attention, block_mask=mask), functools.partial(reference.attention, sees=sees)


@each_mod
@pytest.mark.parametrize("size", [4, 5, 16, 128])
def test_values_and_gradients(mod: Callable[..., Tensor], size: int):
    B, H, G, D = 3, 4, 2, 4
    ours, theirs = both(mod, B, H, T, T, size)
    assert_matches_reference(ours, theirs, *tensors((B, T, H, D), (B, T, G, D), (B, T, G, D)))


@each_mod
@pytest.mark.parametrize(("n", "m"), [(10, 30), (30, 10), (1, 30), (4, 4)])
def test_queries_and_keys_may_differ_in_number(mod: Callable[..., Tensor], n: int, m: int):
    ours, theirs = both(mod, 2, 2, n, m, 4)
    assert_matches_reference(ours, theirs, *tensors((2, n, 2, 3), (2, m, 2, 3), (2, m, 2, 2)))


@each_mod
def test_packed_rows_see_positions_of_their_own(mod: Callable[..., Tensor]):
    q_lens, k_lens = [7, 0, 30, 4, 1], [9, 5, 30, 0, 2]
    H, G, D = 4, 2, 3
    mask = block_mask(mod, T=30, S=30, size=4, **made_for(mod, 5, H))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(
            PackedTensor(q, q_lens), PackedTensor(k, k_lens), PackedTensor(v, k_lens), block_mask=mask
        ).values

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)
        sees = dense_mask(mod, 5, H, 30, 30)
        out = []
        for b, row in enumerate(rows):
            some = sees[b : b + 1, :, : q_lens[b], : k_lens[b]]
            out.append(reference.attention(*(x[None] for x in row), sees=some)[0])
        return torch.cat(out)

    assert_matches_reference(ours, theirs, *tensors((sum(q_lens), H, D), (sum(k_lens), G, D), (sum(k_lens), G, D)))


@pytest.mark.parametrize("mod", [cases.window, cases.by_head, cases.by_row], ids=lambda mod: mod.__name__)
@pytest.mark.few
def test_second_order_and_transforms(mod: Callable[..., Tensor]):
    B, H, n = 2, 2, 4
    ours, theirs = both(mod, B, H, n, n, 2)
    leaves = tensors((B, n, H, 1), (B, n, 1, 1), (B, n, 1, 1))
    assert torch.autograd.gradcheck(ours, leaves)
    assert torch.autograd.gradgradcheck(ours, leaves)
    plain = [x.detach() for x in leaves]
    torch.testing.assert_close(torch.func.jacrev(ours, 1)(*plain), torch.func.jacrev(theirs, 1)(*plain))
    torch.testing.assert_close(torch.func.jacfwd(ours, 0)(*plain), torch.func.jacrev(theirs, 0)(*plain))


def test_half_precision_sums_the_strips_in_float32():
    n = 512
    mask = block_mask(cases.causal, None, None, n, n, 16)
    wide = tensors(*[(1, n, 1, 8)] * 3)
    narrow = [x.detach().to(torch.bfloat16).requires_grad_() for x in wide]
    same = [x.detach().double().requires_grad_() for x in narrow]
    found = torch.autograd.grad(attention(*narrow, block_mask=mask).sum(), narrow)
    wanted = torch.autograd.grad(reference.attention(*same, causal=True).sum(), same)
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).abs().max() < 1e-2 * b.abs().max()


def test_full_blocks_are_taken_as_they_are_and_empty_ones_are_never_looked_at():
    asked = []

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        asked.append(1)
        return i >= j

    counts, numbers = torch.tensor([[[1, 0, 1]]]), torch.tensor([[[[0, 1, 2], [0, 1, 2], [2, 0, 1]]]])
    full_counts, full_numbers = torch.tensor([[[1, 1, 0]]]), torch.tensor([[[[2, 0, 1], [2, 0, 1], [0, 1, 2]]]])
    mask = BlockMask.from_kv_blocks(
        *(counts.int(), numbers.int(), full_counts.int(), full_numbers.int()),
        BLOCK_SIZE=4,
        mask_mod=mod,
        seq_lengths=(12, 10),
    )
    sees = torch.zeros(1, 1, 12, 10, dtype=torch.bool)
    sees[..., :4, :4] = torch.ones(4, 4).tril()
    sees[..., :8, 8:] = True  # though `mod` would say no
    sees[..., 8:, 8:] = torch.ones(4, 2).tril()
    q, k, v = tensors((2, 12, 2, 3), (2, 10, 2, 3), (2, 10, 2, 3))
    assert_matches_reference(
        functools.partial(attention, block_mask=mask), functools.partial(reference.attention, sees=sees), q, k, v
    )
    asked.clear()
    with torch.no_grad():
        poisoned = [x.detach().clone() for x in (k, v)]
        for x in poisoned:
            x[:, 4:8] = torch.nan  # no block of queries lists these keys
        assert attention(q, *poisoned, block_mask=mask).isfinite().all()
    assert len(asked) == 2  # the first and the last block of queries; the middle one meets a full block only


def test_strips_of_a_window_grow_with_the_window_and_not_with_the_keys():
    n, size = 256, 8
    q = torch.randn(1, n, 1, 2)
    mask = block_mask(cases.window, None, None, n, n, size)
    found = list(blocks.cut_blocks(Sight(causal=False, blocks=mask, ends=False), q, q))
    assert sum(len(strip.q.take(q)) for strip in found) == n // size
    assert max(strip.k.take(q).shape[1] for strip in found) == 2 * size


def test_strips_are_cut_where_their_masks_would_grow(monkeypatch: pytest.MonkeyPatch):
    n, size = 256, 8
    q = torch.randn(1, n, 1, 2)
    mask = block_mask(cases.causal, None, None, n, n, size)
    monkeypatch.setattr(blocks, "_PAIRS", 4096)
    found = list(blocks.cut_blocks(Sight(causal=False, blocks=mask, ends=False), q, q))
    made = [strip.mask().numel() for strip in found if strip.mask is not None]
    assert len(found) > 8
    assert max(made) <= 4096
    assert mask.full_kv_num_blocks is not None
    met = int(mask.kv_num_blocks.sum()) + int(mask.full_kv_num_blocks.sum())
    assert sum(made) <= 1.15 * size**2 * met


@each_mod
def test_the_same_as_flex_attention(mod: Callable[..., Tensor], strip_kernel: str):
    """Also how a GPU gets it: the call that hands over, here to flex_attention as it runs without a compiler."""
    B, H, G = 3, 4, 2
    mask = block_mask(mod, T=T, S=T, size=16, **made_for(mod, B, H))
    q, k, v = (torch.randn(B, T, heads, 16) for heads in (H, G, G))
    with torch.no_grad():
        task = Sight(0.3, causal=False, blocks=mask, ends=False)
        with warnings.catch_warnings():  # it warns, once a process, that it runs without a compiler
            warnings.simplefilter("ignore")
            found = gpu.flex(q, k, v, task, flex_attention)
        torch.testing.assert_close(attention(q, k, v, block_mask=mask, scale=0.3), found)


@pytest.mark.parametrize("causal", [False, True])
def test_the_call_that_hands_over_to_sdpa(causal: bool):
    q, k, v = (torch.randn(2, n, heads, 16) for n, heads in ((9, 4), (7, 2), (7, 2)))
    found = gpu.dense(q, k, v, Sight(0.3, causal, ends=False))
    torch.testing.assert_close(found, attention(q, k, v, causal=causal, scale=0.3))
