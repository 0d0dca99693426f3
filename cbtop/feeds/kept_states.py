"""Keeps copies of a store from the last keyframes of a recording, so that small steps back are fast."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass

from cbtop.client.store import Store

MAX_STATES, MAX_STATES_BYTES = 4, 64 << 20


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state of a store at time `at_ns`, before it applied the frame at `offset`."""

    at_ns: int
    offset: int
    pickled: bytes  # pickled, because a deep copy takes twice as long

    def store(self) -> Store:
        """Return a new store in this state."""
        found: Store = pickle.loads(self.pickled)
        return found


class KeptStates:
    """At most MAX_STATES states. From a state, targets at most `reach_ns` later can be reached."""

    def __init__(self, reach_ns: int) -> None:
        self._reach_ns = reach_ns
        self._states: deque[KeptState] = deque(maxlen=MAX_STATES)

    def keep(self, store: Store, offset: int, at_ns: int) -> None:
        """Keep the state of `store`, unless it is large or a state of this moment already exists."""
        if store.size_bytes * MAX_STATES <= MAX_STATES_BYTES and all(at_ns != one.at_ns for one in self._states):
            self._states.append(KeptState(at_ns, offset, pickle.dumps(store, pickle.HIGHEST_PROTOCOL)))

    def before(self, target_ns: int) -> KeptState | None:
        """Return the latest state that can reach the target without a jump, or None."""
        found = [one for one in self._states if one.at_ns <= target_ns <= one.at_ns + self._reach_ns]
        return max(found, key=lambda one: one.at_ns, default=None)

    def clear(self) -> None:
        """Forget all states."""
        self._states.clear()
