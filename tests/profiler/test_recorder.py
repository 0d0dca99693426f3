"""Tests of the recorder: the recorder never disturbs the program, whatever fails, and its memory is bounded."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from cbtop.profiler import recorder as recorder_module
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol import catalog as catalog_module
from cbtop.protocol import codec
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.errors import RingError
from cbtop.protocol.messages import (
    Activity,
    CatalogMessage,
    CheckResult,
    Dependency,
    Goodbye,
    Heartbeat,
    Node,
    TraceAnomaly,
    TraceSummary,
)
from cbtop.protocol.ring import Record, RingWriter
from cbtop.protocol.vocabulary import NodeKind
from tests.cbtop.recorded import Clock, source_of
from tests.representatives import each_value_once, first_by_default

YEAR_NS = 365 * 86400 * 10**9


class Listener:
    """A stand-in for the hot path, which the recorder informs about changes."""

    implementation: ClassVar[str] = "python"
    sample_every: ClassVar[int] = 1

    def __init__(self) -> None:
        self.rings: list[RingWriter | None] = []

    def attach(self, ring: RingWriter | None, /) -> Record:
        self.rings.append(ring)
        return ring.record if ring else lambda *_: None

    def finish(self) -> None: ...

    def ended(self, why: str, /) -> None:
        self.rings.append(None)


class Broken(Listener):
    def attach(self, ring: RingWriter | None, /) -> Record:
        raise RuntimeError("no room")

    def finish(self) -> None:
        raise ValueError("no room")


def said_in(directory: Path) -> list[CatalogMessage]:
    (catalog,) = directory.glob("*.catalog")
    return CatalogReader(catalog).read()[1:]


def walk(recorder: RingRecorder, number: int) -> None:
    """Call each function of the recorder that a program or the profiler may call."""
    recorder.add_listener(Listener())
    recorder.announce(Node(number, None, NodeKind.BRICK, "a brick"))
    recorder.announce(Activity("loading", 0.5))
    recorder.announce(Activity("loading", 1 / number))
    recorder.record(1, 2, 3, 4)
    recorder.flush()
    recorder.nodes()
    recorder.read()
    recorder.read_again()


FAILING: list[tuple[object, str]] = [
    (os, "open"),
    (os, "pwrite"),
    (os, "close"),
    (os, "fstat"),
    (os, "posix_fallocate"),
    (os, "rename"),
    (os, "unlink"),
    (os, "mkdir"),
    (os, "lstat"),
    (mmap, "mmap"),
    (fcntl, "flock"),
    (recorder_module, "_hello"),
    (recorder_module, "RingReader"),
    (codec, "encode"),
    (codec, "decode"),
]


@pytest.mark.parametrize(
    ("owner", "name", "since", "error"),
    each_value_once(
        (*what, since, error)
        for what in FAILING
        for since in ("the start", "the middle")
        for error in (OSError(28, "No space left on device"), RuntimeError("no reason"), MemoryError())
    ),
)
def test_whatever_fails_is_said_once_and_the_host_goes_on(
    runtime: Path,
    owner: ModuleType,
    name: str,
    since: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    recorder = RingRecorder(runtime, 1 << 12)
    if since == "the middle":
        walk(recorder, 1)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        walk(recorder, 2)
        walk(recorder, 3)
        recorder.close("done")
        walk(recorder, 4)
        recorder.close("again")
    assert len(set(caplog.messages)) == len(caplog.messages)
    recorder.forget()  # Act as a forked child would. In the child, nothing fails.
    walk(recorder, 5)
    assert recorder.read() is not None
    recorder.close("done")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_reaches_the_host_and_what_it_cut_short_is_done_later(
    runtime: Path, interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise interrupt

    recorder = RingRecorder(runtime, 1 << 12)
    for owner, name in ((os, "open"), (mmap, "mmap"), (os, "pwrite"), (os, "rename")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            with pytest.raises(interrupt):
                recorder.announce(Activity(name))
        assert list(runtime.iterdir()) == []
    recorder.record(0, 1, 2, 3)
    assert said_in(runtime) == [Activity("rename")]
    assert source_of(runtime).state == "live"


def test_a_listener_that_fails_costs_no_record(runtime: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = RingRecorder(runtime, 1 << 12)
    recorder.add_listener(Broken())
    recorder.record(0, 1, 2, 3)
    recorder.add_listener(Broken())
    recorder.record(0, 1, 2, 3)
    batch = recorder.read()
    assert batch is not None
    assert len(batch.node) == 2
    recorder.close("done")
    assert recorder.failures == 6
    assert len(caplog.messages) == 3


def test_a_listener_is_told_of_each_ring_and_of_its_end(runtime: Path) -> None:
    recorder, listener = RingRecorder(runtime, 1 << 12), Listener()
    recorder.add_listener(listener)
    recorder.record(0, 1, 2, 3)
    recorder.close("done")
    ring, end = listener.rings
    assert isinstance(ring, RingWriter)
    assert end is None


def test_a_record_made_while_the_files_open_is_dropped_and_opens_no_others(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = RingRecorder(runtime, 1 << 12)
    hello = recorder_module._hello

    def interrupted(implementation: str, sample_every: int, *, locked: bool) -> object:
        # A signal handler may record and announce just while the recorder writes its hello message.
        recorder.record(0, 1, 2, 3)
        recorder.announce(Node(1, None, NodeKind.BRICK, "of the handler"))
        return hello(implementation, sample_every, locked=locked)

    monkeypatch.setattr(recorder_module, "_hello", interrupted)
    recorder.record(0, 1, 2, 3)
    batch = recorder.read()
    assert batch is not None
    assert len(batch.node) == 1
    assert len(list(runtime.glob("*.ring"))) == 1
    assert said_in(runtime) == recorder.nodes()


def test_waiting_messages_follow_at_the_next_announcement_flush_or_end(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "FREE_UPDATE_BYTES", 0)
    clock = Clock()
    recorder = RingRecorder(runtime, 1 << 12, clock)
    for number in range(3):
        recorder.announce(Activity("a", number / 10))
    assert said_in(runtime) == [Activity("a", 0.0), Activity("a", 0.1)]
    clock.sleep_us(99_999)
    recorder.flush()
    assert said_in(runtime)[-1] == Activity("a", 0.1)
    clock.sleep_us(1)
    recorder.flush()
    assert said_in(runtime)[-1] == Activity("a", 0.2)
    recorder.announce(Activity("b"))
    recorder.announce(Activity("c"))
    clock.sleep_us(100_000)
    recorder.announce(Node(1, None, NodeKind.BRICK, "n"))
    assert said_in(runtime)[-2:] == [Node(1, None, NodeKind.BRICK, "n"), Activity("c")]
    recorder.announce(Activity("d"))
    recorder.close("done")
    assert said_in(runtime)[-2:] == [Activity("d"), Goodbye("done")]


def test_a_child_may_write_freely_again(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FREE_UPDATE_BYTES", 0)
    recorder = RingRecorder(runtime, 1 << 12, Clock())
    for number in range(3):
        recorder.announce(Activity("a", number / 10))
    for path in runtime.iterdir():
        path.unlink()
    recorder.forget()
    for number in range(3, 6):
        recorder.announce(Activity("a", number / 10))
    assert said_in(runtime) == [Activity("a", 0.3), Activity("a", 0.4)]


def test_flush_does_nothing_when_nothing_waits(runtime: Path) -> None:
    def read() -> int:
        raise AssertionError("no clock is read")

    recorder = RingRecorder(runtime, 1 << 12, read)
    recorder.announce(Activity("a"))
    recorder.flush()
    assert recorder.failures == 0
    assert list(runtime.glob("*.ring"))


def test_years_of_announcements_leave_catalog_room_and_the_last_is_shown(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All limits are 1,000 times smaller than the real limits, which take 1,000 times as long to reach.
    for module, name in (
        (catalog_module, "MAX_CATALOG_BYTES"),
        (recorder_module, "FREE_UPDATE_BYTES"),
        (recorder_module, "PAUSE_DOUBLES_BYTES"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) >> 10)
    monkeypatch.setattr(catalog_module, "_GOODBYE_BYTES", 100)
    monkeypatch.setattr(recorder_module, "UPDATE_NS_PER_BYTE", recorder_module.UPDATE_NS_PER_BYTE << 10)
    clock = Clock()
    recorder = RingRecorder(runtime, 1 << 12, clock)
    number, began_ns = 0, clock()
    while clock() < began_ns + 4 * YEAR_NS:
        number += 1
        recorder.announce(Activity("a", 1 / number))
        recorder.announce(CheckResult("b", "c", True, 1 / number, 1.0))
        clock.now_ns = max(clock() + 1, recorder._pause_until_ns)
    recorder.flush()
    assert recorder.left_out == 0
    (path,) = runtime.glob("*.catalog")
    assert path.stat().st_size < catalog_module.MAX_CATALOG_BYTES * 0.55
    assert set(said_in(runtime)[-2:]) == {Activity("a", 1 / number), CheckResult("b", "c", True, 1 / number, 1.0)}
    recorder.close("done")
    assert said_in(runtime)[-1] == Goodbye("done")


def test_what_was_said_already_is_not_said_again(runtime: Path) -> None:
    recorder = RingRecorder(runtime, 1 << 12)
    for _ in range(3):
        recorder.announce(Dependency(1, 2))
        recorder.announce(Activity("a"))
    assert said_in(runtime) == [Dependency(1, 2), Activity("a")]


@pytest.mark.parametrize(
    "message",
    [
        Activity(object()),  # type: ignore[arg-type]
        Activity("a", float("nan")),
        Activity(b"bytes"),  # type: ignore[arg-type]
        CheckResult("a", "b", True, float("inf"), None),
        Heartbeat(0, ()),
        Goodbye("bye"),
        "text",
        None,
    ],
)
def test_what_no_daemon_would_take_is_left_out_counted_and_logged_once(
    runtime: Path, message: CatalogMessage, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RingRecorder(runtime, 1 << 12)
    for _ in range(3):
        recorder.announce(message)
    recorder.announce(Activity("fine"))
    source = source_of(runtime)
    source.poll()
    assert (source.state, source.state_message().left_out) == ("live", 3)
    assert [line for line in caplog.messages if "cannot say" in line] == caplog.messages[:1] == caplog.messages


def test_a_node_without_room_in_the_catalog_is_counted_with_those_behind_it(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = RingRecorder(runtime, 1 << 12)
    recorder.announce(Node(1, None, NodeKind.BRICK, "a"))
    (path,) = runtime.glob("*.catalog")
    monkeypatch.setattr(catalog_module, "_GOODBYE_BYTES", 100)
    monkeypatch.setattr(catalog_module, "MAX_CATALOG_BYTES", path.stat().st_size + 200)
    recorder.announce(Node(2, None, NodeKind.BRICK, "b" * 200))
    recorder.announce(Node(3, None, NodeKind.BRICK, "c"))
    source = source_of(runtime)
    source.poll()
    assert (source.state, source.state_message().left_out) == ("live", 2)
    assert [node.name for node in source.catalog if isinstance(node, Node)] == ["a"]
    assert len(recorder.nodes()) == 3


def test_beyond_the_bound_nodes_are_left_out(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_NODES", 2)
    recorder = RingRecorder(runtime, 1 << 12)
    for number in range(1, 6):
        recorder.announce(Node(number, None, NodeKind.BRICK, "a"))
    assert (len(recorder.nodes()), recorder.left_out) == (2, 3)
    source = source_of(runtime)
    source.poll()
    assert source.state_message().left_out == 3


def test_a_trace_of_any_size_makes_the_source_not_faulty(runtime: Path) -> None:
    recorder = RingRecorder(runtime, 1 << 12)
    anomalies = tuple(TraceAnomaly("x" * 256) for _ in range(5000))
    recorder.announce(TraceSummary("MLT-01", "activations", "about", 1, (), anomalies))
    recorder.announce(TraceSummary("MLT-01", "activations", "about", 1, (), anomalies[:5]))
    source = source_of(runtime)
    source.poll()
    assert (source.state, source.state_message().left_out) == ("live", 1)
    assert [len(said.anomalies) for said in source.catalog if isinstance(said, TraceSummary)] == [5]


def test_on_a_full_disk_updates_wait_and_do_not_pile_up(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    recorder = RingRecorder(runtime, 1 << 12, clock)
    recorder.announce(Activity("a", 0.0))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        recorder.announce(CheckResult("b", "c", True, None, None))
        for number in range(1000):
            clock.sleep_us(200_000)
            recorder.announce(Activity("a", number / 1000))
    clock.sleep_us(200_000)
    recorder.flush()
    assert said_in(runtime)[1:] == [CheckResult("b", "c", True, None, None), Activity("a", 0.999)]
    assert recorder.left_out == 0


ELSEWHERE = {
    "no posix_fallocate": "import os; del os.posix_fallocate",
    "no fcntl": "import sys; sys.modules['fcntl'] = None",
    "no /proc": "from cbtop.protocol import process; process._PROC = '/no/proc'",
    "another processor": "import platform; platform.machine = lambda: 'aarch64'",
}
ELSEWHERE["all of it"] = "; ".join(ELSEWHERE.values())


# A program that prints the state of a process in the given directory, its counts, and whether it held a lock.
READER = """
import sys
from pathlib import Path
from cbtop.daemon.source import Source
(ring,) = Path(sys.argv[1]).glob("*.ring")
source = Source(ring)
source.poll()
print(source.state, int(source.stats.column("elements")[1]), source.hello.locked)
"""


def read_elsewhere(directory: Path, elsewhere: str) -> str:
    script = f"{ELSEWHERE[elsewhere]}\n{READER}"
    done = subprocess.run([sys.executable, "-c", script, directory], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@first_by_default(
    ("killed", "elsewhere"),
    [
        (False, "all of it"),
        (True, "no /proc"),
        (True, "all of it"),
        pytest.param(False, "no posix_fallocate", marks=pytest.mark.slow),
        pytest.param(False, "another processor", marks=pytest.mark.slow),
        pytest.param(True, "no fcntl", marks=pytest.mark.slow),
        pytest.param(False, "no fcntl", marks=pytest.mark.slow),
        pytest.param(False, "no /proc", marks=pytest.mark.slow),
        pytest.param(True, "no posix_fallocate", marks=pytest.mark.slow),
        pytest.param(True, "another processor", marks=pytest.mark.slow),
    ],
)
def test_on_another_system_a_host_is_profiled_and_read_back_all_the_same(
    runtime: Path, elsewhere: str, killed: bool
) -> None:
    host = (
        f"{ELSEWHERE[elsewhere]}\n"
        "import os; from cbtop import BrickProfiler; from cbtop.protocol.messages import Activity\n"
        "profiler = BrickProfiler()\n"
        "profiler.announce(Activity('serving'))\n"
        "for number in range(1000):\n"
        "    with profiler.brick('a', number): pass\n"
        "assert profiler.report().bricks[0].calls.count == 1000\n"
        f"if {killed}: os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "CBTOP_PURE_PYTHON": "1"}
    done = subprocess.run([sys.executable, "-c", host], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-9 if killed else 0, "")
    state, locked = "gone" if killed else "ended", elsewhere not in ("no fcntl", "all of it")
    assert read_elsewhere(runtime, elsewhere) == f"{state} {sum(range(1000))} {locked}"


@pytest.mark.slow
def test_on_another_system_a_host_that_runs_is_seen_alive(runtime: Path) -> None:
    host = (
        f"{ELSEWHERE['all of it']}\n"
        "import sys; from cbtop import BrickProfiler\n"
        "with BrickProfiler().brick('a', 7): pass\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert read_elsewhere(runtime, "all of it") == "live 7 False"
        process.communicate("")


def test_a_ring_is_refused_where_its_records_would_have_another_layout(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(RingError, match="little-endian"):
        RingWriter(runtime / "1-2-0.ring")
    recorder = RingRecorder(runtime, 1 << 12)
    recorder.record(0, 1, 2, 3)
    assert len(caplog.messages) == 1
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["/srv/serve.py", "-c"], "serve.py"),
        (["-c", "7"], "python -c"),
        (["-"], "python -"),
        ([""], "python"),
        ([], "python"),
    ],
)
def test_a_process_that_runs_no_script_is_called_as_it_was_started(
    argv: list[str], program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", argv)
    assert recorder_module._program() == program


def test_last_figures_are_announced_once_before_the_goodbye(runtime: Path) -> None:
    recorder = RingRecorder(runtime)
    recorder.announce(Activity("a"))
    recorder.open()
    recorder.before_goodbye(lambda: recorder.announce(Activity("last")))
    recorder.before_goodbye(lambda: 1 // 0)
    recorder.close("done")
    recorder.close("again")
    assert said_in(runtime) == [Activity("a"), Activity("last"), Goodbye("done")]
    assert recorder.failures == 1
