"""Other frameworks that run the loops of loop_inputs.py, each in a Python of its own: see peers/README.md."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_loops import workloads
from running.script import Peer

FOLDER = Path(__file__).resolve().parents[1] / "peers"
JAX = Peer("jax", ("jax", "equinox"), lambda cell: is_of(cell, ("lax_", "eqx_")), FOLDER / "jax_loops.py")
TENSORFLOW = Peer("tf", ("tensorflow",), lambda cell: is_of(cell, ("tf_",)), FOLDER / "tf_loops.py")
PEERS = (JAX, TENSORFLOW)


def is_of(cell: dict[str, Any], prefixes: tuple[str, ...]) -> bool:
    """Whether the variant is one of a peer's: their names begin with the framework's."""
    return cell.get("variant", "").startswith(prefixes)


def compare(
    workload: str, T: int, loops: Mapping[str, workloads.Loop], right: str, variants: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """How far losses and gradients of the variants, peers' too, lie from those of the loop `right`, in float64."""
    d = workloads.leaves(workload, T, torch.float64)
    expected = workloads.gradients(loops[right], d)
    found = workloads.compare({name: loops[name] for name in variants if name in loops}, expected, d)
    for name in variants:
        if name not in loops:
            answer = gradients_of_peer(workload, name, T)
            found[name] = workloads.apart(answer, expected) if isinstance(answer, tuple) else answer
            # A peer that fails has no figures; ours are as good without.
            if "error" in found[name]:
                found[name] = {"failed": found[name]["error"]}
    return found


def gradients_of_peer(workload: str, variant: str, T: int) -> workloads.Gradients | dict[str, Any]:
    """Those of the peer that has the variant."""
    cell = {"workload": workload, "variant": variant, "T": T}
    return gradients_of(next(peer for peer in PEERS if peer.runs(cell)), cell)


def gradients_of(peer: Peer, cell: dict[str, Any]) -> workloads.Gradients | dict[str, Any]:
    """The loss and the gradients by name; why there are none, where that is so."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "gradients.npz")
        answer = peer.answer(FOLDER, cell | {"kind": "gradients", "out": out})
        return (answer["loss"], dict(np.load(out))) if "loss" in answer else answer
