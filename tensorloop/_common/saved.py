"""How objects of ours are saved, so that `torch.load` makes them with its default `weights_only=True`.

A file names one function, `restore`, with the name of a class and plain values. torch knows that function as soon as
tensorloop is imported; the room of the class is loaded when a file has one. No file can have anything called but what
is in the table below, and each of these looks at what it is given: kernels trust offsets, and files are anybody's.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from torch import Generator, Tensor
from torch.serialization import add_safe_globals

from tensorloop._common.faces import late

_T = TypeVar("_T")

# Module -> what of it files may name, as `restore` finds it there. Files outlive versions: names stay.
_NAMES = {
    "_common.saved": "Path generator",
    "beam.choose": "Sample StochasticBeam TopK",
    "beam.length": "BoundedReward GNMT Power Sum",
    "beam.result": "Hypotheses Lattice",
    "hf.advice": "Advice",
    "hf.cache": "TrainCache",
    "hf.layers": "ArrayLayer Kind",
    "hf.rollouts": "Rollout",
    "loop.checkpoint.options": "Checkpoints",
    "ordering.graph": "Graph",
    "ordering.ordering": "Ordering",
    "ordering.permutation": "Permutation",
    "ordering.report": "MaskBlocks Report",
    "packed.loaders.sampler": "BatchSampler",
    "packed.rows.dim": "Dim",
    "packed.rows.size": "EntryCount RaggedSize",
    "packed.scores.scores": "PackedScores",
    "packed.static.static": "StaticPackedTensor",
    "packed.tensor": "PackedTensor",
    "packed.views.reordered": "Reordered",
    "regroup": "RegroupPlan",
    "schedule.actions": "Advance Backward Drop Release Restore Snapshot",
    "schedule.base": "Binomial Blocks Periodic StoreAll",
    "schedule.budgeted": "Budgeted",
    "schedule.forecasting": "Forecast _Stretch",
    "schedule.hierarchy": "Hierarchy Level",
    "schedule.online": "Online",
    "tensor_array.array": "TensorArray",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
# What files written before 0.3 name in its place.
_BEFORE = {
    "Dim": "packed.dim packed.rows.dim",
    "PackedScores": "packed.scores packed.scores.scores",
    "PackedTensor": "packed.tensor",
    "Reordered": "packed.reordered packed.views.reordered",
}


def restore(name: str, *state: Any) -> Any:
    """Makes an object of what was saved of it, looked at first: by the class's `__restored__`, or the class itself."""
    if name not in _HOMES:
        raise ValueError(f"a file names {name!r}, which is nothing that tensorloop saves; a newer version may")
    kind = getattr(import_module(f"tensorloop.{_HOMES[name]}"), name)
    try:
        return getattr(kind, "__restored__", kind)(*state)
    except Exception as error:  # what was changed may fail anywhere
        raise ValueError(f"{name} of a file: {str(error).removeprefix(f'{name}: ')}") from error


def saved(*names: str) -> Callable[[type[_T]], type[_T]]:
    """For a class: it is saved as these attributes, or its fields, of which it is made again.

    Classes that a user makes of it are saved as Python saves any.
    """

    def mark(kind: type[_T]) -> type[_T]:
        def reduce_ex(self: Any, protocol: Any) -> Any:
            if type(self) is not kind:
                return super(kind, self).__reduce_ex__(protocol)
            found = names or getattr(self, "_fields", ()) or getattr(self, "__dataclass_fields__", ())
            return restore, (kind.__name__, *(_as_plain(getattr(self, name)) for name in found))

        setattr(kind, "__reduce_ex__", reduce_ex)  # noqa: B010
        return kind

    return mark


class _Named:
    """Stands for what torch takes from no file: it is saved as ours."""

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, self.state


def _as_plain(x: Any) -> Any:
    if isinstance(x, Path):
        return _Named("Path", str(x))
    return _Named("generator", x.device, x.get_state()) if isinstance(x, Generator) else x


def generator(device: Any, state: Tensor) -> Generator:
    """One that goes on where another was."""
    return Generator(device).set_state(state.cpu())


def tell_torch() -> None:
    """Says what `torch.load` may call from here on."""
    old = [
        (partial(restore, name), f"tensorloop.{at}.{name}") for name, homes in _BEFORE.items() for at in homes.split()
    ]
    add_safe_globals([restore, *old, (late("packed.tensor", "_rebuilt"), "tensorloop.packed.tensor._rebuilt")])
