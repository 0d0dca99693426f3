"""Tests of whether a process runs.

The answer follows from the pid, from the lock on the catalog of the process, and from its mapping of the ring.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbtop.daemon import liveness as liveness_module
from cbtop.daemon.liveness import ALIVE_CHECK_S, Liveness
from cbtop.protocol.messages import HostHello
from cbtop.protocol.process import pid_namespace

HELLO = HostHello(2, 0, 7, 1, "here", "", "made", "3", "python", 1, 1)
RING: Any = SimpleNamespace(pid=7, process_start=1)


def liveness(
    monkeypatch: pytest.MonkeyPatch, *, runs: bool, locked: bool, mapped: bool, clock: list[float]
) -> Liveness:
    monkeypatch.setattr(liveness_module, "is_running", lambda *_: runs)
    monkeypatch.setattr(liveness_module, "is_locked", lambda _: locked)
    monkeypatch.setattr(liveness_module, "has_mapped", lambda *_: mapped)
    return Liveness(RING, Path("1.ring"), Path("1.catalog"), lambda: clock[0])


@pytest.mark.parametrize(
    ("runs", "locked", "mapped", "elsewhere", "alive"),
    [
        (True, True, False, False, True),
        (True, False, True, False, True),  # The process runs and has closed its files.
        (True, False, False, False, False),  # The pid exists, but another program has it now.
        (False, True, True, False, False),
        # The pid is from another pid namespace and unknown here, but the lock is held.
        (False, True, False, True, True),
        (True, False, True, True, False),
    ],
)
def test_a_process_with_a_lock_runs_until_it_ends_or_becomes_a_different_program(
    monkeypatch: pytest.MonkeyPatch, runs: bool, locked: bool, mapped: bool, elsewhere: bool, alive: bool
) -> None:
    own = pid_namespace() or 0
    hello = replace(HELLO, locked=True, pid_namespace=own + 1 if elsewhere else pid_namespace())
    checked = liveness(monkeypatch, runs=runs, locked=locked, mapped=mapped, clock=[10.0])
    assert checked.is_alive(hello) is alive


def test_without_a_hello_its_pid_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert liveness(monkeypatch, runs=True, locked=False, mapped=False, clock=[10.0]).is_alive(None)
    assert not liveness(monkeypatch, runs=False, locked=False, mapped=False, clock=[10.0]).is_alive(None)


def test_a_process_is_checked_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    checked = liveness(monkeypatch, runs=True, locked=False, mapped=False, clock=clock)
    assert checked.is_alive(None)
    monkeypatch.setattr(liveness_module, "is_running", lambda *_: False)
    clock[0] += ALIVE_CHECK_S / 2
    assert checked.is_alive(None)
    clock[0] += ALIVE_CHECK_S / 2
    assert not checked.is_alive(None)
