"""The command line: `python -m tensorloop.same OLD.py:original NEW.py:ported --sample NEW.py:sample`."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tensorloop.memory.named_function import BadInput, function_of, of_the_user
from tensorloop.testing.ports import same_loop


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares two functions; gives the exit code: 0 the same, 1 not, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorloop.same",
        description="Compares a loop with its port: values, gradients, side effects, bytes and time.",
        epilog="exit codes: 0 the same; 1 something differs, or nothing could be compared; 2 bad input",
    )
    parser.add_argument("original", help="MODULE:FUNCTION or SCRIPT.py:FUNCTION, the loop as it was")
    parser.add_argument("ported", help="the same with a loop of tensorloop")
    parser.add_argument(
        "--sample", help="a function that gives the arguments as a tuple; default: `sample` beside the port"
    )
    parser.add_argument(
        "--sizes", default="", help="sizes to vary, such as T=7,B=3; default: those of the sample's dims"
    )
    parser.add_argument("--repeats", type=int, default=5, help="how often each way is timed; 0: not at all")
    options = parser.parse_args(arguments)
    module = options.ported.rpartition(":")[0]
    try:
        sizes = {
            name: int(size) for name, _, size in (part.partition("=") for part in options.sizes.split(",") if part)
        }
        with ExitStack() as stack:
            names = (options.original, options.ported, options.sample or f"{module}:sample")
            original, ported, sample = (stack.enter_context(function_of(name)) for name in names)
            report = same_loop(
                original, ported, *_arguments(sample, names[2]), sizes=sizes or None, repeats=options.repeats
            )
    except (BadInput, TypeError, ValueError) as error:
        print(f"tensorloop.same: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report else 1


def _arguments(sample: Any, name: str) -> tuple[Any, ...]:
    try:
        given = sample()
    except Exception as error:
        raise BadInput(f"{name} fails:\n{of_the_user(error)}") from None
    return given if isinstance(given, tuple) else (given,)


if __name__ == "__main__":
    sys.exit(main())
