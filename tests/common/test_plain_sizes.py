"""Torch's formulas run without sympy and dynamo: the answers are torch's own, and nobody else gets them."""

import builtins
import itertools
import threading
from typing import Any

import pytest

from tensorloop._torch import plain_sizes as module
from tensorloop._torch.plain_sizes import plain_sizes
from tests.house.test_public_names import fresh

CONDITIONS = ["expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true"]
BOTH = "sym_and", "sym_or"
ASKED: dict[str, list[tuple[Any, ...]]] = {
    **{name: [(True,), (False,)] for name in CONDITIONS},
    **{name: [(0,), (3,)] for name in ("guard_int", "guarding_hint_or_throw", "has_guarding_hint", "is_nested_int")},
    **{name: [x for n in (1, 2, 3) for x in itertools.product([True, False], repeat=n)] for name in BOTH},
    "sym_eq": [(2, 2), (2, 3), ((2, 3), (2, 3)), ((2, 3), [2, 4]), ([2], (2, 2)), ((), ()), ((2, (3, 4)), (2, (3, 4)))],
}


def test_every_answer_is_asked_for() -> None:
    assert ASKED.keys() == vars(module._SIZES).keys()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.filterwarnings("ignore:guard_size_oblivious")
@pytest.mark.parametrize("name", ASKED)
def test_an_answer_is_torchs_own(name: str) -> None:
    from torch.fx.experimental import symbolic_shapes

    for args in ASKED[name]:
        mine = getattr(module._SIZES, name)(*args)  # pyright: ignore[reportPrivateUsage]
        theirs = getattr(symbolic_shapes, name)(*args)
        assert (mine, type(mine)) == (theirs, type(theirs)), args


def test_other_imports_and_other_hooks_are_left_alone() -> None:
    before = builtins.__import__
    with plain_sizes():
        with plain_sizes():
            assert builtins.__import__ is not before
        mine = builtins.__import__

        def around(*args: Any, **kwargs: Any) -> Any:
            return mine(*args, **kwargs)

        builtins.__import__ = around  # somebody else's, which outlives ours
    try:
        assert builtins.__import__ is around
        with plain_sizes():
            import this_is_no_module  # pyright: ignore  # noqa: F401
    except ModuleNotFoundError:
        assert builtins.__import__ is around
    finally:
        builtins.__import__ = mine
        with plain_sizes():
            pass
    assert builtins.__import__ is before


# -- in processes that have loaded neither

BEGIN = """
import builtins, json, sys, threading
import torch
from tensorloop._torch.plain_sizes import plain_sizes
x = torch.ones(2, 3)
def loaded():
    return sorted({"sympy", "torch._dynamo"} & sys.modules.keys())
"""


def said(code: str) -> Any:
    """What a fresh process prints."""
    return fresh(BEGIN + code)


def test_formulas_load_neither_and_leave_nothing_behind() -> None:
    after, inside, left, restored, same = said("""
was = builtins.__import__
with plain_sizes():
    values = [torch._refs.tril(x), torch._refs.addcmul(x, x, x), torch._refs.softmax(x, 1)]
    inside = loaded()
same = [torch.equal(a, b) for a, b in zip(values, [x.tril(), torch.addcmul(x, x, x), x.softmax(1)])]
def marked(f):
    while f is not None:
        if "__dynamo_disable" in vars(f): return True
        f = getattr(f, "__wrapped__", None)
    return False
left = [name for name, f in vars(torch._refs).items() if callable(f) and hasattr(f, "__dict__") and marked(f)]
print(json.dumps([loaded(), inside, left, builtins.__import__ is was, same]))
""")
    assert (inside, after, left, restored, same) == ([], [], [], True, [True] * 3)


@pytest.mark.parametrize(
    "code",
    [
        "with plain_sizes():\n    import sympy\n    assert sympy.Symbol",
        "with plain_sizes():\n    thread = threading.Thread(target=torch._refs.tril, args=[x])\n"
        "    thread.start()\n    thread.join()",
        "torch._refs.tril(x)",
    ],
    ids=["a user's import", "another thread", "outside"],
)
def test_others_get_the_real_ones(code: str) -> None:
    assert "sympy" in said(f"{code}\nprint(json.dumps(loaded()))")


def test_a_name_that_is_not_known_is_imported() -> None:
    code = "import torch.fx.experimental.symbolic_shapes as s\nprint(json.dumps([loaded(), hasattr(s, 'ShapeEnv')]))"
    ask = 'exec("from torch.fx.experimental.symbolic_shapes import guard_or_false, ShapeEnv", vars(torch._refs))\n'
    assert said(f"with plain_sizes():\n    {ask}{code}") == [["sympy"], True]


def test_threads_do_not_end_each_other() -> None:
    before, entered, leave = builtins.__import__, threading.Event(), threading.Event()

    def stay() -> None:
        with plain_sizes():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()
    with plain_sizes():
        pass
    still = builtins.__import__
    leave.set()
    thread.join()
    assert still is not before
    assert builtins.__import__ is before
