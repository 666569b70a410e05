"""What the text of a program uses: inputs, and all that a loop gives, with gradients. Printed before programs."""

from math import inf, nan  # noqa: F401  # pyright: ignore[reportUnusedImport]
from types import SimpleNamespace  # noqa: F401  # pyright: ignore[reportUnusedImport]

import torch
import torch.nn.functional as F  # noqa: F401  # pyright: ignore[reportUnusedImport]

import tensorloop as tl

noise = [0.0, 0.0]  # how much the inputs of a run are off, those on an edge too: what then changes much says nothing


def make(*shape, seed, low=-1.0, high=1.0, dtype=torch.float64, grad=False):
    """Random values, the same everywhere; of dims of more than one number no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") * (high - low) + low
    if noise[0]:
        x = x * (1 + noise[0] * (torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") - 0.5))
    if dtype.is_complex:
        x = torch.complex(x, x.flip(-1) if x.dim() else -x)
    return x.to(torch.get_default_device(), dtype).requires_grad_(grad and dtype.is_floating_point | dtype.is_complex)


def edge(*shape, seed, kind, dtype=torch.float64, grad=False):
    """Values on an edge: zeros, ones, a few numbers with many ties, whole numbers, infinities among others."""
    generator = torch.Generator().manual_seed(seed)
    if kind in ("zeros", "ones"):
        x = torch.full(shape, float(kind == "ones"), device="cpu")
    else:
        low, high = {"ties": (-1, 2), "whole": (-4, 5), "large": (-3, 4), "infinite": (-2, 3)}[kind]
        x = torch.randint(low, high, shape, generator=generator, device="cpu").to(torch.float64)
        if kind == "large":
            x = x * 2.0**40
        elif kind == "infinite":
            x = torch.where(x == 2, torch.inf, x)
    if noise[1]:
        x = x * (1 + noise[1] * (torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") - 0.5))
    return x.to(torch.get_default_device(), dtype).requires_grad_(grad and dtype.is_floating_point | dtype.is_complex)


def leaves_of(outputs, name=""):
    """(name, tensor or other value) of everything in a tree."""
    if isinstance(outputs, tl.TensorArray):
        yield f"{name}.len", len(outputs)
        if len(outputs):
            yield f"{name}.stack", outputs.stack()
    elif isinstance(outputs, tl.PackedTensor):
        yield f"{name}.lens", outputs.lens
        yield f"{name}.values", outputs.values
    elif isinstance(outputs, tuple | list):
        for i, x in enumerate(outputs):
            yield from leaves_of(x, f"{name}[{i}]")
    elif isinstance(outputs, dict):
        for key, x in outputs.items():
            yield from leaves_of(x, f"{name}{key}")
    elif outputs is not None:
        yield name, outputs


def total(tensors):
    """A sum of all numbers of those that have a gradient, each with a weight of its own."""
    found = []
    for i, x in tensors:
        weight = make(*x.shape, seed=900 + i, low=0.5, high=1.5)
        found.append((weight * (x.real if x.is_complex() else x).double()).sum())
    return torch.stack(found).sum()


def differentiable(tensors):
    """Those that a loss may use, with their places."""
    return [(i, x) for i, x in enumerate(tensors) if isinstance(x, torch.Tensor) and x.requires_grad]


def derivatives(tensors, wanted, create_graph=False):
    """The gradients of their total; zeros where there is none."""
    return torch.autograd.grad(
        total(tensors), wanted, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def results(run, compile, call=0, loss="", second=False):
    """Everything that a program gives in one call: outputs by name, gradients of those whose name begins with `loss`.

    A name begins with `carry` or `ys`.
    """
    torch.manual_seed(call)
    outputs, leaves = run(compile, call)
    found = dict(leaves_of(outputs))
    used = differentiable(x if name.startswith(loss) else None for name, x in found.items())
    wanted = [x for x in leaves.values() if x.requires_grad]
    names = [name for name, x in leaves.items() if x.requires_grad]
    found["random"] = torch.rand(())
    if not used or not wanted:
        return found
    grads = derivatives(used, wanted, create_graph=second)
    found |= {f"gradient of {name}": x for name, x in zip(names, grads, strict=True)}
    again = differentiable(grads)
    if second and again:
        grads = derivatives(again, wanted)
        found |= {f"second gradient of {name}": x for name, x in zip(names, grads, strict=True)}
    return found


@torch.jit.script
def scripted(x, y):
    return x * 2 + torch.sin(y)


switch = [0]  # what `overridden` does


@torch.overrides.wrap_torch_function(lambda x, y: (x, y))
def overridden(x, y):
    return x.cos() + y if switch[0] else x.sin() * y
