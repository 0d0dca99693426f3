"""Measure the capacity of the daemon: records a second on one core, with many hosts at once, with many viewers, and
at rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from benchmarks.base import Figure, Ratio
from cbtop.daemon.source import Source
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.messages import DaemonHello, Heartbeat, Message, SourceState
from cbtop.protocol.ring import CURSOR_WORD, HEADER_BYTES, RECORD_BYTES, SEQUENCE_MASK, SEQUENCE_SHIFT, RingWriter
from cbtop.protocol.ring_reader import RingReader
from cbtop.protocol.subscriber import Subscriber
from cbtop.protocol.vocabulary import BrickId, SourceStatus

# The sizes of a 7B model. One decode step of it has 365 nodes and 365 records.
LAYERS, BRICKS = 28, list(BrickId)[:12]
ROUNDS = 60
HOSTS, RECORDS_PER_S, LOADED_S = 64, 50_000, 10.0
HOST_RING_BYTES = 2 << 20  # A ring of this size has room for 1.3 s of records.
FILL_S = 0.02
FINAL_S = 300  # Wait this many seconds for the final state of the sources. This is enough for any busy machine.
IDLE_HOSTS, IDLE_S = 8, 10.0
SETTLE_S = 12.0  # In this many seconds, the daemon sends two keyframes.
JOINS = 1000
DAEMON = [sys.executable, "-m", "cbtop", "daemon"]


class Load:
    """A real host process. Its ring is filled with whole columns of records, so that one process can write as much as
    many processes.
    """

    def __init__(self, directory: Path | None = None, ring_bytes: int = 8 << 20, spread_ns: int = 50_000) -> None:
        self._spread_ns = spread_ns
        self._recorder = RingRecorder(directory, ring_bytes)
        self._profiler = BrickProfiler(recorder=self._recorder)
        decode_once(self._profiler)
        self._begin_ns = time.perf_counter_ns()  # Records that are written later begin after this first step.
        ring = self._recorder._ring
        assert ring is not None
        self.ring: RingWriter = ring
        self.path = ring.path
        reader = RingReader(ring.path)
        self._order = reader.read().node  # the node of each record of a step, in the order of the records
        self.written = reader.read_to
        reader.close()

    def write(self, count: int) -> None:
        """Write `count` more records into the ring, each with a different duration, in the layout of `ring.py`."""
        words = np.frombuffer(self.ring.memory, dtype="<i8", offset=HEADER_BYTES).reshape(-1, 4)
        number = np.arange(self.written, self.written + count)
        slot = number % self.ring.capacity
        start_ns = self._begin_ns + number * 20_000
        words[slot, 0] = start_ns
        words[slot, 1] = start_ns + 1_000 + number * 7919 % self._spread_ns
        words[slot, 2] = 4096
        words[slot, 3] = self._order[number % len(self._order)] | (((number + 1) & SEQUENCE_MASK) << SEQUENCE_SHIFT)
        self.written += count
        self.ring._words[CURSOR_WORD] = self.written

    def close(self) -> None:
        self._profiler.close()


def decode_once(profiler: BrickProfiler) -> None:
    """Run one decode step of the model. The first call also creates every node."""
    with profiler.step("decode", tokens=1):
        for layer in range(LAYERS):
            with profiler.layer(layer):
                for brick in BRICKS:
                    with profiler.brick(brick, 4096):
                        pass


def run() -> list[Figure]:
    return [*ingest(131_072), *ingest(2_500), *many_hosts(), *joins(), *at_rest()]


def ingest(count: int) -> list[Figure]:
    """Measure how fast records are read from the ring, `count` at a time, and turned into statistics and messages.

    The peer is copying the same bytes.
    """
    used_s, copied_s = [], []
    with tempfile.TemporaryDirectory() as directory:
        load = Load(Path(directory))
        source = Source(load.path)
        source.poll()
        target = np.empty(count * RECORD_BYTES, np.uint8)
        whole = np.frombuffer(load.ring.memory, np.uint8, offset=HEADER_BYTES)
        for number in range(ROUNDS):
            load.write(count)
            begun_s = time.process_time()
            source.poll()
            source.delta()
            used_s.append(time.process_time() - begun_s)
            at = number % (len(whole) // len(target)) * len(target)
            begun_s = time.process_time()
            np.copyto(target, whole[at : at + len(target)])
            copied_s.append(time.process_time() - begun_s)
        state = source.state_message()
        assert state.produced == state.received == load.written
        load.close()
    rate = count * ROUNDS / sum(used_s) / 1e6
    return [Figure(f"daemon: {count:,} records at a time", rate, "M records/s", "memcpy", Ratio.of(copied_s, used_s))]


def many_hosts() -> list[Figure]:
    """Fill the rings of HOSTS hosts for a real daemon, each with RECORDS_PER_S. Measure how much the daemon reads,
    uses and loses.
    """
    with daemon() as process:
        used, begun_s = process.cpu_times(), time.monotonic()
        command = [sys.executable, "-c", "from benchmarks import load; load.fill_many()"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        took_s, now = time.monotonic() - begun_s, process.cpu_times()
        written, filling_s = (float(word) for word in done.stdout.split())
        states = final_states(HOSTS)
        resident = process.memory_info().rss
    received, lost, rejected = (
        sum(getattr(state, name) for state in states) for name in ("received", "overwritten", "rejected")
    )
    share = (now.user + now.system - used.user - used.system) / took_s
    return [
        Figure(
            f"daemon: {HOSTS} hosts, {RECORDS_PER_S:,} records/s asked of each",
            written / filling_s / HOSTS,
            "records/s",
        ),
        Figure("  written together", written / 1e6, "M records"),
        Figure("  received by the daemon", received / 1e6, "M records"),
        Figure("  overwritten before it read them", lost / 1e6, "M records"),
        Figure("  unaccounted for", written - received - lost - rejected, "records"),
        Figure("  the daemon's share meanwhile", 100 * share, "% of a core"),
        Figure("  the daemon's memory", resident / (1 << 20), "MiB"),
    ]


def fill_many() -> None:
    """Fill the rings of HOSTS hosts for LOADED_S at the set rate. Print the number of records and the seconds."""
    loads = [Load(ring_bytes=HOST_RING_BYTES) for _ in range(HOSTS)]
    begun_s = time.monotonic()
    while (elapsed_s := time.monotonic() - begun_s) < LOADED_S:
        due = int(elapsed_s * RECORDS_PER_S)
        for load in loads:
            if count := min(due - load.written, load.ring.capacity // 2):
                load.write(max(0, count))
        time.sleep(FILL_S)
    took_s = time.monotonic() - begun_s
    for load in loads:
        load.close()
    print(sum(load.written for load in loads), took_s)


def final_states(count: int) -> list[SourceState]:
    """Return the final states of `count` sources, as a viewer receives them from the daemon."""
    subscriber = Subscriber(default_endpoint())
    states: dict[str, SourceState] = {}
    deadline_s = time.monotonic() + FINAL_S
    while len(states) < count or any(state.state is SourceStatus.LIVE for state in states.values()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{len(states)} of {count} sources came to an end within {FINAL_S} s")
        for message in subscriber.receive(200):
            if isinstance(message, Heartbeat):
                states |= {state.source: state for state in message.sources}
    subscriber.close()
    return list(states.values())


def joins() -> list[Figure]:
    """Measure how long a new viewer waits until it has all data. There are 8 hosts with 365 nodes each."""
    times_ms = []
    with daemon(), idle_hosts():
        wait_for_hosts()
        for _ in range(JOINS):
            begun_s = time.perf_counter()
            subscriber = Subscriber(default_endpoint())
            said: list[Message] = []
            while not said or not isinstance(said[0], DaemonHello):
                said = subscriber.receive(1000)
            times_ms.append(1e3 * (time.perf_counter() - begun_s))
            assert len(said) == 2 + 3 * IDLE_HOSTS
            subscriber.close()
    times_ms.sort()
    found = {"p50": times_ms[JOINS // 2], "p99": times_ms[JOINS * 99 // 100], "longest": times_ms[-1]}
    return [Figure(f"viewer: complete after joining, {JOINS} joins, {name}", ms, "ms") for name, ms in found.items()]


def at_rest() -> list[Figure]:
    """Measure the daemon's use of CPU while nothing happens."""
    with daemon() as process, idle_hosts():
        wait_for_hosts()
        time.sleep(SETTLE_S)
        begun_s, used = time.monotonic(), process.cpu_times()
        time.sleep(IDLE_S)
        now, elapsed_s = process.cpu_times(), time.monotonic() - begun_s
    share = (now.user + now.system - used.user - used.system) / elapsed_s
    return [Figure(f"daemon: at rest, {IDLE_HOSTS} idle hosts", 100 * share, "% of a core")]


@contextmanager
def daemon() -> Iterator[psutil.Process]:
    """Run a separate daemon for an empty runtime directory."""
    for path in Path(os.environ["CBTOP_RUNTIME_DIR"]).iterdir():
        path.unlink()
    with subprocess.Popen(DAEMON, stderr=subprocess.PIPE) as process:
        assert process.stderr
        process.stderr.readline()
        yield psutil.Process(process.pid)
        process.terminate()


@contextmanager
def idle_hosts() -> Iterator[None]:
    """Start host processes that each run one step and then wait."""
    script = "import sys; from benchmarks import load; from cbtop import BrickProfiler; "
    script += "load.decode_once(BrickProfiler()); sys.stdin.read()"
    hosts = [subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) for _ in range(IDLE_HOSTS)]
    yield
    for host in hosts:
        host.communicate()


def wait_for_hosts() -> None:
    """Wait until the daemon has found all host processes."""
    subscriber = Subscriber(default_endpoint())
    found = 0
    while found < IDLE_HOSTS:
        beats = [message for message in subscriber.receive(2000) if isinstance(message, Heartbeat)]
        found = max([found, *(len(beat.sources) for beat in beats)])
    subscriber.close()
