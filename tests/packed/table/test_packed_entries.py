"""Entries of packed rows as one tensor (N, *F), cut into rows again by sizes (B, -1, *F), beside each row alone."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.packed import PackedTensor
from tensorloop.packed.table.entries import Merged
from tests.support.devices import HERE

D = torch.float64
N, WIDTH = 6, 6  # as many entries as features, so that neither is told from the other by its size
LENS = [[3, 1, 2], [2, 2, 2], [0, 6], [6], [1] * 6, [4, 0, 1, 1, 0, 0]]

torch.manual_seed(0)
W, TABLE = torch.randn(WIDTH, WIDTH, dtype=D), torch.randn(WIDTH, WIDTH, dtype=D)
DEEP = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, WIDTH)).to(D)
CONV = nn.Conv2d(1, 2, 2, padding=1).to(D)

# What a program does to entries (N, 6) before it goes back to rows.
STEPS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x,
    "layers": DEEP,
    "dropout": lambda x: F.dropout(x.clone(), 0.0),
    "product": lambda x: x @ W + x.mm(W) * W[0],
    "einsum": lambda x: torch.einsum("nd, de -> ne", x, W),
    "heads": lambda x: (x.view(-1, 2, 3).transpose(1, 2) * 2).reshape(-1, 6),
    "heads as entries": lambda x: F.normalize(x.view(-1, 3), dim=-1).view(-1, 6),
    "all numbers": lambda x: x.reshape(-1).tanh().unflatten(0, (-1, 6)),
    "between heads": lambda x: (x.view(-1, 2, 3) @ x.view(-1, 3, 2)).flatten(1).repeat(1, 2)[:, :6],
    "pictures": lambda x: F.max_pool2d(CONV(x.view(-1, 1, 2, 3)), 2, padding=1).flatten(1)[:, [0, 1, 2, 3, 4, 5]],
    "chunks": lambda x: torch.cat([x.chunk(2, -1)[1], x.split([2, 4], 1)[0], x[:, :1]], -1),
    "gate": lambda x: F.glu(torch.cat([x, x * 2], 1)),
    "table": lambda x: TABLE[(x[:, 0] > 0).long()] * F.embedding((x.mean(1) > 0).long(), TABLE) * x,
    "classes": lambda x: F.one_hot((x[..., 1] > 0).long(), 6) * x,
    "turned": lambda x: x.view(-1, 2, 3).mT.reshape(-1, 6),
    "codes": lambda x: (
        x
        + torch.zeros(len(x), 6, dtype=D).scatter_(1, torch.cdist(x, TABLE).argmin(-1, keepdim=True), 1).view_as(x) @ W
    ),
    "new ones": lambda x: x.new_zeros(len(x), 6).index_add_(0, x[:, 0].argsort(), x[x[:, 0].argsort()] * 2),
    "each loss": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long), reduction="none")[:, None] * W[1],
    "shares": lambda x: x.softmax(-1) * x.max(1, keepdim=True).values + x.sum(1)[:, None].expand(-1, 6),
    "in place": lambda x: x.clone().masked_fill_(x > 0, 1.0).add_(1),
    "where": lambda x: torch.where(x > 0, x, x.square()).to(torch.float32).to(D).contiguous(),
    "written": lambda x: x.clone().index_add_(0, torch.arange(len(x)), x * 2),
}


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_rows_are_those_of_each_row_alone(name: str, lens: list[int]) -> None:
    values = torch.randn(N, WIDTH, dtype=D, requires_grad=True)
    direction = torch.randn(N, WIDTH, dtype=D)

    def program(x: Any, rows: int) -> Any:
        return STEPS[name](x.reshape(-1, WIDTH)).view(rows, -1, WIDTH)

    got: Any = program(PackedTensor(values, lens), len(lens))
    want: Any = torch.cat([program(row[None], 1)[0] for row in values.split(lens) if len(row)])
    assert got.lens.tolist() == lens
    torch.testing.assert_close(got.values, want)
    if want.requires_grad:
        firsts = [torch.autograd.grad(y, values, direction, create_graph=True)[0] for y in (got.values, want)]
        torch.testing.assert_close(*firsts)
        if firsts[0].requires_grad:
            torch.testing.assert_close(*(torch.autograd.grad(g.square().sum(), values)[0] for g in firsts))


@pytest.mark.parametrize("lens", [[3, 1, 2], [0, 6], [6], [1] * 6, [0, 0], []], ids=str)
def test_every_way_back(lens: list[int]) -> None:
    rows = len(lens)
    p = PackedTensor(torch.randn(sum(lens), 2, 3, dtype=D), torch.tensor(lens, dtype=torch.int64))
    flat: Any
    for flat in (p.flatten(0, 1), p.view(-1, 2, 3), p.reshape(-1, 2, 3), rearrange(p, "b t h d -> (b t) h d")):
        assert type(flat) is Merged
        again: Any
        for again in (flat.view(rows, -1, 2, 3), flat.reshape((rows, -1, 2, 3)), flat.unflatten(0, (rows, -1))):
            assert again.lens.tolist() == lens
            assert torch.equal(again.values, p.values)
            assert type(again.values) is Tensor
        assert flat.view(rows, -1, 6).shape == flat.reshape(rows, -1, 6, 1)[..., 0].shape == (rows, None, 6)
    labels = PackedTensor(torch.arange(sum(lens)), p.dims[0])
    for y in (labels, labels > 1):
        assert torch.equal(y.reshape(-1).view(rows, -1).values, y.values)
    assert type(p.values) is Tensor
    assert p.flatten(0, 1) is not p.values


MOVED: dict[str, Callable[[Any], Any]] = {
    "flip": lambda x: x.flip(0),
    "flip of both": lambda x: x.flip(1, 0),
    "sorted": lambda x: x.sort(0).values,
    "permuted": lambda x: x[torch.tensor([1, 0, 2, 3, 4, 5])],
    "a mask of all": lambda x: x[x[:, 0] < 99],
    "index_select": lambda x: x.index_select(0, torch.arange(6)),
    "there and back": lambda x: x.t().contiguous().t(),
    "transposed, by its attribute": lambda x: x.T,
    "in a batch of one": lambda x: x[None] * 2,
    "a table of them": lambda x: F.embedding(torch.arange(6), x),
    "mixed": lambda x: W @ x,
    "summed up": lambda x: x.cumsum(0),
    "softmax over entries": lambda x: x.softmax(0),
    "of other rows": lambda x: x + PackedTensor(torch.zeros(6, 6, dtype=D), [1, 4, 1]).reshape(-1, 6),
    "rolled": lambda x: x.roll(1, 0),
    "rolled as one": lambda x: x.roll(1),
    "cut and joined": lambda x: torch.cat(x.chunk(2)[::-1]),
    "one by one": lambda x: torch.stack([*x]),
    "turned in place": lambda x: x.clone().t_(),
    "copied in place": lambda x: x.clone().copy_(x.flip(0)),
    "added in place": lambda x: x.clone().add_(x.flip(0)),
    "halves": lambda x: torch.cat([x[:2] * 2, x[2:]]),
    "as a table": lambda x: x.reshape(2, -1).squeeze(-1).view(6, 6),
    "taken": lambda x: x.take_along_dim(torch.arange(6)[:, None].expand(6, 6), 0),
}


@pytest.mark.parametrize("name", MOVED)
def test_entries_that_moved_are_not_cut(name: str) -> None:
    flat = PackedTensor(torch.randn(N, WIDTH, dtype=D), [3, 1, 2]).reshape(-1, WIDTH)
    moved = MOVED[name](flat)
    with pytest.raises(TypeError, match=r"order is not known here, .* would be cut into equal parts.*; write T of"):
        moved.reshape(3, -1, WIDTH)
    t: Any = PackedTensor(torch.zeros(N), [3, 1, 2]).shape[1]
    assert moved.reshape(3, t, WIDTH).lens.tolist() == [3, 1, 2]  # as it is written
    even = MOVED[name](PackedTensor(flat.detach(), [2, 2, 2]).reshape(-1, WIDTH))
    assert even.reshape(3, -1, WIDTH).shape == (3, 2, WIDTH)  # as of a padded tensor without padding


def test_other_cuts_by_number():
    p = PackedTensor(torch.randn(N, WIDTH, dtype=D), [3, 1, 2])
    flat = p.reshape(-1, WIDTH)
    cut = "view: entries of packed rows .* would be cut into equal parts"
    for sizes in ((3, 2, 6), (3, -1), (-1, 3, 6), (3, len(flat) // 3, 3, 2), (3, 2, 6, 1)):
        with pytest.raises(TypeError, match=cut):
            flat.view(*sizes)
    with pytest.raises(TypeError, match="reshape: entries of packed rows"):
        rearrange(flat, "(b t) d -> b t d", b=3)
    with pytest.raises(TypeError, match="unflatten: entries of packed rows"):
        flat.unflatten(sizes=(3, 2), dim=0)
    with pytest.raises(TypeError, match="reshape: entries of packed rows"):
        torch.reshape(shape=(3, 2, -1), input=flat)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="view_as: entries of packed rows"):
        flat.view_as(torch.zeros(3, 2, 6))
    with pytest.raises(TypeError, match="order is not known here"):
        torch.cat(flat[:, :4].chunk(2)).view(3, -1, 4)
    assert p.values.view(3, 2, 6).shape == (3, 2, 6)
    assert flat.view(2, -1, 6).shape == flat.view(2, 3, 6).shape == (2, 3, 6)  # blocks, not as many as rows
    one = PackedTensor(p.values, [6]).reshape(-1, 6)
    assert one.view(1, -1, 6).lens.tolist() == [6]
    assert one.view(1, 6, 6).shape == (1, 6, 6)


# Calls whose result may be (6, ...): those of which the table says that entries stay must treat entries alike.
CALLS: dict[str, Callable[[Any], Any]] = (
    STEPS
    | {
        name: call
        for name, call in MOVED.items()
        if name not in ("a table of them", "of other rows", "taken", "permuted", "index_select")
    }
    | {
        "norm": lambda x: x.norm(dim=0) + x.norm(dim=1),
        "sum over entries": lambda x: x.sum(0),
        "quantiles": lambda x: x.quantile(torch.arange(6, dtype=D) / 6, 1),
        "std": lambda x: torch.std_mean(x, 0)[1],
        "stacked": lambda x: torch.stack([x, x], 0)[0],
        "stacked last": lambda x: torch.stack([x, x * 2], -1).mean(-1),
        "diff": lambda x: x.diff(dim=0, append=x[:1]),
        "padded": lambda x: F.pad(x, (1, -1)),
        "moved": lambda x: F.pad(x, (0, 0, 1, -1)),
        "two lists": lambda x: x.view(6, 2, 3)[:, [0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]],
        "two lists apart": lambda x: x.view(6, 2, 3, 1)[:, [0, 1, 0, 1, 0, 1], :, [0, 0, 0, 0, 0, 0]],
        "weights for each": lambda x: x @ torch.stack([W, TABLE] * 3),
        "an int and a list": lambda x: x.view(6, 1, 6)[:, 0, [0, 1, 2, 3, 4, 5]],
        "lists apart": lambda x: x.view(6, 1, 6, 1)[:, 0, :, [0, 0, 0, 0, 0, 0]],
        "slice": lambda x: x[0:6],
        "permute": lambda x: x.view(6, 2, 3).permute(0, 2, 1),
        "permute of entries": lambda x: x.permute(1, 0),
        "swap": lambda x: torch.swapaxes(x, 0, 1),
        "first": lambda x: x.view(6, 6, 1).movedim(1, 0),
        "broadcast": lambda x: x[:, 0] + x.new_zeros(6, 1),
        "batches": lambda x: torch.bmm(x.view(6, 2, 3), x.view(6, 3, 2)),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
        "unbatched conv": lambda x: F.conv1d(x, W[:, :, None]),
        "pool": lambda x: F.avg_pool1d(x[:, None], 1)[:, 0],
        "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
        "argmax": lambda x: x.argmax(1) + x.argmax(0),
        "top": lambda x: x.topk(6, 0).values,
        "top of each": lambda x: x.topk(3, 1).values,
        "gather": lambda x: x.gather(1, torch.zeros(6, 6, dtype=torch.long)),
        "gather of entries": lambda x: x.gather(0, torch.zeros(6, 6, dtype=torch.long)),
        "repeat": lambda x: x.repeat(1, 2),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
        "cumsum": lambda x: x.cumsum(-1),
        "logsumexp": lambda x: x.logsumexp((0,)),
        "maximum": lambda x: torch.max(x, W[0]),
        "unfold": lambda x: x.unfold(0, 1, 1),
        "triu": lambda x: x.triu(),
        "linear of one": lambda x: F.linear(x[:, 0], W),
        "softmin": lambda x: F.softmin(x, 1),
        "index in front": lambda x: x[..., None, 0],
        "weights": lambda x: F.linear(W, x),
        "inverse": lambda x: torch.linalg.inv(x),
        "outer": lambda x: torch.einsum("nd,md->nm", x, W),
        "between entries": lambda x: torch.einsum("nd,md->nm", x, x),
        "transposed": lambda x: torch.einsum("nd->dn", x),
    }
)


@pytest.mark.parametrize("name", CALLS)
def test_entries_that_are_said_to_stay_do(name: str) -> None:
    order = torch.tensor([2, 0, 1, 5, 3, 4])
    x = torch.randn(N, WIDTH, dtype=D)
    known = CALLS[name](PackedTensor(x, [3, 1, 2]).reshape(-1, WIDTH))
    plain = CALLS[name](x)
    torch.testing.assert_close(known, plain, msg=name)
    if type(known) is Merged and known.in_order:
        torch.testing.assert_close(CALLS[name](x[order]), plain[order])


def test_everything_else_is_as_of_an_ordinary_tensor():
    values = torch.randn(N, WIDTH, dtype=D)
    p = PackedTensor(values, [3, 1, 2])
    flat: Any = p.reshape(-1, WIDTH)
    assert isinstance(flat, Tensor)
    assert (repr(flat), str(flat[:, :1])) == (repr(values), str(values[:, :1]))
    assert flat.tolist() == values.tolist()
    assert (flat.detach().cpu().numpy() == values.cpu().numpy()).all()
    copied: Any
    for copied in (copy.copy(flat), copy.deepcopy(flat)):
        assert torch.equal(copied.view(3, -1, WIDTH).values, values)
    file = io.BytesIO()
    torch.save({"x": flat}, file)
    file.seek(0)
    for loaded in (pickle.loads(pickle.dumps(flat)), torch.load(file)["x"]):
        assert type(loaded) is Tensor
        assert torch.equal(loaded, values)
    weight = nn.Parameter(flat)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    again = PackedTensor(flat, p.lens)
    assert type(again.values) is type((p * flat[:3].unsqueeze(0)).values) is Tensor
    assert type((flat * 2).sum()) is type((flat @ W[:, :2]).mean(0)) is Tensor
    flat[flat > 0] = 0
    assert torch.equal(p.values, values.clamp(max=0))
    with pytest.raises(TypeError, match="must be Tensor, not str"):
        F.linear(flat, "weight")  # pyright: ignore[reportArgumentType]


def test_autograd_knows_nothing_of_them():
    values = torch.randn(N, WIDTH, dtype=D, requires_grad=True)
    p = PackedTensor(values, [3, 1, 2])
    flat = p.reshape(-1, WIDTH)
    assert flat.grad_fn is not None
    assert flat.grad_fn.name() == values.reshape(-1, WIDTH).grad_fn.name()  # pyright: ignore[reportOptionalMemberAccess]
    seen: list[Tensor] = []
    flat.register_hook(seen.append)
    flat.retain_grad()
    labels = PackedTensor(torch.arange(N), p.dims[0]).view(-1)
    F.cross_entropy(flat, labels).backward()
    assert values.grad is not None
    assert torch.equal(seen[0], values.grad)
    assert torch.equal(flat.grad, values.grad)  # pyright: ignore[reportArgumentType]
    assert flat.grad is flat.grad
    leaf = flat.detach().requires_grad_()
    copied = copy.deepcopy(leaf)
    assert copied.is_leaf
    assert copied.requires_grad
    (gradient,) = torch.autograd.grad(leaf.square().sum(), leaf)
    torch.testing.assert_close(gradient, 2 * leaf)


def test_in_transforms_loops_and_graphs():
    values = torch.randn(N, WIDTH, dtype=D)

    def program(x: Tensor) -> Tensor:
        flat = PackedTensor(x, [3, 1, 2]).reshape(-1, WIDTH)
        return flat.pow(3).view(3, -1, WIDTH).values

    torch.testing.assert_close(torch.func.grad(lambda x: program(x).sum())(values), 3 * values**2)
    torch.testing.assert_close(torch.func.vmap(program)(torch.stack([values, -values]))[1], -(values**3))
    torch.testing.assert_close(torch.compile(program, backend="eager")(values), values**3)
    flat = PackedTensor(values, [3, 1, 2]).reshape(-1, WIDTH)
    compiled = torch.compile(lambda x: (x * 2).relu(), backend="eager")
    assert torch.equal(compiled(flat), (flat * 2).relu())
    first = torch.zeros(WIDTH, dtype=D)
    weight = flat.detach().clone().requires_grad_()
    for body, xs in ((lambda h, _: ((h @ weight).cos(), None), None), (lambda h, x: ((h + x).sin(), None), weight)):
        ways = [tl.scan(body, first, xs, length=N, compile=c)[0] for c in ("strict", False)]
        torch.testing.assert_close(*ways)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), weight)[0] for y in ways))
    with torch.autocast(HERE.type, torch.bfloat16):
        out: Any = F.linear(flat.float(), W.float()).view(3, -1, WIDTH)
    assert (out.dtype, out.lens.tolist()) == (torch.bfloat16, [3, 1, 2])
