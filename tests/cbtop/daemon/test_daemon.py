"""Tests of the daemon. Among many ended processes, it finds those that run, and it deletes nothing.

A faulty process does not affect other processes.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count, pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from cbtop.client import collector as collector_module
from cbtop.client.store import Store
from cbtop.daemon import daemon as daemon_module
from cbtop.daemon.daemon import PUBLISH_S, Daemon, DaemonInside, _Timetable
from cbtop.daemon.devices.sampling import NewestSamples
from cbtop.daemon.history import History
from cbtop.daemon.source import Source
from cbtop.feeds.feed import Feed
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol import catalog as catalog_module
from cbtop.protocol import codec
from cbtop.protocol import ended as ended_module
from cbtop.protocol.catalog import CatalogWriter
from cbtop.protocol.device_messages import DeviceSample
from cbtop.protocol.ended import runs
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import RingError
from cbtop.protocol.messages import Heartbeat, HostHello, Message, Node, SourceCatalog, StatsUpdate
from cbtop.protocol.process import process_start
from cbtop.protocol.publisher import JOIN_PREFIX, Publisher
from cbtop.protocol.recording import Frame, FrameKind, RecordingOrigin, RecordingReader, RecordingWriter
from cbtop.protocol.ring import RECORD_BYTES, RingWriter
from cbtop.protocol.ring_reader import Batch, RingReader
from cbtop.protocol.vocabulary import SourceStatus
from tests.integration.hosts import daemon as daemon_process
from tests.integration.hosts import eventually, host, snapshot
from tests.representatives import first_by_default

DEAD = 1 << 30  # A pid that no process can have.


@pytest.fixture
def daemon(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    # List the directory in each round. Otherwise the daemon lists it only now and then.
    monkeypatch.setattr(daemon_module, "LISTING_SHARE", 0)
    with closing(Daemon(default_endpoint())) as made:
        yield made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Message | None]:
    """Return a list that records each message that a daemon sends to its viewers."""
    messages: list[Message | None] = []
    monkeypatch.setattr(Publisher, "send_frames", lambda _, topic, frames: messages.extend(map(codec.decode, frames)))
    return messages


def frames_of(history: History, path: Path) -> list[Frame]:
    """Return the frames of the daemon's history, which are read through a recording written to `path`."""
    writer, number = RecordingWriter(path, RecordingOrigin("here", 1, 1), 1 << 30), 0
    while number < history.end:
        number, frames = history.piece(number)
        number += len(frames)
        assert all([writer.append(frame) for frame in frames])
    writer.close()
    with closing(RecordingReader(path)) as reader:
        return list(reader.frames())


def leave(directory: Path, number: int, age_s: float = 0.0) -> Path:
    """Write the files of an ended process with the pid `DEAD + number`.

    The newest record in the ring is `age_s` old. The files themselves are a day old.
    """
    ring = directory / f"{DEAD + number}-1-0.ring"
    catalog = CatalogWriter(ring.with_suffix(".catalog"))
    catalog.write(HostHello(2, 0, DEAD + number, 1, "here", "", "forged", "3", "python", 1, 1))
    catalog.close()
    end_ns = time.perf_counter_ns() - round(age_s * 1e9)
    writer = RingWriter(ring, 64 * RECORD_BYTES)
    struct.pack_into("<qq", writer.memory, 32, DEAD + number, 1)
    writer.record(1, end_ns - 1, end_ns, 1)
    day_ago_s = time.time() - 86_400
    for path in (ring, ring.with_suffix(".catalog")):
        os.utime(path, (day_ago_s, day_ago_s))
    return ring


@pytest.fixture
def running(runtime: Path) -> Iterator[Callable[[], Path]]:
    """Yield a function that starts a recorder in this process and returns the recorder's ring.

    Recorders run until the test ends.
    """
    profilers = []

    def one_more() -> Path:
        before = set(runtime.glob("*.ring"))
        profilers.append(BrickProfiler(recorder=RingRecorder(runtime)))
        with profilers[-1].brick("a"):
            pass
        (ring,) = {*runtime.glob("*.ring")} - before
        return ring

    yield one_more
    for profiler in profilers:
        profiler.close()


def states(daemon: Daemon) -> dict[str, str]:
    daemon.discover()
    daemon.read()
    return {path.name: source.state for path, source in daemon.sources.items()}


def test_a_process_killed_after_hours_is_shown_though_its_files_look_old(daemon: Daemon, runtime: Path) -> None:
    ring = leave(runtime, 0, age_s=1)
    assert states(daemon) == {ring.name: "gone"}


def test_who_looks_at_what_ended_long_ago_leaves_it_there(daemon: Daemon, runtime: Path) -> None:
    rings = [leave(runtime, number, age_s=5000 + number) for number in range(3)]
    for _ in range(3):
        assert states(daemon) == {}
    assert all(ring.exists() and ring.with_suffix(".catalog").exists() for ring in rings)


def test_a_process_that_ended_ten_minutes_ago_goes_whatever_its_records_say(
    daemon: Daemon, runtime: Path, monkeypatch: pytest.MonkeyPatch, running: Callable[[], Path]
) -> None:
    rings = [leave(runtime, 0), leave(runtime, 1, age_s=-1e9), leave(runtime, 2, age_s=1e6)]
    (runtime / f"{DEAD + 3}-1-0.ring").write_bytes(b"no ring")
    lives = running()
    assert set(states(daemon)) == {rings[0].name, lives.name}
    real_s = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_s() + 599)
    assert set(states(daemon)) == {rings[0].name, lives.name}
    monkeypatch.setattr(time, "monotonic", lambda: real_s() + 605)
    assert set(states(daemon)) == {lives.name}
    assert [path.name for path in runtime.glob("*.ring")] == [lives.name]
    assert [path.stem for path in runtime.glob("*.catalog")] == [lives.stem]


def test_ended_processes_make_room_for_running_ones_and_this_is_logged(
    daemon: Daemon,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    running: Callable[[], Path],
) -> None:
    monkeypatch.setattr(daemon_module, "MAX_SOURCES", 4)
    rings = {number: leave(runtime, number, age_s=10 * number) for number in (2, 5, 1, 3, 4)}
    assert set(states(daemon)) == {rings[number].name for number in (1, 2, 3, 4)}
    first = running()
    assert set(states(daemon)) == {first.name} | {rings[number].name for number in (1, 2, 3)}
    others = [running() for _ in range(3)]
    alive = {first.name, *(ring.name for ring in others)}
    assert states(daemon) == dict.fromkeys(alive, "live")
    assert "those that ended first make room" in caplog.text
    assert all(ring.exists() for ring in rings.values())
    caplog.clear()
    running()
    assert set(states(daemon)) == alive
    leave(runtime, 9)
    assert set(states(daemon)) == alive


def test_where_more_run_than_can_be_shown_it_is_said_once(
    daemon: Daemon,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    running: Callable[[], Path],
) -> None:
    monkeypatch.setattr(daemon_module, "MAX_SOURCES", 2)
    for _ in range(4):
        running()
    for _ in range(3):
        assert len(states(daemon)) == 2
    assert [record.message for record in caplog.records] == ["more than 2 processes run; the others are not shown"]


def test_beyond_the_bounds_the_oldest_go_and_viewers_hear_of_it(
    daemon: Daemon,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    running: Callable[[], Path],
) -> None:
    monkeypatch.setattr(ended_module, "MAX_ENDED", 8)
    lives = running()
    rings = [leave(runtime, number, age_s=10 * number) for number in range(12)]
    states(daemon)
    assert [ring.exists() for ring in rings] == [True] * 6 + [False] * 6
    assert set(states(daemon)) == {lives.name} | {ring.name for ring in rings[:6]}
    assert "the oldest go" in caplog.text


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the name of a ring each time its records are read."""
    found: list[str] = []
    real = RingReader.read

    def noted(reader: RingReader, *, final: bool = False) -> Batch:
        found.append(reader.path.stem)
        return real(reader, final=final)

    monkeypatch.setattr(RingReader, "read", noted)
    return found


def test_of_fifty_that_ended_those_are_read_that_a_viewer_shows(runtime: Path, read: list[str]) -> None:
    rings = [ended(runtime, steps) for steps in range(1, 51)]
    read.clear()  # The profilers above have also read their own rings. These reads must not count.

    def steps(feed: Feed, key: str) -> int | None:
        feed.poll(20)
        view = feed.view(key)
        return view.steps.count if view and view.steps else None

    with DaemonInside(default_endpoint()), Feed() as feed:
        eventually(lambda: feed.poll(20) or len(feed.sources()) == 50)
        assert {source.state for source in feed.sources()} == {SourceStatus.ENDED}
        assert read == []
        keys = {source.key.partition(":")[2].replace(":", "-"): source.key for source in feed.sources()}
        for number in (0, 30, 30, 49):
            assert eventually(lambda at=number: steps(feed, keys[rings[at]])) == number + 1
        assert set(read) == {rings[0], rings[30], rings[49]}
        known = len(read)
        # A viewer that connects late also gets the ended processes, without another read of their rings.
        with Feed() as late:
            eventually(lambda: late.poll(20) or len(late.sources()) == 50)
            assert eventually(lambda: steps(late, keys[rings[30]])) == 31
        assert len(read) == known


def test_a_daemon_inside_sends_an_update_when_its_viewer_took_the_last(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_s: list[float] = []
    now_s = [100.0]
    monkeypatch.setattr(daemon, "publish", lambda: sent_s.append(now_s[0]))
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    daemon.is_drawn = Event()
    for at, is_taken in enumerate((False, True, True, False, False, True)):
        now_s[0] = 100 + PUBLISH_S * at
        if is_taken:
            daemon.is_drawn.set()
        daemon.update()
    # Nothing was taken at 100.75, and 101.0 is half a second after the last update.
    assert sent_s == [100.0, 100.25, 100.5, 101.0, 101.25]
    daemon.is_drawn = None
    daemon.update()
    assert len(sent_s) == 6


def test_a_lost_update_of_an_ended_process_is_sent_again_if_it_is_asked_for(
    runtime: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "ASK_AGAIN_S", 0.05)
    ended(runtime, 3)
    lost = []

    def apply(store: Store, message: Message) -> None:
        if isinstance(message, StatsUpdate) and not lost:
            lost.append(message)
        else:
            real(store, message)

    real = Store.apply
    monkeypatch.setattr(Store, "apply", apply)
    with DaemonInside(default_endpoint()), Feed() as feed:
        view = eventually(lambda: feed.poll(20) or ((seen := feed.view()) and seen.steps and seen))
        assert (len(lost), view.steps.count) == (1, 3)


def test_what_ends_or_is_found_ended_while_the_daemon_runs_is_read_at_once(
    daemon: Daemon, runtime: Path, read: list[str], running: Callable[[], Path]
) -> None:
    before = ended(runtime, 1)
    states(daemon)
    since = ended(runtime, 2)
    states(daemon)
    assert {path.stem: source.is_left_unread for path, source in daemon.sources.items()} == {
        before: True,
        since: False,
    }
    assert before not in read


def test_the_history_holds_nothing_of_what_was_left_unread(daemon: Daemon, runtime: Path, tmp_path: Path) -> None:
    def known(name: str) -> list[str]:
        keyframe = frames_of(daemon.history, tmp_path / name)[-1]
        assert keyframe.kind == FrameKind.KEYFRAME
        return [message.source for message in keyframe.messages() if isinstance(message, SourceCatalog)]

    ended(runtime, 1)
    states(daemon)
    (source,) = daemon.sources.values()
    daemon.keyframe()
    assert known("unread.cbtop") == []
    source.want()
    daemon.read()
    daemon.keyframe()
    assert known("read.cbtop") == [source.key]


def ended(directory: Path, steps: int) -> str:
    """Record `steps` steps in a process that ends normally. Returns the name of its ring."""
    before = set(directory.glob("*.ring"))
    profiler = BrickProfiler(recorder=RingRecorder(directory, 1 << 12))
    for _ in range(steps):
        with profiler.step("decode", tokens=1), profiler.brick("a"):
            pass
    profiler.close()
    (ring,) = {*directory.glob("*.ring")} - before
    return ring.stem


def test_one_running_process_among_thousands_ended_is_found_in_one_round(
    daemon: Daemon, runtime: Path, monkeypatch: pytest.MonkeyPatch, running: Callable[[], Path]
) -> None:
    for number in range(3000):
        (runtime / f"{DEAD + number}-1-0.ring").touch()
        (runtime / f"{DEAD + number}-1-0.catalog").touch()
    lives = running()
    looked: list[str] = []
    monkeypatch.setattr(daemon_module, "runs", lambda ring: looked.append(ring.name) or runs(ring))
    assert states(daemon) == {lives.name: "live"}
    assert len(looked) == daemon_module.LOOKS_AT_ONCE
    for _ in range(50):
        before = len(looked)
        states(daemon)
        assert len(looked) - before <= 2 * daemon_module.LOOKS_AT_ONCE
    assert len(list(runtime.glob("*.ring"))) <= ended_module.MAX_ENDED + 1
    assert lives.exists()


@pytest.mark.slow
def test_bad_rings_by_the_thousand_are_named_a_few_times(
    daemon: Daemon, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(400):
        (runtime / f"{os.getpid()}-{process_start(os.getpid())}-{number}.ring").write_bytes(b"no ring")
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            states(daemon)
    assert sum(len(record.getMessage()) for record in caplog.records) < 4096
    assert len(caplog.records) == daemon_module.MAX_COMPLAINTS + 1
    assert "nothing more is said" in caplog.records[-1].getMessage()


@pytest.mark.slow
def test_a_daemon_whose_complaints_nobody_reads_serves_on(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = runtime / ("x" * 150)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(deep))
    address = f"ipc://{runtime}/d.sock"
    own = f"{os.getpid()}-{process_start(os.getpid())}"
    # These rings have the pid of this running process, so the daemon keeps the rings and checks them again and again.
    for number in range(600):
        (deep / f"{own}-{number}.ring").write_bytes(b"no ring")
    with daemon_process("--bind", address) as serving, host() as process:
        eventually(lambda: list(deep.glob(f"{process.pid}-*.ring")))
        assert [each["pid"] for each in snapshot("--connect", address)] == [process.pid]
        assert serving.poll() is None


@first_by_default("says", ["delta", "snapshot", "records"])
def test_a_source_that_cannot_say_what_it_has_is_faulty_and_the_others_go_on(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    bad, good = (BrickProfiler(recorder=RingRecorder(runtime, 1 << 20)) for _ in range(2))
    broken: set[str] = set()
    real = getattr(Source, says)

    def say(source: Source) -> Any:
        if source.key in broken:
            raise ZeroDivisionError("found")
        return real(source)

    monkeypatch.setattr(Source, says, say)
    monkeypatch.setattr(daemon_module, "KEYFRAME_S", 0.2)

    def counts(feed: Feed) -> dict[str, int]:
        for profiler in (bad, good):
            with profiler.step("decode", tokens=1):
                pass
        feed.poll(20)
        views = [view for source in feed.sources() if (view := feed.view(source.key))]
        return {view.key: view.steps.count for view in views if view.steps}

    def status_of(feed: Feed) -> dict[str, SourceStatus]:
        return {source.key: source.state for source in feed.sources()}

    with DaemonInside(default_endpoint()), Feed() as feed:
        before = eventually(lambda: len(seen := counts(feed)) == 2 and seen)
        first, second = sorted(before, key=lambda key: key.rsplit(":", 1))
        broken.add(first)
        eventually(lambda: counts(feed)[second] > before[second] + 10)
        eventually(lambda: counts(feed) and status_of(feed)[first] is SourceStatus.FAULTY)
        assert status_of(feed)[second] is SourceStatus.LIVE
        # A viewer that connects late gets the live process. It also gets the faulty process, unless the snapshot of
        # that process fails.
        with Feed() as late:
            eventually(lambda: len(counts(late)) > (says != "snapshot"))
    bad.close()
    good.close()


def test_a_long_catalog_is_sent_in_pieces_while_it_is_read_and_then_whole(
    daemon: Daemon, runtime: Path, monkeypatch: pytest.MonkeyPatch, sent: list[Message | None]
) -> None:
    monkeypatch.setattr(catalog_module, "PIECE_BYTES", 200)
    profiler = BrickProfiler(recorder=RingRecorder(runtime))
    for number in range(30):
        with profiler.brick(f"brick {number}"):
            pass
    daemon.discover()
    (source,) = daemon.sources.values()
    rounds = 0
    while source.is_behind:
        sent.clear()
        daemon.keyframe()
        assert not any(isinstance(message, SourceCatalog) and message.complete for message in sent)
        daemon.read()
        rounds += 1
    assert rounds > 3
    sent.clear()
    daemon.keyframe()
    catalogs = [message for message in sent if isinstance(message, SourceCatalog) and message.complete]
    assert [sum(isinstance(one, Node) for one in catalog.messages) for catalog in catalogs] == [30]
    profiler.close()


def test_who_joins_is_told_what_ran_until_then_and_not_until_the_last_look(
    daemon: Daemon, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bytes] = []
    monkeypatch.setattr(Publisher, "questions", lambda _, prefix: [prefix] if prefix == JOIN_PREFIX else [])
    monkeypatch.setattr(Publisher, "answer_frames", lambda _, topics, frames: told.extend(frames))
    profiler = BrickProfiler(recorder=RingRecorder(runtime))
    record([profiler])
    daemon.discover()
    daemon.read()
    record([profiler])
    daemon.answer()
    (update,) = (said for said in map(codec.decode, told) if isinstance(said, StatsUpdate))
    assert update.received == 2
    profiler.close()


def test_a_heartbeat_claims_no_later_moment_than_the_first_read_of_a_source(
    daemon: Daemon, runtime: Path, monkeypatch: pytest.MonkeyPatch, sent: list[Message | None]
) -> None:
    profilers = [BrickProfiler(recorder=RingRecorder(runtime)) for _ in range(2)]
    record(profilers)
    daemon.discover()
    record(profilers)
    clock = count(10**15, 10**9)  # On this clock, each check of the processes takes one second.
    monkeypatch.setattr(time, "perf_counter_ns", clock.__next__)
    daemon.read()
    sent.clear()
    daemon.beat()
    (heartbeat,) = (one for one in sent if isinstance(one, Heartbeat))
    updates = [one for one in sent if isinstance(one, StatsUpdate)]
    assert len(updates) == 2
    assert heartbeat.monotonic_ns <= min(one.monotonic_ns for one in updates)
    for profiler in profilers:
        profiler.close()


@pytest.mark.parametrize(("history_s", "packed"), [(0.0, False), (60.0, True)])
def test_records_are_packed_where_somebody_may_want_them(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, history_s: float, packed: bool
) -> None:
    profiler = BrickProfiler(recorder=RingRecorder(runtime))
    daemon = Daemon(f"ipc://{runtime}/remembers.sock", runtime, history_s=history_s)
    record([profiler])
    daemon.discover()
    record([profiler])
    handed_out: list[int] = []
    monkeypatch.setattr(Source, "records", lambda source: handed_out.append(source.waiting) or [])
    daemon.read()
    assert waiting(daemon) == 1
    daemon.publish()
    assert (handed_out, waiting(daemon)) == (([1], 1) if packed else ([], 0))
    profiler.close()
    daemon.close()


def test_no_more_than_a_bound_of_what_was_read_waits_to_be_said(
    daemon: Daemon, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profilers = [BrickProfiler(recorder=RingRecorder(runtime)) for _ in range(4)]
    record(profilers)
    daemon.discover()
    monkeypatch.setattr(daemon_module, "MOST_WAITING", 0)
    waited, publish = [], daemon.publish

    def watched() -> None:
        waited.append(waiting(daemon))
        publish()

    monkeypatch.setattr(daemon, "publish", watched)
    record(profilers)
    daemon.read()
    assert waited == [1] * 4
    assert waiting(daemon) == 0
    for profiler in profilers:
        profiler.close()


def test_between_what_is_said_only_rings_that_are_filling_are_read(
    daemon: Daemon, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = profilers = [BrickProfiler(recorder=RingRecorder(runtime, 64 * RECORD_BYTES)) for _ in range(2)]
    record(profilers)
    daemon.discover()
    daemon.publish()
    record([slow, *[fast] * 20])
    daemon.read_filling()
    assert sorted(source.waiting for source in daemon.sources.values()) == [0, 20]
    daemon.read()
    assert sorted(source.waiting for source in daemon.sources.values()) == [1, 20]

    def cut_short(*_: object) -> None:
        raise RingError("the file has been cut short")

    monkeypatch.setattr(RingReader, "_pread", cut_short)
    daemon.read_filling()
    assert {source.state for source in daemon.sources.values()} == {SourceStatus.FAULTY}
    for profiler in profilers:
        profiler.close()


def record(profilers: list[BrickProfiler]) -> None:
    for profiler in profilers:
        with profiler.brick("a"):
            pass


def waiting(daemon: Daemon) -> int:
    return sum(source.waiting for source in daemon.sources.values())


def test_while_only_devices_have_news_the_history_forgets_what_is_too_old(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_s, real_ns, late_s = time.monotonic, time.perf_counter_ns, 0
    monkeypatch.setattr(time, "monotonic", lambda: real_s() + late_s)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: real_ns() + late_s * 1_000_000_000)
    sample = DeviceSample("cpu", 1, trouble="none here")
    monkeypatch.setattr(Publisher, "is_heard", True)
    monkeypatch.setattr(NewestSamples, "listen", lambda samples, pids: None)
    monkeypatch.setattr(NewestSamples, "latest", lambda samples: [sample])
    monkeypatch.setattr(NewestSamples, "fresh", NewestSamples.latest)
    for _ in range(130):  # 650 s without a sample. The test sends a keyframe every five seconds.
        late_s += 5
        daemon.keyframe()
        daemon.publish_devices()
    frames = frames_of(daemon.history, tmp_path / "history.cbtop")
    assert sum(frame.kind == FrameKind.KEYFRAME for frame in frames) < 10
    assert frames[0].kind == FrameKind.KEYFRAME
    assert 240 < (time.perf_counter_ns() - frames[0].time_ns) / 1e9 < 400
    assert [sample] in [list(frame.messages()) for frame in frames]


def test_jobs_due_at_about_the_same_time_run_together_and_none_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, woken = 1000.0, 0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    done: dict[str, list[float]] = {"look": [], "publish": []}
    jobs: dict[Callable[[], None], float] = {
        lambda: done["look"].append(now_s): 0.1,
        lambda: done["publish"].append(now_s): 0.25,
    }
    due = _Timetable(jobs)
    while now_s < 1010:
        woken += 1
        for job in due.now():
            job()
        now_s += due.wait_ms() / 1000
    # All jobs share 10 wake-ups per second, the rate of the most frequent job. Separate wake-ups would be 14 per
    # second.
    assert woken <= 102
    assert len(done["publish"]) >= 40
    for name, most_s in (("look", 0.13), ("publish", 0.31)):
        assert max(later - before for before, later in pairwise(done[name])) <= most_s
    now_s += 60  # The daemon was suspended for a minute.
    assert len(due.now()) == 2
    assert due.wait_ms() >= 99  # Runs of a job that were missed are not repeated.
