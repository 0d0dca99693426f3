"""How long Textual's thread waits for keys: it looks up ten times a second; where nobody types, twice will do."""

from __future__ import annotations

import selectors

PATIENT_S = 0.5  # as long may who leaves wait for that thread, unless by a key
TYPING_LOOKS = 10  # so often without anything typed: until then the rest of a key may come, or what it does


class PatientSelector(selectors.SelectSelector):
    """Waits as long as it is told to and, where nothing has come for some time, longer."""

    def __init__(self) -> None:
        super().__init__()
        self._in_vain = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and self._in_vain >= TYPING_LOOKS:
            timeout = max(timeout, PATIENT_S)
        found = super().select(timeout)
        self._in_vain = 0 if found else self._in_vain + 1
        return found
