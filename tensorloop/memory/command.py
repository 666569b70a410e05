"""The command line: `python -m tensorloop.memory SCRIPT.py:function --T 64,128,256,512`."""

import argparse
import importlib.util
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch

from tensorloop._common.extras import refuse_without
from tensorloop._common.html import document
from tensorloop.memory.counting.sites import printable
from tensorloop.memory.named_function import BadInput, Function, function_of, of_the_user, one_line, refuse_arguments
from tensorloop.memory.process import timeline
from tensorloop.memory.report import html
from tensorloop.memory.report.growth import Growth
from tensorloop.memory.report.result import write
from tensorloop.memory.scaling.measure import growth

_TWICE = "backward through the graph a second time"
_CODES = "exit codes: 0 done; 1 above --fail-above; 2 bad input, or the function failed; 130 interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one function; gives the exit code: 0 done, 1 above `--fail-above`, 2 bad input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    with _own_output() as out:
        try:
            _settle_outputs(options)
            with function_of(options.target) as function:
                return _measure(options, _Watched(function, options.target), out)
        except BrokenPipeError:  # whoever read the table has seen enough
            return 0
        except (BadInput, ImportError) as error:
            _say(str(error))
        except OSError as error:  # a full disk
            _say(f"{error.filename or 'standard output'}: {error.strerror or error}")
        except KeyboardInterrupt:
            _say("interrupted")
            return 130
    return 2


class _Watched:
    """A user's function of T, which must give a scalar loss; remembers what to show of its last error."""

    def __init__(self, function: Function, target: str) -> None:
        refuse_arguments(function, target)
        self._function, self._target = function, target
        self.error = ""

    def at(self, T: int) -> Callable[[], torch.Tensor]:
        """Returns the function of no arguments that `growth` calls for this T."""

        def run() -> torch.Tensor:
            self.error = ""
            try:
                loss = self._function(T)
            except SystemExit as error:
                self.error = of_the_user(error)
                raise RuntimeError(f"{self._target} ended the program (exit {error.code})") from None
            except Exception as error:
                self.error = of_the_user(error)
                raise
            if wrong := _no_loss(loss):
                raise TypeError(f"{self._target} must return a scalar loss to call backward on; it gave {wrong}")
            return loss

        return run

    def try_out(self, T: int) -> None:
        """Runs it once at the smallest T: what fills caches, and what fails at once."""
        try:
            self.at(T)()
        except Exception as error:
            raise BadInput(f"at T = {T}, the smallest: {one_line(error)}\n{self.error}".rstrip()) from None


def _no_loss(loss: Any) -> str:
    """Says what is wrong with a loss; an empty string where it serves."""
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}" + (f" of {len(loss)}" if isinstance(loss, tuple | list) else "")
    if loss.numel() != 1:
        return f"a tensor of shape {tuple(loss.shape)}: take its mean() or sum()"
    return "" if loss.requires_grad else "one that needs no gradient: no_grad, detach(), or no parameters in it?"


def _measure(options: argparse.Namespace, watched: _Watched, out: TextIO) -> int:
    watched.try_out(options.T[0])
    if options.timeline:
        _timeline(options, watched)
    try:
        found = growth(watched.at, options.T, progress=options.progress)
    except Exception as error:  # at the smallest T, and in backward: forward was tried
        twice = "the function must not call backward on its loss: it is called here\n" if _TWICE in str(error) else ""
        raise BadInput(f"at T = {options.T[0]}, the smallest: {one_line(error)}\n{twice}{of_the_user(error)}") from None
    above = _above(found, options.fail_above)
    with suppress(BrokenPipeError):  # whoever read the table has seen enough; files and exit code are still wanted
        print(found, file=sys.stderr if options.json == "-" else out, flush=True)
    if found.failed:
        _say(f"failed at T = {found.failed[0]}; figures are of smaller T\n{watched.error or found.failed[1]}")
    _write(options, found, watched.error if found.failed else "", above, out)
    for line in above:
        _say(line)
    if not any(found.bytes):
        _say(f"{options.target} saves nothing for backward at any T: does its loss depend on what its loop makes?")
    return 2 if found.failed or not any(found.bytes) else int(bool(above))


def _timeline(options: argparse.Namespace, watched: _Watched) -> None:
    """Before anything else, as what was allocated once stays with the allocator; at the largest T."""
    try:
        timeline(watched.at(options.T[-1])).save(options.timeline)
    except Exception as error:
        _say(f"no timeline at T = {options.T[-1]}: {one_line(error)}")


def _write(options: argparse.Namespace, found: Growth, error: str, above: list[str], out: TextIO) -> None:
    title = printable(f"Memory of {options.target}")
    for report in options.report:
        if report.suffix == ".png":
            found.save(report, title)
        else:  # with the frames of an error, which the result has not
            write(report, document(title, html.body(found, error)))
    if options.json:
        data = {
            "target": printable(options.target),
            **found.as_dict(),
            "traceback": printable(error),
            "limit": options.fail_above,
            "above": above,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        text = json.dumps(data, indent=1, allow_nan=False) + "\n"
        if options.json == "-":
            print(text, end="", file=out, flush=True)
        else:
            write(Path(options.json), text)


def _above(found: Growth, limit: float | None) -> list[str]:
    """Returns a line for each figure that grows faster than the limit: bytes, which repeat themselves, never time."""
    if limit is None:
        return []
    judged = (("saved", found.bytes, found.marginal), ("peak", found.peaks, found.peak_marginal))
    return [
        f"{name} bytes grow as T^{exponent:.3f}, above the limit of T^{limit:g}"
        for name, n, exponent in judged
        if n and n[-1] > n[0] and exponent > limit
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tensorloop.memory",
        description="Shows which lines of a function save and allocate how many bytes, and how they grow with T.",
        epilog=_CODES,
    )
    parser.add_argument("target", help="SCRIPT.py:function or package.module:function; takes T, returns a scalar loss")
    parser.add_argument(
        "--T", type=_rising, default=(64, 128, 256, 512), metavar="N,N,...", help="sizes, best doubling (%(default)s)"
    )
    parser.add_argument(
        "--report", type=_report, action="append", default=[], metavar="FILE", help="a report: .html or .png"
    )
    parser.add_argument("--json", metavar="FILE", help="all figures; - for the standard output")
    parser.add_argument("--timeline", type=_png, metavar="FILE.png", help="resident memory of a run at the largest T")
    parser.add_argument(
        "--fail-above", type=_limit, metavar="P", help="exit code 1 if saved or peak bytes grow faster than T^P"
    )
    parser.add_argument(
        "--no-progress", dest="progress", action="store_false", help="no progress bar on the standard error"
    )
    parser.set_defaults(progress=importlib.util.find_spec("tqdm") is not None)
    return parser


def _rising(text: str) -> tuple[int, ...]:
    try:
        Ts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers such as 64,128,256; got {text!r}") from None
    if len(Ts) < 2 or Ts[0] < 1 or any(a >= b for a, b in pairwise(Ts)):
        raise argparse.ArgumentTypeError(
            f"must be two or more sizes that rise from 1 on, such as 64,128,256; got {text}"
        )
    return Ts


def _limit(text: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise argparse.ArgumentTypeError(f"must be a power of T such as 1.2; got {text!r}")
    return limit


def _report(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".html", ".htm", ".png"):
        raise argparse.ArgumentTypeError(f"must end in .html or .png; got {text!r}")
    return path


def _png(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png; got {text!r}")
    return path


def _settle_outputs(options: argparse.Namespace) -> None:
    """Refuses what could not be written, before a run that may take long; a script may change the folder meanwhile."""
    if options.timeline:
        refuse_without("memory_profiler", "--timeline")
    if options.timeline or any(report.suffix == ".png" for report in options.report):
        refuse_without("matplotlib", "a picture")
    options.report = [_writable(report) for report in options.report]
    if options.timeline:
        options.timeline = _writable(options.timeline)
    if options.json not in (None, "-"):
        options.json = str(_writable(Path(options.json)))


def _writable(file: Path) -> Path:
    """The absolute path of a file that can be written; what is there stays."""
    new = not file.exists()
    try:
        file.open("ab").close()
    except OSError as error:
        raise BadInput(f"{file}: cannot be written: {error.strerror}") from None
    if new:
        file.unlink()
    return file.absolute()


@contextmanager
def _own_output() -> Iterator[TextIO]:
    """The standard output for ourselves: what a script, its C code or its children print goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        with suppress(OSError):  # what could not be written was told when it was flushed
            out.close()


def _say(what: str) -> None:
    print(printable(f"tensorloop.memory: {what}"), file=sys.stderr)
