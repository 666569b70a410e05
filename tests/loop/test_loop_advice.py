"""What loops say where Python or torch would speak of something else: the right word, added to the error."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import tensorloop
from tests.support.loop_cases import randn, with_and_without_checkpoints

tl: Any = tensorloop  # the calls here are wrong on purpose, and no type checker need say so
XS = torch.arange(15.0).view(5, 3)
STEPS = list(torch.zeros(5, 2, 3).unbind(0))


def words(call: Callable[[], Any], kind: type[Exception]) -> str:
    """The error's text and notes."""
    with pytest.raises(kind) as caught:
        call()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


# -- keywords


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tl.scan(None, XS, XS, axis=0), "scan: there is no argument axis=; here that is dim="),
        (lambda: tl.scan(None, XS, max_length=3), "scan: there is no argument max_length=; here that is length="),
        (lambda: tl.scan(None, XS, n=3), "scan: there is no argument n=; here that is length="),
        (lambda: tl.scan(None, XS, initializer=3), "scan: there is no argument initializer=; here that is init="),
        (lambda: tl.while_loop(bool, None, 0, maximum_iterations=3), "maximum_iterations=; here that is max_steps="),
        (lambda: tl.while_loop(bool, None, 0, num_steps=3), "num_steps=; here that is max_steps="),
        (
            lambda: tl.fori_loop(0, 3, None, 0, unroll=2),
            "fori_loop: there is no argument unroll=; here that is compile=",
        ),
        (lambda: tl.map(torch.sin, XS, axis=1), "map: there is no argument axis=; here that is dim="),
        (lambda: tl.associative_scan(torch.add, XS, axis=1), "associative_scan: there is no argument axis=; here that"),
        (
            lambda: tl.TensorArray.unstack(XS, element_shape=3),
            "TensorArray.unstack: there is no argument",
        ),
        (
            lambda: tl.attention(XS, XS, XS, casual=True),
            "attention: there is no argument casual=; did you mean",
        ),
        (lambda: tl.TensorArray(size=3), "TensorArray: there is no argument size=; here that is capacity="),
        (lambda: tl.TensorArray(clear_after_read=True), "no argument clear_after_read=; it takes element_shape, dtype"),
    ],
)
def test_keywords_of_elsewhere(call: Callable[[], Any], message: str) -> None:
    assert message in words(call, TypeError)


# -- arguments of the user's functions


@with_and_without_checkpoints
def test_functions_of_other_arguments(checkpoints: Any) -> None:
    def scan(body: Any, **options: Any) -> Callable[[], Any]:
        return lambda: tl.scan(body, randn(3), XS.double(), checkpoints=checkpoints, **options)

    message = words(scan(lambda c: (c, None)), TypeError)
    assert "scan: body_fn is called as body_fn(carry, x), but takes (c)" in message
    message = words(scan(lambda c, x: (c, None), context=3), TypeError)
    assert "body_fn is called as body_fn(carry, x, context), but takes (c, x)" in message
    message = words(scan(lambda c, x: (c, None), until=lambda: True), TypeError)
    assert "until is called as until(carry), but takes ()" in message
    message = words(lambda: tl.fori_loop(0, 3, lambda c: c, XS, checkpoints=checkpoints), TypeError)
    assert "fori_loop: body_fn is called as body_fn(i, carry), but takes (c)" in message
    message = words(lambda: tl.while_loop(lambda a, b: True, None.__eq__, (1, 2), checkpoints=checkpoints), TypeError)
    assert "cond_fn is called as cond_fn(carry), but takes (a, b); a tree of several leaves is one argument" in message
    message = words(lambda: tl.map(torch.nn.Bilinear(3, 3, 2), (XS, XS), checkpoints=checkpoints), TypeError)
    assert "map: fn is called as fn(x), but takes (input1: torch.Tensor, input2: torch.Tensor)" in message


def test_functions_of_slabs_and_chunks_of_other_arguments() -> None:
    assert "fn is called as fn(a, b), but takes (a)" in words(lambda: tl.associative_scan(lambda a: a, XS), TypeError)
    message = words(lambda: tl.map(lambda a, b: a, (XS, XS), batch_size=2), TypeError)
    assert "map: fn is called as fn(x), but takes (a, b)" in message


@with_and_without_checkpoints
def test_a_type_error_of_the_body_stays_its_own(checkpoints: Any) -> None:
    def body(carry: Tensor, x: Tensor) -> Any:
        raise TypeError("my own")

    assert words(lambda: tl.scan(body, randn(3), XS, checkpoints=checkpoints), TypeError).startswith(
        "my own\nraised in"
    )


# -- arguments swapped


@with_and_without_checkpoints
@pytest.mark.parametrize(
    "body",
    [
        lambda h, i: torch.sin(h),
        lambda h, i: h @ torch.ones(3, 3),
        lambda state, k: state[0] + 1,
        lambda h, i: h + 1,
        lambda carry, other: carry * 2,
        lambda h, i: i.append(h) + h,
        lambda h, i: torch.ones(3)[h],
    ],
)
def test_a_body_of_fori_loop_that_takes_its_arguments_the_other_way_round(body: Any, checkpoints: Any) -> None:
    with pytest.raises((TypeError, AttributeError, IndexError)) as caught:
        tl.fori_loop(0, 3, body, torch.zeros(3), checkpoints=checkpoints)
    assert "fori_loop calls body_fn(i, carry), the number first" in caught.value.__notes__


def test_other_errors_in_fori_loop_say_nothing_of_it() -> None:
    message = words(lambda: tl.fori_loop(0, 3, lambda i, c: {"a": c["a"].double()}, {"a": XS}), TypeError)
    assert "number first" not in message


# -- xs as a sequence


@pytest.mark.parametrize(
    "call",
    [
        lambda: tl.scan(lambda h, x: (h + x.sum(), None), torch.zeros(3), STEPS),
        lambda: tl.scan(lambda h, x: (torch.nn.Linear(3, 3)(x), None), torch.zeros(3), tuple(STEPS)),
        lambda: tl.map(lambda x: x @ torch.ones(3), STEPS),
        lambda: tl.map(lambda x: x.sum(), STEPS, batch_size=2),
        lambda: tl.associative_scan(torch.add, STEPS),
        lambda: tl.scan(lambda h, x: (h, None), torch.zeros(3), STEPS, length=5),
        lambda: tl.scan(lambda h, x: (h, None), torch.zeros(3), [XS, XS[1:]]),
    ],
)
def test_a_sequence_of_steps_as_xs(call: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError)) as caught:
        call()
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(r"xs is a sequence of \d tensors, which is a tree", message)
    assert "give torch.stack(xs) or a TensorArray" in message


def test_a_tree_of_different_tensors_is_not_taken_for_steps() -> None:
    message = words(lambda: tl.scan(lambda h, x: (h + x, None), torch.zeros(3), [XS, XS[:, :2]]), TypeError)
    assert "xs is a sequence" not in message


# -- lists that grow


@with_and_without_checkpoints
def test_a_list_that_grows_in_the_carry(checkpoints: Any) -> None:
    for body, init in (
        (lambda c, x: ([*c, x], None), []),
        (lambda c, x: ({"seen": (*c["seen"], x), "h": c["h"] + x}, None), {"seen": (XS[0],), "h": randn(3)}),
    ):
        message = words(lambda: tl.scan(body, init, XS, checkpoints=checkpoints), TypeError)  # noqa: B023
        assert "What grows is a TensorArray: begin with tl.TensorArray() in init" in message
    message = words(lambda: tl.scan(lambda c, x: ({"a": x, "b": x}, None), {"a": XS[0]}, XS), TypeError)
    assert "TensorArray" not in message


# -- numbers that vmap batches


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda n: tl.fori_loop(0, n, None.__eq__, 0),
            "fori_loop: upper is batched by vmap, but is one number for all",
        ),
        (lambda n: tl.fori_loop(n, 9, None.__eq__, 0), "fori_loop: lower is batched by vmap"),
        (lambda n: tl.scan(None.__eq__, 0, length=n), "scan: length is batched by vmap"),
        (lambda n: tl.while_loop(bool, bool, 0, max_steps=n), "while_loop: max_steps is batched by vmap"),
        (lambda n: tl.TensorArray.unstack(XS).read(n), "use gather() or scatter() for several slots"),
    ],
)
def test_numbers_that_vmap_batches(call: Callable[[Tensor], Any], message: str) -> None:
    assert message in words(lambda: vmap(call)(torch.arange(3)), TypeError)


def test_what_is_said_instead_of_batched_numbers_works() -> None:
    n = torch.arange(3)
    counted = vmap(lambda n: tl.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (n * 0, n * 0 + 1))[1])
    assert counted(n).tolist() == [1, 2, 4]
    assert torch.equal(vmap(lambda n: tl.TensorArray.unstack(XS).gather(n))(n), XS[:3])


# -- rows that leave


@with_and_without_checkpoints
def test_a_closed_over_tensor_that_keeps_the_rows_that_leave(checkpoints: Any) -> None:
    encoded = torch.randn(3, 4)
    packed = tl.PackedTensor(torch.randn(6, 4), [1, 3, 2])
    call = lambda: tl.scan(lambda h, x: (h + x + encoded, None), randn(3, 4).float(), packed, checkpoints=checkpoints)  # noqa: E731
    assert (
        "scan: 2 of 3 rows are left in the batch at this step; a tensor that the body closes over still has all of "
        "them: pass it as context=" in words(call, RuntimeError)
    )
    call = lambda: tl.while_loop(  # noqa: E731
        lambda c: c[:, 0] < torch.arange(3), lambda c: c + 1, torch.zeros(3, 2), compact=True, checkpoints=checkpoints
    )
    assert "while_loop: 2 of 3 rows are left in the batch" in words(call, RuntimeError)


# -- arrays taken for tensors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (torch.stack, "stack: a TensorArray is no tensor; give it .stack(), all slots as one, or [a:b], some of them"),
        (torch.cat, "cat: a TensorArray is no tensor"),
        (torch.sin, "sin: a TensorArray is no tensor"),
        (lambda a: torch.nn.functional.linear(a, XS), "linear: a TensorArray is no tensor"),
        (lambda a: torch.stack([XS, a]), "stack: a TensorArray is no tensor"),
    ],
)
def test_torch_functions_of_an_array(call: Callable[[Any], Any], message: str) -> None:
    assert message in words(lambda: call(tl.TensorArray.unstack(XS)), TypeError)


def test_attributes_of_tensors() -> None:
    array = tl.TensorArray.unstack(XS)
    assert ".stack() is the tensor of all slots: .stack().sum" in words(lambda: array.sum(), AttributeError)
    message = words(lambda: array.summe, AttributeError)
    assert message == "'TensorArray' object has no attribute 'summe'"
    assert not hasattr(array, "__array__")
    assert torch.equal(torch.stack(list(array)), XS)


# -- what newcomers meet first


def _tanh(h: Any, x: Tensor) -> Any:
    h = x.tanh() if h is None else (x + h).tanh()
    return h, h


@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"compile": True}, {"until": lambda c: c.sum() > 1e9}])
@pytest.mark.parametrize("batch", [3, 1])
def test_xs_with_the_batch_first(batch: int, options: Any) -> None:
    xs, init = randn(batch, 5, 4), randn(batch, 4)
    said = words(lambda: tl.scan(_tanh, init, {"x": xs}, **options), Exception)
    assert "dim=1" not in said  # that error is Python's: it adds to a dict
    said = words(lambda: tl.scan(_tanh, init, xs, **options), Exception)
    where = f"scan: xs {tuple(xs.shape)} is run over along dim 0, so x is (5, 4), and {batch} is how many rows init has"
    assert f"{where}: if xs is batch first, give dim=1" in said
    tl.scan(_tanh, init, xs, **{**options, "dim": 1})


def test_other_mistakes_of_shape_say_nothing_of_a_batch() -> None:
    for init, xs in ((randn(3, 4), randn(5, 2, 4)), (randn(3, 4), randn(3, 3, 5)), (randn(4), randn(4, 3, 5))):
        assert "dim=1" not in words(lambda init=init, xs=xs: tl.scan(_tanh, init, xs), Exception)


@pytest.mark.parametrize(
    "loop",
    [
        lambda: tl.scan(_tanh, None, XS),
        lambda: tl.scan(_tanh, 0, XS),
        lambda: tl.scan(_tanh, 0.0, XS),
        lambda: tl.scan(_tanh, torch.tensor(0.0), XS),
        lambda: tl.scan(lambda h, x: (torch.cat([h, x]), None), torch.zeros(0), XS),
        lambda: tl.scan(lambda state, x: ((x, x), x), None, XS),
        lambda: tl.scan(lambda state, x: ({"h": x}, x), {}, XS),
        lambda: tl.scan(lambda h, x: (x * 1.0, x), torch.zeros(XS.shape[1:], dtype=torch.int64), XS),
        lambda: tl.scan(lambda state, x: ((x, x + state[1]), x), (None, 0), XS),
        lambda: tl.fori_loop(0, 3, lambda i, c: XS[i] + c, 0),
        lambda: tl.while_loop(lambda c: True, lambda c: XS[0], None, max_steps=2),
    ],
)
def test_an_init_that_the_first_step_makes_a_state_of(loop: Any) -> None:
    assert "makes a state of it, give tl.first_only(init)." in words(loop, TypeError)


def test_a_state_that_changes_is_no_such_init() -> None:
    def grows(c: Tensor, x: Tensor) -> Any:
        return torch.cat([c, x]), None

    assert "first_only" not in words(lambda: tl.scan(grows, torch.zeros(3), XS), TypeError)
    late = lambda i, c: c if i < 2 else XS[0]  # noqa: E731
    assert "first_only" not in words(lambda: tl.fori_loop(0, 4, late, 0), TypeError)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("LSTMCell", "returns (state, y): def step(state, x): h, c = cell(x, state); return (h, c), h"),
        ("GRUCell", "returns (state, y): def step(state, x): h = cell(x, state); return h, h"),
        ("RNNCell", "returns (state, y): def step(state, x): h = cell(x, state); return h, h"),
        ("LSTM", "which is a loop itself: call it on xs, `ys, h = lstm(xs, h)`; for steps of your own around it there"),
        (
            "GRU",
            "which is a loop itself: call it on xs, `ys, h = gru(xs, h)`; for steps of your own around it there is",
        ),
        (
            "RNN",
            "which is a loop itself: call it on xs, `ys, h = rnn(xs, h)`; for steps of your own around it there is",
        ),
    ],
)
def test_torch_s_recurrent_modules_are_no_bodies(name: str, how: str, carried: bool) -> None:
    module = getattr(torch.nn, name)(3, 3)
    loops = tl.carrying(module) if carried else tl
    said = words(lambda: loops.scan(module, torch.zeros(2, 3), torch.zeros(5, 2, 3)), TypeError)
    assert f"scan: body_fn is an nn.{name}, which" in said
    assert how in said


def test_a_cell_with_a_forward_of_its_own_is_one() -> None:
    class Cell(torch.nn.GRUCell):
        def forward(self, h: Any, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            h = super().forward(x, h)
            return h, h

    h, hs = tl.scan(Cell(3, 3), torch.zeros(2, 3), torch.zeros(5, 2, 3))
    torch.testing.assert_close(h, hs[-1])
