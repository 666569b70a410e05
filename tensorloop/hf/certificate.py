"""Which layers of transformers' models were compared with the model itself, by what their code does.

certificate.json has a signature for each, written by `python -m tests.support.hf_every --write` from what it measured,
and the versions that it ran with. A layer of another name or model with the same code has the same signature; one that
a newer release changed has another, and is not known until it was compared.
"""

import ast
import hashlib
import inspect
import json
import sys
import textwrap
from functools import cache
from importlib import resources
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tensorloop.hf.signature import CACHES

_OUTER = (PreTrainedModel, GradientCheckpointingLayer)  # which hand a cache on


@cache
def known() -> dict[str, Any]:
    """The certificate: `attention` and `mixers`, signatures by name of the class, and `versions`."""
    return json.loads(resources.files("tensorloop.hf").joinpath("certificate.json").read_text("utf-8"))


@cache
def signature(kind: type[nn.Module]) -> str:
    """Makes a signature of the methods of a layer but the first, without types, comments and docstrings."""
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # made where there is no file
        return ""
    assert isinstance(found, ast.ClassDef)
    text = "".join(_plain(x) for x in found.body if isinstance(x, ast.FunctionDef) and x.name != "__init__")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(function: ast.FunctionDef) -> str:
    """A function as text, without what says nothing of what it computes."""
    function.returns, function.decorator_list = None, []
    for x in ast.walk(function):
        if isinstance(x, ast.arg):
            x.annotation = None
        elif isinstance(x, ast.FunctionDef) and ast.get_docstring(x) is not None:
            x.body = x.body[1:] or [ast.Pass()]
    return ast.unparse(ast.Module([_Untyped().visit(function)], []))


class _Untyped(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return None if node.value is None else ast.Assign([node.target], node.value, lineno=0)


def find_readers(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """(attention, mixers): the innermost modules that take a cache, by whether they ask for attention by a name."""
    takes = [x for x in model.modules() if _reads(type(x))]
    inner = [x for x in takes if not any(y is not x and _reads(type(y)) for y in x.modules())]
    return [x for x in inner if asks_by_name(type(x))], [x for x in inner if not asks_by_name(type(x))]


def _reads(kind: type) -> bool:
    if not issubclass(kind, nn.Module) or issubclass(kind, _OUTER):
        return False
    names = inspect.signature(kind.forward).parameters
    return "hidden_states" in names and any(name in names for name in CACHES)


def asks_by_name(kind: type[nn.Module]) -> bool:
    """Whether modules of this kind find their attention by the name in their config."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(kind.forward).__code__.co_names


def is_served(config: Any) -> bool:
    """Whether a model with this config (that of its decoder) is known to be served by "tensorloop"."""
    found = [x for x in _layers_of(type(config)) if asks_by_name(x)]
    return bool(found) and all(signature(x) in known()["attention"] for x in found)


def is_mixer(kind: type[nn.Module]) -> bool:
    """Whether modules of this kind, no attention, were compared on packed rows."""
    return signature(kind) in known()["mixers"]


@cache
def _layers_of(config: type) -> tuple[type[nn.Module], ...]:
    """The layers that read a cache in the file that has the models with such a config."""
    name = config.__module__.replace(".configuration_", ".modeling_")
    there = vars(sys.modules[name]).values() if name in sys.modules else ()
    return tuple(x for x in there if isinstance(x, type) and x.__module__ == name and _reads(x))
