"""What a carry, xs and ys may be: any pytree, aliases, arrays; and that a body's changes in place stay its own."""

import copy
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import tensorloop as tl
from tests.support.loop_cases import Ours, Slots, compare, randn, rotate, tensors, with_and_without_checkpoints


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Record:
    a: Any
    b: Any


class Tagged:
    """A node with a fact that is no child: (children, tag)."""

    def __init__(self, child: Any, tag: str) -> None:
        self.child, self.tag = child, tag


def tagged_with_keys(node: Any) -> Any:
    return [(_pytree.GetAttrKey("child"), node.child)], node.tag


_pytree.register_dataclass(Record)
_pytree.register_pytree_node(
    Tagged,
    lambda node: ([node.child], node.tag),
    lambda children, tag: Tagged(next(iter(children)), str(tag)),
    flatten_with_keys_fn=tagged_with_keys,
    serialized_type_name="tests.Tagged",
)


class Boxed:
    """A node whose children have no keys, as libraries register theirs."""

    def __init__(self, *children: Any) -> None:
        self.children = children


_pytree.register_pytree_node(
    Boxed,
    lambda node: (list(node.children), None),
    lambda children, _: Boxed(*children),
    serialized_type_name="tests.Boxed",
)

TREES: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"b": x, "a": {"c": x * 2}},
    "keys": lambda x: {3: x, (1, 2): x + 1},
    "lists": lambda x: [[x], [], [x * 2, (x, [x])]],
    "empty": lambda x: ((), x, {}, []),
    "none": lambda x: (None, x, {"a": None}),
    "namedtuple": lambda x: Pair(x, Pair(None, x * 2)),
    "dataclass": lambda x: Record(Record(x, 1), {"a": x}),
    "ordered": lambda x: OrderedDict([("b", x), ("a", x * 2)]),
    "deque": lambda x: deque([x, x * 2]),
    "tagged": lambda x: [Tagged(x, "t"), Tagged((x, x), "u")],
    "without keys": lambda x: {"a": Boxed(x, [Boxed(x * 2)])},
    "leaf": lambda x: x,
}


IN_PLACE = re.compile("in.?place")


def turned(tree: Any) -> Any:
    return _pytree.tree_map(lambda x: rotate(x) if isinstance(x, Tensor) else x, tree)


@with_and_without_checkpoints
@pytest.mark.parametrize("y", ["dict", "namedtuple", "leaf"])
@pytest.mark.parametrize("xs", ["dataclass", "lists", "none"])
@pytest.mark.parametrize("carry", TREES)
def test_trees_of_carry_xs_and_y_are_their_own(carry: str, xs: str, y: str, checkpoints: Any) -> None:
    make_carry, make_xs, make_y = TREES[carry], TREES[xs], TREES[y]

    def program(loops: Any, init: Tensor, rows: Tensor) -> Any:
        def body(state: Any, x: Any) -> Any:
            assert _pytree.tree_structure(state) == _pytree.tree_structure(make_carry(init))
            first = next(leaf for leaf in _pytree.tree_leaves(x) if isinstance(leaf, Tensor))
            return turned(state), make_y(first * tensors(state)[-1])

        given = make_xs(rows) if xs != "dataclass" else Record(Record(rows, None), {"a": rows * 2})
        last, ys = loops.scan(body, make_carry(init), given)
        assert _pytree.tree_structure(last) == _pytree.tree_structure(make_carry(init))
        assert _pytree.tree_structure(ys) == _pytree.tree_structure(make_y(rows))
        return last, ys

    compare(program, randn(2), randn(3, 2), checkpoints=checkpoints)


def test_children_without_keys_are_numbered_in_errors() -> None:
    init = {"a": Boxed(torch.zeros(2), torch.zeros(2))}
    with pytest.raises(TypeError, match=re.escape("c['a'][1]")):
        tl.fori_loop(0, 2, lambda i, c: {"a": Boxed(c["a"].children[0], c["a"].children[1].double())}, init)


@with_and_without_checkpoints
def test_keys_may_come_back_in_another_order(checkpoints: Any) -> None:
    def body(carry: dict[str, Tensor], x: Tensor) -> Any:
        return {"b": carry["b"] + x, "a": carry["a"]}, {"p": x, "q": -x} if x > 1 else {"q": -x, "p": x}

    xs = torch.arange(4.0)
    carry, ys = tl.scan(body, {"a": torch.ones(()), "b": torch.zeros(())}, xs, checkpoints=checkpoints)
    assert (carry["a"].item(), carry["b"].item()) == (1, 6)
    assert torch.equal(ys["p"], xs)
    assert torch.equal(ys["q"], -xs)


@with_and_without_checkpoints
def test_named_results_of_torch_functions(checkpoints: Any) -> None:
    """`torch.max(x, 0)` is a tuple of its own kind."""
    rows = torch.tensor([[1.0, 3.0], [5.0, 2.0]])
    carry, ys = tl.scan(lambda c, x: (x.max(0), x.max(0)), rows[0].max(0), rows, checkpoints=checkpoints)
    assert (carry.values.item(), carry.indices.item()) == (5, 0)
    assert (ys.values.tolist(), ys.indices.tolist()) == ([3, 5], [1, 0])


# -- aliases


@with_and_without_checkpoints
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda c, x: (c, c[0]), id="input returned"),
        pytest.param(lambda c, x: ((c[1], c[0]), c[0]), id="swapped"),
        pytest.param(lambda c, x: ((c[0], c[0]), x), id="one tensor in two slots"),
        pytest.param(lambda c, x: (lambda new: ((new, c[0]), new))(rotate(c[0]) + x), id="carry and y"),
        pytest.param(lambda c, x: ((x, c[0]), x), id="x as carry and y"),
        pytest.param(lambda c, x: ((x.view(2, 1)[:, 0], c[0]), x.flip(0).view(1, 2)), id="views of x"),
        pytest.param(lambda c, x: ((c[0].view(2), rotate(c[1]) * x), (c[0], c[0], x)), id="one y twice"),
    ],
)
def test_aliases_are_legal(body: Callable[..., Any], checkpoints: Any) -> None:
    def program(loops: Any, a: Tensor, xs: Tensor) -> Any:
        a = rotate(a)
        return loops.scan(body, (a, a), xs)  # one tensor twice in init too

    compare(program, randn(2), randn(4, 2), checkpoints=checkpoints)
    compare(program, randn(2, grad=False), randn(4, 2), checkpoints=checkpoints)
    compare(program, randn(2, grad=False), randn(4, 2, grad=False), checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("grad", [False, True])
def test_results_share_no_memory_with_the_callers_tensors(grad: bool, checkpoints: Any) -> None:
    init, xs = randn(2, grad=grad), randn(4, 2, grad=grad)
    w = torch.ones(2, dtype=torch.float64, requires_grad=grad)
    carry, ys = tl.scan(
        lambda c, x: ((c[0], x * 1, c[2] * w), (x, c[0])), (init, init, init), xs, checkpoints=checkpoints
    )
    with torch.no_grad():
        for out in tensors((carry, ys)):
            out.add_(100)
    assert torch.equal(init, randn(2))
    assert torch.equal(xs, randn(4, 2))
    assert not grad or carry[2].grad_fn is not None


# -- changes in place


@with_and_without_checkpoints
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("what", ["carry", "both", "x", "init twice"])
def test_changing_arguments_in_place(what: str, grad: bool, checkpoints: Any) -> None:
    """As if out of place, or refused by autograd where a leaf or a view needs a gradient. Never something else."""

    def body(carry: Any, x: Tensor) -> Any:
        a, b = carry
        if what == "x":
            x.mul_(2)
        else:
            a.add_(x)
        if what == "both":
            b.sub_(x)
        return (rotate(a), b), a.sum() + x.sum()

    def pure(carry: Any, x: Tensor) -> Any:
        a, b = carry
        x = x * 2 if what == "x" else x
        a = a if what == "x" else a + x
        b = b - x if what == "both" else b
        return (rotate(a), b), a.sum() + x.sum()

    init, xs = randn(2, grad=grad), randn(5, 2, grad=grad)
    pair = (init, init if what == "init twice" else rotate(init))
    before = [x.detach().clone() for x in (init, pair[1], xs)]
    try:
        carry, ys = tl.scan(body, pair, xs, checkpoints=checkpoints)
    except RuntimeError as error:
        assert grad, "refused without need"
        assert IN_PLACE.search(str(error))  # noqa: PT017
    else:
        torch.testing.assert_close(tensors((carry, ys)), tensors(tl.scan(pure, pair, xs)))
        if grad:
            grads = torch.autograd.grad(ys.sum(), (init, xs), allow_unused=True, retain_graph=True)
            true = torch.autograd.grad(tl.scan(pure, pair, xs)[1].sum(), (init, xs), allow_unused=True)
            torch.testing.assert_close(grads, true)
    assert all(torch.equal(x, y) for x, y in zip((init, pair[1], xs), before, strict=True)), "the caller's changed"


@with_and_without_checkpoints
@pytest.mark.parametrize("what", ["carry", "x"])
def test_changing_arguments_under_no_grad_never_reaches_the_caller(what: str, checkpoints: Any) -> None:
    """Autograd does not see such a change coming; the loop keeps it, or says that it cannot."""
    init, xs = randn(2), randn(4, 2)

    def body(carry: Tensor, x: Tensor) -> Any:
        with torch.no_grad():
            (carry if what == "carry" else x).add_(1)
        return rotate(carry) + x, carry.sum()

    refused = None
    try:
        tl.scan(body, init, xs, checkpoints=checkpoints)
    except RuntimeError as error:
        refused = str(error)
    assert torch.equal(init, randn(2)), "init changed"
    # xs that need a gradient are not copied, so there a change is reported
    assert torch.equal(xs, randn(4, 2)) if refused is None else IN_PLACE.search(refused)


@with_and_without_checkpoints
def test_a_y_changed_at_a_later_step_is_refused_or_kept(checkpoints: Any) -> None:
    """Without gradient each y is copied when it comes; with one it waits, and the change is seen."""

    def body(carry: Tensor, x: Tensor) -> Any:
        carry.add_(x)
        return carry, carry

    ys = tl.scan(body, torch.zeros(()), torch.ones(4), checkpoints=checkpoints)[1]
    assert ys.tolist() == [1, 2, 3, 4]
    w = torch.ones((), requires_grad=True)

    def with_gradient(carry: Tensor, x: Tensor) -> Any:
        return carry.mul_(w), carry

    try:
        _, ys = tl.scan(with_gradient, torch.ones(()), torch.ones(3), checkpoints=checkpoints)
    except RuntimeError as error:
        assert IN_PLACE.search(str(error))  # noqa: PT017
    else:
        assert torch.autograd.grad(ys.sum(), w)[0].item() == 6


@with_and_without_checkpoints
def test_dropping_a_leaf_of_the_bodys_tree_changes_nothing_outside(checkpoints: Any) -> None:
    """A body may take the containers it gets apart: they are its own."""
    init = {"a": [torch.ones(2)], "b": torch.zeros(2)}

    def body(carry: Any, x: Tensor) -> Any:
        a = carry["a"].pop()
        carry["b"] = carry["b"] + a
        carry["a"].append(a + x)
        return carry, None

    carry, _ = tl.scan(body, init, torch.ones(3), checkpoints=checkpoints)
    assert len(init["a"]) == 1
    assert torch.equal(init["b"], torch.zeros(2))
    assert carry["b"].tolist() == [6, 6]


# -- arrays in the carry


def arrays(loops: Any, init: Tensor) -> dict[str, Any]:
    return {"a": loops.array().append(init), "b": loops.array.unstack(torch.stack([init * 2, init]))}


def appended(carry: Any, x: Tensor, loops: Any) -> Any:
    return {"a": carry["a"].append(rotate(carry["a"][-1]) * x), "b": carry["b"]}, carry["a"][:1].sum()


def overwritten(carry: Any, x: Tensor, loops: Any) -> Any:
    a, b = carry["a"], carry["b"]
    y = b[0] * x
    return {"a": a.append(y), "b": b.write(0, rotate(b[1]) + x).write(1, y)}, b.stack().sum()


def swapped(carry: Any, x: Tensor, loops: Any) -> Any:
    a, b = carry["a"], carry["b"]
    return {"a": b, "b": a.append(b[-1] * x)}, a[0] + b[0]


def renewed(carry: Any, x: Tensor, loops: Any) -> Any:
    new = loops.array()
    for i in range(len(carry["a"])):
        new.append(rotate(carry["a"][i]) * x)
    return {"a": new.append(x), "b": carry["b"]}, carry["a"][-1].sum()


def same_twice(carry: Any, x: Tensor, loops: Any) -> Any:
    a = carry["a"].append(x * carry["b"][0])
    return {"a": a, "b": copied(a)}, a.stack().sum()


def copied(array: Any) -> Any:
    return Slots(array) if isinstance(array, Slots) else array


def restarted(carry: Any, x: Tensor, loops: Any) -> Any:
    """The second array is thrown away at every step."""
    return {"a": carry["a"].append(carry["b"][-1]), "b": loops.array().append(rotate(carry["b"][0]) * x)}, None


def kept_aside(carry: Any, x: Tensor, loops: Any) -> Any:
    """A copy is read after the original has been overwritten."""
    a, b = carry["a"], carry["b"]
    old = copy.copy(b)
    b = b.write(0, rotate(b[1]) * x)
    return {"a": a.append(old[0] + b[0]), "b": b}, old.stack().sum()


@with_and_without_checkpoints
@pytest.mark.parametrize("step", [appended, overwritten, swapped, renewed, same_twice, restarted, kept_aside])
def test_arrays_in_the_carry(step: Callable[..., Any], checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor) -> Any:
        given = arrays(loops, init * 3)
        carry, ys = loops.scan(lambda c, x: step(c, x, loops), given, xs)
        if isinstance(loops, Ours):
            assert (len(given["a"]), len(given["b"])) == (1, 2), "the caller's arrays changed"
            torch.testing.assert_close(given["b"].stack(), torch.stack([init * 6, init * 3]))
        return carry, ys

    # An array carries a gradient as a whole, so its reads do, whatever the slot.
    compare(program, randn(2), randn(5, 2), checkpoints=checkpoints, flags=False)
    compare(program, randn(2, grad=False), randn(5, 2), checkpoints=checkpoints, flags=False)
    compare(program, randn(2), randn(5, 2, grad=False), checkpoints=checkpoints, flags=False)


@with_and_without_checkpoints
def test_an_array_twice_in_init_is_two_arrays(checkpoints: Any) -> None:
    array = tl.TensorArray.unstack(torch.zeros(1, 2))
    a, b = tl.fori_loop(
        0, 3, lambda i, c: (c[0].append(torch.ones(2) * i), c[1]), (array, array), checkpoints=checkpoints
    )
    assert (len(a), len(b), len(array)) == (4, 1, 1)


@with_and_without_checkpoints
def test_an_array_returned_twice_is_two_arrays_in_the_next_step(checkpoints: Any) -> None:
    """Leaves of a carry are values: a write to one of two equal arrays does not show in the other."""

    def body(i: int, carry: Any) -> Any:
        a, b = carry
        a.append(torch.ones(2) * i)
        return (a, a) if i == 0 else (a, b)

    a, b = tl.fori_loop(0, 3, body, (tl.TensorArray(), tl.TensorArray()), checkpoints=checkpoints)
    assert (len(a), len(b)) == (3, 1)


@with_and_without_checkpoints
def test_an_array_returned_twice_at_the_end_is_two_arrays(checkpoints: Any) -> None:
    def body(i: int, carry: Any) -> Any:
        a = carry[0].append(torch.ones(2))
        return a, a

    a, b = tl.fori_loop(0, 3, body, (tl.TensorArray(), tl.TensorArray()), checkpoints=checkpoints)
    a.append(torch.ones(2))
    assert (len(a), len(b)) == (4, 3)
