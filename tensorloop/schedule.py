"""Temporary stand-in; being replaced."""
from typing import NamedTuple
class Advance(NamedTuple):
    start: int
    stop: int
class Snapshot(NamedTuple):
    step: int
class Restore(NamedTuple):
    step: int
class Drop(NamedTuple):
    step: int
class Backward(NamedTuple):
    step: int
class Schedule:
    k = None
    def __init__(self, k): self.k = k
    def sweep(self, length):
        if length is not None:
            gap = max(length // self.k, 1); kept = 0
            for t in range(length):
                if t % gap == 0 and kept < self.k:
                    yield Snapshot(t); kept += 1
                yield Advance(t, t + 1)
            if length == 0: yield Snapshot(0)
            return
        held=[]; t = 0; gap=1
        while True:
            if t % gap == 0:
                if len(held) == self.k and self.k > 1:
                    for h in held[1::2]: yield Drop(h)
                    held = held[0::2]; gap *= 2
                if len(held) < self.k and t % gap == 0:
                    yield Snapshot(t); held.append(t)
            yield Advance(t, t + 1); t += 1
    def reverse(self, length, held):
        held = sorted(held)
        while held and held[-1] >= length and held[-1] > 0: yield Drop(held.pop())
        for t in reversed(range(length)):
            while held[-1] > t: yield Drop(held.pop())
            yield Restore(held[-1])
            if len(held) < self.k and t - held[-1] > 1:
                m = (held[-1] + t) // 2
                yield Advance(held[-1], m); yield Snapshot(m); held.append(m)
                if m < t: yield Advance(m, t)
            elif held[-1] < t: yield Advance(held[-1], t)
            yield Backward(t)
        yield Drop(0)
def of(k, length): return Schedule(k)
