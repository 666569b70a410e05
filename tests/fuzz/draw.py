"""Random choices from a seed."""

import random
from collections.abc import Mapping
from typing import Any


class Draw(random.Random):
    """Random choices from a seed."""

    def chance(self, p: float) -> bool:
        return self.random() < p

    def among(self, weights: Mapping[Any, float]) -> Any:
        """A key, by weights."""
        return self.choices([*weights], [*weights.values()])[0]

    def shape(self) -> tuple[int, ...]:
        """Mostly small ones, of all numbers of dims, now and then with a size of 0 or 1."""
        dims = self.among({0: 1.5, 1: 3, 2: 4, 3: 1.5, 4: 0.5})
        return tuple(self.among({0: 0.12, 1: 0.8, 2: 2, 3: 3, 4: 2, 5: 1}) for _ in range(dims))
