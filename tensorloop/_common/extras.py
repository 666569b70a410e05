"""Packages that are there only if they were asked for."""

import importlib.util


def refuse_without(package: str, name: str) -> None:
    """Raises ImportError where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{name}: needs {package}: pip install 'tensorloop[memory]'")
