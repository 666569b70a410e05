"""What of a run is measured already: in a file beside its results until it is done, so that a stopped run can go on.

Another program would give other figures, so a run goes on with the same command, versions, machine and sources alone.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from running import harness
from running.harness import Cell, Entry

FOLDERS = ("tensorloop", "cuda", "profiling", "docs/examples")
MAY_DIFFER = ("date", "load_at_start", "parts")  # between the parts of a run


class CannotResume(Exception):
    """The partial results are those of another run."""


def sources() -> str:
    """A digest of every program that has a part in a figure."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in (harness.ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(harness.ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Partial:
    """The file, and the run it belongs to."""

    def __init__(self, out: Path, about: dict[str, Any], rounds: int) -> None:
        self.path = out.with_suffix(".partial.json")
        self.about = about
        self._rounds, self._sources = rounds, sources()

    def begin(self, cells: Sequence[Cell], resume: bool) -> list[Entry]:
        """The cells to measure, with what an earlier part has found; what failed there is left to try again.

        Raises CannotResume.
        """
        if not resume or not self.path.is_file():
            return harness.unmeasured(cells)
        old = json.loads(self.path.read_text())
        now, then = self._identity(self.about), self._identity(old["about"]) | {"sources": old["sources"]}
        if differs := [key for key in now | then if now.get(key) != then.get(key)]:
            raise CannotResume(f"{self.path} is of another run ({', '.join(differs)}): measure without --resume")
        self.about |= {key: old["about"][key] for key in MAY_DIFFER if key in old["about"]}
        self.about["parts"] = self.about.get("parts", 1) + 1
        found = {json.dumps(entry["cell"]): entry["raw"] for entry in old["entries"]}
        return [
            {"cell": cell, "raw": [raw for raw in found.get(json.dumps(cell), []) if "error" not in raw]}
            for cell in cells
        ]

    def _identity(self, about: dict[str, Any]) -> dict[str, Any]:
        same = {key: value for key, value in about.items() if key not in MAY_DIFFER}
        return json.loads(json.dumps(same)) | {"sources": self._sources}

    def keep(self, checks: Sequence[Entry], entries: Sequence[Entry]) -> None:
        """Writes what there is: results like any other, marked as partial."""
        done, total = sum(len(entry["raw"]) for entry in entries), self._rounds * len(entries)
        result = {"about": self.about, "again": {}, "checks": checks, "entries": entries}
        harness.write_json(self.path, result | {"partial": f"{done} of {total}", "sources": self._sources})
