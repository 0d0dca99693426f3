"""Tests of the promise to the program: if anything in cbtop fails, the program continues.

No public method raises, and the reason is logged once.
"""

from __future__ import annotations

import functools
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cbtop.daemon.source import Source
from cbtop.profiler.analysis.graph.nodes import Layer
from cbtop.profiler.checks import Finite
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol import ring_reader
from cbtop.protocol.messages import Activity
from cbtop.protocol.vocabulary import BrickId, SyncMode, TransferDirection
from tests.profiler.conftest import of_either
from tests.profiler.memory import Memory
from tests.profiler.signals import nothing_is_lost
from tests.representatives import each_value_once

MAKE = type[BrickProfiler]


class TroubleError(Exception):
    """An error of cbtop."""


class Device:
    """A device that works for some calls and fails in all later calls."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.clock = count(0, 10)

    def mark(self) -> int:
        return self._ask()

    def synchronize(self) -> None:
        self._ask()

    def time_ns(self, mark: object, /) -> int:
        self._ask()
        assert isinstance(mark, int)
        return mark

    def _ask(self) -> int:
        self.left -= 1
        if self.left < 0:
            raise TroubleError("the device is lost")
        return next(self.clock)


class FailingRecorder(Memory):
    def __init__(self, *what: str) -> None:
        super().__init__()
        self.what = what

    def record(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        if "record" in self.what:
            raise TroubleError("no record")
        super().record(tag, start_ns, end_ns, elements)

    def announce(self, message: Any) -> None:
        if "announce" in self.what:
            raise TroubleError("no catalog")
        super().announce(message)

    def close(self, reason: str) -> None:
        if "close" in self.what:
            raise TroubleError("no goodbye")


def _broken_clock(good: int) -> Callable[[], int]:
    left = iter(range(good))

    def clock_ns() -> int:
        try:
            return 10 * next(left)
        except StopIteration:
            raise TroubleError("the clock is gone") from None

    return clock_ns


def _step(profiler: BrickProfiler) -> None:
    with profiler.step("decode", tokens=1) as step, profiler.layer(0), profiler.brick(BrickId.RMS_NORM, 4):
        profiler.add_tokens(1)
        step.name = "prefill"
        step.start_ns = 0
        step.model = "draft"
        step.cancel()
    with profiler.step() as step:
        profiler.stop_brick(profiler.start_brick("a"), 1)
        step.name = "decode"


def _timed(profiler: BrickProfiler) -> None:
    assert profiler.timed("a", elements=lambda x: x.size)(lambda x: x + 1)(1) == 2


ACTIVATION = BrickDefinition.of(BrickId.ACTIVATION, kernels=(KernelDefinition("k", "cpu"),))
CHECKED = BrickDefinition.of(BrickId.ACTIVATION, checks=(Finite(),))

# All public names of a profiler. Each function uses one public name as a program would.
USES: dict[str, Callable[[BrickProfiler], object]] = {
    "start_brick": lambda p: p.stop_brick(p.start_brick("a"), 1),
    "stop_brick": lambda p: p.stop_brick(p.start_brick("b"), 1, failed=True),
    "brick": lambda p: p.brick(ACTIVATION).__enter__(),
    "layer": lambda p: p.layer(3, "encoder").__enter__(),
    "step": _step,
    "timed": _timed,
    "add_tokens": _step,
    "adopt": lambda p: p.adopt(p.place()).__enter__(),
    "announce": lambda p: p.announce(Activity("busy")),
    "check": lambda p: p.check(CHECKED, 1.0),
    "category_stats": lambda p: p.category_stats(),
    "disable": lambda p: p.disable(),
    "elapsed_ns": lambda p: p.elapsed_ns(),
    "enable": lambda p: p.enable(),
    "enable_graph": lambda p: p.enable_graph(),
    "enabled": lambda p: p.enabled,
    "execution_graph": lambda p: p.execution_graph(),
    "finalize": lambda p: p.finalize(),
    "graph": lambda p: p.graph,
    "graph_add_dependency": lambda p: p.graph_add_dependency(
        p.graph_record_brick("x", 1), p.graph_record_brick("y", 1)
    ),
    "graph_is_scope_balanced": lambda p: p.graph_is_scope_balanced,
    "graph_pop_scope": lambda p: (p.graph_push_scope(Layer(1)), p.graph_pop_scope()),
    "graph_push_scope": lambda p: p.graph_push_scope(Layer(0)),
    "graph_record_brick": lambda p: p.graph_record_brick("c", 10),
    "graph_record_kernel": lambda p: p.graph_record_kernel("gemv", 1, (1, 1, 1), (1, 1, 1), duration_ns=4),
    "graph_record_poll": lambda p: p.graph_record_poll("copy", 3, is_done=True),
    "graph_record_transfer": lambda p: p.graph_record_transfer("a", "b", 4, TransferDirection.H2D, 5),
    "graph_to_dot": lambda p: p.graph_to_dot(),
    "implementation": lambda p: p.implementation,
    "parts": lambda p: p.parts,
    "pending_count": lambda p: p.pending_count,
    "place": lambda p: p.place(),
    "record_deferred": lambda p: p.record_deferred("d", 0),
    "record_elapsed": lambda p: p.record_elapsed("e", 3),
    "recording": lambda p: p.recording,
    "report": lambda p: str(p.report()),
    "reset": lambda p: p.reset(),
    "reset_epoch": lambda p: p.reset_epoch(),
    "sample_every": lambda p: p.sample_every,
    "set_sync_mode": lambda p: p.set_sync_mode(SyncMode.IMMEDIATE),
    "stats": lambda p: p.stats,
    "stats_for": lambda p: p.stats_for("a"),
    "sync_mode": lambda p: p.sync_mode,
    "tokens_per_sec": lambda p: p.tokens_per_sec,
    "total_ns": lambda p: p.total_ns,
    "total_tokens": lambda p: p.total_tokens,
    "close": lambda p: p.close(),
}
NOT_RECORDING = {"serve"}  # `serve` starts a process, so tests/integration/test_sidecar.py tests it.


def test_every_public_name_is_used_below(profiler_module: ModuleType) -> None:
    profiler = profiler_module.BrickProfiler(recorder=Memory())
    assert {name for name in dir(profiler) if not name.startswith("_")} == set(USES) | NOT_RECORDING


@contextmanager
def _nothing_of_ours_warns_twice(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cbtop"):
        yield
    said = [message for message in caplog.messages if "Trouble" in message]
    assert len(said) == len(set(said))


TROUBLES: dict[str, Callable[[MAKE, Path], BrickProfiler]] = {
    **{
        f"clock after {good}": lambda make, path, good=good: make(recorder=Memory(), clock_ns=_broken_clock(good))  # type: ignore[misc]
        for good in range(8)
    },
    **{
        f"device after {good}": lambda make, path, good=good: make(recorder=Memory(), device_clock=Device(good))  # type: ignore[misc]
        for good in range(12)
    },
    **{
        f"recorder's {what}": lambda make, path, what=what: make(recorder=FailingRecorder(what))  # type: ignore[misc]
        for what in ("record", "announce", "close")
    },
    "no directory": lambda make, path: make(recorder=RingRecorder(path / "none" / "such")),
}


@pytest.mark.parametrize(
    ("trouble", "sync_mode"), each_value_once(product(TROUBLES, (SyncMode.DEFERRED, SyncMode.IMMEDIATE)))
)
def test_whatever_fails_in_turn_no_public_method_raises(
    make_either: MAKE, runtime: Path, trouble: str, sync_mode: SyncMode, caplog: pytest.LogCaptureFixture
) -> None:
    for first in USES:  # In each round, another use of the profiler is the first to fail.
        profiler = TROUBLES[trouble](make_either, runtime)
        profiler.set_sync_mode(sync_mode)
        with _nothing_of_ours_warns_twice(caplog):
            for name in (first, *USES):
                if name in READS_BACK and not isinstance(profiler.parts.recorder, RingRecorder):
                    continue
                USES[name](profiler)


READS_BACK = {
    "category_stats",
    "execution_graph",
    "graph_to_dot",
    "report",
    "stats_for",
    "tokens_per_sec",
    "total_ns",
    "total_tokens",
}


@pytest.fixture
def make_either(profiler_module: ModuleType) -> MAKE:
    made: MAKE = profiler_module.BrickProfiler
    return made


# A program for a new process. A fork of the test process would call the clocks of all profilers that still exist.
INTERRUPTED = """
import sys
from cbtop.profiler.profiler import BrickProfiler
from tests.profiler.memory import Memory
from tests.profiler.test_host_contract import USES

def interrupted():
    raise KeyboardInterrupt

profiler = BrickProfiler(recorder=Memory(), clock_ns=interrupted)
for name in sys.argv[1:]:
    try:
        USES[name](profiler)
    except KeyboardInterrupt:
        print(name)
"""


def test_an_interrupt_in_a_clock_reaches_the_host(implementation: str) -> None:
    names = ["start_brick", "brick", "step", "elapsed_ns", "record_elapsed"]
    command = [sys.executable, "-c", INTERRUPTED, *names]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr, done.returncode) == (names, "", 0), implementation


def test_a_clock_that_fails_ends_the_recording_and_says_so_once(
    make_either: MAKE, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    profiler = make_either(recorder=memory, clock_ns=_broken_clock(3))
    for _ in range(5):
        with profiler.brick("a"):
            pass
    assert (len(memory.records), profiler.recording) == (1, False)
    (said,) = caplog.messages
    assert "nothing is recorded from here on" in said
    assert "the clock is gone" in said


def test_what_a_lost_device_keeps_is_counted_as_lost(make_either: MAKE, runtime: Path) -> None:
    # The device fails after it has marked three bricks. So it also fails when the profiler waits for these bricks.
    device = Device(6)
    profiler = make_either(recorder=RingRecorder(runtime), device_clock=device)
    for _ in range(3):
        with profiler.brick("a"):
            pass
    profiler.finalize()
    report = profiler.report()
    assert (report.bricks, report.rejected, profiler.pending_count, profiler.recording) == ((), 3, 0, False)


def test_at_exit_what_waits_for_the_device_is_recorded(implementation: str, runtime: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from cbtop.profiler.profiler import BrickProfiler; from cbtop.profiler.recorder import RingRecorder\n"
        "from cbtop.profiler.clocks import HostClock\n"
        "p = BrickProfiler(recorder=RingRecorder(Path(sys.argv[1])), device_clock=HostClock())\n"
        "p.announce(__import__('cbtop.protocol.messages', fromlist=['Activity']).Activity('x'))\n"
        "for _ in range(5):\n"
        "    with p.brick('a'): pass\n"
    )
    subprocess.run([sys.executable, "-c", script, str(runtime)], check=True)
    from cbtop.protocol.ring_reader import RingReader

    (ring,) = runtime.glob("*.ring")
    assert RingReader(ring).read(final=True).node.tolist() == [1] * 5


def _raise_in_a_handler(*_: object) -> None:
    raise TimeoutError("the host's own")


def _handler_that_wants_neither(number: int, frame: object) -> None:
    del number, frame
    _raise_in_a_handler()


class _Handlers:
    def method(self, number: int, frame: object) -> None:
        del self, frame
        _raise_in_a_handler()

    def __call__(self, number: int, *_: object) -> None:
        _raise_in_a_handler()


HANDLERS: dict[str, Callable[[int, Any], object]] = {
    "function": lambda number, frame: _raise_in_a_handler(),
    "with *arguments": _raise_in_a_handler,
    "partial": functools.partial(lambda _, number, frame: _raise_in_a_handler(), "x"),
    "that deletes its arguments": _handler_that_wants_neither,
    "with a number and *arguments": lambda number, *_: _raise_in_a_handler(),
    "method": _Handlers().method,
    "object": _Handlers(),
    "partial that deletes its arguments": functools.partial(_handler_that_wants_neither),
}


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("after", range(7))
def test_a_signal_handlers_error_reaches_the_host_and_recording_goes_on(
    make_either: MAKE, handler: str, after: int
) -> None:
    memory, left = Memory(), iter(range(after))

    # The program owns this clock and cbtop calls it, so a signal can arrive in the middle of cbtop.
    def clock_ns() -> int:
        if next(left, None) is None and next(once, None) is not None:
            signal.raise_signal(signal.SIGUSR1)
        return next(ticks)

    once, ticks = iter([True]), count(0, 10)
    profiler = make_either(recorder=memory, clock_ns=clock_ns)
    before = signal.signal(signal.SIGUSR1, HANDLERS[handler])
    try:
        with pytest.raises(TimeoutError, match="own"):  # noqa: PT012 - the signal may arrive anywhere
            with profiler.step("decode", 1), profiler.brick("a"):
                profiler.stop_brick(profiler.start_brick("b"), 1)
                profiler.record_elapsed("c", 1)
            for _ in range(9):
                profiler.elapsed_ns()
    finally:
        signal.signal(signal.SIGUSR1, before)
    recorded = len(memory.records)
    with profiler.step("decode", 1), profiler.brick("a"):
        pass
    assert len(memory.records) >= recorded + 2


def test_what_a_signal_handler_raises_as_steps_begin_and_end_is_never_lost(make_either: MAKE) -> None:
    profiler = make_either(recorder=Memory())
    for at in count():

        def use() -> None:
            for _ in range(2):
                with profiler.step("decode", 1):
                    pass

        if not nothing_is_lost(use, TimeoutError, at):
            break
    assert profiler.recording


def test_no_signal_in_the_middle_of_finalize_ends_the_recording(make_either: MAKE) -> None:
    """In the middle of finalize, a signal handler raises, finalizes, restarts or records a step."""
    for handle in (_raise_in_a_handler, BrickProfiler.finalize, BrickProfiler.reset, _step):
        memory = Memory()
        profiler = make_either(recorder=memory)
        ready = True

        def record(
            tag: int, start_ns: int, end_ns: int, elements: int, handle: Any = handle, profiler: Any = profiler
        ) -> None:
            nonlocal ready
            if ready:
                ready = False
                signal.raise_signal(signal.SIGUSR1)

        memory.record = record  # type: ignore[method-assign]
        before = signal.signal(signal.SIGUSR1, lambda *_, handle=handle, profiler=profiler: handle(profiler))
        for _ in range(5):
            profiler.record_deferred("d", 0)
        try:
            profiler.finalize()
        except TimeoutError:
            assert handle is _raise_in_a_handler
        finally:
            signal.signal(signal.SIGUSR1, before)
        profiler.finalize()
        assert (profiler.recording, profiler.pending_count) == (True, 0), handle


ABSURD = [1 << 62, -(1 << 62), 1 << 64, "now", 1.5, None]


@pytest.mark.parametrize("time_ns", ABSURD)
def test_a_time_that_cannot_be_meant_is_refused_and_recording_goes_on(make_either: MAKE, time_ns: Any) -> None:
    memory = Memory()
    profiler = make_either(recorder=memory)
    with pytest.raises(ValueError, match=r"a start of .*(146 years|nanoseconds)"):
        profiler.record_deferred("a", time_ns)
    if time_ns is not None:
        with pytest.raises(ValueError, match=r"an end of .*(146 years|nanoseconds)"):
            profiler.record_deferred("a", 0, end_ns=time_ns)
    profiler.record_deferred("a", 0, end_ns=1)
    profiler.finalize()
    assert (len(memory.records), profiler.recording) == (1, True)


def test_a_deferred_brick_that_ends_before_it_begins_is_counted_as_rejected(make_either: MAKE, runtime: Path) -> None:
    profiler = make_either(recorder=RingRecorder(runtime))
    while profiler.elapsed_ns() < 20:
        pass
    for start_ns, end_ns in ((5, 0), (20, 10), (1, 2)):
        profiler.record_deferred("a", start_ns, end_ns=end_ns)
    profiler.finalize()
    report = profiler.report()
    assert (report.rejected, report.bricks[0].calls.count, profiler.recording) == (2, 1, True)


NAMELESS: dict[str, Callable[[BrickProfiler, Any], object]] = {
    "step": lambda p, name: p.step(name),
    "a step's model": lambda p, name: p.step("decode", model=name),
    "record_elapsed": lambda p, name: p.record_elapsed(name, 1),
    "record_deferred": lambda p, name: p.record_deferred(name, 0),
    "graph_push_scope": lambda p, name: p.graph_push_scope(Layer(name)),
    "graph_record_brick": lambda p, name: p.graph_record_brick(name, 1),
    "graph_record_kernel": lambda p, name: p.graph_record_kernel(name),
    "graph_record_transfer": lambda p, name: p.graph_record_transfer(name, "b", 1, TransferDirection.H2D),
    "graph_record_poll": lambda p, name: p.graph_record_poll(name, 1, is_done=True),
    "graph_add_dependency": lambda p, name: p.graph_add_dependency(name, 1),
    "step.name": lambda p, name: setattr(p.step("decode").__enter__(), "name", name),
    "step.model": lambda p, name: setattr(p.step("decode").__enter__(), "model", name),
}


@pytest.mark.parametrize("use", NAMELESS)
def test_what_can_name_nothing_is_refused_and_recording_goes_on(make_either: MAKE, use: str) -> None:
    profiler = make_either(recorder=Memory())
    with pytest.raises(ValueError, match="names no"):
        NAMELESS[use](profiler, ["a"])
    assert profiler.recording


def test_a_recording_that_ends_early_is_over_for_every_viewer_and_is_said(
    make_either: MAKE, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = make_either(recorder=RingRecorder(runtime), clock_ns=_broken_clock(6))
    for _ in range(5):
        with profiler.step("decode", 1), profiler.brick("a"):
            pass
    (ring,) = runtime.glob("*.ring")
    source = Source(ring)
    source.poll()
    assert (source.state, source.reason) == ("ended", "recording ended: TroubleError: the clock is gone")
    source.close()
    assert "recording has ended: TroubleError: the clock is gone" in str(profiler.report())
    assert (profiler.recording, len(caplog.messages)) == (False, 1)


def test_a_recording_that_ended_early_continues_as_a_new_one_when_enabled(make_either: MAKE, runtime: Path) -> None:
    fails = False

    def clock_ns() -> int:
        if fails:
            raise TroubleError("the clock is gone")
        return next(ticks)

    ticks = count()
    profiler = make_either(recorder=RingRecorder(runtime), clock_ns=clock_ns)
    for fails in (False, True, False):
        if not fails:
            profiler.enable()
        with profiler.brick("a"):
            pass
    assert profiler.recording
    found = profiler.stats_for("a")
    assert found is not None
    assert found.calls.count >= 1
    assert len(list(runtime.glob("*.ring"))) == 2


def test_nothing_is_recorded_if_no_file_can_be_opened_and_a_child_retries(make_either: MAKE, runtime: Path) -> None:
    profiler = make_either(recorder=RingRecorder(runtime / "none" / "such"))
    with profiler.step("decode", 1):
        pass
    assert not profiler.recording
    assert "recording has ended" in str(profiler.report())
    profiler._after_fork()  # Call this function as a forked child would.
    assert profiler.recording


@of_either
@pytest.mark.parametrize("raised", [TimeoutError, ValueError])
def test_a_signal_while_files_open_reaches_the_host_and_recording_goes_on(
    make_either: MAKE, runtime: Path, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A record that a signal has interrupted counts as lost at once.
    monkeypatch.setattr(ring_reader, "ABANDONED_AFTER_S", 0.0)
    # Only every 22nd position of the signal is tested, because a test of all positions would take too long.
    for at in count(0 if raised is TimeoutError else 11, 22):
        profiler = make_either(recorder=RingRecorder(runtime, 1 << 12))

        def use(profiler: BrickProfiler = profiler) -> None:
            for number in range(2):
                with profiler.step("decode", 1), profiler.layer(0), profiler.brick(f"a{number}"):
                    profiler.record_deferred("d", 0)
                profiler.finalize()
                profiler.announce(Activity("busy"))
            profiler.report()

        where = nothing_is_lost(use, raised, at)
        with profiler.step("after", 1), profiler.brick("b"):
            pass
        assert profiler.recording
        found = profiler.stats_for("b")
        assert found is not None, where
        assert found.calls.count == 1, where
        rings = list(runtime.glob("*.ring"))
        assert len(rings) == 1, where
        source = Source(rings[0])
        source.poll()
        assert (source.state, source.reason) == ("live", ""), where
        source.close()
        profiler.close()
        for path in runtime.iterdir():
            path.unlink()
        if not where:
            break
