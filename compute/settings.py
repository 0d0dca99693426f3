"""What a user may set of how a model runs; light to import."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cbtop.compute.errors import ComputeError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: of the `top_k` likeliest (0: all) those that together have `top_p` of their
    probability, at a `temperature`, drawn by `seed`. A temperature of 0 is the greedy choice.

    ComputeError for what is none of these: drawn with it, some token comes out all the same.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = {
            "temperature": (0 <= self.temperature < math.inf, "a finite number from 0"),
            "top_k": (self.top_k >= 0, "a whole number from 0"),
            "top_p": (0 < self.top_p <= 1, "above 0, to 1"),
            "seed": (0 <= self.seed < 1 << 64, "a whole number from 0, below 2^64"),
        }
        for name, (is_good, what) in wanted.items():
            if not is_good:
                raise ComputeError(f"{name} is {getattr(self, name)!r:.40}; {what} is wanted")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


GREEDY = Sampling()

GUARD_REACTIONS = ("stop", "log", "fallback")  # to what the guard meets
