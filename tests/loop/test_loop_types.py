"""The types of loops follow from init and xs: pyright holds `assert_type`, running it checks that the values agree."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, assert_type

import torch
from torch import Tensor

import tensorloop as tl


class State(NamedTuple):
    h: Tensor
    n: int


def step(carry: State, x: Tensor) -> tuple[State, dict[str, Tensor]]:
    return State(carry.h + x, carry.n + 1), {"h": carry.h}


def test_scan() -> None:
    carry, ys = tl.scan(step, State(torch.zeros(2), 0), torch.ones(3, 2))
    assert_type(carry, State)
    assert_type(ys, dict[str, Tensor])
    assert type(carry) is State
    assert type(carry.n) is int
    assert type(ys) is dict

    def with_context(carry: Tensor, x: Tensor, context: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
        return carry * context[1] + x, carry + context[0]

    total, rows = tl.scan(with_context, torch.zeros(2), torch.ones(3, 2), context=(torch.ones(2), 0.5))
    assert_type(total, Tensor)
    assert_type(rows, Tensor)


def test_while_loop() -> None:
    def body(carry: State) -> State:
        return State(carry.h * 2, carry.n + 1)

    init = State(torch.ones(2), 0)
    assert_type(tl.while_loop(lambda carry: carry.n < 3, body, init), State)
    carry, steps = tl.while_loop(lambda carry: carry.n < 3, body, init, return_steps=True)
    assert_type(carry, State)
    assert (type(carry), steps) == (State, 3)
    assert_type(steps, int | Any)
    limits = torch.tensor([1, 2])
    rows = tl.while_loop(lambda n: n < limits, lambda n: n + 1, limits * 0, return_steps=True)
    assert_type(rows, tuple[Tensor, Tensor | Any])  # a number where the condition gives one
    assert isinstance(rows[1], Tensor)
    assert_type(tl.while_loop(lambda n, most: n < most, lambda n, most: n + 1, limits * 0, context=limits), Tensor)


def test_fori_loop_and_map() -> None:
    array = tl.fori_loop(0, 3, lambda i, array: array.append(torch.ones(2) * i), tl.TensorArray())
    assert_type(array, tl.TensorArray)
    assert_type(tl.fori_loop(torch.tensor(0), 3, lambda i, n: n + i, 0), int)
    pair = tl.map(lambda x: (x.sum(), x), torch.ones(3, 2))
    assert_type(pair, tuple[Tensor, Tensor])
    assert type(pair) is tuple


def test_associative_scan() -> None:
    assert_type(tl.associative_scan(torch.maximum, torch.rand(4)), Tensor)


def test_attention() -> None:
    x = torch.ones(1, 3, 2, 4)
    p = tl.pack_padded(x, [2])
    assert_type(tl.attention(x, x, x), Tensor)
    assert_type(tl.attention(p, p, p, causal=True), tl.PackedTensor)
    keys = tl.TensorArray().append(x[:, 0])
    assert_type(tl.attention(x[:, 0], keys, keys), Tensor)
    assert type(tl.attention(p, p, p)) is tl.PackedTensor


FORGOTTEN = """
import torch
from torch import Tensor
import tensorloop as tl

h, xs, cell = torch.zeros(3, 3), torch.zeros(5, 3, 3), torch.nn.GRUCell(3, 3)


def typed(h: Tensor, x: Tensor) -> Tensor:
    return h + x


def bare(h, x):
    return torch.tanh(h + x)


def with_context(h: Tensor, x: Tensor, context: Tensor) -> Tensor:
    return h + x + context


tl.scan(typed, h, xs)
tl.scan(bare, h, xs)
tl.scan(lambda h, x: torch.tanh(h + x), h, xs, checkpoints=2)
tl.scan(lambda h, x: h + x, h, xs)
tl.scan(lambda h, x: h + x, h, xs, reverse=True)
tl.scan(lambda h, x, c: h + x, h, xs, context=h)
tl.scan(lambda h, x: h + x, h, tl.pack_padded(xs, [1, 2]))
tl.scan(typed, h, xs, reverse=True, until=lambda c: c.sum() > 3)
tl.scan(with_context, h, xs, context=h)
tl.scan(typed, h, tl.TensorArray())
tl.scan(typed, h, tl.pack_padded(xs, [1, 2]))
tl.scan(lambda h, x: h + 1, h, length=3)
"""


def test_a_body_without_y_is_what_a_checker_blames(tmp_path: Path) -> None:
    """And not xs, of which other overloads want other kinds."""
    file = tmp_path / "forgotten.py"
    file.write_text(FORGOTTEN)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(Path(tl.__file__).parents[1])]}))
    code = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    run = subprocess.run(code, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr + run.stdout  # errors were found, and nothing else went wrong
    found = json.loads(run.stdout)["generalDiagnostics"]
    lines = FORGOTTEN.splitlines()
    calls = {i for i, line in enumerate(lines) if line.startswith("tl.scan")}
    blamed = {x["range"]["start"]["line"]: x["message"] for x in found if x["rule"] == "reportArgumentType"}
    assert blamed.keys() == calls
    for line, message in blamed.items():
        assert 'cannot be assigned to parameter "body_fn"' in message, lines[line]
        assert '"Tensor" is not assignable to "tuple[Tensor, ' in message, lines[line]
