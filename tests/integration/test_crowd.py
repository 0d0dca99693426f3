"""Tests of attacks: a daemon on a loopback address without keys withstands any user of the machine."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cbtop.daemon import daemon as daemon_module
from cbtop.daemon.daemon import DaemonInside
from cbtop.feeds.feed import Feed
from cbtop.protocol import peers
from cbtop.protocol.publisher import JOIN_PREFIX, Publisher
from tests.integration import attackers
from tests.integration.attackers import ATTACKS, attacking
from tests.integration.hosts import CBTOP, daemon, eventually, host

LOOPBACK = "tcp://127.0.0.1:0"
# limit for the daemon's memory: without limits, attacks used 2 GiB within a minute; now they use about 20 MiB
MUCH_BYTES = 200 << 20


@pytest.mark.slow
@pytest.mark.parametrize(  # By default, test one attack that reconnects and one that never reads.
    "attack",
    [
        attack
        if attack in (attackers.joins_and_leaves, attackers.history_never_read)
        else pytest.param(attack, marks=pytest.mark.slow)
        for attack in ATTACKS
    ],
)
def test_a_flood_of_the_daemon_keeps_nobody_out_and_leaves_nothing_behind(attack: Callable[[], bytes]) -> None:
    with host(), serving() as (process, endpoint):
        join(endpoint)
        before_bytes = resident_bytes(process.pid)
        with attacking(endpoint, attack()) as attackers_:
            eventually(lambda: attackers_.said >= 50)
            for _ in range(3):
                join(endpoint)
        assert resident_bytes(process.pid) - before_bytes < MUCH_BYTES
        eventually(lambda: connections(process.pid) == 0)
        join(endpoint)


@pytest.mark.slow
def test_connections_that_say_nothing_are_bounded_and_keep_nobody_out() -> None:
    with host(), serving() as (process, endpoint), Feed([endpoint]) as viewer:
        eventually(lambda: viewer.poll(20) or viewer.view())
        silent = [attackers.connect(endpoint) for _ in range(1_100)]
        for _ in range(3):
            join(endpoint)
        eventually(lambda: connections(process.pid) <= peers.MAX_CONNECTIONS)
        heard = viewer.view()
        assert heard
        eventually(lambda: viewer.poll(20) or ((now := viewer.view()) and now.steps and now.steps != heard.steps))
        for peer in silent:
            peer.close()


def test_those_who_join_within_a_moment_are_answered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = 0
    answer = Publisher.answer_frames

    def counted(publisher: Publisher, topics: Sequence[bytes], frames: Sequence[bytes]) -> None:
        nonlocal answered
        answered += topics[0].startswith(JOIN_PREFIX)
        answer(publisher, topics, frames)

    monkeypatch.setattr(Publisher, "answer_frames", counted)
    began_s = time.monotonic()
    with DaemonInside(LOOPBACK) as inside, attacking(inside.endpoint, attackers.joins_and_leaves()) as attack:
        eventually(lambda: attack.said >= 50)
        join(inside.endpoint)
        took_s = time.monotonic() - began_s
        assert 1 <= answered <= 2 + took_s / daemon_module.JOIN_S


@pytest.mark.slow
def test_a_daemon_is_watched_through_a_forwarded_socket_as_ssh_forwards_it(runtime: Path) -> None:
    there, here = f"ipc://{runtime}/there.sock", f"ipc://{runtime}/here.sock"
    with attackers.forwarding(here, there), Feed([here]) as viewer, host():
        for _ in range(2):  # In the second round, the forwarded address had no listener for a while.
            with daemon("--bind", there):
                assert (runtime / "there.sock").stat().st_mode & 0o777 == 0o600
                eventually(
                    lambda: viewer.poll(20) or ((view := viewer.view()) and view.stale_s is None and view.steps)
                )
            eventually(lambda: viewer.poll(20) or ((view := viewer.view()) and view.stale_s))


def is_stale(viewer: Feed) -> bool:
    """Return whether the viewer marks its data as old."""
    view = viewer.view()
    return view is not None and view.stale_s is not None


def join(endpoint: str) -> None:
    """Connect as a viewer does, and wait until the daemon has answered."""
    with Feed([endpoint]) as viewer:
        eventually(lambda: viewer.poll(20) or not viewer.links.unanswered)


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a daemon on a free loopback port. Yields the process and the address."""
    with subprocess.Popen([*CBTOP, "daemon", "--bind", LOOPBACK], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = re.search(r"serving (\S+);", process.stderr.readline())
        assert said
        try:
            yield process, said[1]
        finally:
            process.terminate()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def connections(pid: int) -> int:
    """Return the number of TCP connections of a process."""
    held = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # The process has closed this descriptor meanwhile.
            held.add(os.readlink(link))
    found = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        found += columns[3] == "01" and f"socket:[{columns[9]}]" in held  # ESTABLISHED
    return found
