"""Modules of `packed/` under the names that they had before they moved into rooms."""

import importlib
import io
import pickle
import zipfile
from typing import Any

import pytest
import torch

import tensorloop as tl
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.scores.scores import PackedScores
from tensorloop.packed.tensor import _rebuilt
from tensorloop.packed.views.reordered import Reordered


def test_an_old_name_warns_and_is_the_same_thing() -> None:
    with pytest.warns(DeprecationWarning, match=r"packed\.dim\.Dim is tensorloop\.packed\.rows\.dim\.Dim now"):
        from tensorloop.packed.dim import Dim as Old  # pyright: ignore[reportMissingImports]
    assert Old is Dim
    old = importlib.import_module("tensorloop.packed.segments")
    with pytest.warns(DeprecationWarning, match=r"segments\.pack is"):
        assert old.pack is segments.pack
    windows = importlib.import_module("tensorloop.packed.time.windows")
    with pytest.warns(DeprecationWarning, match="windows"), pytest.raises(AttributeError, match="nothing_there"):
        _ = windows.nothing_there


@pytest.mark.parametrize(("module", "name"), [("static", "StaticPackedTensor"), ("scores", "PackedScores")])
def test_a_room_called_as_a_module_was(module: str, name: str) -> None:
    room = importlib.import_module(f"tensorloop.packed.{module}")
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is"):
        assert getattr(room, name) is getattr(importlib.import_module(f"tensorloop.packed.{module}.{module}"), name)
    with pytest.raises(AttributeError, match="nothing_there"):
        _ = room.nothing_there


def test_no_such_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tensorloop\.packed\.nothing"):
        importlib.import_module("tensorloop.packed.nothing")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_written_before_is_read(weights_only: bool) -> None:
    p = tl.PackedTensor(torch.arange(3.0), [1, 2])
    scores = p.unsqueeze(-1) @ p.unsqueeze(-1).transpose(1, 2)
    file = io.BytesIO()
    torch.save([p, p.unsqueeze(-1).transpose(1, 2), scores], file, pickle_module=AsBefore)
    moved = {"rows.dim": "dim", "views.reordered": "reordered", "scores.scores": "scores"}
    read, scored, seen = torch.load(io.BytesIO(_renamed(file.getvalue(), moved)), weights_only=weights_only)
    assert read.equal(p)
    assert read.dims == p.dims
    assert torch.equal(scored.pad(), p.unsqueeze(-1).transpose(1, 2).pad())
    assert torch.equal(seen.flat, scores.flat)


class AsBefore:
    """Pickles as before 0.3: each class by its own name."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, x: Any) -> Any:
            match x:
                case tl.PackedTensor():
                    return _rebuilt, (type(x), x.values, x._dim)
                case Dim():
                    return Dim, (x.name, x._lens)
                case Reordered():
                    return Reordered, (x.packed, x.batch, x.time)
                case PackedScores():
                    return PackedScores, (x.flat, x._like, x.rows, x.columns, x.lead)
            return NotImplemented


def _renamed(saved: bytes, moved: dict[str, str]) -> bytes:
    """A file of `torch.save` whose pickle names modules as they were."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as before, zipfile.ZipFile(out, "w") as after:
        for name in before.namelist():
            data = before.read(name)
            if name.endswith("data.pkl"):
                for new, old in moved.items():
                    data = data.replace(f"ctensorloop.packed.{new}\n".encode(), f"ctensorloop.packed.{old}\n".encode())
                assert all(f"ctensorloop.packed.{old}\n".encode() in data for old in moved.values())
            after.writestr(name, data)
    return out.getvalue()


def test_a_pickle_of_today_names_what_is_there(recwarn: pytest.WarningsRecorder) -> None:
    p = tl.PackedTensor(torch.arange(3.0), [1, 2])
    assert pickle.loads(pickle.dumps(p)).equal(p)
    assert not recwarn.list
