"""What runs where, with which versions, and what has been run: each fact once, in this file.

    python -m docs.facts            # writes the facts into the pages
    python -m docs.facts --check    # says which pages hold another wording

A page takes a sentence or a table between `<!-- fact: NAME -->` and `<!-- /fact -->`. A test compares them, and finds
second wordings of these facts elsewhere (`tests/house/test_facts.py`). Docstrings hold theirs word by word.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/tensorloop/tensorloop/blob/main/"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(r"<!-- fact: (?P<name>[\w-]+) -->(?P<text>.*?)<!-- /fact -->", re.DOTALL)


def oldest(package: str) -> str:
    """The oldest version that the package accepts, of Python or of what it depends on."""
    needs = [f"Python{PROJECT['requires-python']}", *PROJECT["dependencies"]]
    found = (re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", need) for need in needs)
    return {x[1].lower(): x[2] for x in found if x is not None}[package.lower()]


EXTRAS_NEEDS: dict[str, list[str]] = PROJECT["optional-dependencies"]

# What each extra is for; what it brings is in pyproject.toml, and a test holds the names.
EXTRAS = {
    "hf": (
        "transformers",
        "[Hugging Face models]({docs}huggingface.md): caches to train through, packed batches, beam search, rollouts",
    ),
    "progress": ("tqdm", "`progress=True` on loops"),
    "memory": (
        "matplotlib, memory-profiler, tqdm",
        "pictures and process memory in [`tl.memory`]({docs}memory.md); its tables need no extra",
    ),
    "examples": ("matplotlib, tqdm", "the [example programs]({docs}examples) and their pictures"),
    "gpu": (
        "numba-cuda, with NVIDIA's compiler for CUDA 13",
        "[kernels for NVIDIA GPUs]({docs}gpu.md#installing)",
    ),
    "ptxas": ("NVIDIA's assembler for GPUs", "contributors: inspects generated kernels"),
    "dev": (
        "the test and lint tools, and all extras except `gpu` and `ptxas`",
        "[work on the library]({source}CONTRIBUTING.md)",
    ),
}

# Feature, on the CPU, on an NVIDIA GPU, on other devices of torch.
DEVICES = [
    ("loops, with or without `checkpoints=`", "yes", "torch operations, step by step", "as on a GPU"),
    ("`compile=True`", "machine code", "CUDA graphs", "the eager loop, with a warning"),
    (
        "a compiled loop in a graph of `torch.compile`",
        "one operation of the graph",
        "breaks the graph",
        "breaks the graph",
    ),
    (
        "TensorArray, packed tensors, regroup",
        "numba kernels and torch operations",
        "torch operations; some have kernels, with the extra `gpu`",
        "torch operations",
    ),
    ("beam search, edit distance", "numba kernels and torch operations", "torch operations", "torch operations"),
    ("attention", "torch's flash kernel and numba kernels", "torch's kernels, or torch operations", "torch operations"),
    ("linear recurrences", "numba kernels", "O(log T) torch operations", "O(log T) torch operations"),
]

# What ran with which versions: Python, PyTorch, what, how it ended.
VERSIONS = [
    ("3.11", "2.13.0", "all tests, for every change", "pass"),
    ("3.11", "2.11.0", "core tests of 0.2.2", "pass"),
    ("3.12", "2.11.0", "all tests after 0.2.2 (19,535)", "pass, but for seven: see below"),
    ("3.12", "2.14.1", "core tests of 0.2.2", "pass"),
    ("3.13", "2.15.0", "core tests of 0.2.2, and those of packed tensors", "pass, but for five: see below"),
    ("3.14", "2.15.0", "core tests of 0.2.2", "pass, but for two: see below"),
]

# Sentences, by name. {docs} leads to the pages, {source} to the repository.
SENTENCES = {
    "needs": "Python {python} or newer, PyTorch {torch} or newer",
    "compile-gpu": "On a GPU `compile=True` records the steps as CUDA graphs ([GPU]({docs}gpu.md)).",
    "gpu-ran": "The code for GPUs is tested on a [pretended CUDA device]({docs}gpu.md#how-it-is-tested). It has not "
    "run on a real GPU yet, so there are no times.",
    "fallback": "A loop that cannot be compiled runs as the eager loop, with one `NotCompiledWarning` that names the "
    'line and says what to write instead. `compile="strict"` raises the same text as an error.',
}

# Sentences of docstrings: (the text, the files that have it).
DOCSTRINGS = [
    (
        "True compiles the loop: to machine code on the CPU, to CUDA graphs on a GPU.",
        ("tensorloop/loop/api.py", "tensorloop/loop/counted.py"),
    ),
]

# Second wordings: nowhere in pages and docstrings but in facts, and on the pages whose subject it is.
ELSEWHERE = {
    r"on the CPU only|only on the CPU|CPU[- ]only|not on a GPU": (),
    r"on both|on either": (),
    r"records? [^.|]{0,40}CUDA graphs": ("gpu.md",),
    r"real GPU|pretended (CUDA )?device|simulated device|without a GPU": (
        "gpu.md",
        "tested.md",
        "returnn_tests.md",
        "many_processes.md",
        "benchmarks/gpu.md",
    ),
    r"(Python|PyTorch|[Tt]orch) (\d\.[\d.]+ (or|and) (newer|older|later)|[≥>]=? ?\d\.\d+)|torch>=\d": (),
}


def _prefix(page: Path) -> dict[str, str]:
    """How a page names other pages: the README has whole addresses, since it is read elsewhere, too."""
    if page.parent == ROOT:
        return {"docs": f"{SOURCE}docs/", "source": SOURCE}
    return {"docs": "../" * (len(page.relative_to(ROOT / "docs").parts) - 1), "source": SOURCE}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |")


TABLES = {
    "devices": lambda: _table(("", "on the CPU", "on an NVIDIA GPU", "on other devices"), DEVICES),
    "versions": lambda: _table(("Python", "PyTorch", "what was run", "result"), VERSIONS),
    "extras": lambda: _table(("extra", "brings", "for"), [(f"`{name}`", *row) for name, row in EXTRAS.items()]),
}


def fact(name: str, page: Path) -> str:
    """A sentence or a table, as a page has it."""
    text = f"\n\n{TABLES[name]()}\n\n" if name in TABLES else SENTENCES[name]
    names = {**_prefix(page), "python": oldest("python"), "torch": oldest("torch")}
    return re.sub(r"\{(\w+)\}", lambda found: names[found[1]], text)


def _same(a: str, b: str) -> bool:
    return a.split() == b.split()


def written(page: Path) -> str:
    """The page with the facts as they are; one that it has already stays as it is wrapped there."""

    def put(found: re.Match[str]) -> str:
        text = fact(found["name"], page)
        if found["name"] in TABLES:
            return f"<!-- fact: {found['name']} -->{text}<!-- /fact -->"
        before = found["text"][: -len(found["text"].lstrip()) or None]
        return found[0] if _same(found["text"], text) else f"<!-- fact: {found['name']} -->{before}{text}<!-- /fact -->"

    return MARK.sub(put, page.read_text())


def second_wordings(text: str, page: str) -> Iterator[str]:
    """Wordings of these facts in a text, outside of the facts themselves."""
    rest = MARK.sub("", text)
    for sentence, _ in DOCSTRINGS:
        rest = re.sub(r"\s+".join(map(re.escape, sentence.split())), "", rest)
    for pattern, pages in ELSEWHERE.items():
        if page not in pages:
            yield from (found[0] for found in re.finditer(pattern, rest))


def main() -> int:
    """Writes the pages, or says which differ."""
    check, different = "--check" in sys.argv[1:], []
    for page in PAGES:
        if (text := written(page)) != page.read_text():
            different.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(text)
    print(*different, sep="\n")
    return int(check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
