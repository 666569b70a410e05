"""What a package index shows: the README without its relative links and pictures, which lead nowhere there."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCED = re.compile(r"^(```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_TARGET = r"\((?!https?://|mailto:)[^)\s]*\)"
_PICTURE = re.compile(rf"^!\[[^\]]*\]{_TARGET}\n+", re.MULTILINE)
_LINK = re.compile(rf"(?P<code>(?<!\[)`[^`\n]*`)|\[(?P<text>[^\]]*)\]{_TARGET}")
_INDEX = re.compile(r"^## Documentation\n.*?(?=^Licensed)", re.MULTILINE | re.DOTALL)

_PAGES = """## Documentation

The pages named above are in `docs/` of the source distribution; begin with `docs/README.md`. Docstrings stand alone.

"""


def for_an_index(readme: str) -> str:
    """The text where no file lies beside it: links are their text, pictures are left out, the list of pages is a line.

    There is no public place to link to yet; with one, links would become absolute here.
    """
    parts = _FENCED.split(_INDEX.sub(_PAGES, readme))
    return "".join(part if i % 2 else _unlinked(part) for i, part in enumerate(parts))


def _unlinked(prose: str) -> str:
    return _LINK.sub(lambda found: found["code"] or found["text"], _PICTURE.sub("", prose))


class Readme(MetadataHookInterface):
    """Gives the distribution its long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the readme to what pyproject.toml says."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text)}
