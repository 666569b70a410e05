"""What impure bodies are made of: state and the statements that change it, with pure ones that look alike.

Texts have words that a program replaces by names of its own: OBJ the state, CLS a class, FUN a function, TMP a local
variable, SCOPE `nonlocal` or `global`, C a number. `h` is the carry, `w` a closed-over tensor, both of three numbers.
"""

# ruff: noqa: E501

from typing import NamedTuple


class Kind(NamedTuple):
    """State, a statement that changes it, and how its value is read after that statement and without it ("")."""

    setup: str
    step: str
    value: str
    peek: str = ""
    reads: str = "number"  # what the value is: "number", "tensor", "bool", or "" where nothing is to be used
    needs: str = ""  # names that the body must have: i, q, x, a (an array), m (a counter, an int)


def kinds(*rows: tuple[str, ...], **options: str) -> list[Kind]:
    """Of rows of setup, step, value and how the value is read without the step, which is the value where left out."""
    return [Kind(*row[:3], row[3] if len(row) > 3 else row[2], **options) for row in rows]  # pyright: ignore


# -- attributes: what has an attribute n, and how that is changed

_OBJECT = "class CLS:\n    def __init__(self):\n        self.n = 0\nOBJ = CLS()"
HOLDERS = {
    "class": "class OBJ:\n    n = 0",
    "subclass": "class CLS:\n    n = 0\nclass OBJ(CLS):\n    pass",
    "class of": "class CLS:\n    n = 0\nOBJ = CLS()",
    "slots": 'class CLS:\n    __slots__ = ("n", "__weakref__")\nOBJ = CLS()\nOBJ.n = 0',
    "enum": "class CLS(enum.Enum):\n    X = 1\nOBJ = CLS.X\nOBJ.n = 0",
    "property": (
        "class CLS:\n    d = [0]\n    @property\n    def n(self):\n        return self.d[0]\n"
        "    @n.setter\n    def n(self, x):\n        self.d[0] = x\nOBJ = CLS()"
    ),
    "setattr": (
        "class CLS:\n    d = {}\n    def __getattr__(self, name):\n        return self.d.get(name, 0)\n"
        "    def __setattr__(self, name, x):\n        self.d[name] = x\nOBJ = CLS()"
    ),
    "descriptor": (
        "class FUN:\n    d = {}\n    def __get__(self, o, kind):\n        return self.d.get(id(o), 0)\n"
        "    def __set__(self, o, x):\n        self.d[id(o)] = x\nclass CLS:\n    n = FUN()\nOBJ = CLS()"
    ),
    "metaclass": (
        "class CLS(type):\n    d = [0]\n    @property\n    def n(cls):\n        return cls.d[0]\n"
        "    @n.setter\n    def n(cls, x):\n        cls.d[0] = x\nclass OBJ(metaclass=CLS):\n    pass"
    ),
    "proxy": f"{_OBJECT}\nFUN = OBJ\nOBJ = weakref.proxy(FUN)",
    "thread local": "OBJ = threading.local()\nOBJ.n = 0",
}
WITH_DICT = {
    "function": "def OBJ():\n    pass\nOBJ.n = 0",
    "method": "class CLS:\n    def go(self):\n        pass\nOBJ = CLS.go\nOBJ.n = 0",
    "module": 'OBJ = types.ModuleType("m")\nOBJ.n = 0',
    "namespace": "OBJ = types.SimpleNamespace(n=0)",
    "object": _OBJECT,
    "cached": "class CLS:\n    @functools.cached_property\n    def n(self):\n        return 0\nOBJ = CLS()\nOBJ.n",
    "dataclass": "@dataclasses.dataclass\nclass CLS:\n    n: int = 0\nOBJ = CLS()",
    "partial": "OBJ = functools.partial(max)\nOBJ.n = 0",
    "exception": "OBJ = ValueError()\nOBJ.n = 0",
    "nn.Module": "OBJ = nn.Linear(3, 3)\nOBJ.n = 0",
    "tensor": "OBJ = torch.zeros(3)\nOBJ.n = 0",
    "parameter": "OBJ = nn.Parameter(torch.zeros(3))\nOBJ.n = 0",
}
SETS = [
    "OBJ.n += 1", "OBJ.n = OBJ.n + 1", 'setattr(OBJ, "n", OBJ.n + 1)', "for OBJ.n in (OBJ.n + 1,):\n    pass",
    'exec("o.n += 1", {"o": OBJ})', "with contextlib.nullcontext(OBJ.n + 1) as OBJ.n:\n    pass", "OBJ.n, TMP = OBJ.n + 1, 0",
    'functools.partial(setattr, OBJ, "n")(OBJ.n + 1)', '(lambda o: setattr(o, "n", o.n + 1))(OBJ)',
    'list(map(lambda o: setattr(o, "n", o.n + 1), [OBJ]))', "TMP = OBJ\nTMP.n += 1",
]  # fmt: skip
SETS_DICT = [
    *SETS, 'OBJ.__dict__["n"] += 1', 'vars(OBJ)["n"] += 1', 'object.__setattr__(OBJ, "n", OBJ.n + 1)',
    "OBJ.__dict__.update(n=OBJ.n + 1)", 'getattr(OBJ, "__dict__")["n"] = OBJ.n + 1', 'TMP = OBJ.n + 1\ndel OBJ.n\nOBJ.n = TMP',
]  # fmt: skip

# -- items: what has a number at 0, and how that is changed

ITEMS = {
    "list": "OBJ = [0]", "list subclass": "class CLS(list):\n    pass\nOBJ = CLS([0])", "UserList": "OBJ = collections.UserList([0])",
    "deque": "OBJ = collections.deque([0])", "array.array": 'OBJ = array.array("d", [0])', "bytearray": "OBJ = bytearray(1)",
    "memoryview": "OBJ = memoryview(bytearray(1))", "ndarray": "OBJ = np.zeros(2)", "ndarray view": "FUN = np.zeros(4)\nOBJ = FUN[1:3]",
    "ndarray of ints": "OBJ = np.zeros(2, int)", "dict": "OBJ = {0: 0}", "defaultdict": "OBJ = collections.defaultdict(int)",
    "Counter": "OBJ = collections.Counter()", "OrderedDict": "OBJ = collections.OrderedDict({0: 0})", "ctypes": "OBJ = (ctypes.c_int * 2)()",
    "ChainMap": "OBJ = collections.ChainMap({0: 0})", "UserDict": "OBJ = collections.UserDict({0: 0})",
}  # fmt: skip
SETS_ITEM = [
    "OBJ[0] += 1", "OBJ[0] = OBJ[0] + 1", "operator.setitem(OBJ, 0, OBJ[0] + 1)", "OBJ.__setitem__(0, OBJ[0] + 1)",
    "OBJ[0], TMP = OBJ[0] + 1, 0", "for OBJ[0] in (OBJ[0] + 1,):\n    pass", 'exec("o[0] += 1", {"o": OBJ})', "TMP = OBJ\nTMP[0] += 1",
    "[OBJ.__setitem__(0, OBJ[0] + v) for v in (1,)]",
]  # fmt: skip

# -- containers that grow or shrink: the value is their length

LISTS = {
    "list": "OBJ = [0]", "UserList": "OBJ = collections.UserList([0])", "deque": "OBJ = collections.deque([0])",
    "array.array": 'OBJ = array.array("q", [0])', "bytearray": "OBJ = bytearray(1)",
}  # fmt: skip
GROWS = [
    "OBJ.append(1)", "OBJ.extend([1])", "TMP = OBJ.extend\nTMP((1, 2))",
    "OBJ.insert(0, 1)", "list(map(OBJ.append, [1]))", "functools.partial(OBJ.append, 1)()", "OBJ.append(len(OBJ))",
    'operator.methodcaller("append", 1)(OBJ)', "TMP = OBJ.append\nTMP(1)", "bisect.insort(OBJ, 1)", "sorted([1], key=OBJ.append)",
    "with contextlib.ExitStack() as TMP:\n    TMP.callback(OBJ.append, 1)", "[OBJ.append(v) for v in (1,)]",
]  # fmt: skip
DICTS = {
    "dict": "OBJ = {}", "OrderedDict": "OBJ = collections.OrderedDict()", "Counter": "OBJ = collections.Counter()",
    "ChainMap": "OBJ = collections.ChainMap({})", "UserDict": "OBJ = collections.UserDict()",
}  # fmt: skip
FILLS = [
    "OBJ[len(OBJ)] = 1", "OBJ.setdefault(len(OBJ), 1)", "OBJ.update({len(OBJ): 1})", "OBJ.setdefault(len(OBJ), 1)\nOBJ[0] = 2",
    "operator.setitem(OBJ, len(OBJ), 1)",
]  # fmt: skip

CONTAINERS = kinds(
    ("OBJ = set()", "OBJ.add(len(OBJ))", "len(OBJ)"),
    ("OBJ = set()", "OBJ.update({len(OBJ)})", "len(OBJ)"),
    ("OBJ = set()", "TMP = OBJ\nTMP |= {len(OBJ)}", "len(OBJ)"),
    ("OBJ = set(range(99))", "OBJ.pop()", "len(OBJ)"),
    ("OBJ = [0]", "TMP = OBJ\nTMP += [1]", "len(OBJ)"),
    ("OBJ = [0]", "OBJ[:0] = [1]", "len(OBJ)"),
    ("OBJ = [0]", "list.append(OBJ, 1)", "len(OBJ)"),
    ("OBJ = [0]", "operator.iadd(OBJ, [1])", "len(OBJ)"),
    ("OBJ = [0]", "heapq.heappush(OBJ, 1)", "len(OBJ)"),
    ("OBJ = [0]", "class TMP:\n    OBJ.append(1)", "len(OBJ)"),
    ('OBJ = {"n": 0}', 'exec("n += 1", OBJ)', 'OBJ["n"]'),
    ("OBJ = nn.Linear(3, 3)\nOBJ.v = [0]", "OBJ.v[0] += 1", "OBJ.v[0]"),
    ("OBJ = nn.Linear(3, 3)\nOBJ.v = []", "OBJ.v = [*OBJ.v, 1]", "len(OBJ.v)"),
    ("OBJ = [*range(99)]", "TMP = heapq.heappop(OBJ)", "TMP", "OBJ[0]"),
    ("OBJ = [*range(99)]", "TMP = OBJ.pop()", "TMP", "OBJ[-1]"),
    ("OBJ = [*range(99)]", "del OBJ[0]", "OBJ[0]"),
    ("OBJ = [1, 2, 3, 4]", "OBJ.reverse()", "OBJ[0]"),
    ("OBJ = [1, 2, 3, 4]", "OBJ.append(OBJ.pop(0))", "OBJ[0]"),
    ("OBJ = collections.deque([1, 2, 3, 4])", "OBJ.rotate(1)", "OBJ[0]"),
    ("OBJ = collections.deque([1, 2], maxlen=2)", "OBJ.append(OBJ[-1] + 1)", "OBJ[0]"),
    ("OBJ = collections.deque(range(99))", "TMP = OBJ.popleft()", "TMP", "OBJ[0]"),
    ("OBJ = dict.fromkeys(range(99))", "TMP = OBJ.popitem()[0]", "TMP", "len(OBJ)"),
    ("OBJ = collections.OrderedDict.fromkeys(range(1, 5))", "OBJ.move_to_end(next(iter(OBJ)))", "next(iter(OBJ))"),
    ("OBJ = collections.defaultdict(list)", 'OBJ["k"].append(1)', 'len(OBJ.get("k", ()))'),
    ("OBJ = collections.defaultdict(int)", "OBJ[len(OBJ)]", "len(OBJ)"),
    ("OBJ = collections.defaultdict(itertools.count(1).__next__)", "TMP = OBJ[len(OBJ)]", "TMP", "len(OBJ)"),
    ('OBJ = {"a": {"b": {"c": {"d": {"n": 0}}}}}', 'OBJ["a"]["b"]["c"]["d"]["n"] += 1', 'OBJ["a"]["b"]["c"]["d"]["n"]'),
    ("OBJ = [[0] for _ in range(9)]", "OBJ[8][0] += 1", "OBJ[8][0]"),
    ("OBJ = list(range(2000))", "OBJ[1500] += 1", "OBJ[1500] - 1500"),
    ("OBJ = ([0], {})", "OBJ[0][0] += 1", "OBJ[0][0]"),
    ("OBJ = np.zeros(3)", "TMP = OBJ\nTMP += 1", "float(OBJ[0])"),
    ("OBJ = np.zeros(3)", "np.add(OBJ, 1, out=OBJ)", "float(OBJ[0])"),
    ("OBJ = np.zeros(3)", "OBJ.fill(OBJ[0] + 1)", "float(OBJ[0])"),
    ("OBJ = np.arange(4.0)", "OBJ[:] = np.roll(OBJ, 1)", "float(OBJ[0])"),
    ("OBJ = np.arange(4.0)", "OBJ.sort()\nOBJ[0] = OBJ[-1] + 1", "float(OBJ[0])"),
    ("FUN = np.zeros(3)\nOBJ = torch.from_numpy(FUN)", "FUN[0] += 1", "float(FUN[0])"),
)

# -- names: closures, globals, defaults

NAMES = kinds(
    ("OBJ = 0", "SCOPE OBJ\nOBJ += 1", "OBJ"),
    ("OBJ = 0", "SCOPE OBJ\nOBJ = OBJ + 1 if OBJ < 4 else 0", "OBJ"),
    ("OBJ = 0", "SCOPE OBJ\nfor OBJ in (OBJ + 1,):\n    pass", "OBJ"),
    ("OBJ = None", "SCOPE OBJ\nOBJ = 1 if OBJ is None else OBJ + 1", "(OBJ or 0)"),
    ("OBJ = None", "SCOPE OBJ\nif OBJ is None:\n    OBJ = 3", "(OBJ or 0)"),
    ("OBJ = ()", "SCOPE OBJ\nOBJ = (*OBJ, 1)", "len(OBJ)"),
    ('OBJ = ""', 'SCOPE OBJ\nOBJ += "a"', "len(OBJ)"),
    ("OBJ = False", "SCOPE OBJ\nOBJ = not OBJ", "int(OBJ)"),
    ("OBJ = 1\nFUN = 2", "SCOPE OBJ, FUN\nOBJ, FUN = FUN, OBJ", "OBJ"),
    ("OBJ = 0\ndef FUN():\n    SCOPE OBJ\n    OBJ += 1\n    return OBJ", "TMP = FUN()", "TMP", "OBJ"),
    ("def CLS():\n    n = 0\n    def go():\n        nonlocal n\n        n += 1\n        return n\n    return go\nFUN = CLS()",
     "TMP = FUN()", "TMP", "FUN.__closure__[0].cell_contents"),
    ("def CLS():\n    n = 0\n    def go():\n        return n\n    return go\nFUN = CLS()",
     "FUN.__closure__[0].cell_contents += 1", "FUN()"),
    ("def FUN(o=[0]):\n    o[0] += 1\n    return o[0]", "TMP = FUN()", "TMP", "FUN.__defaults__[0][0]"),
    ('def FUN(*, o={"n": 0}):\n    o["n"] += 1\n    return o["n"]', "TMP = FUN()", "TMP", 'FUN.__kwdefaults__["o"]["n"]'),
    ("def FUN(k=0):\n    return k", "FUN.__defaults__ = (FUN() + 1,)", "FUN()"),
    ("class OBJ:\n    n = 0\n    @classmethod\n    def go(cls):\n        cls.n += 1", "OBJ.go()", "OBJ.n"),
    ("class OBJ:\n    n = 0\n    @staticmethod\n    def go():\n        OBJ.n += 1", "OBJ.go()", "OBJ.n"),
    ("class OBJ:\n    n = 0\n    def __init__(self):\n        type(self).n += 1", "TMP = OBJ()", "OBJ.n"),
    ("class OBJ:\n    n = 0\n    def __init__(self):\n        self.go()\n    def go(self):\n        OBJ.n += 1\n        return 1",
     "TMP = [OBJ() for _ in range(2)]", "OBJ.n"),
    ("class OBJ:\n    n = 0\nclass CLS:\n    def __del__(self):\n        OBJ.n += 1", "TMP = CLS()\ndel TMP", "OBJ.n"),
    ("class CLS:\n    n = 0\n    def __getitem__(self, k):\n        self.n += 1\n        return self.n\nOBJ = CLS()", "TMP = OBJ[0]", "TMP", "OBJ.n"),
    ("class CLS:\n    n = 0\n    def __len__(self):\n        self.n += 1\n        return self.n\nOBJ = CLS()", "TMP = len(OBJ)", "TMP", "OBJ.n"),
    ("class CLS:\n    n = 0\n    def __add__(self, o):\n        self.n += o\n        return self.n\nOBJ = CLS()", "TMP = OBJ + 1", "TMP", "OBJ.n"),
    ("class CLS:\n    n = 0\n    def __call__(self):\n        self.n += 1\n        return self.n\nOBJ = CLS()", "TMP = OBJ()", "TMP", "OBJ.n"),
    ("class CLS:\n    n = 0\n    def __eq__(self, o):\n        CLS.n += 1\n        return True\nOBJ = CLS()", "TMP = OBJ in [1]", "OBJ.n"),
    ("class CLS:\n    n = 0\n    def __lt__(self, o):\n        CLS.n += 1\n        return True\nOBJ = CLS()", "TMP = sorted([OBJ, OBJ])", "OBJ.n"),
    ("class CLS:\n    n = 0\n    def __format__(self, _):\n        self.n += 1\n        return 'a' * self.n\nOBJ = CLS()", "TMP = f'{OBJ}'", "len(TMP)", "OBJ.n"),
    ("class CLS:\n    n = 0\n    def __hash__(self):\n        self.n += 1\n        return 1\nOBJ = CLS()", "TMP = {OBJ: 1}", "OBJ.n"),
    ("class CLS:\n    n = 0\n    def __bool__(self):\n        self.n += 1\n        return self.n % 2 == 0\nOBJ = CLS()",
     "TMP = 2 if OBJ else 1", "TMP", "OBJ.n"),
    ("class CLS:\n    n = 0\n    @property\n    def v(self):\n        self.n += 1\n        return self.n\nOBJ = CLS()", "TMP = OBJ.v", "TMP", "OBJ.n"),
    ("class CLS:\n    def __getattr__(self, k):\n        self.__dict__[k] = 3\n        return 1\nOBJ = CLS()", "TMP = OBJ.v", "TMP", "len(vars(OBJ))"),
    ("class CLS:\n    n = 0\n    def __enter__(self):\n        self.n += 1\n        return self.n\n    def __exit__(self, *_):\n        pass\nOBJ = CLS()",
     "with OBJ as TMP:\n    pass", "TMP", "OBJ.n"),
    ("OBJ = [0]\n@contextlib.contextmanager\ndef FUN():\n    OBJ[0] += 1\n    yield OBJ[0]", "with FUN() as TMP:\n    pass", "TMP", "OBJ[0]"),
    ("OBJ = [0]\n@functools.lru_cache(None)\ndef FUN(k):\n    OBJ[0] += 1\n    return OBJ[0]", "TMP = FUN(OBJ[0])", "TMP", "OBJ[0]"),
    ("@functools.lru_cache(None)\ndef FUN(k):\n    return k", "FUN(1)", "FUN.cache_info().currsize"),
    ("class CLS:\n    n = 0\n    @functools.cached_property\n    def v(self):\n        CLS.n += 1\n        return CLS.n\nOBJ = CLS()",
     "TMP = OBJ.v\ndel OBJ.v", "TMP", "CLS.n"),
    ("OBJ = [0]\nclass CLS:\n    n = 0\n    def __init__(self, o):\n        self.o = o\n    def go(self):\n        self.o[0] += 1",
     "CLS(OBJ).go()", "OBJ[0]"),
    ("OBJ = [0]\ndef CLS(f):\n    @functools.wraps(f)\n    def go(*a):\n        OBJ[0] += 1\n        return f(*a)\n    return go\n@CLS\ndef FUN(x):\n    return x",
     "FUN(1)", "OBJ[0]"),
    ("OBJ = [0]\n@functools.singledispatch\ndef FUN(k):\n    OBJ[0] += 1", "FUN(1)", "OBJ[0]"),
)  # fmt: skip

# -- iterators, and state that the standard library holds

_GENERATOR = "def FUN():\n    k = 0\n    while True:\n        k += 1\n        yield k\nOBJ = FUN()"
_AT = 'OBJ.gi_frame.f_locals.get("k", 0)'
ITERATORS = kinds(
    ("OBJ = iter(range(99))", "TMP = next(OBJ)", "TMP", "operator.length_hint(OBJ)"),
    ("OBJ = iter([*range(200)])", "TMP = next(OBJ, 0)", "TMP", "operator.length_hint(OBJ)"),
    ("OBJ = iter([*range(200)])", "for TMP in OBJ:\n    break", "TMP", "operator.length_hint(OBJ)"),
    ("OBJ = iter([*range(200)])", "(TMP,) = itertools.islice(OBJ, 1)", "TMP", "operator.length_hint(OBJ)"),
    ("OBJ = iter([*range(200)])", "TMP, _ = itertools.islice(OBJ, 2)", "TMP", "operator.length_hint(OBJ)"),
    ("OBJ = iter([*range(200)])", "TMP = max(itertools.islice(OBJ, 2))", "TMP", "operator.length_hint(OBJ)"),
    ("OBJ = iter([*range(200)])", "TMP = OBJ.__next__()", "TMP", "operator.length_hint(OBJ)"),
    ("OBJ = iter([*range(200)])", "TMP = [v for v, _ in zip(OBJ, [1])][0]", "TMP", "operator.length_hint(OBJ)"),
    ("OBJ = itertools.count()", "TMP = next(OBJ)", "TMP", "int(repr(OBJ)[6:-1])"),
    ("FUN = iter(range(99))\nOBJ = map(float, FUN)", "TMP = next(OBJ)", "TMP", "operator.length_hint(FUN)"),
    ("FUN = iter(range(99))\nOBJ = enumerate(FUN)", "TMP, _ = next(OBJ)", "TMP", "operator.length_hint(FUN)"),
    ("FUN = iter(range(99))\nOBJ = (v for v in FUN)", "TMP = next(OBJ)", "TMP", "operator.length_hint(FUN)"),
    ("FUN = iter(range(99))\nOBJ = itertools.chain(FUN)", "TMP = 40 in OBJ", "int(TMP)", "operator.length_hint(FUN)"),
    ("FUN = iter([1, 2, 3, 4] * 9)\nOBJ = itertools.cycle(FUN)", "TMP = next(OBJ)", "TMP", "operator.length_hint(FUN)"),
    ("FUN = iter(range(99))\nOBJ = itertools.tee(FUN)[0]", "TMP = next(OBJ)", "TMP", "operator.length_hint(FUN)"),
    ("FUN = iter(range(99))\nOBJ = itertools.groupby(FUN)", "TMP = next(OBJ)[0]", "TMP", "operator.length_hint(FUN)"),
    ("OBJ = iter(itertools.count(1).__next__, 200)", "TMP = next(OBJ)", "TMP", "0"),
    (_GENERATOR, "TMP = next(OBJ)", "TMP", _AT),
    (_GENERATOR, "for TMP in OBJ:\n    break", "TMP", _AT),
    (f"{_GENERATOR}\nCLS = OBJ.__next__", "TMP = CLS()", "TMP", _AT),
    ("def FUN():\n    k = 0\n    while True:\n        k += yield k\nOBJ = FUN()\nnext(OBJ)", "TMP = OBJ.send(1)", "TMP", _AT),
    ("class CLS:\n    n = 0\n    def __iter__(self):\n        return self\n    def __next__(self):\n        self.n += 1\n        return self.n\nOBJ = CLS()",
     "TMP = next(OBJ)", "TMP", "OBJ.n"),
)  # fmt: skip
LIBRARY = kinds(
    ('OBJ = contextvars.ContextVar("v", default=0)', "OBJ.set(OBJ.get() + 1)", "OBJ.get()"),
    ("decimal.setcontext(decimal.Context(prec=5))", "decimal.getcontext().prec += 1", "decimal.getcontext().prec"),
    ('os.environ["FUZZ_N"] = "0"', 'os.environ["FUZZ_N"] = str(int(os.environ["FUZZ_N"]) + 1)', 'int(os.environ["FUZZ_N"])'),
    ("sys.setrecursionlimit(3000)", "sys.setrecursionlimit(sys.getrecursionlimit() + 1)", "sys.getrecursionlimit() % 7"),
    ('OBJ = logging.Logger("fuzz", 0)', "OBJ.setLevel(OBJ.level + 1)", "OBJ.level"),
    ("OBJ = io.StringIO()", 'OBJ.write("a")', "OBJ.tell()"),
    ("OBJ = io.StringIO()", 'print("a", file=OBJ)', "len(OBJ.getvalue())"),
    ('OBJ = io.StringIO("1\\n2\\n3\\n4\\n" * 60)', "TMP = int(OBJ.readline())", "TMP", "OBJ.tell()"),
    ("OBJ = io.BytesIO(bytes(range(99)))", "TMP = OBJ.read(1)[0]", "TMP", "OBJ.tell()"),
    ("OBJ = queue.Queue()\nfor FUN in range(200):\n    OBJ.put(FUN)", "TMP = OBJ.get(timeout=2)", "TMP", "OBJ.qsize()"),
    ("OBJ = queue.SimpleQueue()\nfor FUN in range(200):\n    OBJ.put(FUN)", "TMP = OBJ.get()", "TMP", "OBJ.qsize()"),
    ("OBJ = queue.SimpleQueue()\nfor FUN in range(CALLS):\n    OBJ.put(FUN)", "TMP = OBJ.get()", "TMP", "OBJ.qsize()"),
    ("OBJ = queue.Queue()", "OBJ.put(1)", "OBJ.qsize()"),
    ("OBJ = queue.PriorityQueue()\nOBJ.put(0)", "TMP = OBJ.get_nowait()\nOBJ.put(TMP + 1)", "TMP", "OBJ.queue[0]"),
    ("OBJ = [0]", "TMP = threading.Thread(target=OBJ.append, args=(1,))\nTMP.start()\nTMP.join()", "len(OBJ)"),
    ("OBJ = threading.Semaphore(200)", "OBJ.acquire()", "OBJ._value"),
    ('OBJ = string.Template("$a")', 'OBJ.template += "a"', "len(OBJ.template)"),
    ("OBJ = struct.pack_into\nFUN = bytearray(1)", 'OBJ("b", FUN, 0, FUN[0] + 1)', "FUN[0]"),
    ("OBJ = contextlib.ExitStack()", "OBJ.callback(len, ())", "len(OBJ._exit_callbacks)"),
    ("OBJ = types.MappingProxyType({0: [0]})", "OBJ[0][0] += 1", "OBJ[0][0]"),
    ("OBJ = [0]\nFUN = weakref.WeakSet()\nclass CLS:\n    pass\nCLS = CLS()\nFUN.add(CLS)", "FUN.discard(CLS)", "len(FUN)"),
    ('OBJ = types.ModuleType("fuzz_m")\nOBJ.n = 0\nsys.modules["fuzz_m"] = OBJ', "import fuzz_m\nfuzz_m.n += 1", 'sys.modules["fuzz_m"].n'),
)  # fmt: skip
RANDOM = kinds(
    ("random.seed(5)", "TMP = random.random()", "TMP", "hash(random.getstate())"),
    ("random.seed(5)", "TMP = random.choice([1, 2, 3])", "TMP", "hash(random.getstate())"),
    ("random.seed(5)", "TMP = random.gauss(0, 1)", "TMP", "hash(random.getstate())"),
    ("OBJ = random.Random(5)", "TMP = OBJ.random()", "TMP", "hash(OBJ.getstate())"),
    ("OBJ = random.Random(5)\nFUN = OBJ.random", "TMP = FUN()", "TMP", "hash(OBJ.getstate())"),
    ("class CLS(random.Random):\n    pass\nOBJ = CLS(5)", "TMP = OBJ.randint(0, 9)", "TMP", "hash(OBJ.getstate())"),
    ("OBJ = [1, 2, 3, 4]\nFUN = random.Random(5)", "FUN.shuffle(OBJ)", "OBJ[0]"),
    ("np.random.seed(5)", "TMP = float(np.random.rand())", "TMP", "int(np.random.get_state()[2])"),
    ("OBJ = np.random.default_rng(5)", "TMP = float(OBJ.random())", "TMP", 'OBJ.bit_generator.state["state"]["state"] % 10**6'),
    ("OBJ = np.random.RandomState(5)", "TMP = float(OBJ.randn())", "TMP", "int(OBJ.get_state()[2])"),
    ("OBJ = np.random.RandomState(5)", "TMP = torch.from_numpy(OBJ.randn(3))", "float(TMP.sum())", "int(OBJ.get_state()[2])"),
)  # fmt: skip

# -- state that holds tensors

_STATE = "int(OBJ.get_state().double().sum())"
TENSORS = kinds(
    ("OBJ = [torch.zeros(3)]", "OBJ[0] = OBJ[0] * 0.9 + h.detach()", "OBJ[0]"),
    ("OBJ = [torch.zeros(3)]", "OBJ[0] = OBJ[0] * 0.9 + h", "OBJ[0]"),
    ("OBJ = torch.zeros(3)", "SCOPE OBJ\nOBJ = OBJ * 0.9 + h.detach()", "OBJ"),
    ("OBJ = types.SimpleNamespace(n=torch.zeros(3))", "OBJ.n = OBJ.n * 0.9 + h.detach()", "OBJ.n"),
    ("OBJ = nn.Linear(3, 3)\nOBJ.v = None", "OBJ.v = h.detach() if OBJ.v is None else OBJ.v * 0.9", "(torch.zeros(3) if OBJ.v is None else OBJ.v)"),
    ("OBJ = torch.zeros(3)", "OBJ.mul_(0.9).add_(h.detach())", "OBJ.clone()"),
    ("OBJ = torch.zeros(3)", "TMP = OBJ\nTMP += h.detach()", "OBJ.clone()"),
    ("OBJ = torch.zeros(3)", "OBJ[0] += 1", "OBJ.clone()"),
    ("OBJ = []", "OBJ.append(h.detach())", "torch.stack(OBJ).mean(0)", "sum(OBJ, torch.zeros(3))"),
    ("OBJ = [torch.zeros(3)]", "TMP = OBJ.pop()\nOBJ.append(h.detach().sin())", "TMP", "OBJ[0]"),
    ("OBJ = torch.zeros(3)", "OBJ.requires_grad_(not OBJ.requires_grad)", "torch.full((3,), float(OBJ.requires_grad))"),
    ("OBJ = nn.Dropout(0.0)", "OBJ.train(not OBJ.training)", "torch.full((3,), float(OBJ.training))"),
    ("OBJ = nn.BatchNorm1d(3)", "TMP = OBJ(h.detach().expand(2, 3) * torch.ones(2, 1).cumsum(0))", "TMP[0]", "OBJ.running_mean"),
    reads="tensor",
)  # fmt: skip
COLLECT = kinds(
    ("OBJ = []", "OBJ.append(h.detach())", "", "OBJ"),
    ("OBJ = []", "OBJ.append(float(h.sum()))", "", "OBJ"),
    ("OBJ = []", "OBJ.append(h.shape[0])", "", "OBJ"),
    ("OBJ = {}", "OBJ[len(OBJ)] = h.detach().sum()", "", "OBJ"),
    ("OBJ = []", "if h.sum() > 0:\n    OBJ.append(1)", "", "OBJ"),
    ("OBJ = []", "OBJ.append(tuple(h.shape))", "", "OBJ"),
    reads="",
)
GENERATORS = kinds(
    ("OBJ = torch.Generator().manual_seed(3)", "OBJ.manual_seed(7)\nTMP = torch.rand(3, generator=OBJ)", "TMP", _STATE),
    ("OBJ = torch.Generator().manual_seed(3)\nFUN = OBJ.get_state()", "OBJ.set_state(FUN)\nTMP = torch.rand(3, generator=OBJ)", "TMP", _STATE),
    ("OBJ = torch.Generator().manual_seed(3)", "TMP = OBJ.get_state()\nOBJ.manual_seed(7)\nh = h + torch.rand(3, generator=OBJ)\nOBJ.set_state(TMP)\nTMP = torch.rand(3, generator=OBJ)", "TMP", _STATE),
    ("OBJ = torch.Generator().manual_seed(3)", "TMP = torch.Generator()\nTMP.set_state(OBJ.get_state())\nTMP = torch.randn(3, generator=TMP)", "TMP", _STATE),
    ("OBJ = torch.Generator().manual_seed(3)", "TMP = torch.rand(3, generator=OBJ)\nOBJ.manual_seed(7)", "TMP", _STATE),
    ("", "TMP = torch.rand(3, generator=torch.Generator().manual_seed(7))", "TMP", "0"),
    ("", "TMP = torch.Generator().manual_seed(7)\nTMP = torch.randperm(3, generator=TMP).double()", "TMP", "0"),
    ("", "torch.manual_seed(7)\nTMP = torch.rand(3)", "TMP", "torch.initial_seed()"),
    ("OBJ = torch.get_rng_state()", "torch.set_rng_state(OBJ)\nTMP = torch.rand(3)", "TMP", "0"),
    ("", "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(7)\n    TMP = torch.rand(3)", "TMP", "0"),
    reads="tensor",
)  # fmt: skip

# -- pure: objects that a step makes itself

PURE = kinds(
    ("", "TMP = [1, 2]\nTMP.append(3)\nTMP[0] += 4", "sum(TMP)"),
    ("", 'TMP = {"a": 1}\nTMP["b"] = 2\nTMP.update(c=3)\ndel TMP["a"]', "sum(TMP.values())"),
    ("", "TMP = [v * v for v in range(4) if v != 2]", "sum(TMP)"),
    ("", "TMP = {v: [] for v in range(3)}\nTMP[1].append(2)\nTMP.setdefault(7, []).append(1)", "len(TMP)"),
    ("class CLS:\n    def __init__(self):\n        self.n = 0\n    def go(self):\n        self.n += 1\n        return self", "TMP = CLS().go().go()\nTMP.m = TMP.n\nTMP.n += 1", "TMP.n"),
    ("def FUN(n):\n    for k in range(n):\n        yield k", "TMP = sum(FUN(4))", "TMP"),
    ("def FUN(n):\n    while True:\n        n += 1\n        yield n", "TMP = FUN(0)\nTMP = next(TMP) + next(TMP)", "TMP"),
    ("@dataclasses.dataclass\nclass CLS:\n    n: int = 1", "TMP = dataclasses.replace(CLS(), n=3)\nTMP.n += 1", "TMP.n"),
    ("OBJ = [3, 1, 2]", "TMP = sorted(OBJ)\nTMP[0] = 7", "max(TMP) + min(OBJ)"),
    ("OBJ = [3, 1, 2]", 'TMP = f"{OBJ!r}" + ",".join(map(str, OBJ))', "len(TMP)"),
    ("OBJ = {'a': [1]}", 'TMP = copy.deepcopy(OBJ)\nTMP["a"].append(3)', 'sum(TMP["a"])'),
    ("OBJ = {'a': 1}", 'TMP = {**OBJ, "z": 1}\nTMP["a"] += 1', "sum(TMP.values())"),
    ("def CLS():\n    n = 0\n    def go():\n        nonlocal n\n        n += 1\n        return n\n    return go", "TMP = CLS()\nTMP()\nTMP = TMP()", "TMP"),
    ("", 'TMP = collections.Counter("abca")\nTMP["z"] += 1', 'TMP["a"]'),
    ("", "TMP = collections.deque([1])\nTMP.appendleft(3)\nTMP.rotate(1)", "TMP[0]"),
    ("", "TMP = collections.defaultdict(list)\nTMP[1].append(2)", "len(TMP[1])"),
    ("", 'TMP = collections.namedtuple("P", "a b")(1, 2)._replace(a=5)', "TMP.a"),
    ("@contextlib.contextmanager\ndef FUN():\n    yield 3", "with FUN() as TMP, contextlib.suppress(KeyError):\n    TMP += 1", "TMP"),
    ("OBJ = {}", 'try:\n    TMP = OBJ["nothing"]\nexcept KeyError:\n    TMP = 3', "TMP"),
    ("OBJ = {}", "try:\n    TMP = OBJ.nothing\nexcept AttributeError as error:\n    error.note = 1\n    TMP = 2", "TMP"),
    ("", 'match {"a": [1, 2]}:\n    case {"a": [TMP, *_]}:\n        pass', "TMP"),
    ("", "TMP = np.zeros(3)\nTMP[0] += 2\nTMP += 1", "float(TMP.sum())"),
    ("", "TMP = io.StringIO()\nTMP.write('abc')", "len(TMP.getvalue())"),
    ("", "TMP = itertools.count(3)\nnext(TMP)\nTMP = next(TMP)", "TMP"),
    ("", "TMP = random.Random(3)\nTMP = TMP.random() + TMP.random()", "TMP"),
    ("", "TMP = [3, 1, 2]\nheapq.heapify(TMP)\nheapq.heappush(TMP, 0)", "TMP[0] + len(TMP)"),
    ("", "TMP = bytearray(2)\nTMP[0] += 3\nmemoryview(TMP)[1] = 2", "sum(TMP)"),
    ("class CLS:\n    @functools.cached_property\n    def v(self):\n        return 3", "TMP = CLS()\nTMP = TMP.v + TMP.v", "TMP"),
    ("def FUN(*a, **k):\n    k['z'] = 1\n    return len(k)", "TMP = FUN(1, y=2)", "TMP"),
    ('OBJ = contextvars.ContextVar("v", default=0)', "TMP = OBJ.set(5)\nFUN = OBJ.get()\nOBJ.reset(TMP)", "FUN"),
    ("OBJ = types.SimpleNamespace(n=2)", "TMP = copy.copy(OBJ)\nTMP.n += 1", "TMP.n + OBJ.n"),
    ("def FUN(o):\n    o.append(1)\n    o[0] = 2\n    return o", "TMP = FUN(FUN([]))", "len(TMP)"),
    ("", "TMP = [torch.zeros(3)]\nTMP[0] = h.detach()\nTMP.append(h)\nh = TMP[-1] + TMP[0] * 0.1", "len(TMP)"),
    ("", "TMP = torch.zeros(3)\nTMP[0] = 2.0\nTMP += 1\nh = h + 0.1 * TMP", "3"),
)  # fmt: skip

# -- an older object taken back out of something new: (what the program begins with, an expression of INNER)

TAKEN = [
    ("", "[INNER][0]"), ("", "(INNER, 1)[0]"), ("", '{"k": INNER}["k"]'), ("", "(lambda o=INNER: o)()"), ("", "[INNER].pop()"),
    ("def FUN(x):\n    return x", "FUN(INNER)"), ("def FUN(x):\n    return x[0]", "FUN([INNER])"), ("def FUN(x):\n    yield x", "next(FUN(INNER))"),
    ("def FUN(*a, **k):\n    return k['o']", "FUN(o=INNER)"), ("def FUN(*a):\n    return a[0]", "FUN(INNER)"),
    ("def FUN(o):\n    try:\n        raise KeyError(o)\n    except KeyError as e:\n        return e.args[0]", "FUN(INNER)"),
    ("def FUN(o):\n    with contextlib.nullcontext(o) as x:\n        return x", "FUN(INNER)"),
    ("def FUN(o):\n    match [o]:\n        case [x]:\n            return x", "FUN(INNER)"),
    ("def FUN(o):\n    b = []\n    b.append(o)\n    return b[0]", "FUN(INNER)"), ("def FUN(o):\n    [a, *b] = [1, o]\n    return b[0]", "FUN(INNER)"),
    ("class CLS:\n    def __init__(self, o):\n        self.o = o", "CLS(INNER).o"), ("class CLS:\n    def __init__(self, o):\n        self.o = o", "vars(CLS(INNER))['o']"),
    ("class CLS:\n    def __init__(self, o):\n        self.o = o\n    def get(self):\n        return self.o", "CLS(INNER).get()"),
    ("class CLS:\n    def __init__(self, o):\n        self.o = o\n    @property\n    def it(self):\n        return self.o", "CLS(INNER).it"),
    ("class CLS:\n    def __init__(self, o):\n        self.o = o\n    def __getitem__(self, k):\n        return self.o", "CLS(INNER)[0]"),
    ("class CLS:\n    def __init__(self, o):\n        self.o = o\n    def __iter__(self):\n        yield self.o", "[*CLS(INNER)][0]"),
    ("@dataclasses.dataclass\nclass CLS:\n    o: object", "CLS(INNER).o"), ("@dataclasses.dataclass\nclass CLS:\n    o: object", "dataclasses.replace(CLS(INNER)).o"),
    ('CLS = collections.namedtuple("CLS", "a b")', "CLS(INNER, 1).a"), ("", "copy.copy([INNER])[0]"), ("", "list(map(lambda o: o, [INNER]))[0]"),
    ("", "next(iter([INNER]))"), ("", "operator.itemgetter('k')(dict(k=INNER))"), ("", "sorted([INNER], key=id)[0]"), ("", "max([INNER], key=id)"),
    ("", "next(zip([INNER]))[0]"), ("", "dict(enumerate([INNER]))[0]"), ("", "collections.deque([INNER])[0]"), ("", "types.SimpleNamespace(o=INNER).o"),
    ("", "functools.partial(lambda o: o, INNER)()"), ("", "[o for o in [INNER]][0]"), ("", "([INNER] + [])[0]"), ("", "[INNER, 1][:1][0]"),
    ("", "{**{'k': INNER}}['k']"), ("", "next(itertools.chain([INNER]))"), ("", "functools.reduce(lambda a, b: a, [INNER, 0])"),
    ("", "operator.attrgetter('o')(types.SimpleNamespace(o=INNER))"), ("", "{'k': INNER}.get('k')"), ("", "{}.setdefault('k', INNER)"),
    ("", "(INNER if w.dim() else None)"), ("", "collections.ChainMap({'k': INNER})['k']"), ("", "(lambda: INNER)()"),
]  # fmt: skip
