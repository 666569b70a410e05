"""What the site needs beyond MkDocs: links that leave docs/, anchors as on GitHub, docstrings as Markdown, search.

MkDocs loads this file as a hook, griffe as an extension (`mkdocs.yml`); both are there when a site is built, and the
tests of this file need neither.
"""

import json
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

try:
    from griffe import Extension
except ImportError:  # in the tests
    Extension = object

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/tensorloop/tensorloop"
TORCH = "https://docs.pytorch.org/docs/stable/"
TORCH_NAMES = {
    "torch.Tensor": "tensors.html#torch.Tensor",
    "torch.device": "tensor_attributes.html#torch.device",
    "torch.dtype": "tensor_attributes.html#torch.dtype",
    "torch.Generator": "generated/torch.Generator.html#torch.Generator",
    "torch.nn.Module": "generated/torch.nn.Module.html#torch.nn.Module",
}
SECTIONS = (
    "Shapes",
    "Gradient",
    "Cost",
    "Raises",
    "Source",
    "Sources",
    "Ties",
    "Formula",
    "Note",
    "Dtypes",
    "Units",
    "Example",
    "Examples",
    "Args",
    "Attributes",
    "Returns",
)

# Search: what a page's score is multiplied by. The longest beginning of its path counts.
WEIGHTS = {
    "": 2.0,  # guides and first steps: what stands in docs/ itself
    "howto/": 3.0,
    "tutorials/": 3.0,
    "api/": 1.0,
    "examples/": 1.0,
    "glossary.md": 1.0,
    "how_": 0.5,
    "limits.md": 0.5,
    "outside.md": 0.5,
    "tested.md": 0.2,
    "pages.md": 0.1,  # a list of the others
    "benchmarks/": 0.1,
    "decisions/": 0.05,
}
# What people type, for a page, or a section of one, whose title says it in other words.
WORDS = {
    "install.md": (
        "citation cite bibtex licence license pip wheel requirements versions uninstall setup "
        "mac macos windows linux arm supported systems operating system platform"
    ),
    "from_0_2.md": "upgrade upgrading migration migrate update changelog breaking changes 0.3",
    "gallery.md": "gallery pictures picture plots figures images visualize",
    "mixed_precision.md": "amp autocast bfloat16 float16 half precision gradscaler",
    "gpu.md": "gpu cuda nvidia device",
    "howto/slow_lstm.md": "custom lstm rnn gru cell slow loop speed layernorm jit",
    "howto/kv_cache.md": "kv cache decoder transformer torch.cat append",
    "howto/recurrent_ppo.md": "recurrent ppo gae lstm reinforcement learning advantage done reset rl",
    "howto/out_of_memory.md": "out of memory oom cuda memory leak loop grows",
    "howto/spiking.md": "spiking snn surrogate lif neuron norse snntorch",
    "howto/neural_ode.md": "neural ode odeint adjoint solver",
    "howto/kalman.md": "kalman filter state space smoother",
    "howto/ragged_batches.md": "ragged batch nested tensor jagged padding variable length pack_padded_sequence",
    "packed.md": "ragged jagged nested tensor padding variable length",
    "loops.md": "scan while_loop fori_loop for loop checkpoint",
    "loops.md#truncated-backpropagation": "tbptt truncated bptt backpropagation through time chunks",
    "schedules.md": "checkpoint checkpoints checkpointing gradient revolve",
    "compiled.md": "torch.compile compile slow loop jit numba",
    "what_compiles.md": "notcompiledwarning warning not compiled eager fallback",
    "arrays.md": "tensorarray torch.cat append list stack buffer",
    "memory.md": "memory profiler leak",
    "huggingface.md": "hugging face transformers generate kv cache",
    "beam.md": "beam search decode generate",
    "porting.md": "port a loop convert rewrite same_loop equivalence check patterns",
    "outside.md": "maintainer backend patch optional dependency",
    "coming_from.md": "jax lax.scan equinox tensorflow keras torch.compile",
}

_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_FENCED = re.compile(r"^( *```.*?^ *```[^\n]*$)", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`[^`\n]*`)")
_EMPHASIS = re.compile(r"((?<!\S)\*\w[^*\n()]*\w\*(?![\w*]))")
_NAMED = re.compile(r"(?<!\[)`(?:tl|tensorloop)\.([\w.]+)(?:\(\))?`")
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):", re.MULTILINE)
_LISTING = re.compile(r"^(Args|Attributes|Raises|Returns):\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)
_ENTRY = re.compile(r"^([\w, ]+): ")


def slug(text: str, separator: str = "-") -> str:
    """The anchor of a heading as GitHub makes it; `tests/house/test_docs.py` follows links by the same rule."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def linked(markdown: str, page: str) -> str:
    """The page's text with relative links to what is no page of the site made links into the repository."""
    folder = posixpath.dirname(f"docs/{page}")

    def absolute(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        inside = path.startswith("docs/") and not path.endswith(".py") and not (ROOT / path).is_dir()
        if inside or not (ROOT / path).exists():
            return found[0]  # MkDocs follows it, or says that it leads nowhere
        return f"{found[1]}{SOURCE}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{found[3]}"

    parts = _FENCED.split(markdown)
    parts[::2] = [to_api(_LINK.sub(absolute, text)) for text in parts[::2]]
    return "".join(parts)


@cache
def entries() -> dict[str, str]:
    """What the API pages show: a public name -> where it is. A function in a module of its name is named once."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    paths = [path for page in pages for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    return {re.sub(r"(\.\w+)\1$", r"\1", path): path for path in paths}


def api_names() -> frozenset[str]:
    """The public names that the API pages show."""
    return frozenset(entries())


def to_api(prose: str) -> str:
    """The text with `tl.scan` made a link to its entry, where it is no heading and no link yet."""

    def reference(found: re.Match[str]) -> str:
        name = f"tensorloop.{found[1]}"
        return f"[{found[0]}][{entries()[name]}]" if name in entries() else found[0]

    lines = prose.split("\n")
    return "\n".join(line if line.startswith(("#", ":::")) else _NAMED.sub(reference, line) for line in lines)


def _literal(line: str) -> str:
    """A line of a docstring, in which signs of Markdown other than backticks stand for themselves."""
    parts = _CODE.split(line)
    for i, part in enumerate(parts[::2]):
        words = _EMPHASIS.split(part)
        words[::2] = [re.sub(r"([\[\]])|\*(?!\*)", r"\\\g<0>", word).replace("<", "&lt;") for word in words[::2]]
        parts[2 * i] = "".join(words)
    return "".join(parts)


def _listing(found: re.Match[str]) -> str:
    """`Args:` and the like with what is indented below: an item for each name, or a paragraph."""
    lines = [f"{found[1]}:", ""]
    for line in found[2].splitlines():
        deeper = line.startswith("     ")
        lines.append(f"  {line.strip()}" if deeper else _ENTRY.sub(r"- `\1`: ", line.strip()))
    return "\n".join([*lines, ""])


def markdown(docstring: str) -> str:
    """A docstring of this library as Markdown: a paragraph a section, its name in bold, its example a block of code."""
    lines: list[str] = []
    before, code = "", False
    for line in _LISTING.sub(_listing, docstring).splitlines():
        indented = line.startswith("    ")
        if code and line.strip() and not indented:
            lines += ["```", ""]
            code = False
        if indented and not code and (not before.strip() or before.endswith(":")):
            lines += ["", "```python"]
            code = True
        if code:
            lines.append(line[4:])
        else:
            section = _SECTION.match(line)
            lines += [""] if section else []
            lines.append(_SECTION.sub(r"**\1:**", to_api(_literal(line))))
        before = line
    return "\n".join([*lines, "```"] if code else lines)


def on_config(config: Any) -> Any:
    """MkDocs: anchors as on GitHub, and where torch's own names lead."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    for name, page in TORCH_NAMES.items():
        config.plugins["autorefs"].register_url(name, TORCH + page)
    return config


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """MkDocs: a page before it is rendered. The home page has the width of the window for its cards."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    return linked(text, page.file.src_uri)


def weight(page: str) -> float:
    """What the search multiplies the score of a page by."""
    return WEIGHTS[max((start for start in WEIGHTS if page.startswith(start)), key=len)]


def ranked(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of the search index, a page's first one before those of its sections, with weights and words."""
    for entry in found:
        path, _, section = entry["location"].partition("#")
        page = re.sub(r"(^|/)index\.html$", r"\1README.md", path).replace(".html", ".md")
        entry["boost"] = weight(page)
        place = f"{page}#{section}" if section else page
        if place in WORDS:
            entry["tags"] = WORDS[place].split()
    return found


def on_post_page(output: str, **_: Any) -> str:
    """MkDocs: a page as it is written. The theme's script asks github.com for stars where it finds this attribute."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output: str, **_: Any) -> str:
    """MkDocs: what is made from no page, as the one for addresses that are not there."""
    return on_post_page(output)


def on_post_build(config: Any) -> None:
    """MkDocs: when all is written, the index of the search, too."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text())
    index["docs"] = ranked(index["docs"])
    path.write_text(json.dumps(index, separators=(",", ":")))


class Docstrings(Extension):
    """griffe: every docstring becomes Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called once for everything that has been read."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
