"""The link answers from any thread, keeps listening while it is asked, and says when there is nothing to hear."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cbtop.daemon.daemon import DaemonInside
from cbtop.errors import NoDataError
from cbtop.protocol.endpoint import default_endpoint
from cbtop.telemetry import link as link_module
from cbtop.telemetry.link import Link
from cbtop.telemetry.metrics import DAEMON
from cbtop.telemetry.snapshot import snapshot


def test_however_many_ask_it_keeps_listening(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENT_AFTER_S", 1.5)  # a heartbeat comes every second
    monkeypatch.setattr(link_module, "snapshot", lambda *given: (time.sleep(0.02), snapshot(*given))[1])

    def ask_on(deadline_s: float) -> int:
        answers = 0
        while time.monotonic() < deadline_s:
            answers += len(link.snapshot()[DAEMON])
        return answers

    with DaemonInside(default_endpoint()), Link(default_endpoint()) as link, ThreadPoolExecutor(8) as pool:
        assert min(pool.map(ask_on, [time.monotonic() + 2.5] * 8)) > 0


def test_a_daemon_that_has_died_is_not_answered_for(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENT_AFTER_S", 0.3)
    with Link(default_endpoint()) as link:
        with DaemonInside(default_endpoint()):
            link.snapshot()
        time.sleep(0.4)
        with pytest.raises(NoDataError, match=r"nothing heard from the daemon for \d+ s"):
            link.snapshot()


def test_the_cause_of_a_failure_reaches_who_asked(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("found")

    with DaemonInside(default_endpoint()), Link(default_endpoint()) as link:
        monkeypatch.setattr(link_module, "snapshot", broken)
        with pytest.raises(ZeroDivisionError, match="found"):
            link.snapshot()
        monkeypatch.undo()
        assert link.snapshot()[DAEMON]
