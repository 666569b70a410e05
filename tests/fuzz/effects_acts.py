"""What bodies do that is no state of theirs: they catch, share memory, ask for types, take gradients.

The words in capitals are those of `effects_kinds.py`; C is a number near 0, READ and EXC stand in the ways to catch.
"""

# ruff: noqa: E501

import re

from tests.fuzz.draw import Draw
from tests.fuzz.effects_kinds import Kind, kinds

# -- exceptions: READ, or what TMP is otherwise, by EXC

CATCHES = [  # (setup, step)
    ("", "try:\n    TMP = READ\nexcept EXC:\n    TMP = OTHER"),
    ("", "try:\n    TMP = READ\nexcept:\n    TMP = OTHER"),
    ("", "TMP = OTHER\nwith contextlib.suppress(EXC):\n    TMP = READ"),
    ("", "try:\n    TMP = READ\nexcept EXC as error:\n    TMP = OTHER\nelse:\n    TMP = TMP * 0.5"),
    ("", "try:\n    try:\n        TMP = READ\n    finally:\n        h = h * 0.9\nexcept EXC:\n    TMP = OTHER"),
    ("", "try:\n    TMP = READ\nexcept* EXC:\n    TMP = OTHER"),
    ("def FUN(h):\n    v = OTHER\n    try:\n        v = READ\n    finally:\n        return v", "TMP = FUN(h)"),
    ("def FUN(h):\n    for _ in range(1):\n        try:\n            v = READ\n        finally:\n            v = OTHER\n            break\n"
     "    return v", "TMP = FUN(h)"),
    ("class CLS:\n    def __enter__(self):\n        pass\n    def __exit__(self, *_):\n        return True",
     "TMP = OTHER\nwith CLS():\n    TMP = READ"),
    ("@contextlib.contextmanager\ndef FUN():\n    try:\n        yield\n    except EXC:\n        pass", "TMP = OTHER\nwith FUN():\n    TMP = READ"),
    ("", "TMP = OTHER\nwith contextlib.ExitStack() as stack:\n    stack.push(lambda *_: True)\n    TMP = READ"),
    ("def FUN(h, f):\n    try:\n        return f(h)\n    except EXC:\n        return OTHER", "TMP = FUN(h, lambda h: READ)"),
    ("class CLS:\n    def __getattr__(self, name):\n        return OTHER\n    @property\n    def v(self):\n        return READ_SELF",
     "TMP = CLS()\nTMP.__dict__['h'] = h\nTMP = TMP.v"),
    ("class CLS:\n    def __init__(self, h):\n        self.h = h\n    @property\n    def v(self):\n        return READ_SELF",
     "try:\n    TMP = getattr(CLS(h), 'v', OTHER)\nexcept EXC:\n    TMP = OTHER"),
]  # fmt: skip
ANY = ["Exception", "BaseException", "(RuntimeError, ValueError, TypeError, IndexError)", "Exception"]
READS = [
    "float(h.sum())", "int((h[0] * 4).item()) * 0.1", "h[h > 0].sum()", "torch.unique(h.round()).numel() * 0.1", "h.tolist()[0]",
    "len((h > 0).nonzero()) * 0.1", "float(h.max())", "0.1 if h.sum() > 0 else 0.2", "max(h.tolist())", "float(h.numpy(force=True)[0])",
    "float(np.asarray(h.detach())[0])", "float((h > 0).all())", "len(f'{h[0]:.1f}') * 0.1", "sum(v.item() for v in h)", "h.detach().sum().item()",
    "torch.masked_select(h, h > 0).sum()", "bool(h[0] > 0) * 0.1", "h[int(h.argmax())]", "h[h.argmax().item()]", "h.nonzero().shape[0] * 0.1",
    "math.floor(h[0]) * 0.1", "h.split([int(h[0] > 0), 3 - int(h[0] > 0)])[0].sum()", "torch.tensor([float(h[0]), 0.2]).sum()",
    "h.repeat_interleave((h > 0).long()).sum()", "torch.arange(int(h.abs().sum() + 1)).sum() * 0.1", "float(h.isnan().any())",
]  # fmt: skip
FAILS = {  # what fails at some steps: by which error
    "torch.linalg.cholesky(torch.diag(h + C)).sum()": "torch.linalg.LinAlgError",
    "torch.linalg.cholesky(torch.diag(h[:2] + C))[1, 1]": "torch.linalg.LinAlgError",
    "torch.linalg.inv(torch.diag(F.relu(h + C))).sum()": "torch.linalg.LinAlgError",
    "torch.linalg.solve(torch.diag(F.relu(h + C)), h)": "torch.linalg.LinAlgError",
    "torch.linalg.inv_ex(torch.diag(F.relu(h + C)), check_errors=True)[0].sum()": "torch.linalg.LinAlgError",
    "torch.linalg.eigvalsh(torch.diag(torch.log(h + C)))": "RuntimeError",
    "torch.linalg.svdvals(torch.diag(torch.log(h + C))).sum()": "RuntimeError",
    "w.index_select(0, ((h[:1] + C) * 4).long())": "IndexError",
    "w.gather(0, ((h + C) * 3).long())": "RuntimeError",
    "w.take(((h + C) * 3).long())": "IndexError",
    "w[((h + C) * 4).long()]": "IndexError",
    "F.embedding(((h + C) * 3).long(), w[:, None])[:, 0]": "IndexError",
    "(7 // (h > C).sum()) * 0.1": "RuntimeError",
    "(7 % (h > C).long()) * 0.1": "RuntimeError",
    "torch.div(7, (h > C).sum(), rounding_mode='floor') * 0.1": "RuntimeError",
    "F.one_hot(((h + C) * 2).long(), 4).sum(0)[:3] * 0.1": "RuntimeError",
    "torch.multinomial(h + C, 1)[0] * 0.1": "RuntimeError",
    "torch.bernoulli(h + C + 0.3) * 0.1": "RuntimeError",
    "torch.bincount(((h + C) * 3).long(), minlength=9).double().std() * 0.1": "RuntimeError",
    "torch.distributions.Normal(h, h + C).mean": "ValueError",
    "h.repeat_interleave(((h + C) * 2).long()).sum()": "RuntimeError",
    "F.nll_loss(h[None], ((h[:1] + C) * 3).long())": "IndexError",
    "torch.zeros(3).index_add(0, ((h + C) * 3).long(), h)": "IndexError",
    "torch.zeros(3).scatter_add(0, ((h + C) * 3).long(), h)": "RuntimeError",
    "h.masked_scatter(h < C, h[h < 0].detach())": "RuntimeError",
    "torch.normal(h, h + C)": "RuntimeError",
}


def caught(draw: Draw, read: str, other: str, errors: list[str], ways: list[tuple[str, str]]) -> Kind:
    """`read` where that raises nothing, else `other`: some way to write it."""
    words = {"READ_SELF": f"(lambda h: {read})(self.h)", "READ": read, "OTHER": other, "EXC": draw.choice(errors)}
    setup, step = (
        re.sub("READ_SELF|READ|OTHER|EXC", lambda found: words[found[0]], text) for text in draw.choice(ways)
    )
    return Kind(setup, step, "TMP", "0", "either")


# -- types

_TYPES = [
    "isinstance(NUM, int)", "type(NUM) == int", "type(NUM) is int", "NUM.__class__ is int", "issubclass(type(NUM), int)", "NUM is NUM + 0",
    "isinstance(NUM, (int, float))", "isinstance(NUM, numbers.Integral)", "isinstance(NUM, numbers.Number)", 'type(NUM).__name__ == "int"',
    "isinstance(NUM, torch.Tensor)", 'hasattr(NUM, "shape")', 'hasattr(NUM, "bit_length")', "NUM in (1, 3)", "NUM == 2", "NUM % 2 == 0",
    "type(NUM) in (int, bool)", "type(NUM) in {int: 1}", "callable(NUM)",
    "isinstance(NUM, int | float)", "isinstance(NUM, collections.abc.Hashable)", "torch.is_tensor(NUM)", "np.issubdtype(type(NUM), np.integer)",
    "operator.index(NUM) == 2", "type(NUM)(3) == 3", "isinstance(NUM * 0.5, float)", "isinstance(NUM + 1, int)", "type(NUM % 2) is int",
    "isinstance([NUM][0], int)", "isinstance(max(NUM, 0), int)", "NUM.__class__.__name__ == 'int'", "type(NUM).__mro__[0] is int",
    "isinstance(-NUM, int)", "all(type(v) is int for v in [NUM])", "str(NUM) == '2'", "f'{NUM}' == '2'", "hash(NUM) == 2", "{2: True}.get(NUM, False)",
    "NUM.bit_length() > 1", "bool(NUM)", "NUM > 2", "not NUM", "NUM is None", "isinstance(NUM, bool)", "isinstance(NUM, str)",
]  # fmt: skip
_MATCHES = [
    "match NUM:\n    case int():\n        TMP = True\n    case _:\n        TMP = False",
    "match NUM:\n    case 2:\n        TMP = True\n    case _:\n        TMP = False",
    "match {'n': NUM}:\n    case {'n': int() | float()}:\n        TMP = True\n    case _:\n        TMP = False",
    "TMP = FUN(NUM)",
    "try:\n    TMP = [True, False, True, True][NUM]\nexcept Exception:\n    TMP = False",
    "TMP = {int: True}.get(type(NUM), False)",
]
_DISPATCH = "@functools.singledispatch\ndef FUN(v):\n    return False\n@FUN.register\ndef _(v: int):\n    return True"
_NUMBERS = {  # and how often they are asked; the name in them is what the body must have
    "i": 6, "m": 4, "len(a)": 3, "x": 3, "h.shape[0]": 1, "h.numel()": 1, "h.sum().item()": 1, "h.argmax().item()": 1,
}  # fmt: skip


def typed(draw: Draw) -> Kind:
    """A question about the type, or the value, of a number that a loop may have something else for."""
    number = draw.among(_NUMBERS)
    needs = "r" if number == "x" else "".join(name for name in "ima" if re.search(rf"\b{name}\b", number))
    if draw.chance(0.2):
        return Kind(_DISPATCH, draw.choice(_MATCHES).replace("NUM", number), "TMP", "0", "bool", needs)
    return Kind("", "", draw.choice(_TYPES).replace("NUM", number), "0", "bool", needs)


# -- gradients in the body

OF_CARRIES = kinds(
    ("", "TMP = G((h * h).sum(), h, create_graph=CREATE)[0]", "TMP", "0"),
    ("", "TMP = G((h * q).sum(), q, create_graph=CREATE, retain_graph=True)[0]", "TMP", "0"),
    ("", "TMP = G((h * q).sin().sum(), (h, q), create_graph=CREATE, retain_graph=True)[1]", "TMP", "0"),
    ("", "TMP = G((h * g * q).sum(), g, retain_graph=True)[0]", "TMP", "0"),
    ("", "TMP = G((h * q).sum(), q, create_graph=True)[0]\nTMP = G((TMP * h).sum(), q, retain_graph=True, allow_unused=True, materialize_grads=True)[0]",
     "TMP", "0"),
    ("", "TMP = h.detach().requires_grad_()\nTMP = G((TMP ** 3).sum(), TMP)[0]", "TMP", "0"),
    ("", "TMP = q.detach().requires_grad_()\nTMP = G((TMP * h).sum(), TMP, create_graph=True)[0]", "TMP", "0"),
    ("", "with torch.enable_grad():\n    TMP = q.detach().requires_grad_()\n    TMP = G((TMP ** 2 * w).sum(), TMP, create_graph=CREATE)[0]", "TMP", "0"),
    reads="tensor", needs="q",
)  # fmt: skip
BY_X = kinds(  # one path takes the gradient, and the other makes h depend on q
    ("", "if x[0] > 0:\n    TMP = G((h * q).sum(), q, retain_graph=True)[0]\nelse:\n    TMP = torch.zeros(3)\n    h = q * 2", "TMP", "0"),
    ("", "if x[1] > 0:\n    TMP = torch.zeros(3)\n    h = h + q\nelse:\n    TMP = G((h * q).sin().sum(), q, retain_graph=True)[0]", "TMP", "0"),
    ("", "TMP = torch.zeros(3)\nif x.sum() > 0:\n    TMP = G((h * q).sum(), q, retain_graph=True)[0]\nelse:\n    h = h * q", "TMP", "0"),
    reads="tensor", needs="q",
)  # fmt: skip
OF_CAPTURES = kinds(
    ("", "TMP = G(h.sum(), w, retain_graph=True, allow_unused=True, materialize_grads=True)[0]", "TMP", "0"),
    ("", "TMP = G((h * w).sum(), w, retain_graph=True, create_graph=CREATE)[0]", "TMP", "0"),
    ("", "TMP = G((h.detach() * w).sum(), w, create_graph=CREATE)[0]", "TMP", "0"),
    ("", "h = torch.sin(w * h + 1)\nTMP = G(h, w, torch.ones(3), retain_graph=True)[0]", "TMP", "0"),
    ("OBJ = w * 2", "TMP = G((h * OBJ).sum(), OBJ, retain_graph=True)[0]", "TMP", "0"),
    ("OBJ = w.sin()", "TMP = G((h * OBJ).sum(), w, retain_graph=True, create_graph=CREATE)[0]", "TMP", "0"),
    ("", "(h ** 2).sum().backward(retain_graph=True)", "torch.zeros(3) if w.grad is None else w.grad.clone()", "[w.grad]"),
    ("", "(h.detach() * w).sum().backward()", "torch.zeros(3) if w.grad is None else w.grad.clone()", "[w.grad]"),
    ("", "TMP = (h * w).sum()\nTMP.backward(retain_graph=True, inputs=[w])", "w.grad.clone()", "[w.grad]"),
    reads="tensor",
)  # fmt: skip
OF_GRAPHS = kinds(
    ("", "", "h.is_leaf", "0"), ("", "", "h.grad_fn is None", "0"), ("", "", "h.requires_grad", "0"), ("", "", "q.is_leaf", "0"),
    ("", "", "q.grad_fn is None", "0"), ("", "", "g.is_leaf", "0"), ("", "", "g.grad_fn is not None", "0"), ("", "", "g.requires_grad", "0"),
    ("", "", '"Tanh" in type(h.grad_fn).__name__', "0"), ("", "", "len(g.grad_fn.next_functions) > 1 if g.grad_fn else False", "0"),
    ("", "", "g._version > 0", "0"), ("", "", "g is q", "0"), ("", "", "g.data_ptr() == q.data_ptr()", "0"), ("", "", "g._backward_hooks is None", "0"),
    reads="bool", needs="q",
)  # fmt: skip
_FUNCTIONS = [
    "torch.exp(torch.sin(w))", "torch.tanh(w * 2)", "torch.sigmoid(w)", "torch.softmax(w, 0)", "torch.sqrt(w * w + 1)", "w.norm() * w", "w ** 3",
    "torch.log_softmax(w, 0)", "w.logsumexp(0) * torch.ones(3)", "torch.rsqrt(w * w + 1)", "w.prod() * w", "torch.sin(w) * w", "w.cumprod(0)",
    "F.gelu(w)", "F.elu(w)", "F.softplus(w)", "torch.linalg.inv(torch.diag(w + 3)) @ w", "1 / (w + 3)", "w.std() * w", "F.normalize(w, dim=0)",
]  # fmt: skip
_OUTSIDE = [
    ("OBJ = FUNCTION", "TMP = G(OBJ, w, VECTOR, create_graph=True)[0]"),
    ("OBJ = FUNCTION", "TMP = G(OBJ, w, VECTOR, retain_graph=True)[0]"),
    ("OBJ = G((FUNCTION).sum(), w, create_graph=True)[0]", "TMP = G(OBJ, w, VECTOR, retain_graph=True)[0]"),
    ("OBJ = G((FUNCTION).sum(), w, create_graph=True)[0]", "TMP = G(OBJ, w, VECTOR, create_graph=True)[0]"),
    ("OBJ = FUNCTION", "TMP = G((OBJ * VECTOR).sum(), w, create_graph=True)[0]"),
    ("FUN = w * 1.5\nOBJ = (FUNCTION) * FUN", "TMP = G(OBJ, FUN, VECTOR, create_graph=True)[0]"),
]


def outside(draw: Draw) -> Kind:
    """The gradient in the body of a function that was computed before the loop."""
    setup, step = draw.choice(_OUTSIDE)
    step = step.replace("VECTOR", draw.choice(["h", "h", "h.detach()", "torch.ones(3)"]))
    return Kind(setup.replace("FUNCTION", draw.choice(_FUNCTIONS)), step, "TMP", "0", "tensor")


# -- memory that is shared: what the body writes, and what it hands on

WRITES = [
    "h.add_(1)", "h.mul_(0.9)", "h[0] = 0.5", "q.copy_(h)", "q.add_(h)", "h.relu_()", "h[1:].add_(1)", "torch.add(h, 1, out=h)", "h.copy_(h.sin())",
    "q.mul_(0.5)", "q[0] += h[1]", "h.view(-1).add_(0.5)", "F.relu(h, inplace=True)", "h.fill_(0.3)", "h += 1", "h.detach().add_(1)", "q.neg_()",
    "OBJ.add_(1)", "torch._foreach_add_([h, q], 1.0)", "h.index_fill_(0, torch.tensor([0]), 0.1)", "h[h > 1] = 0.0", "h.zero_().add_(q)",
]  # fmt: skip
HANDS_ON = [
    ("h", "h"), ("h", "h[:]"), ("h", "h.view(3)"), ("q", "q"), ("q", "h"), ("h", "h.detach()"), ("h", "OBJ"), ("OBJ", "h"), ("h[:]", "q[:]"), ("h", "q"),
    ("h.T", "q"), ("h", "h.clone()"), ("h.view_as(h)", "h"), ("OBJ", "OBJ"), ("h", "OBJ[:]"), ("h.clone()", "h"), ("h", "h.unsqueeze(0)[0]"), ("h", "h.flip(0)"),
    ("h.contiguous()", "h"), ("h", "h.to(h.dtype)"), ("q", "OBJ"), ("h", "h.reshape(3)"),
]  # fmt: skip
