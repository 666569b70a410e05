"""torch's attention function and layers on packed tensors, with every kind of mask, beside each row alone."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tensorloop.attention import masks
from tensorloop.packed import PackedTensor

D = torch.float64
LENS, OTHER = [3, 0, 4, 1], [2, 1, 0, 5]
sdpa: Any = F.scaled_dot_product_attention
square = nn.Transformer.generate_square_subsequent_mask


def make(lens: list[int], *features: int) -> PackedTensor:
    return PackedTensor(torch.randn(sum(lens), *features, dtype=D, requires_grad=True), lens)


def heads(p: Any, n: int = 2) -> Any:
    return p.unflatten(-1, (n, -1)).transpose(1, 2)


def merge(x: Any) -> Any:
    return x.transpose(1, 2).flatten(2)


def cut(mask: Any, b: int, t: int, s: int) -> Any:
    """The part of a mask that row b alone has."""
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return mask
    mask = mask[(None,) * (4 - mask.dim())]
    row = mask[b if mask.shape[0] > 1 else 0][None]
    row = row if row.shape[2] == 1 else row[:, :, :t]
    return row if row.shape[3] == 1 else row[:, :, :, :s]


def lens_mask(lens: list[int]) -> Tensor:
    """(B, T), true where there is an entry."""
    return torch.arange(max(lens)) < torch.tensor(lens)[:, None]


LOWER = torch.ones(4, 4).tril().bool()
MASKS: dict[str, Any] = {
    "none": None,
    "causal": LOWER,
    "causal numbers": torch.full((4, 4), -torch.inf, dtype=D).triu(1),
    "lowest numbers": torch.full((1, 1, 4, 4), torch.finfo(D).min, dtype=D).triu(1),
    "of lens": lens_mask(LENS)[:, None, None],
    "of lens, numbers": torch.zeros(4, 1, 1, 4, dtype=D).masked_fill(~lens_mask(LENS)[:, None, None], -torch.inf),
    "of lens and causal": lens_mask(LENS)[:, None, None] & LOWER,
    "all": torch.ones(4, 1, 1, 4).bool(),
    "band": LOWER & ~LOWER.tril(-2),
    "of pairs": torch.rand(4, 1, 4, 4) > 0.3,
    "of heads": torch.rand(4, 2, 4, 4) > 0.3,
    "bias": torch.randn(4, 4, dtype=D),
    "a soft triangle": torch.full((4, 4), -2.0, dtype=D).triu(1),
    "bias of heads": torch.randn(1, 2, 4, 4, dtype=D),
    "bias of all": torch.randn(4, 2, 4, 4, dtype=D),
    "hides a key": lens_mask(LENS)[:, None, None] & (torch.arange(4) != 0),
    "hides all of a row": lens_mask(LENS)[:, None, None] & (torch.arange(4) != 2)[:, None, None, None],
}
NOTHING = {"none", "of lens", "of lens, numbers", "all"}
CAUSAL = {"causal", "causal numbers", "lowest numbers", "of lens and causal"}


def close(ours: Any, theirs: Any) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.zeros_like(y) if x is None and y is not None else x, y)


@pytest.mark.parametrize("name", MASKS)
def test_masks_in_the_function_of_torch(name: str) -> None:
    q, k, v = (make(LENS, 6) for _ in range(3))
    mask = MASKS[name]
    out = merge(sdpa(heads(q), heads(k), heads(v), mask, scale=0.7))
    rows = []
    for b, n in enumerate(LENS):
        one = [heads(x[b][None]) for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):  # which can be differentiated twice
            rows.append(merge(sdpa(*one, cut(mask, b, n, n), scale=0.7))[0])
    want = torch.cat(rows)
    torch.testing.assert_close(out.values, want)
    leaves, cotangent = [q.values, k.values, v.values], torch.randn_like(want)
    ours, theirs = (torch.autograd.grad(y, leaves, cotangent, create_graph=True) for y in (out.values, want))
    close(ours, theirs)
    close(*(torch.autograd.grad([g.sin().sum() for g in x], leaves) for x in (ours, theirs)))
    dim = q._dim
    found = masks.read_mask(mask, dim, dim, 2, D)
    assert (found.bias is None) == (name in NOTHING | CAUSAL)
    assert found.causal == (name in CAUSAL)
    if mask is not None:
        assert masks.read_mask(mask, dim, dim, 2, D) is found  # looked at once
        changed = mask.clone()
        masks.read_mask(changed, dim, dim, 2, D)
        changed.fill_(0)
        # of numbers that shows all keys, of bools none
        assert (masks.read_mask(changed, dim, dim, 2, D).bias is None) == (changed.dtype is not torch.bool)


VARIANTS: dict[str, Any] = {
    "causal": lambda q, k, v: sdpa(heads(q), heads(k), heads(v), is_causal=True),
    "one head": lambda q, k, v: sdpa(q, k, v).unsqueeze(1),
    "groups": lambda q, k, v: sdpa(heads(q, 6), heads(k, 6)[:, :2], heads(v, 6)[:, :2], enable_gqa=True),
    "wide values": lambda q, k, v: sdpa(heads(q), heads(k), torch.cat([heads(v), heads(v)], -1)),
    "heads of heads": lambda q, k, v: sdpa(*(heads(x, 6).unflatten(1, (2, 3)) for x in (q, k, v))).flatten(1, 2),
    "a mask with a gradient": lambda q, k, v: sdpa(heads(q), heads(k), heads(v), (q.sum() * 0.1).expand(1, 1)),
    "joined heads": lambda q, k, v: sdpa(*(heads(x).flatten(0, 1) for x in (q, k, v))).unflatten(0, (-1, 2)),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("lens", [(LENS, LENS), (LENS, OTHER), ([2, 2], [2, 2]), ([], [])], ids=str)
def test_forms_of_the_function_of_torch(name: str, lens: tuple[list[int], list[int]]) -> None:
    q, k, v = make(lens[0], 6), make(lens[1], 6), make(lens[1], 6)
    run = VARIANTS[name]
    out = merge(run(q, k, v))
    if not lens[0]:
        assert len(out.values) == 0
        return
    if name == "a mask with a gradient":  # a sum over all rows: it is the same for each
        run = lambda a, b, c: sdpa(heads(a), heads(b), heads(c), (q.sum() * 0.1).expand(1, 1))  # noqa: E731
    want = torch.cat([merge(run(*(x[b][None] for x in (q, k, v))))[0] for b in range(len(lens[0]))])
    torch.testing.assert_close(out.values, want)
    leaves, cotangent = [q.values, k.values, v.values], torch.randn_like(want)
    close(*(torch.autograd.grad(y, leaves, cotangent) for y in (out.values, want)))


@pytest.mark.parametrize("packed", ["queries", "keys"])
def test_padded_queries_with_packed_keys_and_the_other_way(packed: str) -> None:
    p, x = make(LENS, 6), torch.randn(4, 5, 6, dtype=D, requires_grad=True)
    q, k = (p, x) if packed == "queries" else (x, p)
    out = sdpa(heads(q), heads(k), heads(k))
    seen = []
    for y in (x[:1], x[:1].expand(4, 5, 6)):  # one padded row is every row's
        q1, k1 = (p, y) if packed == "queries" else (y, p)
        seen.append(merge(sdpa(heads(q1), heads(k1), heads(k1))))
    torch.testing.assert_close(*(y.values if isinstance(y, PackedTensor) else y for y in seen))
    layer = nn.MultiheadAttention(6, 2, batch_first=True, dtype=D)
    for found in (merge(out), *layer(q, k, k)[:1], layer(q, k, k, need_weights=False)[0]):
        assert isinstance(found, PackedTensor) == (packed == "queries")
    for b, n in enumerate(LENS):
        alone = sdpa(heads(q[b][None]), heads(k[b][None]), heads(k[b][None]))
        torch.testing.assert_close(merge(out)[b], merge(alone)[0])
        if n:
            for weights in (False, True):
                mine = layer(q, k, k, need_weights=weights)[0][b]
                torch.testing.assert_close(mine, layer(q[b][None], k[b][None], k[b][None], need_weights=weights)[0][0])


@pytest.mark.parametrize("name", ["none", "causal", "band", "of heads", "bias", "bias of all", "hides a key"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention(name: str, weights: bool, batch_first: bool) -> None:
    lens = [3, 2, 4, 1]
    layer = nn.MultiheadAttention(6, 2, batch_first=batch_first, dtype=D)
    p, mask = make(lens, 6), MASKS[name]
    hidden = None
    if name == "hides a key":
        hidden, mask = ~(lens_mask(lens) & (torch.arange(4) != 0)) | (torch.tensor(lens) == 1)[:, None], None
        hidden[3, 0] = False
    elif mask is not None and mask.dtype is torch.bool:
        mask = ~(mask | torch.eye(4).bool())
    given = (
        mask.flatten(0, 1)
        if mask is not None and mask.dim() == 4 and mask.shape[0] == 4 and mask.shape[1] == 2
        else mask
    )
    if given is not None and given.dim() == 4:
        given = given.expand(4, 2, 4, 4).flatten(0, 1)
    turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, found = layer(*(turn(p),) * 3, hidden, weights, given)
    out = turn(out)
    rows, all_weights = [], []
    for b, n in enumerate(lens):
        one = turn(p[b][None])
        part = cut(mask, b, n, n)
        part = part.expand(1, 2, n, n)[0] if part is not None else None
        y, w = layer(one, one, one, None if hidden is None else hidden[b : b + 1, :n], weights, part)
        rows.append(turn(y)[0])
        all_weights.append(w)
    want = torch.cat(rows)
    torch.testing.assert_close(out.values, want)
    leaves, cotangent = [p.values, *layer.parameters()], torch.randn_like(want)
    close(*(torch.autograd.grad(y, leaves, cotangent) for y in (out.values, want)))
    assert (found is not None) == weights
    if weights:
        for row, w in zip(found.unbind(), all_weights, strict=True):
            torch.testing.assert_close(row, w[0])
        each = layer(*(turn(p),) * 3, average_attn_weights=False)[1]
        assert each.shape == (4, 2, None, None)


def padded_rows(layer: Any, p: PackedTensor, *others: Any, **options: Any) -> Tensor:
    return torch.cat([layer(row[None], *others, **options)[0] for row in p])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoders_of_torch_with_every_mask(training: bool, norm_first: bool) -> None:
    lens = [3, 2, 4, 1]
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, norm_first=norm_first, dtype=D)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).train(training)
    p = make(lens, 6)
    for mask in (None, square(4, dtype=D), torch.ones(4, 4).triu(1).bool()):
        for padding in (None, ~lens_mask(lens)):
            for causal in (None, False) if mask is not None else (None,):
                if mask is not None and padding is not None and mask.dtype != padding.dtype:
                    continue
                out = encoder(p, mask, padding, causal)
                rows = [
                    encoder(row[None], None if mask is None else mask[:n, :n])[0]
                    for row, n in zip(p, lens, strict=True)
                ]
                torch.testing.assert_close(out.values, torch.cat(rows))
                leaves = [p.values, *encoder.parameters()]
                cotangent = torch.randn_like(out.values)
                close(*(torch.autograd.grad(y, leaves, cotangent) for y in (out.values, torch.cat(rows))))


def test_decoders_of_torch() -> None:
    lens, states = [3, 2, 4, 1], [2, 5, 1, 3]
    layer = nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True, dtype=D)
    decoder = nn.TransformerDecoder(layer, 2)
    p, memory = make(lens, 6), make(states, 6)
    out: Any = decoder(p, memory, square(4, dtype=D), None, None, ~lens_mask(states))
    rows = [decoder(p[b][None], memory[b][None], square(n, dtype=D))[0] for b, n in enumerate(lens)]
    torch.testing.assert_close(out.values, torch.cat(rows))
    leaves, cotangent = [p.values, memory.values, *decoder.parameters()], torch.randn_like(out.values)
    close(*(torch.autograd.grad(y, leaves, cotangent) for y in (out.values, torch.cat(rows))))


def test_whole_transformers_and_packed_masks() -> None:
    model = nn.Transformer(6, 2, 1, 1, 8, 0.0, batch_first=True, dtype=D)
    lens, states = [3, 2], [2, 4]
    p, memory = make(lens, 6), make(states, 6)
    out: Any = model(memory, p, tgt_mask=square(3, dtype=D))
    rows = [model(memory[b][None], p[b][None], tgt_mask=square(n, dtype=D))[0] for b, n in enumerate(lens)]
    torch.testing.assert_close(out.values, torch.cat(rows))
    tokens = PackedTensor(torch.tensor([1, 0, 2, 3, 1]), lens)
    seen = merge(sdpa(*(heads(p),) * 3, (tokens != 0)[:, None, None, :]))
    row = heads(p[0][None])
    torch.testing.assert_close(seen[0], merge(sdpa(row, row, row, torch.tensor([[True, False, True]])))[0])


def test_dropout_is_of_weights() -> None:
    p = make([30, 20], 8)
    torch.manual_seed(0)
    v = PackedTensor(torch.ones(50, 8, dtype=D), [30, 20])
    out = sdpa(heads(p), heads(p), heads(v), dropout_p=0.5)
    values = out.packed.values.detach()
    assert values.std() > 0.05
    assert 0.9 < float(values.mean()) < 1.1


def test_a_row_of_nan_stays_alone() -> None:
    p = make(LENS, 6)
    spoilt = p.values.detach().clone()
    spoilt[3:7] = torch.nan
    spoilt.requires_grad_()
    x = PackedTensor(spoilt, LENS)
    for mask in MASKS.values():
        sound = merge(sdpa(*(heads(x),) * 3, mask))[torch.tensor([0, 3])].values
        torch.testing.assert_close(sound, merge(sdpa(*(heads(p),) * 3, mask))[torch.tensor([0, 3])].values)
        (grad,) = torch.autograd.grad(sound.sum(), spoilt)
        assert not grad[[0, 1, 2, 7]].isnan().any()


LAYER = nn.MultiheadAttention(6, 2, batch_first=True, dtype=D)
REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("short mask", lambda p, x: sdpa(x, x, x, LOWER[:3, :3]), ValueError, r"attn_mask must fit .*4, 4\), got \(3, 3\)"),
    ("wrong kind", lambda p, x: sdpa(x, x, x, LOWER.long()), TypeError, "attn_mask must be of bools or floats"),
    ("both", lambda p, x: sdpa(x, x, x, LOWER, is_causal=True), ValueError, "both attn_mask and is_causal"),
    (
        "other lens",
        lambda p, x: sdpa(x, x, x, lens_mask([2, 4, 3, 1])[:, None, None]),
        ValueError,
        "attn_mask shows key 0 of row 1, which has 0 entries: it was made for other lens",
    ),
    (
        "padding",
        lambda p, x: LAYER(p, p, p, ~lens_mask([4, 0, 3, 1])),
        ValueError,
        "key_padding_mask shows key 3 of row 0, which has 3 entries",
    ),
    ("order", lambda p, x: sdpa(p.unflatten(-1, (2, 3)), x, x), TypeError, r"query is .*transpose\(1, 2\) what is"),
    ("heads", lambda p, x: sdpa(x, x[:, :1], x[:, :1]), ValueError, "write enable_gqa=True"),
    ("rows", lambda p, x: sdpa(x, x, heads(make(OTHER, 6))), ValueError, "k and v"),
    ("layer", lambda p, x: nn.MultiheadAttention(6, 2, dtype=D)(p, p, p), TypeError, "make the layer with batch_first"),
    (
        "added keys",
        lambda p, x: nn.MultiheadAttention(6, 2, add_bias_kv=True, batch_first=True, dtype=D)(p, p, p),
        TypeError,
        "leave out bias_k",
    ),
    (
        "zero keys",
        lambda p, x: nn.MultiheadAttention(6, 2, add_zero_attn=True, batch_first=True, dtype=D)(p, p, p),
        TypeError,
        "leave out bias_k, add_zero_attn",
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", [case[0] for case in REFUSED])
def test_what_is_refused(name: str) -> None:
    _, fn, kind, text = next(case for case in REFUSED if case[0] == name)
    p = make(LENS, 6)
    with pytest.raises(kind, match=text):
        fn(p, heads(p))


@pytest.mark.parametrize("change", [lambda m: m.data.fill_(True), lambda m: m.numpy().fill(True)])
@pytest.mark.parametrize("sizes", [None, (2, 1, -1, -1)])
def test_a_mask_that_was_changed_behind_torchs_back_is_read_again(change: Any, sizes: Any) -> None:
    p, mask = make(LENS, 6), LOWER.clone()
    x = heads(p)
    given = mask if sizes is None else mask.expand(len(LENS), *sizes[1:])
    attend: Any = F.scaled_dot_product_attention
    before = attend(x, x, x, attn_mask=given).pad()
    change(mask)
    after = attend(x, x, x, attn_mask=given).pad()
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, attend(x, x, x).pad())


def test_masks_are_forgotten_with_their_tensors() -> None:
    dim, before = make(LENS, 1)._dim, len(masks._READ)
    mask = LOWER.clone()
    masks.read_mask(mask, dim, dim, 2, D)
    assert len(masks._READ) == before + 1
    del mask
    assert len(masks._READ) == before
