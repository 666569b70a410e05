"""The limits in `docs/limits.md` and `docs/api/loop.md`, of loops: errors by their words, others by what happens.

The lines on checkpointed loops: `test_loop_limits_replay.py`.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad, grad
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

import tensorloop as tl
from tests.support.loop_cases import Counter, randn, rotate

STEPS = 6


def swung(c: Tensor, w: Tensor) -> Tensor:
    """One step that keeps the size of c (2,) and depends on w (2,)."""
    return rotate(c) + (c * w).sin()


def looped(body: Callable[[int, Tensor], Tensor], checkpoints: Any = 2) -> Tensor:
    return tl.fori_loop(0, STEPS, body, torch.ones(2, dtype=torch.float64), checkpoints=checkpoints)


# -- all loops


def test_until_of_many_dims_or_batched_is_refused() -> None:
    def run(x: Tensor) -> Any:
        return tl.scan(lambda c, _: (c + 1, c), x, None, 3, until=lambda c: c > 2)

    with pytest.raises(TypeError, match=r"scan: until must return a bool or a bool tensor of one element .* got a"):
        run(torch.zeros(3, 2))
    with pytest.raises(TypeError, match="until is batched by vmap; only while_loop stops each element on its own"):
        vmap(run)(torch.zeros(3))


def test_reverse_needs_a_known_length() -> None:
    with pytest.raises(ValueError, match="reverse=True needs xs or length=: there is no last index to begin at"):
        tl.scan(lambda c, _: (c, None), 0, until=lambda c: True, reverse=True)


@pytest.mark.parametrize("loop", ["scan", "map"])
def test_no_steps_make_one_call_on_tensors_without_numbers(loop: str, capsys: pytest.CaptureFixture[str]) -> None:
    def look(x: Tensor) -> Tensor:
        print(type(x).__name__, *x.shape)
        return x.new_zeros(4)

    def wrong(x: Tensor) -> Tensor:
        return x + x.new_zeros(3)

    def run(fn: Callable[[Tensor], Tensor]) -> Tensor:
        xs = torch.zeros(0, 2)
        return tl.map(fn, xs) if loop == "map" else tl.scan(lambda c, x: (c, fn(x)), 0, xs)[1]

    assert tuple(run(look).shape) == (0, 4)
    assert capsys.readouterr().out == "FakeTensor 2\n"
    with pytest.raises(RuntimeError) as error:
        run(wrong)
    assert f"{loop} has no steps to do" in "".join(error.value.__notes__)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("loop", ["scan", "map", "map in chunks"])
def test_what_the_body_keeps_in_its_first_step_is_not_made_by_no_steps(loop: str, compile: bool) -> None:
    kept: dict[str, Tensor] = {}

    def masks(x: Tensor) -> Tensor:
        if "mask" not in kept:
            kept["mask"] = torch.ones_like(x)
        return x * kept["mask"]

    xs = torch.zeros(0, 2)
    if loop == "scan":
        tl.scan(lambda c, x: (c, masks(x)), 0, xs, compile=compile)
    else:
        tl.map(masks, xs, compile=compile, batch_size=2 if loop == "map in chunks" else None)
    assert not kept


def test_map_in_chunks_follows_the_rules_of_vmap() -> None:
    xs = torch.randn(6, 2)
    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        tl.map(lambda x: x if x.sum() > 0 else -x, xs, batch_size=2)
    with pytest.raises(RuntimeError, match=r"vmap: It looks like you're calling .item"):
        tl.map(lambda x: x * x.sum().item(), xs, batch_size=2)
    with pytest.raises(ValueError, match="checkpoints and batch_size do not go together; leave one out"):
        tl.map(torch.sin, xs, batch_size=2, checkpoints=2)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_closed_over_tensor_does_not_shrink(checkpoints: Any) -> None:
    step = torch.arange(1.0, 5.0)
    with pytest.raises(RuntimeError, match=r"size of tensor a \(2\) must match the size of tensor b \(4\)"):
        tl.while_loop(lambda c: c < 6, lambda c: c + step, torch.zeros(4), compact=True, checkpoints=checkpoints)
    out = tl.while_loop(
        lambda c, step: c < 6,
        lambda c, step: c + step,
        torch.zeros(4),
        context=step,
        compact=True,
        checkpoints=checkpoints,
    )
    assert out.tolist() == [6, 6, 6, 8]


class Tally:
    """No pytree: a leaf to the loop."""

    def __init__(self, n: int) -> None:
        self.n = n


def test_an_object_in_the_carry_that_steps_change_is_refused() -> None:
    w = randn(2)

    def changing(i: int, carry: Any) -> Any:
        tally, c = carry
        tally.n += 1
        return tally, swung(c, w * tally.n)

    def making(i: int, carry: Any) -> Any:
        tally, c = carry
        return Tally(tally.n + 1), swung(c, w * (tally.n + 1))

    def run(body: Any, checkpoints: Any) -> Tensor:
        init = Tally(0), torch.ones(2, dtype=torch.float64)
        return grad(tl.fori_loop(0, STEPS, body, init, checkpoints=checkpoints)[1].sum(), w)[0]

    torch.testing.assert_close(run(changing, None), run(making, None))
    torch.testing.assert_close(run(making, 2), run(making, None))
    with pytest.raises(RuntimeError, match="the body reads the attribute n to which an earlier step has written"):
        run(changing, 2)


# -- rows that stop

NEVER = torch.tensor([-1.0, 1.0, 3.0], dtype=torch.float64)  # the first stops at once; its root is NaN


def rooted(c: Tensor, w: Tensor) -> Tensor:
    return c + (w * c).sqrt() * 3


def runs(c: Tensor) -> Tensor:
    return (c > 0) & (c < 10)


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("compact", [False, True])
def test_nan_from_the_carry_of_a_stopped_row_reaches_nothing(compact: bool, checkpoints: Any) -> None:
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = tl.while_loop(runs, lambda c: rooted(c, w), NEVER, compact=compact, checkpoints=checkpoints)
    alone = tl.while_loop(runs, lambda c: rooted(c, w), NEVER[1:])
    torch.testing.assert_close(out, torch.cat([NEVER[:1], alone]))
    torch.testing.assert_close(grad(out.sum(), w), grad(alone.sum(), w))


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("compact", [False, True])
def test_a_body_that_mixes_rows_sees_the_last_real_input_of_stopped_ones(compact: bool, checkpoints: Any) -> None:
    """With compact=True it does not see them at all."""
    init, limits = randn(3, 2), [2, 4, 1]

    def mixed(x: Tensor) -> Tensor:
        return torch.sin(3 * x) + x.mean(0)

    got = tl.while_loop(
        lambda c: c[1] < torch.tensor(limits)[c[2]],
        lambda c: (mixed(c[0]), c[1] + 1, c[2]),
        (init, torch.zeros(3, dtype=torch.int64), torch.arange(3)),
        compact=compact,
        checkpoints=checkpoints,
    )[0]
    state, last = list(init.unbind(0)), list(init.unbind(0))
    for t in range(max(limits)):
        on = [b for b in range(3) if t < limits[b]]
        seen = on if compact else range(3)
        last = [state[b] if b in on else last[b].detach() for b in range(3)]
        new = mixed(torch.stack([last[b] for b in seen]))
        state = [new[list(seen).index(b)] if b in on else state[b] for b in range(3)]
    plain = torch.stack(state)
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(grad(got.sum(), init), grad(plain.sum(), init))


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("compact", [False, True])
def test_a_shorter_array_in_the_place_of_another(compact: bool, checkpoints: Any) -> None:
    """Rows stop after 1, 2 and 3 steps; the body brings a new array at each step."""

    def run(lengths: list[int]) -> Any:
        def body(carry: Any) -> Any:
            _, x, limit, n = carry
            new = tl.TensorArray.unstack((x + 1).expand(lengths[int(n.max())], len(x)))
            return new, x + 1, limit, n + 1

        zero = torch.zeros(3, dtype=torch.int64)
        init = tl.TensorArray.unstack(torch.zeros(1, 3)), torch.zeros(3), torch.tensor([1, 2, 3]), zero
        return tl.while_loop(lambda c: c[3] < c[2], body, init, compact=compact, checkpoints=checkpoints)[0].stack()

    assert run([2, 2, 3]).tolist() == [[1, 2, 3], [1, 2, 3], [0, 0, 3]]
    with pytest.raises(ValueError, match="put an array of 1 slots in the place of one of 2, while rows have stopped"):
        run([2, 1, 1])


@pytest.mark.parametrize("arrays", [False, True])
def test_random_numbers_are_drawn_for_the_rows_in_the_batch(arrays: bool) -> None:
    limits, w = torch.arange(8), torch.ones(8, dtype=torch.float64, requires_grad=True)

    def body(carry: Any) -> Any:
        c, n, limit, array = carry
        noise = torch.rand(len(c), dtype=torch.float64)
        return c + (c * noise).sin(), n + 1, limit, array.append(c) if arrays else array

    def run(checkpoints: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        init = w * 1, limits * 0, limits, tl.TensorArray() if arrays else None
        out = tl.while_loop(lambda c: c[1] < c[2], body, init, compact=True, checkpoints=checkpoints)[0]
        return out.detach(), grad(out.sum(), w)[0]

    plain, one, two = run(None), run(1), run(2)
    torch.testing.assert_close(one, two)
    assert torch.equal(one[0], plain[0]) == torch.equal(one[1], plain[1]) == (not arrays)


def test_nan_of_an_element_that_never_runs_under_vmap_reaches_what_is_closed_over() -> None:
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    init = NEVER.clone().requires_grad_()
    out = vmap(lambda x: tl.while_loop(runs, lambda c: rooted(c, w), x))(init)
    assert out[0].item() == -1
    d_init, d_w = grad(out.sum(), (init, w))
    assert d_init[0].item() == 1
    assert torch.isfinite(d_init).all()
    assert d_w.isnan()


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("how", ["closed over", "context", "context, compact"])
def test_nan_from_what_is_closed_over_or_in_context(how: str, checkpoints: Any) -> None:
    a = torch.tensor([0.0, 4.0, 9.0], dtype=torch.float64, requires_grad=True)
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    init = torch.tensor([9.0, 1.0, 1.0], dtype=torch.float64)
    if how == "closed over":
        out = tl.while_loop(lambda c: c < 5, lambda c: c + (w * a).sqrt(), init, checkpoints=checkpoints)
    else:
        out = tl.while_loop(
            lambda c, a: c < 5,
            lambda c, a: c + (w * a).sqrt(),
            init,
            context=a,
            compact=how.endswith("compact"),
            checkpoints=checkpoints,
        )
    d_a, d_w = grad(out.sum(), (a, w))
    assert torch.isfinite(out).all()
    assert torch.isfinite(d_a[1:]).all()
    assert d_a[0].isnan().item() == d_w.isnan().item() == (how != "context, compact")


# -- transforms and compilers


def test_checkpoints_are_ignored_under_transforms_and_in_forward_mode() -> None:
    body = Counter(lambda i, c: swung(c, c))

    def run(c: Tensor) -> Tensor:
        return tl.fori_loop(0, STEPS, body, c, checkpoints=2).sum()

    start = torch.ones(2, dtype=torch.float64)
    found = torch.func.grad(run)(start)
    assert body.calls == STEPS
    with forward_ad.dual_level():
        forward_ad.unpack_dual(run(forward_ad.make_dual(start, start)))
    assert body.calls == 2 * STEPS
    torch.testing.assert_close(grad(run(start.requires_grad_()), start)[0], found)
    assert body.calls > 4 * STEPS


def test_a_graph_of_the_gradient_runs_the_loop_again_as_a_plain_one() -> None:
    w = randn(2)
    body = Counter(lambda i, c: swung(c, w))
    out = looped(body)
    assert body.calls == STEPS
    (first,) = grad(out.sum(), w, create_graph=True)
    assert body.calls == 2 * STEPS
    true = grad(grad(looped(body, None).sum(), w, create_graph=True)[0].sum(), w)
    torch.testing.assert_close(grad(first.sum(), w), true)


def scanned(xs: Tensor) -> Tensor:
    return tl.scan(lambda c, x: (rotate(c) + x, None), xs[0], xs)[0]


def whiled(x: Tensor) -> Tensor:
    return tl.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x)


class Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (scanned, "scan"),
        (whiled, "while_loop"),
        (lambda x: tl.fori_loop(0, 3, lambda i, c: c + 1, x), "fori_loop"),
        (lambda x: tl.map(torch.sin, x), "map"),
    ],
    ids=["scan", "while_loop", "fori_loop", "map"],
)
def test_one_graph_is_refused_by_name(function: Callable[[Tensor], Tensor], name: str) -> None:
    torch.compiler.reset()
    x = torch.zeros(3, 2)
    with pytest.raises(Unsupported, match=f"{name} runs a Python loop"):
        torch.compile(function, fullgraph=True, backend="eager")(x)
    with pytest.raises(Unsupported, match=f"{name} runs a Python loop"):
        torch.export.export(Module(function), (x,), strict=True)


def test_an_associative_scan_is_traced_as_one_graph() -> None:
    torch.compiler.reset()
    x = torch.randn(3, 2)
    compiled = torch.compile(lambda x: tl.associative_scan(torch.add, x), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x.cumsum(0))


def test_export_and_make_fx_unroll() -> None:
    xs, others = torch.randn(4, 2), torch.randn(4, 2)
    exported = torch.export.export(Module(scanned), (xs,), strict=False).module()
    for traced in (exported, make_fx(scanned)(xs)):
        torch.testing.assert_close(traced(others), scanned(others))
    with pytest.raises(Exception, match="Could not guard on data-dependent expression"):
        torch.export.export(Module(whiled), (torch.zeros(3),), strict=False)


@pytest.mark.filterwarnings("ignore::tensorloop.loop.NotCompiledWarning")
@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"compile": True, "checkpoints": 2}], ids=str)
def test_make_fx_with_symbolic_sizes_unrolls(options: Any) -> None:
    """T becomes a number; the other sizes stay symbols."""

    def stepped(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(c) * x, c + x

    def counted(c: Any) -> Any:
        return c[0].sin(), c[1] + 1

    def grown(array: tl.TensorArray, x: Tensor) -> tuple[tl.TensorArray, Tensor]:
        return array.append(x.cos()), array[:].sum(0)

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "scan": lambda x: tl.scan(stepped, x[0], x, **options)[1],
        "reverse": lambda x: tl.scan(stepped, x[:, 0], x, dim=1, reverse=True)[0],
        "map": lambda x: tl.map(torch.sin, x, **options),
        "chunks": lambda x: tl.map(torch.sin, x, batch_size=2),
        "fori_loop": lambda x: tl.fori_loop(0, x.shape[0], lambda i, c: c * x[i], x[0]),
        "while_loop": lambda x: tl.while_loop(lambda c: c[1] < 3, lambda c: (c[0].sin(), c[1] + 1), (x, 0), **options)[
            0
        ],
        "associative_scan": lambda x: tl.associative_scan(torch.mul, x),
        "array": lambda x: tl.scan(grown, tl.TensorArray().append(x[0]), x)[1],
        "gradient": lambda x: grad(tl.scan(stepped, x[0], x, **options)[1].sum(), x)[0],
    }
    for name, function in functions.items():
        x = torch.rand(4, 3, requires_grad=name == "gradient")
        traced = make_fx(function, tracing_mode="symbolic")(x)
        again = torch.rand(4, 3, requires_grad=name == "gradient")
        torch.testing.assert_close(traced(again), function(again), msg=lambda text, name=name: f"{name}: {text}")
        wider = torch.rand(4, 5, requires_grad=name == "gradient")
        if name not in ("reverse",):  # runs over that dim
            torch.testing.assert_close(traced(wider), function(wider))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_jit_trace_bakes_in_the_number_of_steps() -> None:
    traced: Any = torch.jit.trace(whiled, (torch.zeros(3),), check_trace=False)
    assert whiled(torch.full((3,), 8.0)).tolist() == [8, 8, 8]
    assert traced(torch.full((3,), 8.0)).tolist() == [11, 11, 11]


def changing(c: Any, given: Tensor) -> Any:
    given.add_(0.1)
    return c[0] * given, c[1], c[2] + 1


@pytest.mark.parametrize("steps", [[3, 0, 5, 1, 5, 2], [1, 3], [2, 2, 2]])
def test_a_context_changed_in_place_where_rows_leave(steps: list[int]) -> None:
    """At the next cut, and at the end, the rows would be the caller's as they were."""

    def run(compact: bool) -> Any:
        init = (torch.ones(len(steps), 1), torch.tensor(steps), torch.zeros(len(steps), dtype=torch.int64))
        given = torch.ones(len(steps), 1)
        return tl.while_loop(lambda c, g: c[2] < c[1], changing, init, context=given, compact=compact)[0]

    expected = [[math.prod(1 + 0.1 * (i + 1) for i in range(n))] for n in steps]
    torch.testing.assert_close(run(False), torch.tensor(expected))
    with pytest.raises(RuntimeError, match=r"while_loop: context, or .* was changed in place .* in the carry"):
        run(True)


def test_a_context_changed_in_place_beside_packed_rows() -> None:
    def body(c: Tensor, x: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return c + x * given["a"].add_(1), c

    xs, context = tl.PackedTensor(torch.ones(4, 1), [3, 1]), {"a": torch.zeros(2, 1)}
    with pytest.raises(RuntimeError, match=re.escape("scan: context['a'], or a tensor")):
        tl.scan(body, torch.zeros(2, 1), xs, context=context)


def test_a_shared_number_in_a_context_may_count() -> None:
    """It has no rows, so none leave it."""

    def body(c: Any, given: Any) -> Any:
        given["k"].add_(1)
        return c[0] + 1, c[1] + given["k"]

    lens, init = torch.tensor([1, 3, 2, 5]), (torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    context = {"lens": lens, "k": torch.tensor(0)}
    out = tl.while_loop(lambda c, given: c[0] < given["lens"], body, init, context=context, compact=True)
    assert out[1].tolist() == [1, 6, 3, 15]


def test_a_batched_context_changed_in_place_where_rows_leave() -> None:
    def run(given: Tensor) -> Tensor:
        init = (torch.ones(2, 1), torch.tensor([1, 3]), torch.zeros(2, dtype=torch.int64))
        return tl.while_loop(lambda c, g: c[2] < c[1], changing, init, context=given, compact=True)[0]

    with pytest.raises(RuntimeError, match="changed in place"):
        vmap(run)(torch.ones(3, 2, 1))
