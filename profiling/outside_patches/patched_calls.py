"""Public calls of the packages that are patched, and a process that runs them when asked.

The process has either the package as installed or the patched copy on its path: `python patched_calls.py PACKAGE SET`.
It reads a line of JSON, does what it says and answers with one.
"""

import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl


class Size(NamedTuple):
    """Of a sequence."""

    steps: int
    rows: int
    width: int


class Call(NamedTuple):
    """What a user of the package calls, and the tensors whose gradients are wanted."""

    run: Callable[[], Any]
    inputs: Sequence[Tensor]


Calls = dict[str, Callable[[Size], Call]]
SIZES = {"quick": Size(6, 2, 4), "short": Size(32, 4, 16), "usual": Size(128, 8, 32)}


def _xs(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _of_module(module: Any, run: Callable[..., Any], *xs: Tensor) -> Call:
    """The inputs and weights of a module; weights are moved away from zero."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    with torch.no_grad():
        for weight in weights:
            weight.add_(0.1 * torch.randn_like(weight))
    return Call(run, [*(x for x in xs if x.requires_grad), *weights])


def _recurrent(name: str, layers: int = 1, **options: Any) -> Callable[[Size], Call]:
    def make(size: Size) -> Call:
        layer = getattr(import_module("torchrecurrent"), name)(size.width, size.width, num_layers=layers, **options)
        xs = _xs(size.steps, size.rows, size.width)
        return _of_module(layer, lambda: layer(xs), xs)

    return make


def _torchrl(name: str) -> Callable[[Size], Call]:
    """The layer that is written in Python."""

    def make(size: Size) -> Call:
        layer = getattr(import_module("torchrl.modules"), name)(size.width, size.width, num_layers=2, batch_first=True)
        xs = _xs(size.rows, size.steps, size.width)
        return _of_module(layer, lambda: layer(xs), xs)

    return make


def _resetting(name: str, backend: str) -> Callable[[Size], Call]:
    """A module for rollouts in which episodes end, so that rows begin anew."""

    def make(size: Size) -> Call:
        modules, TensorDict = import_module("torchrl.modules"), import_module("tensordict").TensorDict
        states = ["h", "c"] if name == "LSTMModule" else ["h"]
        module = getattr(modules, name)(
            input_size=size.width,
            hidden_size=size.width,
            in_keys=["x", *states],
            out_keys=["y", *(("next", state) for state in states)],
            python_based=backend == "pad",
            recurrent_backend=backend,
        )
        xs, begins = _xs(size.rows, size.steps, size.width), torch.zeros(size.rows, size.steps, 1, dtype=torch.bool)
        begins[:, 0] = True
        begins[::2, size.steps // 2] = True
        zeros = {state: torch.zeros(size.rows, size.steps, 1, size.width) for state in states}

        def run() -> Tensor:
            with modules.set_recurrent_mode(True):
                return module(TensorDict({"x": xs, "is_init": begins, **zeros}, [size.rows, size.steps]))["y"]

        return _of_module(module, run, xs)

    return make


def _slstm(size: Size) -> Call:
    cells = import_module("xlstm.blocks.slstm.cell")
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    config = cells.sLSTMCellConfig(
        hidden_size=size.width, num_heads=4, backend="vanilla", enable_automatic_mixed_precision=False
    )
    cell = cells.sLSTMCell(config).to(getattr(torch, dtype))
    xs = _xs(size.rows, size.steps, 4 * size.width)
    return _of_module(cell, lambda: cell(xs), xs)


def _reservoir(name: str) -> Callable[[Size], Call]:
    """A reservoir without trainable weights, over one sequence after a washout."""

    def make(size: Size) -> Call:
        net = getattr(import_module("auto_esn.esn.esn"), name)(input_size=1, hidden_size=4 * size.width, bias=True)
        xs, cell = _xs(4 * size.steps, 1), net.reservoir.esn_cell

        def run() -> Tensor:
            cell.reset_hidden()
            return net.reservoir(xs, washout=3)

        return Call(run, [xs])

    return make


def _allpole(order: int) -> Callable[[Size], Call]:
    def make(size: Size) -> Call:
        sample_wise_lpc = import_module("torchlpc").sample_wise_lpc
        xs, steps = _xs(size.rows, 64 * size.steps), 64 * size.steps
        a = (torch.rand(size.rows, steps, order) / order - 0.5 / order).requires_grad_()
        return Call(lambda: sample_wise_lpc(xs, a), [xs, a])

    return make


LAYERS = ("MGU", "LiGRU", "IndRNN", "coRNN", "LEM", "PeepholeLSTM", "RAN", "UnICORNN")
CALLS: dict[str, Calls] = {
    "torchrecurrent": {name: _recurrent(name) for name in LAYERS}
    | {"JANET, 2 layers": _recurrent("JANET", 2), "MUT1, 2 layers": _recurrent("MUT1", 2)},
    "torchrl": {
        "LSTM in Python, 2 layers": _torchrl("LSTM"),
        "GRU in Python, 2 layers": _torchrl("GRU"),
        "LSTMModule in Python, with resets": _resetting("LSTMModule", "pad"),
        "GRUModule in Python, with resets": _resetting("GRUModule", "pad"),
        "LSTMModule, backend scan, with resets": _resetting("LSTMModule", "scan"),
        "GRUModule, backend scan, with resets": _resetting("GRUModule", "scan"),
    },
    "xlstm": {"sLSTMCell, backend vanilla": _slstm},
    "auto-esn": {name: _reservoir(name) for name in ("DeepESN", "GroupOfESN", "GroupedDeepESN")},
    "torchlpc": {"sample_wise_lpc, order 1": _allpole(1)},
}


# ---- the process ----


def forward_backward(call: Call) -> list[Tensor]:
    """The results that are floats, and the gradients of a weighted sum of them."""
    found = [x for x in tree_leaves(call.run()) if x.is_floating_point()]
    weighted = [(x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in found]
    total = torch.stack(weighted).sum()
    gradients = torch.autograd.grad(total, list(call.inputs), allow_unused=True, materialize_grads=True)
    return [x.detach() for x in (*found, *gradients)]


class Server:
    """Does what it is asked; makes each call once for each dtype."""

    def __init__(self, package: str, size: Size) -> None:
        self.calls, self.size, self.made = CALLS[package], size, {}

    def call(self, name: str, dtype: torch.dtype = torch.float32) -> Call:
        if (name, dtype) not in self.made:
            torch.manual_seed(0)
            self.made[name, dtype] = self.calls[name](self.size)
        return self.made[name, dtype]

    def values(self, name: str, path: str, times: int) -> str:
        """In double precision, where the call takes it, and after so many calls: by then a loop is compiled."""
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                call = self.call(name, dtype)
                for _ in range(times - 1):
                    forward_backward(call)
                torch.save(forward_backward(call), path)
                return str(dtype)
            except RuntimeError:
                if dtype == torch.float32:
                    raise
            finally:
                torch.set_default_dtype(torch.float32)
        return ""

    def time(self, name: str) -> float:
        """Processor seconds of one forward and backward pass."""
        call = self.call(name)
        gc.collect()
        start = time.process_time()
        forward_backward(call)
        return time.process_time() - start

    def bytes(self, name: str) -> int:
        """What one call keeps for its backward pass; 0 where torch's own scan refuses to be watched."""
        try:
            return tl.memory.saved_bytes(self.call(name).run)
        except Exception:
            return 0


def main(package: str, size: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    server, answers = Server(package, SIZES[size]), sys.stdout
    sys.stdout = sys.stderr  # what packages print
    for line in sys.stdin:
        try:
            what, *arguments = json.loads(line)
            answer = {"answer": getattr(server, what)(*arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
