"""A progress bar, where one is asked for."""

from types import TracebackType
from typing import Any, Self

from tensorloop._common.arguments import as_bool


class Progress:
    """Counts the steps of a loop; shows them with tqdm if `shown`."""

    def __init__(self, shown: bool, name: str, total: int | None) -> None:
        self.is_shown = as_bool(shown, "progress")
        self.bar: Any = _bar(name, total) if shown else None

    def update(self, steps: int = 1) -> None:
        if self.bar is not None:
            self.bar.update(steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.close()


def _bar(name: str, total: int | None) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(f"{name}: progress=True needs tqdm: pip install tqdm") from error
    return tqdm(total=total, desc=name, unit="step", dynamic_ncols=True)
