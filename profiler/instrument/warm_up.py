"""Tells the first steps of a kind, its warm-up, from those that follow.

The first steps compile, tune, allocate and fill caches. The steps themselves show how long that lasts. It ends when
steps stop becoming faster: the faster of the last two took at least SETTLED of the faster of the two before. It ends
after MOST steps in any case: the steps of such a program never settle, and all are shown.
Its steps have a name of their own, so that no figure of later steps contains them.
"""

from __future__ import annotations

from cbtop.protocol.vocabulary import WARM_UP

LEAST, MOST = 4, 32  # steps
SETTLED = 0.9
MAX_KINDS = 64

Kind = tuple[str, str]  # phase and model


class WarmUps:
    """The warm-ups of the kinds of steps of one process."""

    __slots__ = ("_took_ns", "settled")

    def __init__(self) -> None:
        self.settled: set[Kind] = set()
        self._took_ns: dict[Kind, list[int]] = {}  # of each step, while the kind warms up

    def named(self, phase: str, model: str) -> str:
        """Return the name of a step that begins now: `phase`, or another one in the warm-up."""
        kind = (phase, model)
        if kind in self.settled or len(self.settled) + len(self._took_ns) > MAX_KINDS:
            return phase
        self._took_ns.setdefault(kind, [])
        return phase + WARM_UP

    def took(self, phase: str, model: str, duration_ns: int) -> None:
        """Take the duration of a step of the warm-up, and see whether that is over."""
        took_ns = self._took_ns.get((phase, model))
        if took_ns is None:
            return
        took_ns.append(duration_ns)
        is_flat = len(took_ns) >= LEAST and min(took_ns[-2:]) >= SETTLED * min(took_ns[-4:-2])
        if is_flat or len(took_ns) >= MOST:
            self.settled.add((phase, model))
            self._took_ns.pop((phase, model), None)
