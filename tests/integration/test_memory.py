"""Many processes use only the documented memory. Everything that does not fit into it is reported.

`make soak` runs these tests with the other slow tests. To run only these tests: `.venv/bin/python -m pytest -m slow
-n 0 -o log_cli=true -o log_cli_level=INFO tests/integration/test_memory.py`.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.load import Load
from cbtop.feeds.feed import Feed
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from tests.integration.hosts import CBTOP, DEADLINE_S, PATIENTLY, daemon, eventually, host, snapshot

_log = logging.getLogger(__name__)

MIB = 1 << 20
TINY_SOURCES, TINY_BYTES = 200, 80 * MIB
HOSTS, DAEMON_BYTES, VIEWER_BYTES = 64, 150 * MIB, 250 * MIB  # The profiled processes have 365 nodes each.
RING_BYTES, RECORDS, ROUNDS = 1 << 20, 20_000, 8  # The number of rounds is enough to fill the daemon's history.
SPREAD_NS = 50_000_000  # The duration of calls varies between 1 µs and 50 ms.
LITTLE_KIB = 1_000_000  # Limit of the address space of a process in KiB, for `ulimit -v`.

# A program that shows every process. The program prints a line when it has counted the given numbers of records and
# processes.
VIEWER = """
import sys
from cbtop.feeds.feed import Feed
wanted = int(sys.argv[1])
with Feed() as feed:
    while sum(seen.record.stats.received for seen in feed.seen().values()) < wanted:
        feed.poll(100)
    views = [feed.view(source.key, window=True) for source in feed.sources()]
    print(len(views), flush=True)
    sys.stdin.read()
"""


def most_bytes(pid: int) -> int:
    """Return the peak of the resident memory of a process."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


@pytest.mark.slow
def test_the_daemon_takes_80_mib_for_two_hundred_tiny_processes(runtime: Path) -> None:
    profilers = [BrickProfiler(recorder=RingRecorder(runtime, 1 << 16)) for _ in range(TINY_SOURCES)]
    for profiler in profilers:
        with profiler.step("decode", tokens=1), profiler.brick("a"):
            pass
    with daemon() as serving, Feed() as feed:
        eventually(lambda: feed.poll(100) or len(feed.sources()) == TINY_SOURCES)
        taken = most_bytes(serving.pid)
    _log.info("%d tiny processes: the daemon took %.1f MiB", TINY_SOURCES, taken / MIB)
    assert taken <= TINY_BYTES
    for profiler in profilers:
        profiler.close()


@pytest.mark.slow
def test_64_processes_of_365_nodes_take_150_mib_in_a_daemon_250_in_a_viewer(runtime: Path) -> None:
    loads = [Load(runtime, RING_BYTES, SPREAD_NS) for _ in range(HOSTS)]
    with daemon() as serving, Feed() as feed:
        for _ in range(ROUNDS):
            for load in loads:
                load.write(RECORDS)
            written = sum(load.written for load in loads)
            eventually(lambda written=written: feed.poll(100) or received(feed) == written)
        arguments = [sys.executable, "-c", VIEWER, str(written)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as viewer:
            assert viewer.stdout
            assert int(viewer.stdout.readline()) == HOSTS
            taken, shown = most_bytes(serving.pid), most_bytes(viewer.pid)
            viewer.communicate()
    _log.info("%d processes: the daemon took %.1f MiB, a viewer %.1f MiB", HOSTS, taken / MIB, shown / MIB)
    assert taken <= DAEMON_BYTES
    assert shown <= VIEWER_BYTES
    for load in loads:
        load.close()


def received(feed: Feed) -> int:
    return sum(seen.record.stats.received for seen in feed.seen().values())


@pytest.mark.slow
def test_in_too_little_memory_every_process_is_shown_or_named() -> None:
    with ExitStack() as running:
        hosts = [running.enter_context(host()) for _ in range(8)]
        eventually(lambda: len(snapshot()) == len(hosts))
        cbtop = [*CBTOP, "--once", "--window=all", "--view", "bricks"]
        command = ["sh", "-c", f'ulimit -v {LITTLE_KIB}; exec "$@"', "sh", *cbtop]
        done = subprocess.run(
            [*command, *PATIENTLY],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    shown = {int(pid) for pid in re.findall(r", pid (\d+)", done.stdout)}
    _log.info("of %d processes %d shown, exit code %d: %s", len(hosts), len(shown), done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    assert all(one.pid in shown or str(one.pid) in done.stderr for one in hosts)
