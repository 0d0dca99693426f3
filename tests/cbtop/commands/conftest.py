"""A machine whose pace depends on no neighbour."""

from __future__ import annotations

import pytest

from cbtop.commands.shared import machine_pace
from cbtop.viewmodels.runs import Pace


@pytest.fixture(autouse=True)
def steady_pace(monkeypatch: pytest.MonkeyPatch) -> list[Pace]:
    """What is taken for the machine's pace, in turn; the last again and again."""
    paces = [Pace(1_000.0, 5_000.0)]
    monkeypatch.setattr(machine_pace, "machine_pace", lambda: paces.pop(0) if len(paces) > 1 else paces[0])
    return paces
