"""Checkpoints: written whole or not at all, read without running code, refused when of another kind."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from docs.examples.g2p.data import Vocabulary
from docs.examples.g2p.model import G2P, Config

MODEL_FORMAT = "tensorloop-g2p-model-1"
TRAINING_FORMAT = "tensorloop-g2p-training-2"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not of the kind that was asked for."""


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it in its place.

    Killed at any moment, ``path`` holds either all of the old file or all of the new one; a half-written
    neighbour ``.NAME.tmp`` may stay, and the next write takes its place. One writer at a time.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename in this folder last through a power cut (POSIX; elsewhere folders cannot be opened)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: str | Path, value: object) -> None:
    """Write a value as indented JSON, atomically."""
    write_atomically(path, lambda file: file.write((json.dumps(value, indent=1) + "\n").encode("utf-8")))


def save(path: str | Path, format_name: str, content: dict[str, Any]) -> None:
    """Write a checkpoint of this format, atomically."""
    write_atomically(path, lambda file: torch.save({"format": format_name, **content}, file))


def load(path: str | Path, format_name: str) -> dict[str, Any]:
    """Read a checkpoint of this format on the CPU. Raises CheckpointError for everything that is not one."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: is not a checkpoint, or is cut short ({first_line})") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != format_name:
        raise CheckpointError(f"{path}: expected a checkpoint of format {format_name!r}, found {found!r}")
    return content


def describe(model: G2P, vocabulary: Vocabulary) -> dict[str, Any]:
    """What a checkpoint says of a model besides its weights."""
    symbols = {"letters": list(vocabulary.letters), "phones": list(vocabulary.phones)}
    return {"config": asdict(model.config), "vocabulary": symbols}


def save_model(path: str | Path, model: G2P, vocabulary: Vocabulary) -> None:
    """Write a model and its vocabulary: all that evaluating and saying words needs."""
    save(path, MODEL_FORMAT, {**describe(model, vocabulary), "weights": model.state_dict()})


def load_model(path: str | Path) -> tuple[G2P, Vocabulary]:
    """Read a model, ready for decoding. Raises CheckpointError as ``load`` does, or if its weights do not fit."""
    content = load(path, MODEL_FORMAT)
    try:
        symbols = content["vocabulary"]
        vocabulary = Vocabulary(tuple(symbols["letters"]), tuple(symbols["phones"]))
        model = G2P(Config(**content["config"]))
        model.load_state_dict(content["weights"])
    except (KeyError, TypeError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: does not fit this program's model ({first_line})") from error
    if not all(bool(weight.isfinite().all()) for weight in model.state_dict().values()):
        raise CheckpointError(f"{path}: holds weights that are not finite")
    return model.eval(), vocabulary
