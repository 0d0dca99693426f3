"""The daemon bears a load for as long as it lasts: it accounts for every record and grows by nothing."""

from __future__ import annotations

import logging
import statistics
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.load import Load, final_states
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.messages import DaemonHello, Message, SourceCatalog
from cbtop.protocol.subscriber import Subscriber
from tests.integration.hosts import daemon

_log = logging.getLogger(__name__)

HOSTS, RECORDS_PER_S = 8, 20_000
RING_BYTES = 1 << 20  # a second and a half of it
WARM_UP_S = 2.0
MIB = 1 << 20
SOAK = pytest.param(600.0, 4 * MIB, marks=[pytest.mark.slow, pytest.mark.timeout(900)])


# To keep what eight sources say in half a second, or a byte of each record, is a MiB in five seconds; in ten minutes
# four MiB are the twentieth part of a byte. The allocator's own holes take up to one.
@pytest.mark.parametrize(("lasting_s", "most_growth_bytes"), [(5.0, MIB), SOAK])
def test_under_load_memory_descriptors_and_threads_stay_as_they_are(
    runtime: Path, lasting_s: float, most_growth_bytes: int
) -> None:
    loads = [Load(runtime, RING_BYTES, spread_ns=64) for _ in range(HOSTS)]
    with daemon("--history", "0") as process:  # which would grow, to its bound
        watched = psutil.Process(process.pid)
        anonymous, descriptors, threads = [], [], []
        begun_s = next_s = time.monotonic()
        while (elapsed_s := time.monotonic() - begun_s) < WARM_UP_S + lasting_s:
            for load in loads:
                load.write(max(0, min(int(elapsed_s * RECORDS_PER_S) - load.written, load.ring.capacity // 2)))
            if time.monotonic() > next_s:  # once in half a second a viewer comes and goes
                next_s += 0.5
                join()
                if elapsed_s > WARM_UP_S:
                    anonymous.append(anonymous_bytes(process.pid))
                    descriptors.append(watched.num_fds())
                    threads.append(watched.num_threads())
            time.sleep(0.02)
        for load in loads:
            load.close()
        states = final_states(HOSTS)
    quarter = len(anonymous) // 4
    grown = statistics.median(anonymous[-quarter:]) - statistics.median(anonymous[:quarter])
    written = sum(load.written for load in loads)
    _log.info("%.0f s, %d records, own memory at first %d KiB", lasting_s, written, anonymous[0] >> 10)
    _log.info("at most %d KiB, grown by %d KiB", max(anonymous) >> 10, grown / 1024)
    _log.info("descriptors %s, threads %s", sorted(set(descriptors)), sorted(set(threads)))
    assert grown < most_growth_bytes
    assert max(descriptors) - min(descriptors) <= 2  # a viewer that is just leaving
    assert len(set(threads)) == 1
    assert sum(state.produced for state in states) == written
    assert all(s.produced == s.received + s.overwritten + s.rejected for s in states)
    assert sum(state.rejected for state in states) == 0


def test_a_viewer_is_complete_with_its_first_message_whenever_it_comes(runtime: Path) -> None:
    loads = [Load(runtime, RING_BYTES) for _ in range(HOSTS)]
    with daemon():
        while len({message.source for message in join() if isinstance(message, SourceCatalog)}) < HOSTS:
            time.sleep(0.1)
        said = [join() for _ in range(30)]
    for load in loads:
        load.close()
    for messages in said:
        assert len(messages) == 2 + 3 * HOSTS  # hello; catalog, statistics and state of each; heartbeat
        assert isinstance(messages[0], DaemonHello)
        assert all(message.complete for message in messages if isinstance(message, SourceCatalog))


def join() -> list[Message]:
    """What a viewer that comes now is told first."""
    subscriber = Subscriber(default_endpoint())
    said: list[Message] = []
    while not said or not isinstance(said[0], DaemonHello):
        said = subscriber.receive(1000)
    subscriber.close()
    return said


def anonymous_bytes(pid: int) -> int:
    """What the process holds of its own: no file, no ring."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
