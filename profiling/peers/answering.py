"""What the peers' scripts share: a cell is carried out and answered in one line of JSON.

A script here is run by the Python of its venv, with the folder profiling/ on the path and one of these cells:

    {"kind": "time", "workload": W, "variant": V, "T": T, "threads": n, "repeats": n, "slow": seconds}
    {"kind": "memory", "workload": W, "variant": V, "T": T, "threads": n}
    {"kind": "gradients", "workload": W, "variant": V, "T": T, "threads": n, "out": FILE}   in float64, into a .npz
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from running import resident

Cell = dict[str, Any]


class Compiled(NamedTuple):
    """A loop that gives its loss and its gradients, by name, when they are ready."""

    warm_up: Callable[[], Any]
    run: Callable[[], Any]
    compile_s: float


def time_run(cell: Cell, loop: Compiled) -> dict[str, Any]:
    loop.warm_up()
    total, value = [], 0.0
    while len(total) < cell["repeats"] and sum(total) <= cell["slow"]:
        gc.collect()
        start = time.perf_counter()
        loss, grads = loop.run()
        total.append(time.perf_counter() - start)
        value = float(loss)
        del loss, grads
    return {"loss": value, "compile_s": loop.compile_s, "total_s": total}


def peak(cell: Cell, loop: Compiled) -> dict[str, Any]:
    loop.warm_up()
    before = resident.settle()
    loss, grads = loop.run()
    growth = resident.high_water() - before
    value = float(loss)
    del loss, grads
    return {"loss": value, "compile_s": loop.compile_s, "peak_bytes": growth}


def gradients(cell: Cell, loop: Compiled) -> dict[str, Any]:
    loss, grads = loop.run()
    arrays: dict[str, Any] = {name: np.asarray(grad) for name, grad in grads.items()}
    np.savez(cell["out"], **arrays)
    return {"loss": float(loss)}


KINDS = {"time": time_run, "memory": peak, "gradients": gradients}


def main(compiled: Callable[[Cell, bool], Compiled], threads: Callable[[int], object]) -> None:
    """Answers the cell of the command line; `compiled` is told whether to compute in float64."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", required=True, type=json.loads, help="what to do, JSON")
    cell = parser.parse_args().cell
    try:
        threads(cell["threads"])
        result = KINDS[cell["kind"]](cell, compiled(cell, cell["kind"] == "gradients"))
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(result), flush=True)
