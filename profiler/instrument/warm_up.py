"""Decides which steps of a kind are warm-up steps. The first steps compile, tune, allocate and fill caches.

Rules
- A warm-up ends when steps no longer become faster: the faster of the last two takes at least SETTLED times as long
  as the faster of the two before.
- Steps with less and less work become faster, too. So a warm-up also ends when the time per token (without tokens:
  per sequence) no longer decreases.
- If another kind of steps of this model has ended its warm-up like this, a warm-up ends after its first step.
- A warm-up ends after MAX_WARM_UP_STEPS steps in any case, because the steps of some programs never settle.
- Warm-up steps have a different name, to keep them out of the figures of later steps.
"""

from __future__ import annotations

from cbtop.protocol.vocabulary import MAX_WARM_UP_STEPS, WARM_UP

LEAST = 4  # smallest number of steps in a warm-up of one kind of step
SETTLED = 0.9
MAX_KINDS = 64

Kind = tuple[str, str]  # phase and model


class WarmUps:
    """The warm-ups of all kinds of steps of one process."""

    __slots__ = ("_took_ns", "settled")

    def __init__(self) -> None:
        self.settled: set[Kind] = set()
        # Kind of step -> (duration, duration per token) in ns, for each of its warm-up steps.
        self._took_ns: dict[Kind, list[tuple[float, float]]] = {}

    def named(self, phase: str, model: str) -> str:
        """Return the name of a step that begins now: `phase`, and a suffix during the warm-up."""
        kind = (phase, model)
        if self._took_ns.get(kind) and any([other == model for _, other in self.settled]):
            # One step of this kind has run, and another kind of this model's steps has ended its warm-up.
            self._settle(kind)
        if kind in self.settled or len(self.settled) + len(self._took_ns) > MAX_KINDS:
            return phase
        self._took_ns.setdefault(kind, [])
        return phase + WARM_UP

    def took(self, phase: str, model: str, duration_ns: int, size: int = 0) -> None:
        """Store the duration of a warm-up step. End the warm-up if steps no longer become faster.

        `size` is the number of tokens of the step. Without tokens it is the number of sequences, or 0 if unknown.
        """
        took_ns = self._took_ns.get((phase, model))
        if took_ns is None:
            return
        took_ns.append((duration_ns, duration_ns / max(1, size)))
        if (
            _is_flat([whole for whole, _ in took_ns])
            or _is_flat([each for _, each in took_ns])
            or len(took_ns) >= MAX_WARM_UP_STEPS
        ):
            self._settle((phase, model))

    def _settle(self, kind: Kind) -> None:
        self.settled.add(kind)
        self._took_ns.pop(kind, None)


def _is_flat(took_ns: list[float]) -> bool:
    return len(took_ns) >= LEAST and min(took_ns[-2:]) >= SETTLED * min(took_ns[-4:-2])
