"""`torch.compile` around packed tensors: right results, whatever had to be passed by."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# In a process of its own: what went wrong did so at a kernel's first call, and tests before this one make it.
PROGRAM = """
import sys
import warnings
import torch
import torch.nn.functional as F
import tensorloop as tl

warnings.simplefilter("ignore")
warnings.filterwarnings("error", "Dynamo detected")
lens, others = [3, 0, 4, 1], [2, 5, 1, 3]
table = torch.randn(6, 6)
functions = {
    "softmax": lambda p: p.softmax(1),
    "log_softmax": lambda p: p.log_softmax(1),
    "logsumexp": lambda p: p.logsumexp(1),
    "sum": lambda p: p.sum(1),
    "mean": lambda p: p.mean(1),
    "mean of the batch": lambda p: p.mean(0),
    "std": lambda p: p.std(1),
    "amax": lambda p: p.amax(1, initial=-9.0),
    "argmax": lambda p: p[p.lens > 0].argmax(1),
    "cumsum": lambda p: p.cumsum(1),
    "flip": lambda p: p.flip(1),
    "pad": lambda p: p.pad(),
    "pad with ones": lambda p: p.pad(1.0),
    "pack": lambda p: tl.pack_padded(p.pad(), p.lens),
    "crop": lambda p: p[:, 1:3],
    "rows": lambda p: p[[2, 0]],
    "cat of time": lambda p: torch.cat([p, p], 1),
    "broadcast": lambda p: p - p.sum(1, keepdim=True),
    "linear": lambda p: F.linear(p, table).relu() + 1,
    "pointwise": lambda p: torch.sigmoid(p).tanh() * p.exp(),
    "attention": lambda p: tl.attention(*[p.unflatten(-1, (2, 3))] * 3, causal=True),
    "fallback": lambda p: p.cumprod(1),
}
functions = {name: functions[name] for name in sys.argv[1:] or functions}


def values(out):
    return out.values if isinstance(out, tl.PackedTensor) else out


def gradient(f, rows, x):
    x = x.clone().requires_grad_()
    out = values(f(tl.PackedTensor(x, rows)))
    if out.requires_grad:
        (x.grad,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), x.grad


compiled = {name: torch.compile(f, backend="eager") for name, f in functions.items()}
for rows in (lens, others):
    x = torch.randn(sum(rows), 6)
    seen = {name: gradient(f, rows, x) for name, f in compiled.items()}
    for name, f in functions.items():
        out, grad = gradient(f, rows, x)
        torch.testing.assert_close(seen[name], (out, grad), equal_nan=True, msg=lambda text: f"{name}: {text}")
print("same")
"""

# One of each way that functions go: kernels with and without indices, pieces of rows, the dispatch, the fallback.
FEW = ["softmax", "argmax", "cumsum", "pad", "pack", "crop", "rows", "broadcast", "linear", "attention", "fallback"]


@pytest.mark.parametrize("names", [FEW, pytest.param([], marks=pytest.mark.extended)], ids=["few", "all"])
def test_compiled_functions_give_what_plain_ones_do(names: list[str]):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cuda")])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert run.stdout == "same\n", run.stderr
