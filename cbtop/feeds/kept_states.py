"""Keep copies of a replay's store at recent keyframes, so that small steps back in time are fast."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass

from cbtop.client.store import Store

MAX_STATES, MAX_STATES_BYTES = 4, 64 << 20


@dataclass(frozen=True, slots=True)
class KeptState:
    """A copy of a replay's store, from the time `at_ns` of the recording, before the frame at `offset`."""

    at_ns: int
    offset: int
    pickled: bytes  # The pickled store. A deep copy would take twice as long.

    def store(self) -> Store:
        """Return a new store with the copied state."""
        found: Store = pickle.loads(self.pickled)
        return found


class KeptStates:
    """Keeps at most MAX_STATES copies of a store.

    A copy is used for targets up to `reach_ns` after it.
    """

    def __init__(self, reach_ns: int) -> None:
        self._reach_ns = reach_ns
        self._states: deque[KeptState] = deque(maxlen=MAX_STATES)

    def keep(self, store: Store, offset: int, at_ns: int) -> None:
        """Add a copy of `store`, unless it is too large or was already copied at this moment."""
        if store.size_bytes * MAX_STATES <= MAX_STATES_BYTES and all(at_ns != one.at_ns for one in self._states):
            self._states.append(KeptState(at_ns, offset, pickle.dumps(store, pickle.HIGHEST_PROTOCOL)))

    def before(self, target_ns: int) -> KeptState | None:
        """Return the last copy that is at most `reach_ns` before the target, or None."""
        found = [one for one in self._states if one.at_ns <= target_ns <= one.at_ns + self._reach_ns]
        return max(found, key=lambda one: one.at_ns, default=None)

    def clear(self) -> None:
        """Drop all copies."""
        self._states.clear()
