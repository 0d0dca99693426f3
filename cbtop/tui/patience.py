"""Makes Textual's input thread poll every half second instead of every tenth while the user types nothing."""

from __future__ import annotations

import selectors

PATIENT_S = 0.5  # An exit waits at most this long for the input thread, unless a key caused the exit.
TYPING_LOOKS = 10  # After this many polls without input, polls get rarer. A key sequence is complete by then.


class SlowPollSelector(selectors.SelectSelector):
    """Selector that waits longer than the given timeout after some time without input."""

    def __init__(self) -> None:
        super().__init__()
        self._in_vain = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and self._in_vain >= TYPING_LOOKS:
            timeout = max(timeout, PATIENT_S)
        found = super().select(timeout)
        self._in_vain = 0 if found else self._in_vain + 1
        return found
