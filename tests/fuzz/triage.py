"""The finds of a run in groups, and what their programs have in common: `python tests/fuzz/triage.py build/fuzz`.

Finds are of one group where their messages are the same but for numbers and names. Beside a group stand the words of
its programs that are rare in others, with how much more often they are there: most often the operation at fault.
"""

import argparse
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

SAMPLE = 400  # programs whose words are counted, of those without a find


def main(arguments: list[str] | None = None) -> int:
    """Prints the groups, the largest first."""
    from tests.fuzz.run import read

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("build/fuzz"))
    parser.add_argument("--reasons", action="store_true", help="why loops were not compiled, instead")
    parser.add_argument("--small", type=int, default=0, help="how many programs of a group are made small and shown")
    parser.add_argument("--seeds", type=int, default=8, help="how many are shown of a group")
    asked = parser.parse_args(arguments)
    found = list(read(asked.out))
    if asked.reasons:
        return _reasons(found)
    usual = words_of([x["seed"] for x in found if x["outcome"] == "same"][:SAMPLE])
    groups = grouped(found)
    for key, seeds in sorted(groups.items(), key=lambda group: -len(group[1])):
        print(f"{len(seeds):5}  {key}")
        print(f"       seeds {' '.join(map(str, seeds[: asked.seeds]))}")
        print(f"       words {', '.join(telling(seeds[:60], usual))}", flush=True)
        if asked.small:
            _print_small(seeds[: asked.small])
    print(f"{len(groups)} groups of {sum(map(len, groups.values()))} finds in {len(found)} programs")
    return 0


def _print_small(seeds: list[int]) -> None:
    """The smallest programs of a group that give the same kind of find."""
    from tests.fuzz.child import prepare
    from tests.fuzz.programs import program
    from tests.fuzz.shrink import judge_of, shrink

    prepare()
    for seed in seeds:
        text = shrink(program(seed), judge_of(), seconds=20)
        print("\n".join(f"       | {line}" for line in [f"seed {seed}", *text.splitlines()]), flush=True)


def _reasons(found: list[dict[str, Any]]) -> int:
    reasons = Counter(re.sub(r"\b\d+\b", "N", x.get("reason", ""))[:150] for x in found if not x.get("compiled"))
    for reason, n in reasons.most_common():
        print(f"{n:5}  {reason or 'left to the eager loop without a word'}")
    return 0


def grouped(found: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The seeds of each kind of find, by the first message."""
    groups: dict[str, list[int]] = defaultdict(list)
    for x in found:
        if x["finds"]:
            groups[kind(x["finds"][0])].append(x["seed"])
    return groups


def kind(message: str) -> str:
    """A message without what differs from program to program."""
    message = re.sub(r"^call \d+: ", "", message)
    message = re.sub(r"\b[a-z]\d+(_base)?\b", "NAME", message)
    message = re.sub(r"\[\d+\]", "[.]", message)
    if ": value, " in message:
        name, _, numbers = message.partition(": value, ")
        eager, _, rest = numbers.partition(", compiled ")
        odd = "nan where there is none" if "nan" in rest.split(" ")[0] and "nan" not in eager else "another value"
        return f"{name.replace('second gradient', 'gradient')}: {odd}"
    return re.sub(r"-?\b\d[\d.e+-]*\b", "N", message)[:220]


def words_of(seeds: list[int]) -> Counter[str]:
    """In what share of these programs a word stands."""
    from tests.fuzz.programs import program

    counts: Counter[str] = Counter()
    for seed in seeds:
        counts.update(words(program(seed)))
    return Counter({word: n / max(1, len(seeds)) for word, n in counts.items()})  # pyright: ignore[reportArgumentType]


def words(text: str) -> set[str]:
    """The operations, options and kinds of input that a program names."""
    return {
        w for w in re.findall(r"[A-Za-z_][A-Za-z_.0-9]{2,}", text) if not re.fullmatch(r"[a-z]\d+(_\w+)?(\..*)?", w)
    } | {f".{w}(" for w in re.findall(r"[a-z]\d+\.(\w+)\(", text)}


def telling(seeds: list[int], usual: Counter[str]) -> list[str]:
    """The words that these programs have more often than usual ones."""
    own = words_of(seeds)
    few = 1 / SAMPLE
    score = {w: share * min(share / (usual[w] + few), 50) for w, share in own.items()}
    best = sorted(score, key=lambda w: -score[w])[:5]
    return [f"{w} {own[w]:.0%}/{usual[w]:.0%}" for w in best]


if __name__ == "__main__":
    sys.exit(main())
