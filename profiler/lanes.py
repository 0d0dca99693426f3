"""Gives lanes (small numbers) to steps. Steps that run at the same time have different lanes in their records."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import ref

from cbtop.protocol.ring import LANE_SHIFT, LANES

# The lane of steps that found no other lane free. Their records cannot be distinguished.
SHARED_LANE = (LANES - 1) << LANE_SHIFT


class LaneHolder(Protocol):
    """A step that may hold a lane. `lane` is its lane now, or None."""

    lane: int | None


class Lanes:
    """The lanes of one profiler's steps. Weak references to the steps tell which lanes are in use."""

    __slots__ = ("_holders", "_taking")

    def __init__(self) -> None:
        # Lane -> the last step that took it. The shared lane is missing, because several steps may hold it.
        self._holders: dict[int, ref[LaneHolder] | None] = {lane << LANE_SHIFT: None for lane in range(LANES - 1)}
        self._taking = threading.RLock()

    @property
    def free(self) -> list[int]:
        """The lanes that no running step holds."""
        return [lane for lane, holder in self._holders.items() if _is_free(lane, holder)]

    @property
    def holders(self) -> list[LaneHolder | None]:
        """The step that took each lane last, unless it was garbage-collected."""
        return [holder() for holder in self._holders.values() if holder is not None]

    def take(self, step: LaneHolder) -> int:
        """Reserve a lane for `step`, and return it. If none is free, return the shared lane."""
        with self._taking:
            for lane, holder in self._holders.items():
                held_by = None if holder is None else holder()
                if held_by is None or held_by.lane != lane:  # the same as `_is_free`, written out to save a call
                    self._holders[lane] = ref(step)
                    step.lane = lane
                    return lane
        step.lane = SHARED_LANE
        return SHARED_LANE

    def after_fork(self) -> None:
        """In a forked child, create a new lock, because the parent may have held the old one."""
        self._taking = threading.RLock()


def _is_free(lane: int, holder: ref[LaneHolder] | None) -> bool:
    step = None if holder is None else holder()
    return step is None or step.lane != lane
