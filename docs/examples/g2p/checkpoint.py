"""Checkpoints: written whole or not at all, read without running code, refused when damaged or of another kind."""

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from docs.examples.g2p.data import Vocabulary
from docs.examples.g2p.model import G2P, Config

MODEL_FORMAT = "tensorloop-g2p-model-1"
TRAINING_FORMAT = "tensorloop-g2p-training-2"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not of the kind that was asked for."""


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it in its place.

    Killed at any moment, ``path`` holds either all of the old file or all of the new one; a half-written
    neighbour ``.NAME.(letters).tmp`` may stay, and the next write takes it away. One writer at a time. The name of
    the neighbour is drawn by lot, and what is there already, a symlink too, is never written to.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            _fill(file, write, path)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    for left in path.parent.iterdir():
        if left.name.startswith(f".{path.name}.") and left.name.endswith(".tmp"):
            with suppress(OSError):  # it is no file, or not ours: what was to be written is there
                left.unlink()


def _fill(file: IO[bytes], write: Callable[[IO[bytes]], object], path: Path) -> None:
    try:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:  # a full disk: it says what is the matter, but not with which file
        error.filename = str(path)
        raise
    except RuntimeError as error:  # so torch.save tells of a write that failed
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


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
    try:
        with path.open("rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such checkpoint") from error
    except Exception as error:  # damaged bytes may read as anything
        if isinstance(error, OSError) and error.filename is not None:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        raise CheckpointError(f"{path}: is not a checkpoint, or is cut short ({_said(error)})") from error
    found = content.get("format") if isinstance(content, dict) else None
    if not isinstance(found, str) or found != format_name:
        shown = found if isinstance(found, str) else None
        raise CheckpointError(f"{path}: expected a checkpoint of format {format_name!r}, found {shown!r}")
    return content


@contextmanager
def unfit(path: Path, what: str) -> Iterator[None]:
    """Whatever goes wrong in the block with what the file holds is a CheckpointError that names file and cause."""
    try:
        yield
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path}: does not fit {what} (it has no {error.args[0]!r})") from error
    except Exception as error:
        raise CheckpointError(f"{path}: does not fit {what} ({_said(error)})") from error


def _said(error: Exception) -> str:
    """The first line of a message, without a colon at its end."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" :")


def check_weights(path: Path, name: str, found: Any, expected: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless ``found`` has these names, with tensors of these shapes and dtypes, all finite."""
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: {name} must be a dict of tensors, found {type(found).__name__}")
    odd = [key for key in expected if key not in found] or [key for key in found if key not in expected]
    if odd:
        which = "has no" if odd[0] in expected else "has an unknown"
        raise CheckpointError(f"{path}: does not fit this program's model ({name} {which} {odd[0]!r})")
    for key, like in expected.items():
        check_tensor(path, f"{name}[{key!r}]", found[key], like)


def check_tensor(path: Path, name: str, found: Any, like: Tensor) -> None:
    """Raises CheckpointError unless ``found`` is a tensor of the shape and dtype of another, and finite."""
    if not isinstance(found, Tensor):
        raise CheckpointError(f"{path}: {name} must be a tensor, found {type(found).__name__}")
    if found.shape != like.shape or found.dtype != like.dtype or found.layout != like.layout:
        is_, must = (f"{tuple(x.shape)} of {x.dtype}" for x in (found, like))
        raise CheckpointError(f"{path}: does not fit this program's model ({name} is {is_}, not {must})")
    if not bool(found.isfinite().all()):
        raise CheckpointError(f"{path}: holds weights that are not finite ({name})")


def describe(model: G2P, vocabulary: Vocabulary) -> dict[str, Any]:
    """What a checkpoint says of a model besides its weights."""
    symbols = {"letters": list(vocabulary.letters), "phones": list(vocabulary.phones)}
    return {"config": asdict(model.config), "vocabulary": symbols}


def save_model(path: str | Path, model: G2P, vocabulary: Vocabulary) -> None:
    """Write a model and its vocabulary: all that evaluating and saying words needs."""
    save(path, MODEL_FORMAT, {**describe(model, vocabulary), "weights": model.state_dict()})


def load_model(path: str | Path) -> tuple[G2P, Vocabulary]:
    """Read a model, ready for decoding. Raises CheckpointError as ``load`` does, or if its weights do not fit."""
    path = Path(path)
    content = load(path, MODEL_FORMAT)
    with unfit(path, "this program's model"):
        vocabulary = Vocabulary(*(_symbols(path, content["vocabulary"], name) for name in ("letters", "phones")))
        config = Config(**content["config"])
        for name in ("letters", "phones"):
            if getattr(config, name) != len(getattr(vocabulary, name)):
                raise CheckpointError(
                    f"{path}: its vocabulary has not the {getattr(config, name)} {name} of its config"
                )
        with torch.device("meta"):  # sizes that are damaged take no memory before they are compared
            expected = G2P(config).state_dict()
        check_weights(path, "weights", content["weights"], expected)
        model = G2P(config)
        model.load_state_dict(content["weights"])
    return model.eval(), vocabulary


def _symbols(path: Path, vocabulary: Any, name: str) -> tuple[str, ...]:
    symbols = vocabulary[name]
    if not isinstance(symbols, list) or not all(isinstance(x, str) for x in symbols) or len({*symbols}) < len(symbols):
        raise CheckpointError(f"{path}: its {name} must be a list of strings, each once")
    return tuple(symbols)
