"""Code written with einops on packed tensors, values and gradients beside each row alone."""

import gc
from typing import Any

import einops
import pytest
import torch
import torch.nn.functional as F
from einops import einsum, pack, parse_shape, rearrange, reduce, repeat, unpack
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import nn

from tensorloop.packed import Dim, PackedTensor

D = torch.float64
CASES: list[list[int]] = [[3, 0, 4, 1], [2, 2], [1], [5], []]
WIDTH, HEADS = 12, 2


def merged(x: Any) -> Any:
    return rearrange(x, "b h n d -> b n (h d)")


def back_from_entries(x: Any) -> Any:
    flat = rearrange(x, "b n d -> (b n) d") * 2
    return rearrange(flat, "(b n) d -> b n d", **parse_shape(x, "b n _"))


def interleaved(x: Any) -> Any:
    odd, even = rearrange(x, "... (d r) -> r ... d", r=2)
    return rearrange(torch.stack([-even, odd], -1), "... d r -> ... (d r)")


def with_token(x: Any, length: int = 1) -> Any:
    """Tokens in front, and the way back."""
    token = torch.ones(WIDTH, dtype=D)
    y, shapes = pack([repeat(token, "d -> b n d", b=x.shape[0], n=length), x], "b * d")
    tokens, states = unpack(y.cumsum(1), shapes, "b * d")
    return states + reduce(tokens, "b n d -> b 1 d", "mean")


def class_token(x: Any) -> Any:
    y, shapes = pack([x, repeat(torch.ones(WIDTH, dtype=D), "d -> b d", b=x.shape[0])], "b * d")
    states, token = unpack(y.cumsum(1), shapes, "b * d")
    return states * rearrange(token, "b d -> b 1 d")


def split_heads(x: Any) -> Any:
    return rearrange(x, "b n (h d) -> b h n d", h=HEADS)


# (B, T*, 12) -> (B, ..), as in padded code.
PROGRAMS: dict[str, Any] = {
    "heads and back": lambda x: merged(split_heads(x)),
    "layer": lambda x: Rearrange("b h t d -> b t (h d)")(Rearrange("b t (h d) -> b h t d", h=3)(x) * 2),
    "qkv": lambda x: merged(rearrange(x, "b n (qkv h d) -> qkv b h n d", qkv=3, h=2).unbind(0)[1]),
    "channels first": lambda x: rearrange(rearrange(x, "b t c -> b c t").cumsum(-1), "b c t -> b t c"),
    "time first": lambda x: rearrange(rearrange(x, "b t c -> t b c").cumsum(0), "t b c -> b t c"),
    "heads in the batch": lambda x: rearrange(
        rearrange(x, "b t (h d) -> (b h) t d", h=3).cumsum(1), "(b h) t d -> b t (h d)", h=3
    ),
    "entries": back_from_entries,
    "dots": lambda x: rearrange(rearrange(x, "b ... (h d) -> b h ... d", h=2), "b h t d -> b t (d h)"),
    "ones": lambda x: rearrange(rearrange(x, "b t d -> b 1 t d 1"), "b 1 t d 1 -> b t d"),
    "a list": lambda x: rearrange([x, 2 * x], "l b t d -> b t (l d)"),
    "pairs": interleaved,
    "repeated": lambda x: repeat(x, "b t d -> b t (r d)", r=2),
    "one for each row": lambda x: x + repeat(x.sum(1), "b d -> b t d", t=x.shape[1]),
    "positions": lambda x: x + repeat(torch.arange(x.shape[1]), "t -> t d", d=WIDTH),
    "mean": lambda x: reduce(x[:, :], "b t d -> b d", "mean").nan_to_num(),
    "sum of all": lambda x: reduce(x, "b t d -> b", "sum"),
    "kept": lambda x: x - reduce(x, "b t d -> b 1 d", "sum"),
    "max of heads": lambda x: reduce(x, "b t (h d) -> b t h", "max", h=4),
    "layer that reduces": lambda x: Reduce("b t (h d) -> b h", "sum", h=2)(x),
    "scores": lambda x: merged(
        einsum(
            einsum(split_heads(x), split_heads(x), "b h i d, b h j d -> b h i j").softmax(-1),
            split_heads(x),
            "b h i j, b h j d -> b h i d",
        )
    ),
    "tokens": with_token,
    "three tokens": lambda x: with_token(x, 3),
    "class token": class_token,
}


class Attention(nn.Module):
    """Pre-norm attention of rotated queries, with a token that everything sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.null = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(2, WIDTH))
        self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        b, n, device = *x.shape[:2], x.device
        x = self.norm(x)
        q, k, v = self.to_q(x), *self.to_kv(x).chunk(2, dim=-1)
        nk, nv = (repeat(t, "d -> b 1 d", b=b) for t in self.null)
        k, v = torch.cat((nk, k), dim=-2), torch.cat((nv, v), dim=-2)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=HEADS) for t in (q, k, v))
        angles = rearrange(torch.arange(n, device=device), "n -> n 1") * 0.1
        q = q * angles.cos() + interleaved(q) * angles.sin()
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.5
        attn = sim.softmax(dim=-1, dtype=torch.float32).to(x.dtype)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class Convolution(nn.Module):
    """The module of a Conformer, as a chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.LayerNorm(WIDTH), Rearrange("b n c -> b c n"), nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GLU(dim=1)),
            *(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.SiLU(), Rearrange("b c n -> b n c")),
        )

    def forward(self, x: Any) -> Any:
        return self.net(x) + x


class RelativeScores(nn.Module):
    """Distances looked up in a table, one for each query and key."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.to_qk = nn.Embedding(9, WIDTH // HEADS), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Any) -> Any:
        n = x.shape[1]
        q, k = (rearrange(t, "b n (h d) -> b h n d", h=HEADS) for t in self.to_qk(x).chunk(2, dim=-1))
        steps = torch.arange(n, device=x.device)
        apart = rearrange(steps, "i -> i ()") - rearrange(steps, "j -> () j")
        places = self.table(apart.clamp(-4, 4) + 4)
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k)
        scores = scores + torch.einsum("b h n d, n r d -> b h n r", q, places)
        return rearrange(scores.softmax(-1) @ rearrange(x, "b n (h d) -> b h n d", h=HEADS), "b h n d -> b n (h d)")


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = EinMix("b t c -> b t (h d)", weight_shape="c h d", bias_shape="h d", c=WIDTH, h=2, d=3)
        self.groups = EinMix("b t (g c) -> b t g e", weight_shape="g c e", g=2, c=3, e=4)

    def forward(self, x: Any) -> Any:
        return rearrange(self.groups(self.heads(x).relu()), "b t g e -> b t (e g)")


class Tokens(nn.Module):
    """Registers in front of what an encoder layer sees, then the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(3, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, 0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        x, shapes = pack([repeat(self.tokens, "n d -> b n d", b=x.shape[0]), x], "b * d")
        tokens, x = unpack(self.layer(x), shapes, "b * d")
        return x + reduce(tokens, "b n d -> b 1 d", "mean")


MODULES = [Attention, Convolution, RelativeScores, Mixed, Tokens]


def compare(run: Any, lens: list[int], weights: list[torch.Tensor]) -> None:
    """Values and gradients of packed rows and of each row alone."""
    x = torch.randn(sum(lens), WIDTH, dtype=D, requires_grad=True)
    ours = run(PackedTensor(x, lens))
    rows = [run(row[None])[0] for row in x.split(lens)]
    found = list(ours.unbind(0)) if lens else []
    if not lens:
        assert ours.shape[0] == 0
        return
    torch.testing.assert_close(found, rows)
    losses = [
        torch.cat([(row.sin() * (b + 1)).flatten() for b, row in enumerate(side)]).sum() for side in (found, rows)
    ]
    grads = [torch.autograd.grad(loss, [x, *weights], allow_unused=True, materialize_grads=True) for loss in losses]
    torch.testing.assert_close(*grads)


# einops itself packs no tensors of no rows, and torch convolves no row of no entries.
PACKING = {"tokens", "three tokens", "class token", Tokens}


@pytest.mark.parametrize(
    ("name", "lens"), [(name, lens) for name in PROGRAMS for lens in CASES if lens or name not in PACKING]
)
def test_programs_are_as_on_each_row(name: str, lens: list[int]):
    compare(PROGRAMS[name], lens, [])


@pytest.mark.parametrize(
    ("kind", "lens"),
    [
        (kind, lens)
        for kind in MODULES
        for lens in CASES
        if (lens or kind not in PACKING) and (0 not in lens or kind is not Convolution)
    ],
)
def test_modules_are_as_on_each_row(kind: type[nn.Module], lens: list[int]):
    torch.manual_seed(0)
    module = kind().to(D)
    compare(module, lens, list(module.parameters()))


REFUSED: dict[str, tuple[Any, str]] = {
    "steps with heads": (lambda x: rearrange(x, "b t (h d) -> b (t h) d", h=3), "mul: the ragged dim"),
    "steps with heads, as many as rows": (
        lambda x: rearrange(x, "b t (h d) -> b (t h) d", h=2),
        r"as \(2, B \* \*, 6\)",
    ),
    "steps in groups": (lambda x: rearrange(x, "b (t s) d -> b t (s d)", s=2), "floordiv: the ragged dim"),
    "steps as features": (lambda x: rearrange(x, "b t d -> b (t d)"), "mul: the ragged dim"),
    "entries, time first": (lambda x: rearrange(x, "b t d -> (t b) d"), "mixes the batch or the ragged dim"),
}


@pytest.mark.parametrize(("run", "said"), REFUSED.values(), ids=REFUSED)
def test_what_mixes_steps_is_refused(run: Any, said: str):
    with pytest.raises(TypeError, match=said):
        run(PackedTensor(torch.randn(5, WIDTH), [3, 2]))


def test_batches_of_the_same_sizes_are_not_mixed_up_and_not_kept():
    """einops keeps what it found for a shape: not for sizes of other rows, nor those of rows that are gone."""

    def run(lens: list[int]) -> None:
        p = PackedTensor(torch.arange(5.0 * WIDTH).view(5, WIDTH), lens)
        found: Any = rearrange(split_heads(p), "b h t d -> b t h d")
        assert found.lens.tolist() == lens
        spread: Any = repeat(p.sum(1), "b d -> b t d", t=p.shape[1])
        assert spread.lens.tolist() == lens
        assert torch.equal(found[1].flatten(1), p[1])

    for lens in 2 * [[3, 2], [2, 3], [4, 1], [3, 2]]:
        run(lens)
    PackedTensor(torch.ones(2), [2, 0])  # what the last dim was compared with
    gc.collect()
    assert not [x for x in gc.get_objects() if isinstance(x, Dim) and x._lens.tolist() == [4, 1]]


def test_steps_are_a_tensor_beside_packed_ones():
    p = PackedTensor(torch.randn(5, WIDTH), [3, 2])
    assert F.relu(rearrange(p, "b t d -> b d t")).shape == (2, WIDTH, None)
    assert einops.asnumpy(rearrange(p.detach(), "b t d -> (b t) d")).shape == (5, WIDTH)
