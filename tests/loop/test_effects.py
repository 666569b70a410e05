"""What the Python of a step may do: effects are refused before anything has changed, and pure steps are let through."""

# ruff: noqa: E501, F401 - the texts of steps use the imports

import array
import bisect
import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import heapq
import io
import itertools
import logging
import operator
import queue
import random
import struct
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.effects.follow import following
from tensorloop.loop.effects.judge import Effect, Judge
from tensorloop.loop.effects.notes import StepNotes

IMPORTS = {name: value for name, value in globals().items() if isinstance(value, types.ModuleType)}
STATE = """
class Holder:
    n = 0
class Slots:
    __slots__ = ("n",)
    def __init__(self): self.n = 0
class Borg:
    shared = {"n": 0}
    def __init__(self): self.__dict__ = self.shared
class Lazy:
    def __init__(self): self.kept = {"n": 0}
    @property
    def n(self): self.kept["n"] += 1; return self.kept["n"]
def counting():
    n = 0
    def count():
        nonlocal n
        n += 1
        return n
    return count
def function(k=0): return k
@dataclasses.dataclass
class Record:
    n: int = 0
item, slots, lazy, count = Holder(), Slots(), Lazy(), counting()
item.n, item.kept = 0, [0]
items, names, seen, line, raw = [0, 1], {"n": 0}, {1}, collections.deque([1, 2]), bytearray(2)
numbers, shown, values = array.array("d", [0]), memoryview(raw), np.zeros(3)
kinds, counted, users = collections.defaultdict(int), collections.Counter("ab"), collections.UserList([0])
steps, generator, mapped = iter(range(9)), (i for i in range(9)), map(abs, [1, 2, 3])
waiting, text, rng, stand_in = queue.SimpleQueue(), io.StringIO(), random.Random(1), weakref.proxy(item)
waiting.put(1)
referred = weakref.WeakSet([item])
tensor, layer = torch.zeros(3), nn.Linear(2, 2)
tensor.n = 0
total = 0
"""
IMPURE = r"""
item.n += 1
setattr(item, "n", 3)
object.__setattr__(item, "n", 3)
object.__setattr__(tensor, "n", 3)
item.__dict__["n"] = 3
vars(item).update(n=3)
del item.n
Holder.n += 1
type(item).other = 1
stand_in.n = 2
slots.n += 1
Borg().n = 4
function.n = 1
function.__defaults__ = (1,)
count.__closure__[0].cell_contents = 7
count()
lazy.n
globals()["total"] = 3
exec("total = 3", globals())
items[0] += 1
items[:1] = [5]
other = items; other += [1]
[items][0][0] = 5
items.append(1)
list.append(items, 1)
list(map(items.append, [1]))
sorted([1], key=items.append)
functools.partial(items.append, 3)()
operator.methodcaller("append", 3)(items)
operator.setitem(items, 0, 5)
heapq.heappush(items, 1)
bisect.insort(items, 1)
items.sort(reverse=True)
items[0], items[1] = 3, 4
for items[0] in (1, 2): pass
[items.append(i) for i in range(2)]
names["n"] += 1
names.update(n=3)
names.setdefault("z", []).append(1)
kinds["new"]
counted["x"] += 1
users[0] = 1
seen.add(2)
line.rotate(1)
raw[0] += 1
shown[0] = 3
memoryview(raw)[0] = 3
struct.pack_into("b", raw, 0, 4)
numbers[0] += 1
other = values; other += 1
np.add(values, 1, out=values)
next(steps)
for _ in steps: break
first, *rest = steps
list(itertools.islice(steps, 1))
next(generator)
3 in generator
next(mapped)
waiting.get()
text.write("a")
rng.random()
random.random()
print("a", file=text)
referred.discard(item)
threading.Thread(target=items.append, args=(1,)).start()
layer.eval()
try: items.append(1)\nexcept BaseException: pass
with contextlib.ExitStack() as stack: stack.callback(items.append, 1)
class Inner: items.append(1)
for x in {"k": item}.values(): x.n = 5
"""
PURE = r"""
own = [1]; own.append(2); own[0] = 3; own += [1]; own.sort()
own = {}; own["a"] = 1; own.update(b=2); del own["a"]; own.setdefault("k", []).append(1)
own = Record(); own.n += 1; own = dataclasses.replace(own, n=5); own.n = 2
own = copy.copy(item); own.n += 1; vars(own)["m"] = 1
own = copy.deepcopy(names); own["n"] = 3
own = counting(); own(); own()
own = sum(i for i in range(3)) + max(items) + len(names)
own = f"{items!r}" + ",".join(map(str, items)) + "%s" % (names,)
own = sorted(names.items(), key=operator.itemgetter(1)), [*items], {**names}, list(zip(items, items))
own = bytearray(2); own[0] += 3; memoryview(own)[1] = 2
own = np.zeros(3); own[0] += 1; own += 1; own.sort()
own = collections.Counter("ab"); own["z"] += 1
own = collections.defaultdict(list); own["x"].append(1)
own = itertools.count(3); next(own)
own = random.Random(3); own.random(); own.choice([1, 2])
own = io.StringIO(); own.write("a")
own = [3, 1]; heapq.heapify(own); heapq.heappop(own)
own = nn.Linear(2, 2); own.eval(); own.n = 3
own = torch.zeros(3); own.n = 1; own.requires_grad_()
own = struct.unpack("b", struct.pack("b", 3))
own = function(**{"k": 3}) + function.__defaults__[0]
own = item.n, slots.n, Holder.n, tensor.n, stand_in.n, values[0], kinds.get("k"), next(iter(items))
item.n = 0
with contextlib.suppress(KeyError), contextlib.ExitStack() as own: names["none"]
try: names["none"]\nexcept KeyError as error: error.note = 1
match {"a": [1, 2]}:\n    case {"a": [own, *_]}: pass
own = item is None or tensor is tensor or item in referred
"""


def step_of(text: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A step of that text, and the state that it finds."""
    found: dict[str, Any] = {**IMPORTS, "__name__": "users"}
    exec(compile(STATE, "<state>", "exec"), found)
    lines = "\n    ".join(text.replace("\\n", "\n").splitlines())
    exec(compile(f"def step():\n    {lines}", "<step>", "exec"), found)
    return found["step"], found


def judged(text: str) -> tuple[Effect | None, bool]:
    """What is refused of a step, and whether it has left anything."""
    step, found = step_of(text)
    before, judge = said(found), Judge()
    try:
        with following(judge), contextlib.suppress(Effect):
            step()
    finally:
        judge.end()
    return judge.seen, said(found) != before


def said(found: dict[str, Any]) -> str:
    """The state as text."""
    simple = ["items", "names", "seen", "line", "raw", "numbers", "values", "kinds", "counted", "users", "total"]
    parts = [repr(found.get(name)) for name in simple]
    parts += [repr(vars(found["item"])), repr(found["Borg"].shared)]
    parts += [str(found["Holder"].n), str(found["slots"].n), repr(vars(found["function"])), found["text"].getvalue()]
    parts += [repr(found["lazy"].kept), repr(found["rng"].getstate()), str(operator.length_hint(found["steps"]))]
    parts += [str(found["waiting"].qsize()), str(len(found["referred"])), str(found["layer"].training)]
    parts += [repr(vars(found["tensor"])), str(found["tensor"].requires_grad), repr(found["function"].__defaults__)]
    return "\n".join([*parts, repr(found["count"].__closure__[0].cell_contents)])


@pytest.mark.parametrize("text", IMPURE.strip().splitlines())
def test_effects_are_refused_before_they_happen(text: str) -> None:
    effect, changed = judged(text)
    assert effect is not None
    assert effect.place[0] in ("<step>", "<state>")
    assert not changed


@pytest.mark.parametrize("text", PURE.strip().splitlines())
def test_pure_steps_are_let_through(text: str) -> None:
    effect, changed = judged(text)
    assert effect is None
    assert not changed


# -- loops with checkpoints: (what a step writes, how it reads it)

READ = [
    ('item.__dict__["n"] += 1', "item.n"),
    ("vars(item).update(n=item.n + 1)", "item.n"),
    ("item.n += 1", 'vars(item)["n"]'),
    ("Holder.n += 1", "Holder().n"),
    ("total.n = 2 * total.n", "globals()['total'].n"),
    ("count.__closure__[0].cell_contents += 1", "count.__closure__[0].cell_contents"),
    ("kinds['k'] += 1", "kinds['k']"),
    ("shown[0] += 1", "raw[0]"),
    ("raw[0] += 1", "shown[0]"),
    ("tensor.n += 1", "tensor.n"),
    ("tensor.requires_grad_(not tensor.requires_grad)", "float(tensor.requires_grad)"),
    ("threading.Thread(target=items.append, args=(1,)).run()", "len(items)"),
    ("log.setLevel(log.level + 1)", "log.level"),
    ("gate.acquire()", "gate._value"),
    ("place.n += 1", "place.n"),
]
MORE = "log, gate, place, total = logging.Logger('a', 1), threading.Semaphore(9), threading.local(), Record(1)\nplace.n = 0"


def body_of(*lines: str) -> tuple[Any, dict[str, Any]]:
    """A body with these lines before its result."""
    found: dict[str, Any] = {**IMPORTS, "__name__": "users"}
    text = "\n    ".join(("def body(c, x):", *lines, "return c * x, None"))
    exec(compile(f"{STATE}\n{MORE}\n{text}", "<body>", "exec"), found)
    return found["body"], found


def scanned(body: Any) -> Any:
    return tl.scan(body, torch.ones(2, requires_grad=True), torch.ones(5, 2), checkpoints=2)[0]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("write", "read"), READ)
def test_what_a_step_has_written_no_step_reads(write: str, read: str, first: bool) -> None:
    lines = write, f"c = c * (1 + {read})"
    body, found = body_of(*(reversed(lines) if first else lines))
    before = said(found), found["tensor"].n, found["log"].level, found["gate"]._value, found["place"].n
    with pytest.raises(RuntimeError, match=r"the body .*<body>:\d+"):
        scanned(body)
    assert (said(found), found["tensor"].n, found["log"].level, found["gate"]._value, found["place"].n) == before


@pytest.mark.parametrize(
    "line",
    [
        "item.n += 1",
        "items.append(1)",
        "names['n'] = 3",
        "kinds['k'] += 1",
        "log.info('a %s', item.n)",
        "text.write('a')",
        "tensor.n += 1",
    ],
)
def test_what_no_step_reads_may_be_written(line: str) -> None:
    body, _ = body_of(line)
    scanned(body).sum().backward()


def test_what_a_step_has_made_is_not_kept() -> None:
    body, _ = body_of("own = [c]", "own.append(c * 2)", "c = own[-1]")
    scanned(body).sum().backward()  # no warning that somebody still holds it


def test_notes_hold_nothing_new() -> None:
    notes = StepNotes()
    judge = Judge(notes)
    with following(judge):
        [].append(1)
    judge.end()
    assert not notes.undo()


@pytest.mark.filterwarnings("ignore:scan. not compiled")
def test_two_leaves_of_a_carry_that_are_one_tensor() -> None:
    def body(carry: Any, x: Any) -> Any:
        a, b = carry
        y = torch.sin(a + x)
        y = y * 0.5 if a is b else y
        return (y, y), y

    init, xs = (torch.ones(3), torch.ones(3)), torch.zeros(4, 3)
    found = tl.scan(body, init, xs, compile=True)[1]
    torch.testing.assert_close(found, tl.scan(body, init, xs)[1])
    with pytest.raises(RuntimeError, match="the same"):
        tl.scan(body, (torch.ones(3, requires_grad=True), torch.ones(3)), xs, checkpoints=2)


@pytest.mark.filterwarnings("ignore:scan. not compiled")
def test_a_carry_of_a_tensor_from_outside_that_is_written_to() -> None:
    def run(**options: Any) -> Any:
        outside = torch.zeros(3)

        def body(carry: Any, x: Any) -> Any:
            a, b = carry
            a += x
            return (b, outside), a.sum()

        return tl.scan(body, (torch.ones(3), torch.ones(3)), torch.ones(5, 3), **options), outside

    torch.testing.assert_close(run(compile=True), run())


@pytest.mark.filterwarnings("ignore:scan. not compiled")
def test_an_error_that_a_clause_around_another_one_catches() -> None:
    def body(c: Any, x: Any) -> Any:
        try:
            try:
                y = 7 // (x > 0).sum()
            finally:
                c = c * 0.5
        except RuntimeError:
            y = c.sum()
        return c + y, None

    xs = torch.tensor([[1.0, 0], [0, 0], [1, 1]])
    found = tl.scan(body, torch.ones(2), xs, compile=True)[0]
    torch.testing.assert_close(found, tl.scan(body, torch.ones(2), xs)[0])


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_generators_that_a_step_seeds_and_sets_back(checkpoints: int) -> None:
    def run(**options: Any) -> Any:
        generator = torch.Generator().manual_seed(3)

        def body(c: Any, x: Any) -> Any:
            kept = generator.get_state()
            generator.manual_seed(7)
            c = torch.sin(c * torch.rand(3, generator=generator))
            generator.set_state(kept)
            return c * torch.rand(3, generator=generator) + x, None

        init = torch.ones(3, requires_grad=True)
        return torch.autograd.grad(tl.scan(body, init, torch.ones(5, 3), **options)[0].sum(), init)

    torch.testing.assert_close(run(checkpoints=checkpoints), run())


@pytest.mark.filterwarnings("ignore:scan. not compiled")
@pytest.mark.parametrize("test", ["type(n).__name__ == 'int'", "type(n) is int", "{int: True}.get(type(n))"])
def test_types_of_numbers_that_are_read(test: str) -> None:
    body, _ = body_of("n = c.argmax().item()", f"c = c * (2 if {test} else 3)")
    found = tl.scan(body, torch.ones(2), torch.ones(5, 2), compile=True)[0]
    torch.testing.assert_close(found, tl.scan(body, torch.ones(2), torch.ones(5, 2))[0])
