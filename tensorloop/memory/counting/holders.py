"""Which storages the arrays and loops of this library hold."""

import gc
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from tensorloop.memory.counting.storages import storages_of

_NESTED = (list, tuple, dict)
_MEMORY = __name__.rsplit(".", 2)[0]
_LIBRARY = _MEMORY.rpartition(".")[0]


def held_by_library(wanted: Collection[weakref.ref[torch.UntypedStorage]]) -> set[weakref.ref[torch.UntypedStorage]]:
    """Those storages that tensors reach which an object of this library refers to, through lists and dicts.

    Looks at every object that Python's collector knows; at none where nothing is asked.
    """
    found: set[weakref.ref[torch.UntypedStorage]] = set()
    if not wanted:
        return found
    reach = [x for x in gc.get_objects() if _is_ours(type(x))]
    seen = {id(x) for x in reach}
    while reach:
        for x in gc.get_referents(reach.pop()):
            if isinstance(x, Tensor):
                found.update(key for _, storage in storages_of(x) if (key := weakref.ref(storage)) in wanted)
            elif type(x) in _NESTED and id(x) not in seen:
                seen.add(id(x))
                reach.append(x)
    return found


def _is_ours(cls: Any) -> bool:
    module = getattr(cls, "__module__", "")
    return isinstance(module, str) and module.startswith(_LIBRARY + ".") and not module.startswith(_MEMORY)
