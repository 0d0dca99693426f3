"""Ctrl-C is noticed between two polls. A second Ctrl-C raises. The old handler is restored afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from cbtop.commands.shared.interrupts import noted_interrupt


def press() -> None:
    signal.raise_signal(signal.SIGINT)


class _PressedWhileItGoes:
    def __del__(self) -> None:
        press()


def test_it_is_noted_where_an_exception_would_be_dropped() -> None:
    with noted_interrupt() as is_interrupted:
        assert not is_interrupted()
        _PressedWhileItGoes()
        assert is_interrupted()


@pytest.fixture
def usual_handler() -> Iterator[None]:
    """Install the default SIGINT handler, because a shell ignores SIGINT in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_handler")
def test_pressed_twice_it_raises_and_afterwards_once_is_enough() -> None:
    before = signal.getsignal(signal.SIGINT)
    with noted_interrupt():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        press()


def test_in_another_thread_nothing_is_changed() -> None:
    found = []

    def run() -> None:
        with noted_interrupt() as is_interrupted:
            found.append((is_interrupted(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(False, signal.getsignal(signal.SIGINT))]
