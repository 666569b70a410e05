"""Sentences that say what figures say, for the beginning of a page: true whoever wins, and left out without figures."""

from collections.abc import Mapping

LONGER = {"time": "as long", "memory": "as much memory"}
TIE = 0.05  # what one run of a busy machine may be off


def times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}" if ratio < 1 else f"{ratio:.1f}"


def speed(ratio: float, peer: str) -> str:
    """What ours is, of its time over a peer's: '5.2 times as fast as lax.scan', '0.7 times as fast as'."""
    return f"about as fast as {peer}" if abs(ratio - 1) <= TIE else f"{times(1 / ratio)} times as fast as {peer}"


def share(ratio: float) -> str:
    """A part of something else: '3.4 %', '1.5 times'."""
    return f"{ratio * 100:.2g} %" if ratio < 0.995 else f"{times(ratio)} times"


def listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def winners(ratios: Mapping[str, float | None], what: str = "time", most: int = 5) -> list[str]:
    """Where a peer wins by more than 5 %, of our figure over the peer's by row: a line, and the clearest by name."""
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known:
        return []
    lost = sorted((name for name in known if known[name] > 1 + TIE), key=lambda name: -known[name])
    if not lost:
        return [f"No peer wins by more than 5 % in {what} ({len(known)} comparisons)."]
    said = f"Where peers win by more than 5 % in {what} ({len(lost)} of {len(known)} comparisons):"
    verb = "takes" if what == "time" else "needs"
    rows = [f"- {name}: ours {verb} {times(known[name])} times {LONGER[what]}" for name in lost[:most]]
    more = [f"- and {len(lost) - most} more: see the tables"] if len(lost) > most else []
    return [said, "\n".join([*rows, *more])]
