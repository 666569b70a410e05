"""What stands in the graph that `torch.compile` makes, in the place of a function that dynamo cannot trace.

torch lets no library outside of it tell dynamo how to trace a call that takes a function; its own loops do it by a
higher-order operator and a variable of dynamo's for it. Private names of torch, tried with 2.11 to 2.15:
`_torchdynamo_inline` and `_dynamo_marked_constant` on functions, `torch._ops.HigherOrderOperator`,
`torch._C._AutoDispatchBelowAutograd`, `torch._dynamo.variables.higher_order_ops`, `torch._dynamo.exc`,
`torch._higher_order_ops.utils.setup_compilation_env`. Dynamo's are imported where dynamo runs already.
"""

import re
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx

from tensorloop._torch import transforms
from tensorloop._torch.eager_only import called_eagerly

_A = ParamSpec("_A")
_T = TypeVar("_T")
_C = TypeVar("_C", bound=Callable[..., Any])

below_autograd = torch._C._AutoDispatchBelowAutograd


class NotInGraph(Exception):
    """Why a call cannot stand in a graph: the graph breaks there."""


# (the function as a graph, its inputs without numbers, what was captured, settings) -> (operation, its first argument)
Make = Callable[..., tuple[Any, Any]]


def stands_in_graphs(traced: Callable[..., Any]) -> Callable[[_C], _C]:
    """Marks a function that runs eagerly: for it dynamo traces `traced(plain, ...)`, where `plain` breaks the graph."""

    def mark(function: _C) -> _C:
        def plain(*args: Any, **options: Any) -> Any:
            return function(*args, **options)

        def inline(*args: Any, **options: Any) -> Any:
            return traced(plain, *args, **options)

        plain.__name__ = function.__name__
        called_eagerly(plain)
        marked: Any = function
        marked._torchdynamo_inline = inline
        return function

    return mark


def constant_in_graphs(function: Callable[_A, _T]) -> Callable[_A, _T]:
    """Dynamo calls the function, of constants if it takes any, and takes what it gives as a constant."""

    def call(*args: _A.args, **options: _A.kwargs) -> _T:
        return function(*args, **options)

    marked: Any = call
    marked._dynamo_marked_constant = True
    return call


def graph_operator(name: str, make: Make) -> Any:
    """An operator for functions that dynamo traces: `operator(function, carry, xs, rows, steps, **settings)`.

    The function is called with carry and rows and gives (the next carry, y). In the graph there is one operation
    instead, `(text, [*carry, *xs, *what the function captures], steps)`, which `make` gives.
    """
    from torch._dynamo.exc import UserError, unimplemented
    from torch._dynamo.variables import higher_order_ops
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._ops import HigherOrderOperator

    class _Operator(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__(name)

        def __call__(self, *args: Any, **settings: Any) -> Any:
            raise NotImplementedError(f"{name} stands for what dynamo writes; it is never called")

    def _live(tx: Any, x: Any, value: torch.Tensor) -> Any:
        """As the step gets it: of a carry a later one may want a gradient, and a custom Function is seen only then."""
        grad = torch.is_grad_enabled() and transforms.maybe_level() is None and value.is_floating_point()
        if value.requires_grad or not grad:
            return x
        with higher_order_ops.discard_graph_changes(tx):
            proxy = tx.output.create_proxy("call_function", torch.clone, (x.as_proxy(),), {})
            return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=value.clone().requires_grad_())

    class _Variable(higher_order_ops.TorchHigherOrderOperatorVariable):
        _HOP_NAME = name

        def _call_function(self, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            function, carry, xs, rows, steps = args
            given = [*carry.items, *rows.items]
            examples = [x.as_proxy().node.meta["example_value"] for x in given]
            live = [_live(tx, x, value) for x, value in zip(given, examples, strict=True)]
            try:
                (_, spec), graph, lifted = higher_order_ops.speculate_subgraph(
                    tx,
                    function,
                    live,
                    {},
                    name,
                    source_target=self.value,
                    set_subgraph_inputs="flatten_manual",
                    should_flatten_outputs=True,
                    supports_input_mutation=False,
                    supports_aliasing=True,  # the default until 2.15; a body may give a leaf of its carry as y
                )
            except UserError as error:  # of a value that is read: dynamo would stop at it, and not break the graph
                text = str(error).strip().partition("\n")[0]
                unimplemented(gb_type="loop", context=name, explanation=text, hints=[])
            module = fx.GraphModule(dict(tx.output.nn_modules), graph)
            captured = list(lifted)
            settings = {key: x.as_python_constant() for key, x in kwargs.items()}
            more = [x.node.meta["example_value"] for x in captured]
            try:
                if any(x is not None for x in spec.const_values or ()):
                    raise NotInGraph("its body gives numbers")
                operation, text = make(module, examples, more, carry=len(carry.items), **settings)
            except NotInGraph as reason:
                unimplemented(gb_type="loop", context=name, explanation=str(reason), hints=[])
            tensors = [x.as_proxy() for x in (*carry.items, *xs.items)]
            tensors += [x for x, value in zip(captured, more, strict=True) if isinstance(value, torch.Tensor)]
            return higher_order_ops._call_function_and_unflatten_output(
                tx, operation, (text, tensors, steps.as_proxy()), {}, None, spec, None
            )

    higher_order_ops._hop_name_to_variable_class[name] = _Variable
    return _Operator()


def run_as_graph(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Has dynamo trace a function inside of `torch.export`, whose modes see what the graph does."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._higher_order_ops.utils import setup_compilation_env

    try:
        with setup_compilation_env() as backend:
            return torch.compile(function, backend=backend, fullgraph=True)(*args, **options)
    except TorchDynamoException as error:
        text = str(error)
        said = re.search(r"NotInGraph\((['\"])(.*)\1\)", text) or re.search(r"(E)xplanation: (.*)", text)
        raise NotInGraph(said[2] if said else text.strip().partition("\n")[0]) from None


def operators_of(module: fx.GraphModule) -> list[Any]:
    """The higher-order operators in a graph and those below it: they have gradients that its operations do not show."""
    from torch._ops import HigherOrderOperator

    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return [n.target for graph in graphs for n in graph.nodes if isinstance(n.target, HigherOrderOperator)]


def undisturbed(function: Callable[[], _T]) -> _T:
    """Runs a function out of reach of all modes around the caller, dynamo's and AOTAutograd's among them."""
    found: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.append(function())
        except BaseException as error:  # it is the caller's
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]
