"""Which run made a table: its caption, and the rows of a file of results that one machine and one version have made.

A table is of one machine and one version. A run that leaves out rows (`--only`) may join the results of another one
where both are the same; `strangers` names the rows that forbid it. Older files hold rows of several machines or
versions: `runs` takes them apart, and each gets tables of its own.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from pages import names

Result = dict[str, Any]
About = dict[str, Any]
Group = Callable[[dict[str, Any]], Hashable]


# ---- one machine, one version ----


def differences(a: About, b: About) -> list[str]:
    """What is not the same, in words; a peer that one of them lacks is no difference."""
    found = [
        f"{what}: {x} and {y}"
        for what in ("processor", "cores")
        for x, y in [(a["machine"][what], b["machine"][what])]
        if x != y
    ]
    ours, theirs = versions(a), versions(b)
    return found + [
        f"{name}: {ours[name]} and {theirs[name]}" for name in ours if theirs.get(name, ours[name]) != ours[name]
    ]


def versions(about: About) -> dict[str, str]:
    """Those of peers too."""
    found = {name: about["versions"][name] for name in ("tensorloop", "torch", "python")}
    for peer in about.get("peers", {}).values():
        found |= peer
    return found


def strangers(old: Result, about: About, cells: Sequence[dict[str, Any]], group: Group) -> dict[str, list[str]]:
    """Groups that a run of these cells leaves as they are, and what differs there: another machine or version."""
    new, found = {group(cell) for cell in cells}, {}
    for left in {group(entry["cell"]) for entry in old.get("entries", [])} - new:
        made = old.get("again", {}).get(str(left), old["about"])
        if differs := differences(made, about):
            found[str(left)] = differs
    return dict(sorted(found.items()))


def runs(result: Result, group: Group) -> list[Result]:
    """The results of each machine and version, like results of their own; those of the first run come first."""
    again = result.get("again", {})
    kinds: list[tuple[About, set[str]]] = [(result["about"], set())]  # the first run has all groups not in any other
    for name, about in again.items():
        known = next((found for first, found in kinds if not differences(first, about)), None)
        if known is None:
            kinds.append((about, {name}))
        else:
            known.add(name)
    others = {name for _, found in kinds[1:] for name in found}

    def part(number: int, about: About, found: set[str]) -> Result:
        def has(entry: dict[str, Any]) -> bool:
            name = str(group(entry["cell"]))
            return name in found if number else name not in others

        rows = {key: [entry for entry in result.get(key, []) if has(entry)] for key in ("checks", "entries")}
        if not number:
            return result | rows | {"again": {name: again[name] for name in again if name in found}}
        same = {name: again[name] for name in again if name in found and again[name] is not about}
        return {"about": about, "again": same, "whole": False, **rows}

    parts = [part(number, about, found) for number, (about, found) in enumerate(kinds)]
    return [parts[0], *(each for each in parts[1:] if each["entries"])]


# ---- in words ----


def line(result: Result) -> str:
    """When, with what and where, in two short sentences."""
    about = result["about"]
    dates = sorted({about["date"], *(later["date"] for later in result.get("again", {}).values())})
    known, machine, threads = versions(about), about["machine"], about["threads"]
    return (
        f"Measured on {' and '.join(dates)} with tensorloop {known['tensorloop']} and torch {known['torch']}. "
        f"Processor: {machine['processor']}, {machine['cores']} cores; {threads} thread{'s' if threads > 1 else ''}."
    )


def details(result: Result, titles: Mapping[str, str] | None = None) -> str:
    """The command and what else one needs to know to measure it again, as a list."""
    about, items = result["about"], []
    items.append(f"Command: `{names.worded(about['command'])}`")
    items.append("Versions: " + ", ".join(f"{name} {version}" for name, version in versions(about).items()))
    items.append(f"Rounds: {about['rounds']}. Load of the machine at the start: {about['load_at_start']}")
    if stopped := result.get("partial"):
        items.append(f"**The run was stopped**: {stopped} figures")
    if (parts := about.get("parts", 1)) > 1:
        items.append(f"In {parts} parts: the run was stopped and went on")
    if about.get("set") == "short":
        items.append("The short set: few sizes, measured once")
    if missing := [name for name, peer in about.get("peers", {}).items() if not peer]:
        items.append(f"Not installed: {', '.join(missing)}")
    return "\n".join(f"- {item}." for item in [*items, *_later(result, titles or {})])


def _later(result: Result, titles: Mapping[str, str]) -> list[str]:
    """Rows that were measured again on the same machine with the same versions, by the command that did it."""
    found: dict[str, list[str]] = {}
    for group, about in result.get("again", {}).items():
        said = f"`{names.worded(about['command'])}`, {about['date']}, rounds: {about['rounds']}"
        found.setdefault(said, []).append(titles.get(group, group))
    return [f"Measured in a run of their own: {'; '.join(groups)} ({said})" for said, groups in found.items()]
