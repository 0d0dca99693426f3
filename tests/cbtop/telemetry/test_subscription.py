"""Tests of the exporter's subscription to a daemon.

The subscription answers any thread, continues to receive, and notices if the daemon is silent.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cbtop.client.collector import Collector
from cbtop.daemon.daemon import DaemonInside
from cbtop.errors import NoDataError
from cbtop.protocol.endpoint import default_endpoint
from cbtop.telemetry import subscription as subscription_module
from cbtop.telemetry.metrics import DAEMON, Snapshot
from cbtop.telemetry.snapshot import snapshot
from cbtop.telemetry.subscription import Subscription
from tests.integration.hosts import DEADLINE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the timeouts to the deadline of the tests, because the machine may be busy."""
    for name in ("ANSWER_S", "SILENT_AFTER_S"):
        monkeypatch.setattr(subscription_module, name, DEADLINE_S)


@pytest.mark.slow
def test_however_many_ask_it_keeps_listening(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []

    class Listening(Collector):
        def poll(self, timeout_ms: int = 0) -> None:
            did.append("listens")
            super().poll(timeout_ms)

    def answer(*given: Any) -> Snapshot:
        did.append("answers")
        return snapshot(*given)

    monkeypatch.setattr(subscription_module, "Collector", Listening)
    monkeypatch.setattr(subscription_module, "snapshot", answer)

    def ask(times: int) -> int:
        return sum(len(subscription.snapshot()[DAEMON]) for _ in range(times))

    with (
        DaemonInside(default_endpoint()),
        Subscription(default_endpoint()) as subscription,
        ThreadPoolExecutor(8) as pool,
    ):
        assert list(pool.map(ask, [25] * 8)) == [25] * 8
    assert "answers" in did
    assert ("answers", "answers") not in pairwise(did)


def test_a_daemon_that_has_died_is_not_answered_for(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Subscription(default_endpoint()) as subscription:
        with DaemonInside(default_endpoint()):
            subscription.snapshot()
        monkeypatch.setattr(subscription_module, "SILENT_AFTER_S", 0.0)
        with pytest.raises(NoDataError, match=r"nothing heard from the daemon for \d+ s"):
            subscription.snapshot()


def test_the_cause_of_a_failure_reaches_who_asked(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("found")

    with DaemonInside(default_endpoint()), Subscription(default_endpoint()) as subscription:
        monkeypatch.setattr(subscription_module, "snapshot", broken)
        with pytest.raises(ZeroDivisionError, match="found"):
            subscription.snapshot()
        monkeypatch.setattr(subscription_module, "snapshot", snapshot)
        assert subscription.snapshot()[DAEMON]
