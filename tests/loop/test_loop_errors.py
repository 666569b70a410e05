"""What loops refuse, and the words they say it in; exceptions of the body pass through.

One file, however long: every loop is held against the same lists of wrong arguments and wrong bodies.
"""

import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop
from tensorloop.loop.called import Called
from tests.support.devices import ON
from tests.support.loop_cases import Counter, randn, rotate, with_and_without_checkpoints

tl: Any = tensorloop  # most calls here are wrong on purpose, and no type checker need say so
ZERO = torch.zeros(2)
XS = torch.zeros(3, 2)


def keep(carry: Any, *rest: Any) -> Any:
    return carry, None


# -- arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tl.scan(3, ZERO, XS), "scan: body_fn must be callable, got int 3"),
        (lambda: tl.scan(keep, ZERO, XS, until=True), "scan: until must be callable, got bool True"),
        (lambda: tl.while_loop(None, keep, ZERO), "while_loop: cond_fn must be callable, got NoneType None"),
        (lambda: tl.while_loop(bool, ZERO, ZERO), "while_loop: body_fn must be callable, got a tensor of shape (2,)"),
        (lambda: tl.fori_loop(0, 3, None, ZERO), "fori_loop: body_fn must be callable"),
        (lambda: tl.map([], XS), "map: fn must be callable, got list []"),
        (
            lambda: tl.fori_loop(0, 2.5, keep, ZERO),
            "fori_loop: upper must be an int or a 0-d integer tensor, got float",
        ),
        (
            lambda: tl.fori_loop(True, 2, keep, ZERO),
            "fori_loop: lower must be an int or a 0-d integer tensor, got bool",
        ),
        (lambda: tl.fori_loop(0, torch.tensor(2.0), keep, ZERO), "fori_loop: upper must be an int or a 0-d integer"),
        (lambda: tl.fori_loop(0, torch.tensor([2]), keep, ZERO), "fori_loop: upper must be an int or a 0-d integer"),
        (lambda: tl.scan(keep, ZERO, XS, 3.0), "scan: length must be an int"),
        (lambda: tl.scan(keep, ZERO, XS, dim=0.0), "scan: dim must be an int"),
        (lambda: tl.while_loop(bool, keep, 1, max_steps=2.0), "while_loop: max_steps must be an int"),
        (
            lambda: tl.scan(keep, ZERO, [1, 2]),
            "scan: xs[0] is int 1; expected a tensor, a TensorArray, a range or None",
        ),
        (lambda: tl.scan(keep, ZERO, {"a": XS, "b": [2.5]}), "scan: xs['b'][0] is float 2.5; expected a tensor"),
        (
            lambda: tl.scan(keep, ZERO, XS, checkpoints=2.0),
            'scan: checkpoints must be None, an int, "auto", a Schedule',
        ),
        (
            lambda: tl.scan(keep, ZERO, XS, checkpoints=True),
            'scan: checkpoints must be None, an int, "auto", a Schedule',
        ),
        (lambda: tl.scan(keep, ZERO, XS, reverse="no"), "scan: reverse must be True or False, got str 'no'"),
    ],
)
def test_arguments_of_the_wrong_type(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda body: tl.scan(body, ZERO), "scan: nothing says when to stop: give xs, length= or until="),
        (lambda body: tl.scan(body, ZERO, ()), "scan: nothing says when to stop"),
        (lambda body: tl.scan(body, ZERO, until=bool, reverse=True), "scan: reverse=True needs xs or length="),
        (lambda body: tl.scan(body, ZERO, length=-1), "scan: length must be at least 0, got -1"),
        (lambda body: tl.scan(body, ZERO, XS, 4), "scan: length is 4, but xs has length 3 along dim 0"),
        (lambda body: tl.scan(body, ZERO, XS, 0), "scan: length is 0, but xs has length 3 along dim 0"),
        (
            lambda body: tl.scan(body, ZERO, {"a": XS, "b": [XS[:2], None]}),
            "scan: the leaves of xs have different lengths along dim 0: xs['a']: 3, xs['b'][0]: 2",
        ),
        (lambda body: tl.scan(body, ZERO, XS, dim=2), "scan: xs has shape (3, 2) and no dim 2 to run over"),
        (lambda body: tl.scan(body, ZERO, XS, dim=-3), "scan: xs has shape (3, 2) and no dim -3 to run over"),
        (lambda body: tl.scan(body, ZERO, [XS, torch.ones(())]), "scan: xs[1] has shape () and no dim 0"),
        (lambda body: tl.map(body, ()), "map: xs has no tensor to run over"),
        (lambda body: tl.map(body, {"a": XS, "b": XS[1:]}), "map: the leaves of xs have different lengths"),
        (lambda body: tl.while_loop(bool, body, 1, max_steps=-1), "while_loop: max_steps must be at least 0, got -1"),
        (lambda body: tl.scan(body, ZERO, XS, checkpoints=0), "scan: checkpoints must be at least 1"),
        (lambda body: tl.while_loop(bool, body, 1, checkpoints=-3), "while_loop: checkpoints must be at least 1"),
    ],
)
def test_arguments_of_the_wrong_value_before_any_call(call: Callable[[Any], Any], message: str) -> None:
    body = Counter(keep)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(body)
    assert body.calls == 0


# -- what functions return


@with_and_without_checkpoints
@pytest.mark.parametrize(
    ("out", "got"),
    [
        (None, "got None"),
        ((ZERO,), "got a tuple of 1"),
        ((ZERO, ZERO, ZERO), "got a tuple of 3"),
        (ZERO, f"got Tensor (2,) float32 {ON}"),
        ({"carry": 1}, "got dict"),
    ],
    ids=["None", "1", "3", "tensor", "dict"],
)
def test_a_body_that_returns_no_pair(out: Any, got: str, checkpoints: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"scan: body_fn must return (carry, y), {got}")):
        tl.scan(lambda c, x: out, ZERO, XS, checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (1, "int 1"),
        (0.5, "float 0.5"),
        (None, "NoneType None"),
        ((True,), "tuple (True,)"),
        (torch.tensor(1), "a tensor of shape () and dtype torch.int64"),
        (torch.ones(2), "a tensor of shape (2,) and dtype torch.float32"),
        (torch.ones(2, 1, dtype=torch.bool), "a tensor of shape (2, 1) and dtype torch.bool; reduce it"),
    ],
    ids=["int", "float", "None", "tuple", "int tensor", "floats", "matrix"],
)
def test_a_condition_that_is_no_bool(answer: Any, got: str, checkpoints: Any) -> None:
    with pytest.raises(
        TypeError, match=re.escape("while_loop: cond_fn must return a bool") + ".*" + re.escape(f"got {got}")
    ):
        tl.while_loop(lambda c: answer, lambda c: c, ZERO, checkpoints=checkpoints)
    with pytest.raises(TypeError, match=re.escape("scan: until must return a bool") + ".*" + re.escape(f"got {got}")):
        tl.scan(keep, ZERO, XS, until=lambda c: answer, checkpoints=checkpoints)


# -- the carry


@with_and_without_checkpoints
def test_another_structure_names_both_and_the_keys_that_differ(checkpoints: Any) -> None:
    init = {"a": ZERO, "state": [ZERO, {"x": 1, "y": ZERO}]}

    def body(carry: Any, x: Tensor) -> Any:
        return {"a": ZERO, "state": [ZERO, {"x": 1, "z": ZERO}], "more": ZERO}, None

    with pytest.raises(TypeError) as error:
        tl.scan(body, init, XS, checkpoints=checkpoints)
    message = str(error.value)
    assert "scan: the body returned a carry of another structure at step 0" in message
    assert "- {'a': *, 'state': [*, {'x': *, 'y': *}]}" in message
    assert "+ {'a': *, 'state': [*, {'x': *, 'z': *}], 'more': *}" in message
    assert f"- carry['state'][1]['y']: Tensor (2,) float32 {ON}" in message
    assert f"+ carry['state'][1]['z']: Tensor (2,) float32 {ON}" in message
    assert f"+ carry['more']: Tensor (2,) float32 {ON}" in message
    assert "carry['a']" not in message


@with_and_without_checkpoints
@pytest.mark.parametrize(
    ("init", "out"),
    [
        ((ZERO, ZERO), (ZERO,)),
        ((ZERO,), [ZERO]),
        (ZERO, (ZERO,)),
        ((ZERO,), ZERO),
        ([], [ZERO]),
        ({"a": ZERO}, {"a": (ZERO,)}),
        ((ZERO, None), (ZERO,)),
        (None, ()),
    ],
    ids=["shorter", "list", "wrapped", "bare", "longer", "deeper", "none lost", "none"],
)
def test_containers_of_another_kind_or_length(init: Any, out: Any, checkpoints: Any) -> None:
    with pytest.raises(TypeError, match="scan: the body returned a carry of another structure at step 0"):
        tl.scan(lambda c, x: (out, None), init, XS, checkpoints=checkpoints)


@with_and_without_checkpoints
def test_every_leaf_that_differs_is_named_at_the_first_step_that_differs(checkpoints: Any) -> None:
    init = {"a": torch.zeros(2), "b": [torch.zeros(2), 1], "c": torch.zeros(3), "d": None}

    def body(i: int, carry: Any) -> Any:
        if i < 2:
            return carry
        return {
            "a": torch.zeros(2, 1),
            "b": [torch.zeros(2, dtype=torch.float64), 1.0],
            "c": carry["c"],
            "d": torch.zeros(1),
        }

    with pytest.raises(TypeError) as error:
        tl.fori_loop(0, 5, body, init, checkpoints=checkpoints)
    lines = str(error.value).splitlines()
    assert lines[0] == "fori_loop: the body changed the carry at step 2 (- what was, + what it returned):"
    assert lines[1:9] == [
        f"  - carry['a']: Tensor (2,) float32 {ON}",
        f"  + carry['a']: Tensor (2, 1) float32 {ON}",
        f"  - carry['b'][0]: Tensor (2,) float32 {ON}",
        f"  + carry['b'][0]: Tensor (2,) float64 {ON}",
        "  - carry['b'][1]: int",
        "  + carry['b'][1]: float",
        "  - carry['d']: None",
        f"  + carry['d']: Tensor (1,) float32 {ON}",
    ]
    assert "begin with a float in init" in lines[9]
    assert "raised in step 2 of fori_loop" in error.value.__notes__


class Doubled(torch.nn.Module):
    def forward(self, step: int, state: Any) -> Any:
        return {"h": state["h"].double()}

    def of_many(self, *arguments: Any) -> Any:
        return self(*arguments)


def as_double(i: int, memory: Any, /, power: int = 1) -> Any:
    return {"h": memory["h"].double() * power}


@with_and_without_checkpoints
@pytest.mark.parametrize(
    ("body", "name"),
    [
        (lambda i, h: {"h": h["h"].double()}, "h"),
        (as_double, "memory"),
        (functools.partial(as_double, power=2), "memory"),
        (Doubled(), "state"),
        (Doubled().forward, "state"),
        (lambda i, carry: {"h": carry["h"].double()}, "carry"),
        (lambda i, _: {"h": _["h"].double()}, "carry"),
        (Doubled().of_many, "carry"),
        (lambda *both: as_double(*both), "carry"),
    ],
)
def test_a_carry_is_called_what_the_body_calls_it(body: Any, name: str, checkpoints: Any) -> None:
    with pytest.raises(TypeError) as error:
        tl.fori_loop(0, 2, body, {"h": ZERO}, checkpoints=checkpoints)
    lines = str(error.value).splitlines()
    said = "" if name == "carry" else f"{name} is its carry; "
    assert lines[0] == f"fori_loop: the body changed the carry at step 0 ({said}- what was, + what it returned):"
    assert lines[1] == f"  - {name}['h']: Tensor (2,) float32 {ON}"


def test_functions_in_c_have_no_names() -> None:
    assert Called("body_fn", max, ("carry",)).parameter("carry") == "carry"
    assert Called("body_fn", torch.sin, ("carry",)).parameter("carry") == "carry"


def test_a_lost_key_stands_under_the_users_name() -> None:
    with pytest.raises(TypeError) as error:
        tl.scan(lambda state, x: ({"a": x}, None), {"a": ZERO, "b": ZERO}, XS)
    lines = str(error.value).splitlines()
    assert lines[0] == "scan: the body returned a carry of another structure at step 0 (state is its carry):"
    assert f"  - state['b']: Tensor (2,) float32 {ON}" in lines


def test_nobody_asks_for_names_while_all_goes_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Called, "signature", lambda self: pytest.fail("asked"))
    tl.scan(lambda state, x: (state + x, None), ZERO, XS)
    tl.while_loop(lambda n: n < 3, lambda n: n + 1, torch.zeros(2))


@with_and_without_checkpoints
def test_a_carry_on_another_device(checkpoints: Any) -> None:
    with pytest.raises(TypeError, match=re.escape("+ c: Tensor (2,) float32 meta")):
        tl.fori_loop(0, 2, lambda i, c: c.to("meta"), ZERO, checkpoints=checkpoints)


@with_and_without_checkpoints
def test_other_strides_are_no_error(checkpoints: Any) -> None:
    out = tl.fori_loop(0, 3, lambda i, c: c.t().contiguous().t() + 1, torch.zeros(3, 2), checkpoints=checkpoints)
    assert torch.equal(out, torch.full((3, 2), 3.0))


@with_and_without_checkpoints
def test_an_init_that_broadcasts_against_x_is_caught(checkpoints: Any) -> None:
    message = re.escape(f"- c: Tensor () float32 {ON}\n  + c: Tensor (2,) float32 {ON}\nA carry keeps its shape")
    with pytest.raises(TypeError, match=message):
        tl.scan(lambda c, x: (c + x, None), torch.zeros(()), XS, checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("init", [0, 0.0, False])
def test_a_number_that_becomes_a_tensor_is_refused(init: Any, checkpoints: Any) -> None:
    with pytest.raises(TypeError, match=re.escape("begin with a torch.tensor(...) in init")):
        tl.scan(lambda c, x: (c + x.sum(), None), init, XS, checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize(
    "array",
    [
        tl.TensorArray.unstack(torch.zeros(1, 3)),
        tl.TensorArray.unstack(torch.zeros(1, 2, dtype=torch.float64)),
        tl.TensorArray(element_shape=(2, 2)),
    ],
    ids=["shape", "dtype", "rank"],
)
def test_another_kind_of_array_is_refused(array: Any, checkpoints: Any) -> None:
    init = tl.TensorArray.unstack(torch.zeros(1, 2))
    with pytest.raises(TypeError, match=re.escape(f"- c: TensorArray of (2,) float32 {ON}\n  + c: TensorArray of")):
        tl.fori_loop(0, 2, lambda i, c: array, init, checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize(
    "kinds", [(tl.TensorArray.unstack(XS), XS), (XS, tl.TensorArray.unstack(XS)), ("a", 1), (1, "a")]
)
def test_a_leaf_stays_what_it_is(kinds: tuple[Any, Any], checkpoints: Any) -> None:
    with pytest.raises(TypeError, match="the body changed the carry at step 0"):
        tl.fori_loop(0, 2, lambda i, c: kinds[1], kinds[0], checkpoints=checkpoints)


# -- ys and arrays


@with_and_without_checkpoints
@pytest.mark.parametrize(
    ("later", "message"),
    [
        (lambda y: y[:1], "scan: y['a'] changed at step 2"),
        (lambda y: y.double(), "scan: y['a'] changed at step 2"),
        (lambda y: None, "scan: y['a'] changed at step 2"),
        (lambda y: 1.0, "scan: y['a'] changed at step 2"),
        (lambda y: (y,), "scan: the body returned a y of another structure at step 2"),
    ],
    ids=["shape", "dtype", "none", "number", "structure"],
)
def test_a_y_that_changes(later: Callable[[Tensor], Any], message: str, checkpoints: Any) -> None:
    def body(i: int, x: Tensor) -> Any:
        return i + 1, {"a": x if i < 2 else later(x)}

    with pytest.raises(TypeError, match=re.escape(message)):
        tl.scan(body, 0, XS, checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("y", [tl.TensorArray(), "text", object()], ids=["array", "text", "object"])
def test_a_y_that_does_not_stack(y: Any, checkpoints: Any) -> None:
    with pytest.raises(TypeError, match=re.escape("expected tensors, numbers or None")):
        tl.scan(lambda c, x: (c, y), ZERO, XS, checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.append(ZERO),
        lambda a: a.write(0, ZERO),
        lambda a: a.extend([ZERO]),
        lambda a: a.scatter([0], ZERO[None]),
        lambda a: a.write_rows(torch.zeros(2, dtype=torch.int64), ZERO),
    ],
    ids=["append", "write", "extend", "scatter", "write_rows"],
)
def test_writing_to_an_array_made_outside_is_refused(write: Callable[[Any], Any], checkpoints: Any) -> None:
    array = tl.TensorArray.unstack(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="carry"):
        tl.scan(lambda c, x: (c, write(array) and None), ZERO, XS, checkpoints=checkpoints)
    assert torch.equal(array.stack(), torch.ones(1, 2))
    array.append(ZERO)
    assert len(array) == 2


@with_and_without_checkpoints
@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (lambda a: a.write(5, ZERO), IndexError),
        (lambda a: a.write(-2, ZERO), IndexError),
        (lambda a: a.append(ZERO.double()), TypeError),
        (lambda a: a.append(torch.zeros(3)), ValueError),
        (lambda a: a.read(1), IndexError),
    ],
    ids=["beyond", "negative", "dtype", "shape", "read"],
)
def test_errors_of_arrays_in_the_carry(write: Callable[[Any], Any], kind: type[Exception], checkpoints: Any) -> None:
    array = tl.TensorArray.unstack(torch.ones(1, 2))
    with pytest.raises(kind, match=r"TensorArray"):
        tl.fori_loop(0, 2, lambda i, c: write(c), array, checkpoints=checkpoints)
    assert len(array) == 1


# -- exceptions of the body


class Unhappy(Exception):
    pass


def raise_at(step: int, kind: type[BaseException]) -> Callable[[int], None]:
    def fail(i: int) -> None:
        if i == step:
            raise kind("from the body")

    return fail


@with_and_without_checkpoints
@pytest.mark.parametrize("kind", [Unhappy, KeyboardInterrupt, StopIteration, GeneratorExit])
@pytest.mark.parametrize("step", [0, 2])
def test_an_exception_of_the_body_passes_through(step: int, kind: type[BaseException], checkpoints: Any) -> None:
    fail = raise_at(step, kind)
    init, xs, array = randn(2), randn(4, 2), tl.TensorArray.unstack(torch.ones(1, 2).double())

    def body(carry: Any, x: Tensor) -> Any:
        state, kept, i = carry
        kept.append(state)
        fail(i)
        return (rotate(state) + x, kept, i + 1), array.stack().sum() * x

    with pytest.raises(kind, match="from the body") as error:
        tl.scan(body, (init, tl.TensorArray(), 0), xs, checkpoints=checkpoints)
    assert "fail" in [frame.name for frame in traceback.extract_tb(error.tb)]
    assert f"raised in step {step} of scan" in error.value.__notes__
    # a following call works, and what was captured is the caller's again
    array.append(init)
    fail = raise_at(-1, kind)
    carry, ys = tl.scan(body, (init, tl.TensorArray(), 0), xs, checkpoints=checkpoints)
    assert len(carry[1]) == 4
    assert torch.autograd.grad(ys.sum(), init)[0].shape == (2,)


@with_and_without_checkpoints
@pytest.mark.parametrize("where", ["cond", "until"])
def test_an_exception_of_a_condition_passes_through(where: str, checkpoints: Any) -> None:
    def fails(carry: Any) -> bool:
        raise Unhappy("from the condition")

    call: Any = {
        "cond": lambda: tl.while_loop(fails, lambda c: c, randn(2), checkpoints=checkpoints),
        "until": lambda: tl.scan(keep, randn(2), XS, until=fails, checkpoints=checkpoints),
    }[where]
    with pytest.raises(Unhappy, match="from the condition"):
        call()


@with_and_without_checkpoints
def test_an_exception_in_an_inner_loop_notes_both_loops(checkpoints: Any) -> None:
    def outer(i: int, c: Tensor) -> Tensor:
        fail = raise_at(1 if i == 2 else -1, Unhappy)
        return tl.fori_loop(0, 3, lambda j, d: (fail(j), rotate(d))[1], c, checkpoints=checkpoints)

    with pytest.raises(Unhappy) as error:
        tl.fori_loop(0, 4, outer, randn(2), checkpoints=checkpoints)
    assert error.value.__notes__ == ["raised in step 1 of fori_loop", "raised in step 2 of fori_loop"]
