"""Gradients of TensorArray, one behaviour a test; random programs are in test_tensor_array_programs.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import tensorloop as tl
from tests.support.devices import HERE


def values(n: int, *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(HERE).manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(n)]


def filled(xs: list[Tensor], settled: bool = False) -> tl.TensorArray:
    """An array of `xs`; settled: they have left the waiting list for the buffer."""
    array = tl.TensorArray()
    for x in xs:
        array.append(x * 1.0)
    if settled:
        array.stack()
    return array


@pytest.mark.parametrize("settled", [False, True])
def test_a_slot_written_twice_gives_the_first_value_zero(settled: bool) -> None:
    a, b, c = values(3, 4)
    array = filled([a, b], settled)
    array[0] = c * 2
    da, db, dc = grad((array.stack() ** 2).sum(), (a, b, c))
    torch.testing.assert_close(da, torch.zeros_like(a))
    torch.testing.assert_close(db, 2 * b.detach())
    torch.testing.assert_close(dc, 8 * c.detach())


@pytest.mark.parametrize("settled", [False, True])
def test_a_slot_overwritten_by_a_constant_passes_nothing(settled: bool) -> None:
    a, b = values(2, 4)
    array = filled([a, b], settled)
    array[1] = torch.ones(4, dtype=torch.float64)
    da, db = grad(array.stack().sum(), (a, b))
    assert torch.equal(da, torch.ones(4, dtype=torch.float64))
    assert torch.equal(db, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("settled", [False, True])
def test_a_slot_read_twice_gets_the_sum(settled: bool) -> None:
    a, b = values(2, 4)
    array = filled([a, b], settled)
    out = (array[0] * 3).sum() + (array[0] ** 2).sum() + array[:1].sum() + array.stack().sum()
    (da,) = grad(out, a)
    torch.testing.assert_close(da, 5 + 2 * a.detach())


def test_written_and_never_read() -> None:
    a, b, c = values(3, 2)
    array = filled([a, b, c])
    grads = grad(array[:2].sum() * 1.0, (a, b, c), allow_unused=True)
    assert torch.equal(grads[0], torch.ones(2, dtype=torch.float64))
    assert torch.equal(grads[1], grads[0])
    assert torch.equal(grads[2], torch.zeros(2, dtype=torch.float64))


def test_write_read_overwrite_read_each_read_differentiates_to_what_it_read() -> None:
    a, b = values(2, 3)
    array = filled([a])
    first = array[:1]
    array[0] = b * 1.0
    second = array[:1]
    da, db = grad((first**3).sum(), (a, b), allow_unused=True, retain_graph=True)
    torch.testing.assert_close(da, 3 * a.detach() ** 2)
    assert db is None
    da, db = grad((second**3).sum(), (a, b))
    assert torch.equal(da, torch.zeros_like(a))
    torch.testing.assert_close(db, 3 * b.detach() ** 2)


def test_reads_differentiated_jointly_are_not_counted_twice() -> None:
    a, b = values(2, 3)
    array = filled([a, b], settled=True)
    one, two = array[0], array.stack()
    (alone_one,) = grad(one.sum(), a, retain_graph=True)
    (alone_two,) = grad((two**2).sum(), a, retain_graph=True)
    (joint,) = grad(one.sum() + (two**2).sum(), a)
    torch.testing.assert_close(joint, alone_one + alone_two)


def test_a_memory_network_overwrites_views_that_backward_needs() -> None:
    """Every step reads all slots nonlinearly, then overwrites one that the read covered."""
    x = torch.linspace(-1, 1, 3, dtype=torch.float64).requires_grad_()
    turn = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)

    def memory(x: Tensor, array) -> Tensor:
        for _ in range(3):
            array.append(torch.cos(x))
        for t in range(7):
            read = torch.softmax(array.stack(), 0)
            array[t % 3] = turn @ (read * x).sum(0) + torch.sin(read[t % 3])
        return (array.stack() ** 2).sum()

    class Slots(list):
        def stack(self) -> Tensor:
            return torch.stack(self)

    ours, theirs = grad(memory(x, tl.TensorArray()), x)[0], grad(memory(x, Slots()), x)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert gradcheck(lambda x: memory(x, tl.TensorArray()), x)
    assert gradgradcheck(lambda x: memory(x, tl.TensorArray()), x)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (0, 1)])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_gradcheck_at_odd_sizes(n: int, shape: tuple[int, ...]) -> None:
    def through(*xs: Tensor) -> Tensor:
        array = tl.TensorArray()
        total = torch.zeros((), dtype=torch.float64)
        for i, x in enumerate(xs):
            array.append(x)
            total = total + (array[: i + 1] ** 3).sum()
        array[n // 2] = xs[0] * xs[-1]
        return total + torch.sin(array.stack()).sum() + (array.gather([0, n - 1, 0]) ** 2).sum()

    xs = tuple(values(n, *shape))
    assert gradcheck(through, xs)
    assert gradgradcheck(through, xs)


def test_complex_gradients() -> None:
    xs = [torch.randn(3, dtype=torch.complex128).requires_grad_() for _ in range(3)]

    def through(*xs: Tensor) -> Tensor:
        array = filled(list(xs))
        array[1] = xs[0] * array[1].conj()
        return torch.view_as_real(array.stack() * array[:1]).pow(2).sum()

    assert gradcheck(through, tuple(xs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_gradients_have_the_dtype_of_the_values(dtype: torch.dtype) -> None:
    xs = [torch.arange(3, dtype=dtype).requires_grad_() for _ in range(2)]
    array = filled(xs)
    out = array[:1].sum() + array.stack().sum() * 2
    grads = grad(out, xs)
    assert [g.dtype for g in grads] == [dtype, dtype]
    assert grads[0].tolist() == [3, 3, 3]
    assert grads[1].tolist() == [2, 2, 2]


def test_gather_sums_duplicates_and_scatter_gives_the_overwritten_value_zero() -> None:
    a, b, c = values(3, 2)
    array = filled([a, b, c])
    da, db, dc = grad(array.gather([1, 1, 2]).sum(), (a, b, c))
    assert [g[0].item() for g in (da, db, dc)] == [0, 2, 1]

    (v,) = values(1, 3, 2)
    array = filled([a, b, c]).scatter([0, 2, 0], v * 1.0)
    da, db, dv = grad(array.stack().sum(), (a, b, v))
    assert [g[0].item() for g in (da, db)] == [0, 1]
    assert dv[:, 0].tolist() == [0, 1, 1]


def test_gather_of_any_shape_and_an_index_changed_later() -> None:
    xs = values(4, 2)
    index = torch.tensor([[0, -1], [2, 2]])
    array = filled(xs)
    read = array.gather(index)
    assert read.shape == (2, 2, 2)
    index.zero_()
    grads = grad(read.sum(), xs)
    assert [g[0].item() for g in grads] == [1, 0, 2, 1]


def test_write_rows_routes_each_row_to_its_slot() -> None:
    a, b, x = values(3, 3, 2)
    array = filled([a, b])
    pos, where = torch.tensor([0, 2, 1]), torch.tensor([True, True, False])
    array.write_rows(pos, x * 1.0, where)
    pos.zero_()
    where.fill_(True)
    assert len(array) == 3
    weights = torch.arange(9, dtype=torch.float64).view(3, 3, 1)
    da, db, dx = grad((array.stack() * weights).sum(), (a, b, x))
    assert da[:, 0].tolist() == [0, 1, 2]
    assert db[:, 0].tolist() == [3, 4, 5]
    assert dx[:, 0].tolist() == [0, 7, 0]
    assert array[2][0].tolist() == [0, 0]


def test_extend_and_unstack_and_iteration() -> None:
    (v,) = values(1, 5, 2)
    array = tl.TensorArray.unstack(v).extend(v * 2)
    out = sum((x * (i + 1)).sum() for i, x in enumerate(array))
    assert isinstance(out, Tensor)
    (dv,) = grad(out, v)
    assert dv[:, 0].tolist() == [i + 1 + 2 * (i + 6) for i in range(5)]


@pytest.mark.parametrize("order", [range(200), range(199, -1, -1), [3, 150, 3, 64, 65, 63, 199, 0]])
def test_reads_of_an_unstacked_tensor_in_any_order(order) -> None:
    (v,) = values(1, 200, 2)
    array = tl.TensorArray.unstack(v * 1.0)
    (ours,) = grad(sum((array[i] ** 2 * k).sum() for k, i in enumerate(order, 1)), v)  # type: ignore[arg-type]
    (theirs,) = grad(sum((v[i] ** 2 * k).sum() for k, i in enumerate(order, 1)), v)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_retain_graph_and_partial_inputs_twice() -> None:
    a, b, c = values(3, 2)
    array = filled([a, b])
    out = (array.stack() ** 2).sum() * 1.0
    array.append(c * out)
    total = (array.stack() ** 3).sum()
    reference = torch.stack([a, b, c * (torch.stack([a, b]) ** 2).sum()])
    expected = grad((reference**3).sum(), (a, b, c))
    for _ in range(2):
        for i, x in enumerate((a, b, c)):
            torch.testing.assert_close(grad(total, x, retain_graph=True)[0], expected[i])
    for x, e in zip(grad(total, (a, b, c)), expected, strict=True):
        torch.testing.assert_close(x, e)
    # nothing is saved by the array itself, but the functions around it have been freed
    with pytest.raises(RuntimeError, match="second time"):
        grad(total, a)


def test_backward_between_writes() -> None:
    a, b = values(2, 2)
    array = filled([a])
    (array.stack() ** 2).sum().backward(retain_graph=True)
    torch.testing.assert_close(a.grad, 2 * a.detach())
    array.append(b * 1.0)
    (array.stack() ** 2).sum().backward()
    torch.testing.assert_close(a.grad, 4 * a.detach())
    torch.testing.assert_close(b.grad, 2 * b.detach())


def test_the_gradient_that_enters_is_never_written_into() -> None:
    """`torch.stack` fails this: the leaves' .grad are views of `g`, and the second backward adds into them."""
    xs = values(3, 2)
    array = tl.TensorArray()
    for x in xs:
        array.append(x)
    out = array.stack()
    g = torch.ones(3, 2, dtype=torch.float64)
    for _ in range(3):
        out.backward(g, retain_graph=True)
    assert torch.equal(g, torch.ones(3, 2, dtype=torch.float64))
    assert all(torch.equal(x.grad, torch.full((2,), 3.0, dtype=torch.float64)) for x in xs if x.grad is not None)


def test_gradients_kept_by_hooks_stay_what_they_were() -> None:
    xs = values(4, 2)
    array, kept, copies = tl.TensorArray(), [], []
    total = torch.zeros((), dtype=torch.float64)

    def keep(g: Tensor) -> None:
        kept.append(g)
        copies.append(g.clone())

    for t, x in enumerate(xs):
        y = x * 1.0
        y.register_hook(keep)
        array.append(y)
        view = array[: t + 1]
        view.register_hook(keep)
        total = total + (view**2).sum()
    total.backward()
    assert len(kept) == 8
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_a_parameter_s_gradient_does_not_keep_the_gradient_buffer() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    array = tl.TensorArray()
    for _ in range(50):
        array.append(torch.ones(2, requires_grad=True) * 2)
    array.stack()
    array.append(weight)
    array.stack().sum().backward()
    assert weight.grad is not None
    assert weight.grad.untyped_storage().nbytes() == 2 * 4


def test_interleaved_arrays_that_feed_each_other() -> None:
    x = torch.linspace(0.3, 1, 2, dtype=torch.float64).requires_grad_()

    class Slots(list):
        def __getitem__(self, i: Any) -> Any:
            return torch.stack(list(self)[i]) if isinstance(i, slice) else super().__getitem__(i)

    def chain(x: Tensor, make: Callable) -> Tensor:
        a, b = make(), make()
        a.append(x * 1.0)
        b.append(x * 2)
        for t in range(5):
            a.append(torch.sin(b[: t + 1].sum(0)))
            b.append(torch.cos(a[: t + 2].sum(0)))
        return (a[3] * b[4]).sum()

    assert gradcheck(lambda x: chain(x, tl.TensorArray), x)
    torch.testing.assert_close(grad(chain(x, tl.TensorArray), x), grad(chain(x, Slots), x))


def test_holes_and_reverse_filling() -> None:
    xs = values(4, 2)
    array = tl.TensorArray(capacity=4)
    for i in reversed(range(4)):
        array[i] = xs[i] * (i + 1)
    grads = grad(array.stack().sum(), xs)
    assert [g[0].item() for g in grads] == [1, 2, 3, 4]


def test_a_view_changed_in_place_that_backward_needs_is_caught() -> None:
    (a,) = values(1, 3)
    view = filled([a])[:1]
    with pytest.raises(RuntimeError, match="modified inplace"):
        view.add_(1)
    out = (view**2).sum()
    with torch.no_grad():
        view.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        out.backward()


def test_no_grad_regions_cut_the_gradient_as_in_a_list_of_slots() -> None:
    a, b = values(2, 2)
    array = filled([a])
    with torch.no_grad():
        array.append(b * 1.0)
        assert not array.stack().requires_grad
        assert not array[0].requires_grad
    da, db = grad(array.stack().sum(), (a, b), allow_unused=True)
    assert da[0].item() == 1
    assert db is None


def test_detach_and_to() -> None:
    (a,) = values(1, 2)
    array = filled([a])
    assert not array.detach().stack().requires_grad
    (da,) = grad(array.to(torch.float32).stack().sum(), a)
    assert da.dtype == torch.float64
    assert da.tolist() == [1, 1]


def test_the_history_of_an_unstacked_tensor_is_what_it_was_then() -> None:
    """Once the array has copied it, in-place changes of the tensor, or of its history, are its owner's business."""
    (p,) = values(1, 3, 2)
    v = p * 1
    array = tl.TensorArray.unstack(v).append(torch.zeros(2, dtype=torch.float64))
    v.mul_(3)
    (d,) = grad(array.stack().sum(), p)
    assert torch.equal(d, torch.ones_like(p))

    v = p * 1
    array = tl.TensorArray.unstack(v)
    v.detach_()
    (d,) = grad(array.stack().sum() + array[0].sum(), p)
    assert d[:, 0].tolist() == [2, 1, 1]


@pytest.mark.parametrize("cut", ["detach_", "requires_grad_"])
def test_a_waiting_value_detached_in_place_is_refused_and_can_be_replaced(cut: str) -> None:
    (p,) = values(1, 2)
    array = tl.TensorArray()
    h = p * 2 if cut == "detach_" else p.detach().clone().requires_grad_()
    array.append(h).append(p * 3)
    h.detach_() if cut == "detach_" else h.requires_grad_(False)
    for use in (array.stack, lambda: array[0], lambda: array.append(p).extend([p]).stack()):
        with pytest.raises(RuntimeError, match=r"slot 0 was changed in place \(or detached\)"):
            use()
    assert torch.equal(array[1], p * 3)
    array[0] = p * 5
    (d,) = grad(array[:2].sum(), p)
    assert d.tolist() == [8, 8]


def test_every_read_of_an_unstacked_row_is_a_tensor_of_its_own() -> None:
    (v,) = values(1, 3, 2)
    array = tl.TensorArray.unstack(v)
    a = array[0]
    a.register_hook(lambda g: g * 10)
    b = array[0]
    assert a is not b
    (d,) = grad(b.sum(), v)
    assert d[0].tolist() == [1, 1]
    with torch.no_grad():
        a.zero_()
    assert torch.equal(array[0], v[0])


def test_iteration_gives_copies_that_may_be_changed() -> None:
    xs = values(3, 2)
    array = filled(xs)
    with torch.no_grad():
        for row in array:
            row.mul_(0)
    assert torch.equal(array.stack(), torch.stack(xs))
    assert len(list(array)) == 3


def test_a_sparse_gradient_of_a_read() -> None:
    (table,) = values(1, 4, 2)
    array = tl.TensorArray().extend(table * 2)
    out = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), array.stack(), sparse=True)
    (d,) = grad(out.sum(), table)
    assert d[:, 0].tolist() == [0, 4, 0, 2]


def test_a_subclass_turns_the_array_into_a_list_and_loses_nothing() -> None:
    class Marked(Tensor):
        pass

    (p,) = values(1, 2)
    x = p * 2
    array = tl.TensorArray().append(x)
    with torch.no_grad():
        array.append(torch.zeros(2, dtype=torch.float64).as_subclass(Marked))
        x.mul_(5)
    assert torch.equal(array[0].as_subclass(Tensor), p * 2)
    (d,) = grad(array.stack().sum(), p)
    assert d.tolist() == [2, 2]
