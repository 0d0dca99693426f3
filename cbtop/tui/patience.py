"""Let Textual's input thread poll only twice a second, and not ten times, while the user types nothing."""

from __future__ import annotations

import selectors

# Seconds between polls of the input. If the app exits without a key, it waits for the input thread for at most this
# long.
PATIENT_S = 0.5
# Polling slows down after this many polls without input. The characters of a key have all arrived by then.
TYPING_LOOKS = 10


class SlowPollSelector(selectors.SelectSelector):
    """A selector (see the module `selectors`) that waits longer than requested after some time without input."""

    def __init__(self) -> None:
        super().__init__()
        self._in_vain = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and self._in_vain >= TYPING_LOOKS:
            timeout = max(timeout, PATIENT_S)
        found = super().select(timeout)
        self._in_vain = 0 if found else self._in_vain + 1
        return found
