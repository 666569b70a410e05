"""Object code that tests keep from run to run, in a folder of their own: one run makes more than the user's holds."""

import functools
from pathlib import Path

from tensorloop.compiler.targets.cpu import object_cache as cache
from tests.device import built

MOST = 20_000  # entries of some kilobytes; a run makes some thousands


class Objects(cache.Folder):
    """A folder that is trimmed when a run begins, and not for each entry."""

    def _trim(self) -> None:
        pass

    def begin(self) -> None:
        """Drops the older half where there are too many."""
        entries = [*self.path.glob("*.o")]
        if len(entries) > MOST:
            for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime)[: MOST // 2]:
                entry.unlink(missing_ok=True)


def begin() -> None:
    """Stands in for the user's folder; a test that names another by XDG_CACHE_HOME or HOME has that one."""
    users, folder = cache.user_folder().path, cache._folder.__wrapped__
    kept = Objects(built.folder() / "objects")
    kept.begin()
    cache._folder = functools.cache(lambda path: kept if Path(path) == users else folder(path))
