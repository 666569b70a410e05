"""Modules of other packages on packed rows: how many run without a changed line, beside themselves on every row alone.

    python profiling/zoo.py --zoo-python PYTHON            # a Python that has the packages: some minutes
    python profiling/zoo.py --zoo-python PYTHON --bench    # and times and bytes of three layers at half padding

Each module is built small, with random weights, in float64 where it takes that, in eval, and in training where a row is
by itself there (dropout 0, no batch norm). Its code is the package's; what calls it gives a packed tensor in place of
the padded one. The result's rows and the gradients of the input and of every parameter, for directions drawn for each
row, are compared with those of the module on every row alone. *unchanged*: they agree. *changed*: they agree with the
lines that the page shows. *refused*: a call is not taken. *wrong*: anything else.

A pip of that Python finds all: torchaudio, espnet, speechbrain, transformers, einops, and of packages written with that
conformer, vit_pytorch, perceiver_pytorch and rotary_embedding_torch, without their dependencies; and the twelve of
zoo_modules/zoo_more.py, likewise, with what an import of each then asks for. Where
torchaudio's own library does not load beside torch's CPU build, leave its folder `lib` out: no module needs it.
"""

import sys
import warnings
from argparse import ArgumentParser, Namespace
from typing import Any

from running import harness
from running.script import Peer, Result, Script, Target
from zoo_modules import (
    zoo_bench,
    zoo_check,
    zoo_einops,
    zoo_espnet,
    zoo_more,
    zoo_speechbrain,
    zoo_torch,
    zoo_torchaudio,
    zoo_transformers,
)

LISTS = {
    "torch": zoo_torch.MODULES,
    "torchaudio": zoo_torchaudio.MODULES,
    "transformers": zoo_transformers.MODULES,
    "espnet": zoo_espnet.MODULES,
    "speechbrain": zoo_speechbrain.MODULES,
    "einops": zoo_einops.MODULES,
    "more": zoo_more.MODULES,
}
PACKAGES = tuple(LISTS)
WANTED = 24
UNCHANGED = "unchanged"


def _modules_of(package: str) -> list[zoo_check.Module]:
    return LISTS[package]


def cells(args: Namespace) -> list[harness.Cell]:
    found: list[harness.Cell] = [{"kind": "modules", "package": package} for package in PACKAGES]
    if args.bench:
        found += [{"kind": "bench", "layer": layer, "size": args.set} for layer in zoo_bench.LAYERS]
    return found


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # of the packages
    if cell["kind"] == "bench":
        return zoo_bench.measure(cell["layer"], cell["size"])
    return {"modules": [_describe(module) for module in _modules_of(cell["package"])]}


def _describe(module: zoo_check.Module) -> dict[str, Any]:
    found = zoo_check.check(module)
    edits = [edit.diff for edit in module.edits] if found.changed else []
    ways = "eval, train" if module.train else "eval"
    return {"name": module.name, "ways": ways, "lens": list(module.lens), **found._asdict(), "edits": edits}


def _found(result: Result) -> list[tuple[str, dict[str, Any]]]:
    """(package, module) of all that ran."""
    entries = [entry for entry in result["entries"] if entry["cell"]["kind"] == "modules" and entry["raw"]]
    return [(e["cell"]["package"], module) for e in entries for module in e["raw"][-1].get("modules", ())]


def _count(result: Result, what: str) -> int:
    return sum(module["result"] == what for _, module in _found(result))


def section(result: Result, picture: str) -> str:
    found = _found(result)
    rows = [
        [package, module["name"], _result_text(module), module["ways"], f"{module['apart']:.1e}"]
        for package, module in found
    ]
    blocks = [harness.table(["package", "module", "result", "compared in", "apart"], rows, text_columns=4)]
    diffs = {diff: None for _, module in found for diff in module["edits"]}
    if diffs:
        blocks.append("**Changed lines.**")
        blocks += [f"```diff\n{diff}\n```" for diff in diffs]
    stopped = [
        f"- {package}, {module['name']}: at `{module['line']}`\n  {module['error']}"
        for package, module in found
        if module["error"]
    ]
    if stopped:
        blocks += ["**What stopped them**, as they are:", "\n".join(stopped)]
    timed = [entry for entry in result["entries"] if entry["cell"]["kind"] == "bench"]
    return "\n\n".join([*blocks, *_timed(timed)])


def _result_text(module: dict[str, Any]) -> str:
    return f"{module['changed']} lines changed" if module["changed"] else module["result"]


def _timed(entries: list[harness.Entry]) -> list[str]:
    def shown(entry: harness.Entry, key: str, divisor: float) -> str:
        value = harness.median(entry, key)
        return harness.digits(None if value is None else value / divisor)

    rows = [
        [
            entry["cell"]["layer"],
            *(shown(entry, f"{way}_s", 1e-3) for way in ("padded", "packed")),
            shown(entry, "ratio", 1),
            *(shown(entry, f"{way}_bytes", 2**20) for way in ("padded", "packed")),
        ]
        for entry in entries
    ]
    if not rows:
        return []
    header = ["layer", "padded, ms", "packed, ms", "ratio", "padded, MiB kept", "packed, MiB kept"]
    return ["A step, forward and backward, where half of the padded tensor is padding:", harness.table(header, rows)]


def summary(result: Result) -> list[str]:
    found = _found(result)
    return [
        f"Of {len(found)} modules {_count(result, UNCHANGED)} run on packed rows without a changed line, "
        f"{_count(result, 'changed')} with the lines changed that are shown below; {_count(result, 'refused')} are "
        f"refused, {_count(result, 'wrong')} give other numbers than on the rows alone."
    ]


def targets(result: Result) -> list[Target]:
    if len({package for package, _ in _found(result)}) < len(PACKAGES):
        return []
    found = [
        Target("modules that run unchanged", _count(result, UNCHANGED), WANTED, least=True),
        Target("modules that give other numbers", _count(result, "wrong"), 0),
    ]
    for entry in result["entries"]:
        if entry["cell"]["kind"] == "bench":
            kept = [harness.median(entry, f"{way}_bytes") for way in ("packed", "padded")]
            share = kept[0] / kept[1] if kept[0] is not None and kept[1] else None
            found.append(Target(f"{entry['cell']['layer']}, time beside padded", harness.median(entry, "ratio"), 0.6))
            found.append(Target(f"{entry['cell']['layer']}, bytes beside padded", share, 0.6))
    return found


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--bench", action="store_true", help="times and bytes of three layers too")


def needs_packages(cell: harness.Cell) -> bool:
    """Whether a cell runs modules that are not torch's."""
    return cell.get("package", cell.get("layer")) not in ("torch", zoo_bench.LAYERS[0])


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 1},
    targets=targets,
    peers=(Peer("zoo", (*PACKAGES[1:-1], *zoo_more.PACKAGES), needs_packages),),
    options=options,
    group=lambda cell: cell["kind"],
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
