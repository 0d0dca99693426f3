"""Tests of `cbtop.live`: the function yields JSON reports of running processes, and leaves no thread or file open."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import threading

import pytest

import cbtop
from cbtop.errors import NoDataError
from tests.integration.hosts import DEADLINE_S, host
from tests.integration.hosts import snapshot as printed_sources

PROGRAM = """
import cbtop, sys
for snapshot in cbtop.live(0.1, timeout_s=300):
    print(snapshot["sources"][0]["pid"], flush=True)
"""


def threads() -> set[threading.Thread]:
    """Return the threads of this process, except for a thread of pyzmq that lives until the process ends."""
    return {thread for thread in threading.enumerate() if type(thread).__name__ != "GarbageCollectorThread"}


def test_a_snapshot_has_the_keys_of_the_json_report() -> None:
    before = threads()
    with host() as process:
        snapshots = list(itertools.islice(cbtop.live(0.1, timeout_s=DEADLINE_S), 2))
        (printed,) = printed_sources()
    for snapshot in snapshots:
        assert snapshot["schema"] == "cbtop.snapshot/1"
        (source,) = snapshot["sources"]
        assert source.keys() == printed.keys()
        assert (source["pid"], source["steps"]["phase"]) == (process.pid, "decode")
    first, second = (one["sources"][0]["steps"]["count"] for one in snapshots)
    assert 0 < first <= second
    assert threads() == before


@pytest.mark.parametrize("interval_s", [0, pytest.param(0.05, marks=pytest.mark.slow)])
def test_it_ends_when_nothing_runs_any_longer(interval_s: float) -> None:
    with host() as process:
        snapshots = cbtop.live(interval_s, timeout_s=DEADLINE_S)
        next(snapshots)
        process.kill()
        assert sum(1 for _ in snapshots) < 50_000


@pytest.mark.parametrize("interval_s", [-1, math.nan, math.inf])
def test_an_interval_that_is_no_time_is_an_error(interval_s: float) -> None:
    with pytest.raises(ValueError, match=r"interval_s is (-1|nan|inf); seconds from 0 are expected"):
        next(cbtop.live(interval_s))


@pytest.mark.slow
def test_leaving_the_loop_closes_everything() -> None:
    before = threads()
    with host():
        for _ in (snapshots := cbtop.live(0.1, timeout_s=DEADLINE_S)):
            break
        snapshots.close()
        assert threads() == before


@pytest.mark.slow
def test_ctrl_c_ends_the_loop_at_once_and_leaves_no_trace() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with host(), subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline()
        os.kill(run.pid, signal.SIGINT)
        _, errors = run.communicate(timeout=DEADLINE_S)
    assert errors.splitlines()[-1] == b"KeyboardInterrupt"
    assert b"ignored" not in errors


def test_nothing_to_watch_is_an_error_that_says_how_long_it_waited() -> None:
    with pytest.raises(NoDataError, match=r"no running process has recorded a step within 0\.1 s"):
        next(cbtop.live(timeout_s=0.1))
