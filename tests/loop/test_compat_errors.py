"""What `tl.compat` refuses, and in what words: torch's names of the arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensorloop as tl
from tests.support.compat_cases import both
from tests.support.devices import ON

X = torch.ones(3, 2)
# of any type: most of what is given here is wrong
torch_scan: Any = tl.compat.torch_scan
torch_while_loop: Any = tl.compat.torch_while_loop
torch_associative_scan: Any = tl.compat.torch_associative_scan
ERRORS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    (
        "no function",
        lambda: torch_scan(3, X, X),
        TypeError,
        "torch_scan: combine_fn must be callable, got int 3",
    ),
    (
        "one thing",
        lambda: torch_scan(lambda c, x: c, X[0], X),
        TypeError,
        f"torch_scan: combine_fn must return (carry, y), got Tensor (2,) float32 {ON}",
    ),
    (
        "one argument",
        lambda: torch_scan(lambda c: c, X[0], X),
        TypeError,
        "torch_scan: combine_fn is called as combine_fn(carry, x), but takes (c)",
    ),
    (
        "a carry that grows",
        lambda: torch_scan(lambda h, x: (h + x, x), torch.zeros(1), X),
        TypeError,
        "torch_scan: the body changed the carry at step 0 (h is its carry; - what was, + what it returned):\n"
        f"  - h: Tensor (1,) float32 {ON}\n  + h: Tensor (2,) float32 {ON}",
    ),
    (
        "another dict",
        lambda: torch_scan(lambda c, x: ({"b": c["a"]}, x), {"a": X[0]}, X),
        TypeError,
        "torch_scan: the body returned a carry of another structure at step 0",
    ),
    (
        "lengths",
        lambda: torch_scan(lambda c, x: (c, x), X[0], {"a": X, "b": X[:2]}),
        ValueError,
        "torch_scan: the leaves of xs have different lengths along dim 0: xs['a']: 3, xs['b']: 2",
    ),
    (
        "no dim",
        lambda: torch_scan(lambda c, x: (c, x), X[0], X, dim=2),
        ValueError,
        "torch_scan: xs has shape (3, 2) and no dim 2 to run over",
    ),
    (
        "no int",
        lambda: torch_scan(lambda c, x: (c, x), X[0], X, dim=0.5),
        TypeError,
        "torch_scan: dim must be an int or a 0-d integer tensor, got float 0.5",
    ),
    (
        "no bool",
        lambda: torch_scan(lambda c, x: (c, x), X[0], X, reverse=1),
        TypeError,
        "torch_scan: reverse must be True or False, got int 1",
    ),
    (
        "only None",
        lambda: torch_scan(lambda c, x: (c, x), X[0], {"a": None}),
        ValueError,
        "torch_scan: xs has no tensor to run over, only None; give it one",
    ),
    (
        "a number",
        lambda: torch_scan(lambda c, x: (c, x), X[0], [X, 3]),
        TypeError,
        "torch_scan: xs[1] is int 3; expected a tensor",
    ),
    (
        "a lone tensor",
        lambda: torch_while_loop(lambda x: x < 3, lambda x: (x,), X),
        TypeError,
        "torch_while_loop: carried_inputs must be a tuple, an entry for each argument of body_fn, got a tensor",
    ),
    (
        "no tuple",
        lambda: torch_while_loop(lambda x: x.sum() < 9, lambda x: x + 1, (X,)),
        TypeError,
        "torch_while_loop: body_fn must return a tuple, an entry for each argument of body_fn, got a tensor",
    ),
    (
        "too many",
        lambda: torch_while_loop(lambda x: x.sum() < 9, lambda x: (x, x), (X,)),
        TypeError,
        "torch_while_loop: body_fn must return as many entries as carried_inputs has, 1, got 2",
    ),
    (
        "an int that becomes a tensor",
        lambda: torch_while_loop(lambda i: i < 3, lambda i: (torch.tensor(i),), (0,)),
        TypeError,
        "torch_while_loop: the body changed the carry at step 0 (carried_inputs is its carry; - what was, + what it "
        f"returned):\n  - carried_inputs[0]: int\n  + carried_inputs[0]: Tensor () int64 {ON}\nA Python number keeps "
        "its type: begin with a torch.tensor(...) in carried_inputs",
    ),
    (
        "a condition of rows",
        lambda: torch_while_loop(lambda x: x < 3, lambda x: (x + 1,), (X,)),
        TypeError,
        f"torch_while_loop: cond_fn must return a bool or a bool tensor of one element, got Tensor (3, 2) bool {ON}; "
        "tl.while_loop has rows",
    ),
    (
        "a condition that is a number",
        lambda: torch_while_loop(lambda x: 1, lambda x: (x + 1,), (X,)),
        TypeError,
        "torch_while_loop: cond_fn must return a bool or a bool tensor of one element, got int",
    ),
    (
        "a mode",
        lambda: torch_associative_scan(torch.add, X, 0, combine_mode="fast"),
        ValueError,
        "torch_associative_scan: combine_mode must be 'pointwise' or 'generic', got 'fast'",
    ),
    (
        "an element that shrinks",
        lambda: torch_associative_scan(lambda a, b: (a + b).sum(), X, 0),
        TypeError,
        "torch_associative_scan: combine_fn must return elements like those it gets; these leaves were (-) and are "
        f"(+):\n  - Tensor (2,) float32 {ON}\n  + Tensor () float32 {ON}",
    ),
    (
        "an element of another type",
        lambda: torch_associative_scan(lambda a, b: (a + b).double(), X, 0),
        TypeError,
        "torch_associative_scan: combine_fn must return elements like those it gets",
    ),
    (
        "an element of another structure",
        lambda: torch_associative_scan(lambda a, b: {"i": a["i"], "k": 0.0}, {"i": X}, 0),
        TypeError,
        "torch_associative_scan: combine_fn must return elements like those it gets; the structure was (-)",
    ),
    (
        "no tensors",
        lambda: torch_associative_scan(torch.add, (), 0),
        TypeError,
        "torch_associative_scan: xs holds no tensor",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_errors_speak_of_torch_s_arguments(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert str(raised.value).startswith(text)


def test_a_user_s_own_error_is_his_and_the_next_call_works() -> None:
    class Mine(Exception):
        pass

    def fail(*_: Any) -> Any:
        raise Mine

    for call in (
        lambda fn: torch_scan(fn, X[0], X),
        lambda fn: torch_while_loop(lambda x: True, fn, (X,)),
        lambda fn: torch_associative_scan(fn, X, 0),
    ):
        with pytest.raises(Mine):
            call(fail)
    assert torch_scan(both(torch.add), X[0], X)[0].tolist() == [4, 4]
