"""What a stage has found so far, in a file that is whole at any moment: killed processes lose one item at most.

Without torch: who starts the stages reads and mends these files, too.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ERROR = "error"  # what went wrong in an item
ABSENT = "absent"  # what the machine lacks for it


@dataclass
class Kept:
    """The items of one stage: what each gave, which one is running, which there are in all."""

    path: Path
    rows: dict[str, Row] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    running: str = ""
    failed: str = ""
    """Why the stage's process ended before any item of it could run."""
    processes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, folder: Path, stage: str) -> "Kept":
        path = folder / f"{stage}.json"
        return cls(path, **(json.loads(path.read_text()) if path.is_file() else {}))

    def save(self) -> None:
        told = {name: value for name, value in vars(self).items() if name != "path"}
        beside = self.path.with_name(f".{self.path.name}.new")
        beside.write_text(json.dumps(told, indent=1, default=str) + "\n")
        os.replace(beside, self.path)

    def begin(self, name: str) -> None:
        self.running = name
        self.save()

    def end(self, row: Row) -> None:
        self.rows[self.running] = row
        self.running = ""
        self.save()

    def retry(self) -> None:
        """Forgets what failed."""
        self.rows = {name: row for name, row in self.rows.items() if ERROR not in row}
        self.running = self.failed = ""
        self.save()

    @property
    def left(self) -> list[str]:
        """Items that have not run."""
        return [name for name in self.names if name not in self.rows]

    @property
    def errors(self) -> dict[str, str]:
        return {name: str(row[ERROR]) for name, row in self.rows.items() if ERROR in row}

    @property
    def absent(self) -> dict[str, str]:
        return {name: str(row[ABSENT]) for name, row in self.rows.items() if ABSENT in row}

    @property
    def whole(self) -> bool:
        """Whether every item has run, whatever came out."""
        return bool(self.names) and not self.left and not self.failed
