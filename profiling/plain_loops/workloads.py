"""The loops that are measured, each in TensorArray and in the ways plain PyTorch has.

W1, slice by slice: ys[t] = xs[t] * sqrt(t); the loss is sum(ys).
W3, a cache that trains: at step t
    h = tanh(x_t Wx + o Wo);  q, k, v = h Wq, h Wk, h Wv;  K[t], V[t] = k, v
    o = softmax(q . K[:t+1] / sqrt(D)) V[:t+1]
  and the loss is the sum of o**2 over all steps.
ring, a memory of M slots: step t reads one older slot r, then writes slot t % M with tanh(x_t W + r U);
  the loss is the sum of r**2 over all steps, plus that of the memory at the end.

Every variant of a workload takes the same leaves and gives the same loss. Shapes: T time, B batch, F or D
features.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from plain_loops import loop_inputs
from torch import Tensor

from tensorloop import TensorArray

SLOTS = 64  # of the ring

Leaves = dict[str, Tensor]
Loop = Callable[[Leaves], Tensor]
Prefixes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Gradients = tuple[float, dict[str, Any]]  # the loss, and the gradients by name


def leaves(workload: str, T: int, dtype: torch.dtype = torch.float32) -> Leaves:
    """The inputs as tensors; the floating ones get a gradient. The numbers are the same for every dtype."""
    return {
        name: torch.from_numpy(values).to(dtype).requires_grad_() if values.dtype.kind == "f" else torch.tensor(values)
        for name, values in loop_inputs.make(workload, T).items()
    }


def differentiated(d: Leaves) -> list[Tensor]:
    return [x for x in d.values() if x.requires_grad]


# ---- W1 ----


def w1_tensor_array(d: Leaves) -> Tensor:
    xs, ys = TensorArray.unstack(d["xs"]), TensorArray()
    for t in range(len(xs)):
        ys.append(xs[t] * math.sqrt(t))
    return ys.stack().sum()


def w1_list_unbind(d: Leaves) -> Tensor:
    ys = []
    for t, x in enumerate(d["xs"].unbind(0)):
        ys.append(x * math.sqrt(t))
    return torch.stack(ys).sum()


def w1_list_index(d: Leaves) -> Tensor:
    xs, ys = d["xs"], []
    for t in range(len(xs)):
        ys.append(xs[t] * math.sqrt(t))
    return torch.stack(ys).sum()


def w1_inplace_index(d: Leaves) -> Tensor:
    xs = d["xs"]
    ys = torch.zeros_like(xs)
    for t in range(len(xs)):
        ys[t] = xs[t] * math.sqrt(t)
    return ys.sum()


def w1_inplace_unbind(d: Leaves) -> Tensor:
    ys = torch.zeros_like(d["xs"])
    for t, x in enumerate(d["xs"].unbind(0)):
        ys[t] = x * math.sqrt(t)
    return ys.sum()


def w1_cat(d: Leaves) -> Tensor:
    ys = d["xs"].new_zeros(0, *d["xs"].shape[1:])
    for t, x in enumerate(d["xs"].unbind(0)):
        ys = torch.cat([ys, (x * math.sqrt(t))[None]])
    return ys.sum()


# ---- W3 ----


def attend(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """q (B, D) over K and V (t, B, D), time first."""
    weights = torch.softmax(torch.einsum("bd,tbd->bt", q, K) / math.sqrt(q.shape[-1]), -1)
    return torch.einsum("bt,tbd->bd", weights, V)


def attend_batch_first(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """q (B, D) over K and V (B, t, D)."""
    weights = torch.softmax(torch.bmm(K, q[:, :, None])[:, :, 0] / math.sqrt(q.shape[-1]), -1)
    return torch.bmm(weights[:, None], V)[:, 0]


def w3(d: Leaves, prefixes: Prefixes, attention: Callable[..., Tensor] = attend) -> Tensor:
    """The loop; `prefixes` takes k and v (B, D) of this step and gives K[:t+1] and V[:t+1]."""
    o = torch.zeros_like(d["xs"][0])
    loss = o.new_zeros(())
    for x in d["xs"].unbind(0):
        h = torch.tanh(x @ d["Wx"] + o @ d["Wo"])
        K, V = prefixes(h @ d["Wk"], h @ d["Wv"])
        o = attention(h @ d["Wq"], K, V)
        loss = loss + (o**2).sum()
    return loss


def w3_tensor_array(d: Leaves) -> Tensor:
    K, V = TensorArray(), TensorArray()

    def prefixes(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        t = len(K)
        K.append(k)
        V.append(v)
        return K[: t + 1], V[: t + 1]

    return w3(d, prefixes)


def w3_cat(d: Leaves) -> Tensor:
    K = V = d["xs"].new_zeros(0, *d["xs"].shape[1:])

    def prefixes(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal K, V
        K, V = torch.cat([K, k[None]]), torch.cat([V, v[None]])
        return K, V

    return w3(d, prefixes)


def w3_cat_batch_first(d: Leaves) -> Tensor:
    _, B, D = d["xs"].shape
    K = V = d["xs"].new_zeros(B, 0, D)

    def prefixes(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal K, V
        K, V = torch.cat([K, k[:, None]], 1), torch.cat([V, v[:, None]], 1)
        return K, V

    return w3(d, prefixes, attend_batch_first)


def w3_stack(d: Leaves) -> Tensor:
    ks, vs = [], []

    def prefixes(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ks.append(k)
        vs.append(v)
        return torch.stack(ks), torch.stack(vs)

    return w3(d, prefixes)


def w3_inplace_clone(d: Leaves) -> Tensor:
    K, V = torch.zeros_like(d["xs"]), torch.zeros_like(d["xs"])
    t = 0

    def prefixes(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal t
        K[t], V[t] = k, v
        t += 1
        # Without the clones backward stops: "modified by an inplace operation".
        return K[:t].clone(), V[:t].clone()

    return w3(d, prefixes)


# ---- ring ----


def older_slots(T: int) -> list[int | None]:
    """The slot that each step reads, among those written before it; the first step has none."""
    random = np.random.RandomState(0)
    return [None, *(int(random.randint(min(t, SLOTS))) for t in range(1, T))]


def ring(
    d: Leaves,
    read: Callable[[int], Tensor],
    write: Callable[[int, Tensor], object],
    memory: Callable[[], Tensor],
) -> Tensor:
    """The loop; `write(slot, y)` comes after `read(slot)` in each step, `memory()` is (min(T, M), B, D)."""
    loss = d["xs"].new_zeros(())
    nothing = torch.zeros_like(d["xs"][0])
    for t, (x, slot) in enumerate(zip(d["xs"].unbind(0), older_slots(len(d["xs"])), strict=True)):
        r = nothing if slot is None else read(slot)
        loss = loss + (r**2).sum()
        write(t % SLOTS, torch.tanh(x @ d["W"] + r @ d["U"]))
    return loss + (memory() ** 2).sum()


def ring_tensor_array(d: Leaves) -> Tensor:
    slots = TensorArray()
    return ring(d, slots.read, slots.write, slots.stack)


def ring_list(d: Leaves) -> Tensor:
    slots: list[Tensor] = []

    def write(i: int, y: Tensor) -> None:
        slots[i : i + 1] = [y]  # at i == len(slots) this appends

    return ring(d, slots.__getitem__, write, lambda: torch.stack(slots))


def ring_cat(d: Leaves) -> Tensor:
    slots = d["xs"].new_zeros(0, *d["xs"].shape[1:])

    def write(i: int, y: Tensor) -> None:
        nonlocal slots
        slots = torch.cat([slots[:i], y[None], slots[i + 1 :]])

    return ring(d, lambda i: slots[i], write, lambda: slots)


def ring_inplace_clone(d: Leaves) -> Tensor:
    T, *shape = d["xs"].shape
    slots = d["xs"].new_zeros(min(T, SLOTS), *shape)
    return ring(d, lambda i: slots[i].clone(), slots.__setitem__, lambda: slots)


# The first of each workload is ours, the second the peer that the ratios are taken against.
VARIANTS: dict[str, dict[str, Loop]] = {
    "W1": {
        "tensor_array": w1_tensor_array,
        "list_unbind": w1_list_unbind,
        "list_index": w1_list_index,
        "inplace_index": w1_inplace_index,
        "inplace_unbind": w1_inplace_unbind,
        "cat": w1_cat,
    },
    "W3": {
        "tensor_array": w3_tensor_array,
        "cat": w3_cat,
        "cat_batch_first": w3_cat_batch_first,
        "stack": w3_stack,
        "inplace_clone": w3_inplace_clone,
    },
    "ring": {
        "tensor_array": ring_tensor_array,
        "list": ring_list,
        "cat": ring_cat,
        "inplace_clone": ring_inplace_clone,
    },
}


def peer_of(workload: str) -> str:
    """The variant that ratios are taken against."""
    return list(VARIANTS[workload])[1]


def gradients(loop: Loop, d: Leaves) -> Gradients:
    loss = loop(d)
    grads = torch.autograd.grad(loss, differentiated(d))
    return loss.item(), dict(zip((name for name, x in d.items() if x.requires_grad), grads, strict=True))


def apart(found: Gradients, right: Gradients) -> dict[str, float]:
    """Relative differences: of the loss, and of the gradients max|a - b| / max|b|, the largest over the leaves."""
    pairs = [(torch.as_tensor(found[1][name], device=grad.device), grad) for name, grad in right[1].items()]
    worst = [(a - grad).abs().max() / grad.abs().max() for a, grad in pairs]
    # torch's max keeps a NaN, where Python's may lose it.
    return {"loss": abs(found[0] - right[0]) / abs(right[0]), "gradient": torch.stack(worst).max().item()}


def compare(loops: Mapping[str, Loop], right: Gradients, d: Leaves) -> dict[str, dict[str, Any]]:
    """How far each loop lies from the right loss and gradients, or its error."""
    found: dict[str, dict[str, Any]] = {}
    for variant, loop in loops.items():
        try:
            found[variant] = apart(gradients(loop, d), right)
        except Exception as error:
            found[variant] = {"error": f"{type(error).__name__}: {error}"[:500]}
    return found
