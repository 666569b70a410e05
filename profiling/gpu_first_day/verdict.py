"""Whether kernels (PTX) are to become the default: of what the other stages have found, without a device.

All cases right, none a rung below, the sanitizer clean, and the time relative to graphs: the median of the loops at
most 0.8, the worst at most 1.1. What is missing is no yes.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from gpu_first_day.kept import Kept

MEDIAN, WORST = 0.8, 1.1
YES, NO, OPEN = "PTX becomes the default", "PTX stays opt-in", "Not decided: something is missing"
REHEARSAL = "Not decided: this is a rehearsal"


def verdict(found: Mapping[str, Kept], rehearsed: bool) -> dict[str, Any]:
    """What holds, what does not, what is missing, and the answer."""
    against, missing = list[str](), list[str]()
    proofs, times, sanitizer = found["proofs"], found["times"], found["sanitize"]
    for stage in (proofs, times, sanitizer):
        name = stage.path.stem
        if stage.failed:
            missing.append(f"{name}: {stage.failed}")
        if not stage.names:
            missing.append(f"{name}: has not run")
        late = [item for item in stage.left if not item.endswith(" step")]  # torch.compile has no part in it
        if late:
            missing.append(f"{name}: {len(late)} of {len(stage.names)} not run: {', '.join(late[:3])} ...")
    against += [f"proofs: {name}: {error}" for name, error in proofs.errors.items()]
    against += [f"proofs: {name}: {'; '.join(row['fell'])}" for name, row in proofs.rows.items() if row.get("fell")]
    missing += [f"proofs: {name}: {why}" for name, why in proofs.absent.items()]
    against += [f"sanitize: {name}: {why}" for name, why in sanitizer.errors.items() if name.endswith("ours")]
    missing += [f"sanitize: {name}: {why}" for name, why in sanitizer.errors.items() if not name.endswith("ours")]
    missing += [f"sanitize: {name}: {why}" for name, why in sanitizer.absent.items() if name.endswith("ours")]
    ratios, lacking = relative(times)
    missing += [f"times: {text}" for text in lacking]
    told: dict[str, Any] = {"ratios": ratios}
    if ratios:
        told["median"], told["worst"] = statistics.median(ratios.values()), max(ratios.values())
        if told["median"] > MEDIAN:
            against.append(f"times: the median is {told['median']:.2f} of graphs, at most {MEDIAN} was allowed")
        if told["worst"] > WORST:
            worst = max(ratios, key=lambda loop: ratios[loop])
            against.append(f"times: the worst, {worst}, is {told['worst']:.2f} of graphs, at most {WORST} was allowed")
    else:
        missing.append("times: no loop has a time as kernels and as graphs")
    answer = REHEARSAL if rehearsed else NO if against else OPEN if missing else YES
    return told | {"answer": answer, "against": against, "missing": missing}


def relative(times: Kept) -> tuple[dict[str, float], list[str]]:
    """Time as kernels relative to graphs, of each loop that is kernels when it is asked for; and what lacks a time."""
    ratios, lacking = dict[str, float](), list[str]()
    for name in times.names:
        loop, way = name.split(" ", 1)
        ours, graphs = times.rows.get(name, {}), times.rows.get(f"{loop} compiled", {})
        if way != "kernels" or ours.get("refused"):  # by a bound: graphs run there in either case
            continue
        if "ms" not in ours or "ms" not in graphs:
            if f"{loop} compiled" in times.rows and name in times.rows:
                lacking.append(f"{loop}: {(ours | graphs).get('error') or (ours | graphs).get('absent') or 'no time'}")
            continue
        if ours.get("fell") or graphs.get("fell"):
            lacking.append(f"{loop}: {'; '.join([*ours.get('fell', []), *graphs.get('fell', [])])}")
        elif ours.get("process") != graphs.get("process"):
            lacking.append(f"{loop}: its two times are of two processes")
        else:
            ratios[loop] = ours["ms"] / graphs["ms"]
    return ratios, lacking
