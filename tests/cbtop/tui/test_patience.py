"""Tests of the thread that reads the keyboard.

While idle, the thread wakes up twice a second. It wakes up at once for a key.
"""

from __future__ import annotations

import os
import selectors

import pytest
from textual.drivers import linux_driver

from cbtop.tui import background
from cbtop.tui.patience import PATIENT_S, TYPING_LOOKS, SlowPollSelector

ASKED_S = 0.1  # the timeout in seconds that Textual passes to `select`


def test_it_waits_longer_after_a_silent_second_and_as_told_from_the_next_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited_s: list[float | None] = []
    real = selectors.SelectSelector.select

    def select(
        self: selectors.SelectSelector, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        waited_s.append(timeout)
        return real(self, 0)

    monkeypatch.setattr(selectors.SelectSelector, "select", select)
    keyboard, keys = os.pipe()
    with SlowPollSelector() as selector:
        selector.register(keyboard, selectors.EVENT_READ)
        for _ in range(TYPING_LOOKS + 2):
            assert selector.select(ASKED_S) == []
        os.write(keys, b"q")
        assert selector.select(ASKED_S)
        os.read(keyboard, 1)
        assert selector.select(ASKED_S) == []
        assert selector.select(0) == []
    os.close(keyboard)
    os.close(keys)
    assert waited_s == [*[ASKED_S] * TYPING_LOOKS, *[PATIENT_S] * 3, ASKED_S, 0]


def test_textual_waits_with_it() -> None:
    assert background.AskingDriver.run_input_thread is linux_driver.LinuxDriver.run_input_thread
    assert vars(linux_driver)["selectors"].SelectSelector is SlowPollSelector
