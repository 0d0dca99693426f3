"""Polling interval of Textual's input thread: a tenth of a second, or half a second while the user types nothing."""

from __future__ import annotations

import selectors

PATIENT_S = 0.5  # Seconds. Also the longest wait for the input thread on exit, unless a key caused the exit.
TYPING_LOOKS = 10  # Polls without input before the wait gets longer. Until then, the rest of a key sequence may come.


class SlowPollSelector(selectors.SelectSelector):
    """Selector that waits for the given timeout, or longer after some time without input."""

    def __init__(self) -> None:
        super().__init__()
        self._in_vain = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and self._in_vain >= TYPING_LOOKS:
            timeout = max(timeout, PATIENT_S)
        found = super().select(timeout)
        self._in_vain = 0 if found else self._in_vain + 1
        return found
