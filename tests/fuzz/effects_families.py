"""The kinds of statements of impure bodies: how often each is drawn, and how its state is used."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.draw import Draw
from tests.fuzz.effects_acts import (
    ANY,
    CATCHES,
    FAILS,
    OF_CAPTURES,
    OF_CARRIES,
    OF_GRAPHS,
    READS,
    caught,
    outside,
    typed,
)  # fmt: skip
from tests.fuzz.effects_kinds import (
    COLLECT,
    CONTAINERS,
    DICTS,
    FILLS,
    GENERATORS,
    GROWS,
    HOLDERS,
    ITEMS,
    ITERATORS,
    LIBRARY,
    LISTS,
    NAMES,
    PURE,
    RANDOM,
    SETS,
    SETS_DICT,
    SETS_ITEM,
    TAKEN,
    TENSORS,
    WITH_DICT,
    Kind,
)  # fmt: skip

# How state is used. All but the last two change it in each step: and a later one reads it ("feedback"), nothing does
# ("write"), on one path alone ("late"). "between": it changes between calls, "backward": before a call's backward.
MODES = {"feedback": 5, "write": 1.2, "late": 0.5, "read": 0.8, "between": 1.2, "backward": 0.3}


@dataclass
class Family:
    """A kind of statement, how often it is drawn, and how."""

    weight: float
    draw: Callable[[Draw], Kind]
    state: bool = True
    modes: dict[str, float] = field(default_factory=lambda: MODES)


def _attribute(draw: Draw) -> Kind:
    setup = draw.choice([*HOLDERS.values(), *WITH_DICT.values()])
    return Kind(setup, draw.choice(SETS_DICT if setup in WITH_DICT.values() else SETS), "OBJ.n", "OBJ.n")


def _item(draw: Draw) -> Kind:
    return Kind(draw.choice([*ITEMS.values()]), draw.choice(SETS_ITEM), "float(OBJ[0])", "float(OBJ[0])")


def _grown(draw: Draw) -> Kind:
    if draw.chance(0.4):
        return Kind(draw.choice([*DICTS.values()]), draw.choice(FILLS), "len(OBJ)", "len(OBJ)")
    return Kind(draw.choice([*LISTS.values()]), draw.choice(GROWS), "len(OBJ)", "len(OBJ)")


def _taken(draw: Draw) -> Kind:
    """State that is reached by way of something new."""
    kind = draw.choice([_attribute, _item, _grown])(draw)
    setups, inner = [kind.setup], "OBJ"
    for number in range(draw.among({1: 3, 2: 1})):
        setup, text = draw.choice(TAKEN)
        for word in ("FUN", "CLS"):
            setup, text = (re.sub(rf"\b{word}\b", f"{word}{number}", x) for x in (setup, text))
        setups, inner = [*setups, setup], text.replace("INNER", inner)
    step, value = (re.sub(r"\bOBJ\b", lambda _: inner, text) for text in (kind.step, kind.value))
    return kind._replace(setup="\n".join(filter(None, setups)), step=step, value=value)


def _caught_read(draw: Draw) -> Kind:
    return caught(draw, draw.choice(READS), "0.25", ANY, CATCHES)


def _caught_failure(draw: Draw) -> Kind:
    operation = draw.choice([*FAILS])
    other = draw.choice(["h * 0.5", "h.sum() * 0.1", "0.25"])
    return caught(draw, operation, other, [*ANY, FAILS[operation]], CATCHES[:-2])


def _of(kinds: list[Kind]) -> Callable[[Draw], Kind]:
    return lambda draw: draw.choice(kinds)


ONLY_HERE = {"feedback": 4, "write": 1.0, "late": 0.4}  # where the way to read it is not one to use
FAMILIES = {
    "attribute": Family(5, _attribute),
    "item": Family(3, _item),
    "grown": Family(2, _grown),
    "container": Family(3, _of(CONTAINERS)),
    "name": Family(5, _of(NAMES)),
    "taken": Family(5, _taken),
    "iterator": Family(2, _of(ITERATORS), modes=ONLY_HERE),
    "library": Family(3, _of(LIBRARY), modes=ONLY_HERE),
    "random": Family(2, _of(RANDOM), modes=ONLY_HERE),
    "tensors": Family(3, _of(TENSORS), modes={"feedback": 4, "write": 1, "late": 0.4}),
    "collect": Family(1.5, _of(COLLECT), modes={"write": 1}),
    "generator": Family(3, _of(GENERATORS), modes={"feedback": 1}),
    "pure": Family(6, _of(PURE), state=False),
    "caught read": Family(4, _caught_read, state=False),
    "caught failure": Family(5, _caught_failure, state=False),
    "types": Family(5, typed, state=False),
    "grad of carry": Family(3, _of(OF_CARRIES), state=False),
    "grad of capture": Family(2.5, _of(OF_CAPTURES), modes={"feedback": 1}),
    "grad outside": Family(2.5, outside, state=False),
    "graph": Family(1.5, _of(OF_GRAPHS), state=False),
    "shared": Family(4, _of([])),
}
# What turns a statement on between two calls: (setup, whether it is on, what turns it on).
SWITCHES = [
    ("sw = False", "sw", "sw = True"),
    ("sw = [False]", "sw[0]", "sw[0] = True"),
    ("sw = []", "len(sw) > 0", "sw.append(1)"),
    ("sw = []", "sw", "sw.append(1)"),
    ("sw = {}", "sw.get('on')", "sw['on'] = True"),
    ("sw = {'a': [0, {'on': 0}]}", "sw['a'][1]['on']", "sw['a'][1]['on'] = 1"),
    ("sw = {1}", "2 in sw", "sw.add(2)"),
    ("sw = collections.deque([0])", "max(sw) > 0", "sw.append(1)"),
    ("sw = types.SimpleNamespace(on=False)", "sw.on", "sw.on = True"),
    ("sw = types.SimpleNamespace()", "hasattr(sw, 'on')", "sw.on = True"),
    ("class sw:\n    on = 0.0", "sw.on > 0", "sw.on = 1.0"),
    ("sw = collections.namedtuple('sw', 'on')(0)", "sw.on", "sw = sw._replace(on=1)"),
    ("def sw():\n    return False", "sw()", "sw = lambda: True"),
    ("def sw(on=False):\n    return on", "sw()", "sw.__defaults__ = (True,)"),
    ("sw = functools.partial(lambda on=0: on)", "sw()", "sw.keywords['on'] = 1"),
    ("sw = nn.Sequential(nn.Tanh())", "not sw.training", "sw.eval()"),
    ("sw = nn.Sequential()", "len(sw)", "sw.append(nn.Tanh())"),
    ("sw = nn.Identity()", "sw(2) > 2", "sw.register_forward_hook(lambda *given: 3)"),
    ("sw = torch.zeros(2)", "sw.shape[0] > 2", "sw = torch.zeros(3)"),
    ("sw = contextvars.ContextVar('sw', default=0)", "sw.get()", "sw.set(1)"),
]
PURE_FAMILIES = {"pure", "branch"}
