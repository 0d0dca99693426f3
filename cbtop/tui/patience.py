"""Reduce the polling of Textual's input thread from ten times to twice a second while the user types nothing."""

from __future__ import annotations

import selectors

PATIENT_S = 0.5  # seconds between polls; an exit without a key waits at most this long for the input thread
TYPING_LOOKS = 10  # number of polls without input before polling slows down; a key sequence is complete by then


class SlowPollSelector(selectors.SelectSelector):
    """A selector that waits longer than requested if no input has come for some time."""

    def __init__(self) -> None:
        super().__init__()
        self._in_vain = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and self._in_vain >= TYPING_LOOKS:
            timeout = max(timeout, PATIENT_S)
        found = super().select(timeout)
        self._in_vain = 0 if found else self._in_vain + 1
        return found
