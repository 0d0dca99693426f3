"""Tells the first steps of a kind, its warm-up, from those that follow.

The first steps compile, tune, allocate and fill caches. The steps themselves show how long that lasts.

Rules
- A warm-up ends when steps stop becoming faster: the faster of the last two took at least SETTLED of the faster of
  the two before. Steps with less and less to do become faster, too. So it also ends when steps take no less time a
  token (without tokens: a sequence).
- If another kind of its model has settled, it ends after the first step of its kind.
- It ends after MOST steps in any case: the steps of such a program never settle, and all are shown.
- Its steps have a name of their own, so that no figure of later steps contains them.
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
        # For each step, while the kind warms up: its duration, and the duration per token.
        self._took_ns: dict[Kind, list[tuple[float, float]]] = {}

    def named(self, phase: str, model: str) -> str:
        """Return the name of a step that begins now: `phase`, or another one in the warm-up."""
        kind = (phase, model)
        if self._took_ns.get(kind) and any([other == model for _, other in self.settled]):
            self._settle(kind)  # the model is warm, and the first step of this kind is over
        if kind in self.settled or len(self.settled) + len(self._took_ns) > MAX_KINDS:
            return phase
        self._took_ns.setdefault(kind, [])
        return phase + WARM_UP

    def took(self, phase: str, model: str, duration_ns: int, size: int = 0) -> None:
        """Take the duration of a step of the warm-up, and see whether that is over.

        `size` is how many tokens it had, or sequences; 0 if that is not known.
        """
        took_ns = self._took_ns.get((phase, model))
        if took_ns is None:
            return
        took_ns.append((duration_ns, duration_ns / max(1, size)))
        if (
            _is_flat([whole for whole, _ in took_ns])
            or _is_flat([each for _, each in took_ns])
            or len(took_ns) >= MOST
        ):
            self._settle((phase, model))

    def _settle(self, kind: Kind) -> None:
        self.settled.add(kind)
        self._took_ns.pop(kind, None)


def _is_flat(took_ns: list[float]) -> bool:
    return len(took_ns) >= LEAST and min(took_ns[-2:]) >= SETTLED * min(took_ns[-4:-2])
