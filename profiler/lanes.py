"""Lanes tell the records of steps that run at the same time apart. Each belongs to one step at a time."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import ref

from cbtop.protocol.ring import LANE_SHIFT, LANES

SHARED_LANE = (LANES - 1) << LANE_SHIFT  # shared by all further steps: their times are not told apart


class LaneHolder(Protocol):
    """A step. `lane` is the one it has now, or None."""

    lane: int | None


class Lanes:
    """The lanes of one profiler's steps. Weak references tell which step has which lane."""

    __slots__ = ("_holders", "_taking")

    def __init__(self) -> None:
        # The step that took each lane last. The shared lane has none: it is for all further steps.
        self._holders: dict[int, ref[LaneHolder] | None] = {lane << LANE_SHIFT: None for lane in range(LANES - 1)}
        self._taking = threading.RLock()

    @property
    def free(self) -> list[int]:
        """The lanes without a step: their last one has ended, or has gone with its thread, task or generator."""
        return [lane for lane, holder in self._holders.items() if _is_free(lane, holder)]

    @property
    def holders(self) -> list[LaneHolder | None]:
        """The steps that took a lane last; None if such a step has gone."""
        return [holder() for holder in self._holders.values() if holder is not None]

    def take(self, step: LaneHolder) -> int:
        """Give `step` a lane. It is the shared one if all others are taken."""
        with self._taking:
            for lane, holder in self._holders.items():
                held_by = None if holder is None else holder()
                if held_by is None or held_by.lane != lane:  # as _is_free
                    self._holders[lane] = ref(step)
                    step.lane = lane
                    return lane
        step.lane = SHARED_LANE
        return SHARED_LANE

    def after_fork(self) -> None:
        """In a child: make a new lock, which the parent may have held."""
        self._taking = threading.RLock()


def _is_free(lane: int, holder: ref[LaneHolder] | None) -> bool:
    step = None if holder is None else holder()
    return step is None or step.lane != lane
