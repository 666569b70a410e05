"""What the text of a program uses: modules, inputs, and loops as Python has them. Printed before programs."""

import array  # noqa: F401
import bisect  # noqa: F401
import collections
import collections.abc
import contextlib  # noqa: F401
import contextvars  # noqa: F401
import copy
import ctypes  # noqa: F401
import dataclasses  # noqa: F401
import decimal  # noqa: F401
import enum  # noqa: F401
import functools  # noqa: F401
import heapq  # noqa: F401
import io  # noqa: F401
import itertools  # noqa: F401
import logging  # noqa: F401
import math  # noqa: F401
import numbers  # noqa: F401
import operator  # noqa: F401
import os  # noqa: F401
import queue  # noqa: F401
import random  # noqa: F401
import string  # noqa: F401
import struct  # noqa: F401
import sys  # noqa: F401
import threading  # noqa: F401
import types  # noqa: F401
import weakref  # noqa: F401

import numpy as np
import torch
import torch.nn.functional as F  # noqa: F401
from torch import nn  # noqa: F401
from torch.utils._pytree import tree_map

import tensorloop as tl

G = torch.autograd.grad


def make(*shape, seed, grad=False):
    """Random values around 0."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    return x.requires_grad_(grad)


def own(tree):
    """A carry of the loop's own: copies of the caller's tensors and arrays."""

    def copied(x):
        if isinstance(x, torch.Tensor):
            return x.clone()
        return copy.copy(x) if isinstance(x, tl.TensorArray) else x

    return tree_map(copied, tree)


def stacked(ys):
    """The ys of all steps, along a new first dim."""
    return tree_map(lambda *y: torch.stack([torch.as_tensor(v) for v in y]), *ys)


class Python:
    """The loops of tensorloop, in plain Python."""

    def scan(self, body, init, xs=None, length=0, until=None):
        carry, ys = own(init), []
        for x in range(length) if xs is None else xs:
            carry, y = body(carry, None if xs is None else x)
            ys.append(tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, y))
            if until is not None and until(carry):
                break
        return carry, stacked(ys)

    def fori_loop(self, lower, upper, body, init):
        carry = own(init)
        for i in range(lower, upper):
            carry = body(i, carry)
        return carry

    def while_loop(self, cond, body, init):
        carry = own(init)
        while cond(carry):
            carry = body(carry)
        return carry

    def map(self, fn, xs):
        return stacked([fn(x) for x in xs])


def leaves_of(tree, name):
    """(name, tensor or number) of everything that a loop gives."""
    if isinstance(tree, tuple):
        for i, x in enumerate(tree):
            yield from leaves_of(x, f"{name}[{i}]")
    elif isinstance(tree, tl.TensorArray):
        yield name, tree.stack()
    else:
        yield name, tree


def frozen(x):
    """State as numbers, text and lists of these, so that it stays what it is now."""
    if isinstance(x, torch.Tensor | np.ndarray):
        try:
            return x.tolist()
        except Exception as error:
            return f"a tensor without values: {type(error).__name__}"
    if isinstance(x, collections.abc.Mapping):
        return [[frozen(k), frozen(v)] for k, v in x.items()]
    if isinstance(x, collections.abc.Iterable) and not isinstance(x, str):
        return [frozen(v) for v in x]
    return x if isinstance(x, bool | int | float | str | None) else str(type(x))


class Report:
    """What the calls of a program give: outputs, gradients, and the state that is left after forward and backward."""

    def __init__(self):
        self.found, self.calls = {}, 0

    def __call__(self, carry, ys, inputs, left, later=None, keep=False):
        call, self.calls = f"call {self.calls}", self.calls + 1
        outputs = [*leaves_of(carry, "carry"), *leaves_of(ys, "ys")]
        self.found |= {f"{call}: {name}": frozen(x) for name, x in outputs} | {f"{call}: state": frozen(left())}
        if later:
            later()
        wanted = [x for x in inputs if x.requires_grad]
        used = [x for _, x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
        if used and wanted:
            loss = torch.stack([(make(*x.shape, seed=i) * x).sum() for i, x in enumerate(used)]).sum()
            grads = G(loss, wanted, allow_unused=True, materialize_grads=True, retain_graph=keep)
            self.found |= {f"{call}: gradient {i}": frozen(x) for i, x in enumerate(grads)}
        self.found[f"{call}: state after backward"] = frozen(left())


def results(program, loops, **options):
    """(what a program gives, the error that ended it or None)"""
    report, dtype = Report(), torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        program()(loops, report, **options)
    except BaseException as error:
        return report.found, error
    finally:
        torch.set_default_dtype(dtype)
    return report.found, None
