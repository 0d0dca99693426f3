"""What a user may set of how a model runs; light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: of the `top_k` likeliest (0: all) those that together have `top_p` of their
    probability, at a `temperature`, drawn by `seed`. A temperature of 0 is the greedy choice."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


GREEDY = Sampling()

GUARD_REACTIONS = ("stop", "log", "fallback")  # to what the guard meets
