"""In place means in place: a slice along time is changed where it was taken from, as on every row alone."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorloop.packed import PackedTensor
from tensorloop.packed.static.static import StaticPackedTensor
from tensorloop.packed.table import aliases

LENS = [5, 2, 9]
D = torch.float64


def make(*features: int, grad: bool = False) -> PackedTensor:
    gen = torch.Generator().manual_seed(len(features))
    return PackedTensor(torch.randn(sum(LENS), *(features or (4,)), dtype=D, generator=gen).requires_grad_(grad), LENS)


def heads(x: Any) -> Any:
    return x.unflatten(-1, (2, 2)).transpose(1, 2)


def rows_of(x: Any) -> tuple[Tensor, ...]:
    return x.unbind(0) if isinstance(x, Tensor) else x.unbind()


def run(body: Callable[[Any], Any], text: str = "") -> Any:
    """A body on the packed tensor and on each row alone, (1, T, 4): values and gradients are the same."""
    x = make(grad=True)
    out = body(x * 1)
    wanted = []
    for b, part in enumerate(x.values.detach().split(LENS)):
        row = part[None].clone().requires_grad_()
        want = body(row * 1)
        wanted.append(torch.autograd.grad(want.sin().sum(), row)[0][0])
        torch.testing.assert_close(rows_of(out)[b], want[0])
    total: Any = out.sin().sum() if isinstance(out, Tensor) else sum(r.sin().sum() for r in out.unbind())
    torch.testing.assert_close(torch.autograd.grad(total, x.values)[0], torch.cat(wanted))
    return out


# What is changed; x is looked at afterwards.
FORMS: dict[str, Callable[[Any], Any]] = {
    "a span": lambda x: x[:, :2].zero_(),
    "all but the first": lambda x: x[:, 1:].mul_(2),
    "from the end": lambda x: x[:, -2:].fill_(0.5),
    "a step": lambda x: x[:, 0].fill_(0.5),
    "the last step": lambda x: x[:, -1].clamp_(min=0),
    "select": lambda x: x.select(1, 1).neg_(),
    "every second": lambda x: x[:, ::2].mul_(3),
    "narrow": lambda x: x.narrow(1, 0, 2).tanh_(),
    "a piece": lambda x: x.detach().split(2, 1)[0].zero_(),
    "a part": lambda x: x.tensor_split([1], 1)[1].zero_(),
    "windows": lambda x: x.unfold(1, 2, 2).mul_(2),
    "a slice of a slice": lambda x: x[:, 1:][:, :1].zero_(),
    "features of a slice": lambda x: x[:, 1:, 1:3].mul_(2),
    "features of a step": lambda x: x[:, 0, 1:3].zero_(),
    "one feature, then steps": lambda x: x[..., 0][:, 1:].zero_(),
    "rows of a slice": lambda x: [row.zero_() for row in x.detach()[:, 1:]],
    "entries of a slice": lambda x: x[:, 1:].flatten(0, 1).zero_(),
    "channels first": lambda x: x.transpose(1, 2)[..., 1:].mul_(2),
    "a step, channels first": lambda x: x.transpose(1, 2)[:, :, 0].zero_(),
    "heads first": lambda x: heads(x)[:, :, 1:].mul_(2),
    "a head": lambda x: heads(x)[:, 0, :2].zero_(),
    "heads in the batch": lambda x: heads(x).view(-1, x.shape[1], 2).mul_(2),
    "relu": lambda x: F.relu(x[:, 1:], inplace=True),
    "a module": lambda x: nn.SiLU(inplace=True)(x[:, 0]),
    "dropout": lambda x: F.dropout(x[:, 1:], 1.0, True, True),
    "copy_": lambda x: x[:, 1:].copy_(x[:, :-1].clone()),
    "without autograd": lambda x: x[:, 1:].detach().mul_(2),
    "added to itself": lambda x: x[:, 1:].__iadd__(x[:, :-1].clone()),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_is_changed_in_a_slice_is_changed_in_its_source(name: str) -> None:
    def body(x: Any) -> Any:
        FORMS[name](x)
        return x

    run(body)


@pytest.mark.parametrize(
    "taken", [lambda x: x[:, 1:], lambda x: x[:, 0], lambda x: x[:, 1:][..., :2], lambda x: x.transpose(1, 2)[..., 1:]]
)
@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x[:, 1:].zero_(), lambda x: x[..., 1].fill_(3)])
def test_a_slice_sees_what_is_changed_later(taken: Any, change: Any) -> None:
    def body(x: Any) -> Any:
        y = taken(x)
        change(x)
        return y

    run(body)


def test_a_slice_outlives_its_source() -> None:
    def body(x: Any) -> Any:
        x = x[:, 1:]
        x[:, :1].mul_(3)
        return x

    run(body)


def test_shifted() -> None:
    def body(x: Any) -> Any:
        out = torch.zeros_like(x)
        out[:, 1:].copy_(x[:, :-1])
        return out

    run(body)


def residual(x: Any) -> Any:
    r = x
    x += x.detach().sin()
    return x + r


def channels(x: Any) -> Any:
    h = x.transpose(1, 2)
    h *= 2
    return x


def features(x: Any) -> Any:
    q = x[..., :2]
    q -= 1
    q[:, 1:] *= 3
    q **= 2
    return x


def scored(x: Any) -> Any:
    s = heads(x) @ heads(x).transpose(-1, -2)
    a = s
    a -= a.detach().amax(-1, True)
    a /= 2
    return s


def steps(x: Any) -> Any:
    x[:, 0] += 1
    x[:, 1:] *= x[:, 1:].detach().clone()
    y = x[:, -1]
    y += 2
    return x


@pytest.mark.parametrize("body", [residual, channels, features, scored, steps])
def test_operators_change_in_place(body: Callable[[Any], Any]) -> None:
    run(body)


def test_operators_of_numbers_and_masks() -> None:
    n = PackedTensor(torch.arange(16), LENS)
    m, i = n > 3, n
    k = m
    k &= n < 9
    k |= n == 0
    k ^= n == 5
    i //= 2
    i %= 5
    i <<= 1
    i |= 1
    i >>= 1
    want = torch.arange(16)
    mask = (want > 3) & (want < 9) | (want == 0)
    assert k is m
    assert i is n
    assert torch.equal(m.values, mask ^ (want == 5))
    assert torch.equal(n.values, (((want // 2 % 5) << 1) | 1) >> 1)
    with pytest.raises(RuntimeError, match="can't be cast"):
        n += 0.5


def test_what_is_no_change_in_place_is_refused() -> None:
    p = make()
    static = StaticPackedTensor(torch.zeros(4, 2), torch.tensor([1, 2]))
    with pytest.raises(TypeError, match="not changed in place; use add"):
        static += 1
    with pytest.raises(ValueError, match=r"windows that overlap .* clone\(\)"):
        p.unfold(1, 2, 1).mul_(2)
    leaf = make(grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        leaf[:, 1:].zero_()


@pytest.mark.parametrize("operator", ["+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<<", ">>"])
@pytest.mark.parametrize("see", [lambda p: p, lambda p: p.transpose(1, 2), lambda p: p @ p.transpose(1, 2)])
def test_padded_tensors_are_not_changed_by_packed_ones(operator: str, see: Any) -> None:
    """Where torch says no more than a TypeError, Python would go on with x = x + p."""
    p = see(PackedTensor(torch.ones(16, 4, dtype=torch.int64), LENS))
    names = {"p": p, "x": torch.ones(p.pad().shape, dtype=torch.int64)}
    with pytest.raises(RuntimeError, match=r"a padded tensor cannot be changed in place .* write x = \w+\(x, p\)"):
        exec(f"x {operator}= p", names)


def test_backward_needs_what_was_changed() -> None:
    x = make(grad=True) * 1
    y = x[:, 1:].exp_()
    out = y * y
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_contiguous_views_are_copies_as_torchs() -> None:
    def body(x: Any) -> Any:
        y = x.transpose(1, 2).contiguous()
        y *= 2
        z = x.unsqueeze(1).contiguous()  # which is no other order
        z += 1
        return x + y.transpose(1, 2)

    run(body)


def test_in_transforms() -> None:
    def body(values: Tensor) -> Tensor:
        x = PackedTensor(values, LENS) * 1
        y = x[:, 1:]
        x[:, 0].mul_(2)
        x[:, 1:][:, :1].zero_()
        x[:, :2] += 1
        x.sin_()
        return (x.values.sum(0) + y.values.cos().sum(0)).sum()

    x = make(grad=True).values
    (want,) = torch.autograd.grad(body(x), x)
    torch.testing.assert_close(torch.func.grad(body)(x.detach()), want)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(body))(torch.stack([x.detach()] * 2))[1], want)
    assert torch.autograd.gradgradcheck(body, (x,))
    with pytest.raises(TypeError, match=r"in torch.func .* write x\[:, a:b\]"):
        torch.func.vmap(lambda v: PackedTensor(v, LENS)[:, 1:][..., :2].zero_().values)(torch.zeros(2, 16, 4))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode: Any) -> None:
    with mode():
        x = make()
        want = x.values.clone()
        y = x[:, 1:][..., :2]
        y.zero_()
        x += 1
        for part in want.split(LENS):
            part[1:, :2] = 0
        assert torch.equal(x.values, want + 1)
        assert torch.equal(y.values, torch.ones_like(y.values))


def test_nothing_is_kept() -> None:
    gc.collect()
    before = len(aliases._COPIES), len(aliases._TAKEN)
    x = make(grad=True) * 1
    memory = weakref.ref(x.values.untyped_storage())
    y, z = x[:, 1:], x[:, 0]
    x[:, 1:] += 1
    y[:, :1].zero_()
    z.mul_(2)
    assert len(aliases._COPIES) > before[0]
    del x
    assert memory() is None
    del y, z
    assert (len(aliases._COPIES), len(aliases._TAKEN)) == before


def test_a_step_is_an_ordinary_tensor_otherwise() -> None:
    y: Any = make()[:, 0]
    assert isinstance(y, Tensor)
    assert repr(y).startswith("tensor(")
    assert type(copy.deepcopy(y)) is type(pickle.loads(pickle.dumps(y))) is Tensor
    assert type(y + 1) is Tensor
    assert type(torch.stack([y, y])) is Tensor


LISTS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "rows": (lambda x: x.transpose(1, 2), [0, 1]),
    "rows by a tensor": (lambda x: x.transpose(1, 2), torch.tensor([0, 1])),
    "steps": (lambda x: x.transpose(1, 2), (slice(None), slice(None), [0])),
    "heads": (heads, (slice(None), [1])),
    "heads of scores": (lambda x: heads(x) @ heads(x).mT, (slice(None), [1])),
}


@pytest.mark.parametrize("name", LISTS)
def test_what_a_list_takes_is_a_copy(name: str) -> None:
    turn, key = LISTS[name]
    x = turn(PackedTensor(torch.randn(9, 4, dtype=torch.float64), [3, 2, 4]))
    before = x._memory.clone()
    taken = x[key]
    taken += 1
    assert torch.equal(x._memory, before)


def test_heads_of_scores_that_a_list_of_sizes_cuts_are_views() -> None:
    x = heads(PackedTensor(torch.randn(9, 4, dtype=torch.float64), [3, 2, 4]))
    scores = x @ x.mT
    wanted = [row * 2 for row in scores.unbind()]
    scores.split([1, 1], 1)[1].mul_(2)
    scores.split(1, 1)[0].mul_(2)
    for one, row in zip(scores.unbind(), wanted, strict=True):
        assert torch.equal(one, row)


# -- writes by index


def triangle(s: Any) -> None:
    s.tril_()


WRITES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "channels first, a channel": (lambda x: x.transpose(1, 2), lambda v: v.__setitem__((slice(None), 0), 0)),
    "channels first, steps": (lambda x: x.transpose(1, 2), lambda v: v.__setitem__((..., slice(1, None)), 3)),
    "channels first, a step": (lambda x: x.mT, lambda v: v.__setitem__((..., 0), v[..., 1].detach().clone())),
    "heads first, a feature": (heads, lambda v: v.__setitem__((..., 0), 0)),
    "heads first, a head": (heads, lambda v: v.__setitem__((slice(None), 0), v[:, 1].detach().sin())),
    "heads first, a row of numbers": (heads, lambda v: v.__setitem__(..., torch.tensor([1.0, 2.0], dtype=D))),
    "a mask": (heads, lambda v: v.__setitem__(v > 0, 0.5)),
}


@pytest.mark.parametrize("name", WRITES)
def test_views_are_written(name: str) -> None:
    see, write = WRITES[name]

    def body(x: Any) -> Any:
        write(see(x))
        return x

    run(body)


SCORES: dict[str, Callable[[Any], Any]] = {
    "keys": lambda s: s.__setitem__((..., slice(1, None)), 0),
    "a query": lambda s: s.__setitem__((..., 0, slice(None)), 1),
    "a head": lambda s: s.__setitem__((slice(None), 0), s[:, 1].detach().sin()),
    "pairs": lambda s: s.__setitem__((slice(None), slice(None), [0, 1], [1, 0]), 2),
    "a mask": lambda s: s.__setitem__(s > 0, 0.5),
    "a slice": lambda s: s[..., 1:, :-1].zero_(),
    "turned": lambda s: s.transpose(-1, -2)[..., 0].mul_(2),
    "one head": lambda s: s[:, 0].mul_(2),
    "the diagonal": lambda s: s.diagonal(0, -2, -1).fill_(1),
    "above it": lambda s: s.diagonal(1, -2, -1).mul_(3),
    "a triangle": triangle,
    "the other": lambda s: s.copy_(s.triu(1)),
    "filled": lambda s: s.fill_(2).zero_(),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_written(name: str) -> None:
    def body(x: Any) -> Any:
        s = heads(x) @ (heads(x) * 0.5).transpose(-1, -2)
        SCORES[name](s)
        return s + x.sum() * 0 if isinstance(x, Tensor) else s + 0 * x.values.sum()

    run(body)


def test_triangles_and_diagonals() -> None:
    def body(x: Any) -> Any:
        s = heads(x) @ (heads(x) * 0.5).transpose(-1, -2)
        return s.tril() - s.triu(1) * 2 + s.diagonal(0, -2, -1).unsqueeze(-1)

    run(body)


def test_self_loops_of_all_rows() -> None:
    """Pairs of all steps of the longest row: each row takes its own."""
    x = make()
    adj = (x @ x.transpose(1, 2)).gt(1).double()
    i = torch.arange(9)
    adj[:, i, i] = 7
    for row in adj.unbind():
        assert (row.diagonal() == 7).all()
    with pytest.raises(IndexError, match="out of range for"):
        adj[:, torch.tensor([9]), torch.tensor([0])] = 1
    with pytest.raises(TypeError, match="write one number"):
        adj[:, i, i] = torch.ones(9, dtype=D)


def test_what_is_not_written() -> None:
    x = make()
    view = x.transpose(1, 2)
    with pytest.raises(ValueError, match="whose longest row has 9"):
        view[:, 0] = torch.zeros(3, 4, dtype=D)
    with pytest.raises(TypeError, match="a packed tensor in the place of an ordinary one"):
        view[..., 0] = x
    with pytest.raises(TypeError, match="several numbers where a mask is true"):
        view[view > 0] = view


# -- copies of views and scores


@pytest.mark.parametrize("see", [lambda x: x, heads, lambda x: x @ x.transpose(1, 2)])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_views_and_scores_are_copied(see: Any, copied: Any) -> None:
    x = see(make())
    assert torch.equal(copied(x), x)


@pytest.mark.parametrize("see", [heads, lambda x: x @ x.transpose(1, 2)])
def test_views_and_scores_are_saved(see: Any) -> None:
    x = see(make())
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["x"], x)


def test_a_module_that_keeps_its_weights_is_copied() -> None:
    module = nn.Module()
    module.weights = heads(make()) @ heads(make()).transpose(-1, -2)  # pyright: ignore
    assert torch.equal(copy.deepcopy(module).weights, module.weights)  # pyright: ignore
