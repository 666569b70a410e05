"""The attributes of objects that have no dict of them."""

from types import MemberDescriptorType
from typing import Any


def slots_of(x: Any) -> list[str]:
    """The names of an object's `__slots__`, set or not, as `getattr` takes them."""
    kinds = [kind for kind in type(x).__mro__ if "__slots__" in vars(kind)]
    return [name for kind in kinds for name, x in vars(kind).items() if type(x) is MemberDescriptorType]
