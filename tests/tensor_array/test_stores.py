"""The contract of what stands behind a TensorArray: who keeps it, and that whoever does not is seen."""

import inspect

import pytest
from torch import Tensor

from tensorloop.beam.arrays import AncestryStore
from tensorloop.loop.checkpoint.array_versions import LoopBuffer
from tensorloop.loop.shrunk_arrays import Picked, Shrunk
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.slot_list import Slots
from tensorloop.tensor_array.store import Store

OPTIONAL = {"flush", "one", "attend", "tell_length", "truncate", "put_at", "read_at"}
PROMISED = {name for name in vars(Store) if not name.startswith("_")} - OPTIONAL
STORES = [Buffer, Slots, LoopBuffer, Shrunk, Picked, AncestryStore]


def missing(store: type) -> set[str]:
    """What a store leaves as the contract has it: stubs."""
    return {name for name in PROMISED if inspect.getattr_static(store, name) is vars(Store)[name]}


def changed(store: type) -> set[str]:
    """Methods that take something else than the contract says."""
    methods = [name for name in {*PROMISED, "one", "attend"} if inspect.isfunction(vars(Store)[name])]
    return {name for name in methods if parameters(store, name) != parameters(Store, name)}


def parameters(store: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(store, name)).parameters)


def test_the_contract_is_written() -> None:
    assert {"length", "append", "extend", "pad", "put", "read", "span", "whole", "gather", "fork", "detach"} <= PROMISED


@pytest.mark.parametrize("store", STORES)
def test_a_store_keeps_the_contract(store: type) -> None:
    assert Store in store.__mro__
    assert missing(store) == set()
    assert changed(store) == set()
    assert not hasattr(object.__new__(store), "__dict__")  # an array a step: slots all the way down


def test_a_store_that_does_not_is_seen() -> None:
    class Half(Slots):
        read = Store.read

        def append(self, x: Tensor, name: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            pass

        def span(self, first: int, stop: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise NotImplementedError

    assert missing(Half) == {"read"}
    assert changed(Half) == {"append", "span"}
