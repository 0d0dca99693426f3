"""Tests of several daemons in one view. Each daemon has its own link, and its faults do not affect other daemons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cbtop.feeds.feed import Feed
from cbtop.viewmodels.source import SourceView
from tests.integration.hosts import CBTOP, HOST, cbtop, eventually, nobody, once_answered, snapshot


@contextmanager
def elsewhere(rank: int | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """Run a daemon and a profiled process in a new runtime directory, as on another machine.

    Yields the address of the daemon, the daemon and the process.
    """
    ranks = {} if rank is None else {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    with TemporaryDirectory(prefix="cbtop-test-") as directory:
        environment = os.environ | {"CBTOP_RUNTIME_DIR": directory} | ranks
        with (
            subprocess.Popen([*CBTOP, "daemon"], env=environment, stderr=subprocess.PIPE) as daemon,
            subprocess.Popen([sys.executable, "-c", HOST, "-1"], env=environment) as process,
        ):
            assert daemon.stderr
            assert b"serving" in daemon.stderr.readline()
            try:
                yield f"ipc://{Path(directory) / 'daemon.sock'}", daemon, process
            finally:
                daemon.kill()
                process.kill()


def see(feed: Feed, pid: int) -> SourceView | None:
    feed.poll(20)
    return feed.view(feed.links.key_of(pid) or "?")


def steps_of(feed: Feed, pid: int) -> int:
    view = see(feed, pid)
    return view.steps.count if view and view.steps else 0


@pytest.mark.slow
def test_the_loss_of_one_daemon_neither_clears_nor_freezes_the_others() -> None:
    with elsewhere() as (first, daemon, lost), elsewhere() as (second, _, kept), Feed([first, second]) as feed:
        eventually(lambda: steps_of(feed, lost.pid) > 5 and steps_of(feed, kept.pid) > 5)
        daemon.kill()
        daemon.wait()
        eventually(lambda: (view := see(feed, lost.pid)) is not None and view.stale_s is not None)
        at_loss = steps_of(feed, kept.pid)
        eventually(lambda: steps_of(feed, kept.pid) > at_loss + 5)
        stale, fresh = see(feed, lost.pid), see(feed, kept.pid)
        assert stale is not None
        assert fresh is not None
        assert (stale.stale_s or 0) > 3
        assert stale.steps is not None
        assert stale.steps.count > 5
        assert fresh.stale_s is None
        assert f"{first}: nothing heard for" in feed.status()
        assert {source.key: source.stale_s is None for source in feed.sources()} == {
            stale.key: False,
            fresh.key: True,
        }


@pytest.mark.slow
def test_two_daemons_of_one_boot_have_one_clock() -> None:
    with elsewhere() as (first, _, process), Feed([first]) as feed:
        eventually(lambda: (view := see(feed, process.pid)) is not None and view.clock is not None)
        view = see(feed, process.pid)
    assert view is not None
    assert view.clock is not None
    assert (view.clock.offset_us, view.clock.uncertainty_us) == (0, 0)


# The default run skips this test, because tests above and below show processes of all daemons on a screen, and
# test_ls.py has ranks.
@pytest.mark.slow
def test_once_shows_what_runs_at_all_of_them_with_its_rank() -> None:
    with elsewhere(0) as (first, _, one), elsewhere(1) as (second, _, two):
        links = ["--connect", first, "--connect", second]
        # Wait until both processes are shown, because one may start before the other.
        seen = eventually(lambda: len(seen := snapshot(*links)) == 2 and seen)
        found = {source["pid"]: (source["rank"], source["world_size"]) for source in seen}
    assert found == {one.pid: (0, 2), two.pid: (1, 2)}


@pytest.mark.slow
def test_a_daemon_that_does_not_answer_is_named_and_the_others_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere() as (first, _, process), nobody() as silent:
        snapshot("--connect", first)  # wait until there is data
        once_answered(monkeypatch, unanswered=1)
        done = cbtop(
            "--headless", "--once", "--window=all", "--timeout", "0.5", "--connect", first, "--connect", silent
        )
    assert done.returncode == 0
    assert f"pid {process.pid}" in done.stdout
    assert f"no answer from {silent}" in done.stderr
