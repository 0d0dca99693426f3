"""How long Textual's thread waits for keys: it polls ten times a second, and twice a second if nothing is typed."""

from __future__ import annotations

import selectors

PATIENT_S = 0.5  # also the longest wait for that thread on exit, unless by a key
TYPING_LOOKS = 10  # polls without input before waiting longer: the rest of a key may still come


class SlowPollSelector(selectors.SelectSelector):
    """Waits for the given timeout, or longer if there was no input for some time."""

    def __init__(self) -> None:
        super().__init__()
        self._in_vain = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and self._in_vain >= TYPING_LOOKS:
            timeout = max(timeout, PATIENT_S)
        found = super().select(timeout)
        self._in_vain = 0 if found else self._in_vain + 1
        return found
