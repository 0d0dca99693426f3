"""Tests of the hot path (the code that records a brick), in Python and in C: both write the same records.

The cost is known. The hot path does not crash, whatever a program does.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.profiler.hot_path import BrickTimer
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.codec import EncodedNode
from cbtop.protocol.messages import CatalogMessage
from cbtop.protocol.ring import FLAG_FAILED, FLAG_UNCOUNTED, NO_NODE, RECORD_BYTES, SEQUENCE_MASK, SLOTS, RingWriter
from cbtop.protocol.ring_reader import InFlight, RingReader
from cbtop.protocol.vocabulary import BrickCategory, BrickId
from tests.profiler.memory import Memory

MAKE = type[BrickProfiler]


@pytest.fixture
def make(profiler_module: ModuleType) -> MAKE:
    made: MAKE = profiler_module.BrickProfiler
    return made


@pytest.fixture
def profiler(make: MAKE, runtime: Path) -> BrickProfiler:
    return make(recorder=RingRecorder(runtime))


class Untrue:
    """An object without a truth value, like a tensor with several elements."""

    def __bool__(self) -> bool:
        raise AssertionError("it was asked")


class NoFiles:
    """A recorder that opens no files. The test attaches a ring itself."""

    def record(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        raise AssertionError("it has a ring")

    def announce(self, message: CatalogMessage) -> None: ...

    def announce_nodes(self, nodes: Sequence[EncodedNode]) -> None: ...

    def flush(self) -> None: ...

    def close(self, reason: str) -> None: ...


def reader_in(directory: Path) -> RingReader:
    (ring,) = directory.glob("*.ring")
    return RingReader(ring)


def test_f101_there_are_fifteen_bricks() -> None:
    assert [brick.value for brick in BrickId] == list(range(15))


def test_f102_every_brick_has_its_category() -> None:
    of = {category: [brick.name for brick in BrickId if brick.category is category] for category in BrickCategory}
    assert of == {
        BrickCategory.NORM: ["RMS_NORM", "LAYER_NORM"],
        BrickCategory.ATTENTION: [
            "QKV_PROJECTION",
            "ROPE_EMBEDDING",
            "ATTENTION_SCORE",
            "ATTENTION_SOFTMAX",
            "ATTENTION_OUTPUT",
            "OUTPUT_PROJECTION",
        ],
        BrickCategory.FFN: ["GATE_PROJECTION", "UP_PROJECTION", "ACTIVATION", "DOWN_PROJECTION"],
        BrickCategory.OTHER: ["EMBEDDING", "LM_HEAD", "SAMPLING"],
        # Collective operations are not in the enumeration. They have their own names.
        BrickCategory.COMMUNICATION: [],
    }


def test_announcing_a_node_counts_in_the_enclosing_times_and_not_its_own(make: MAKE) -> None:
    now_ns = [0]

    class Slow(Memory):
        def announce_nodes(self, nodes: Sequence[EncodedNode]) -> None:
            super().announce_nodes(nodes)
            # Each announcement of nodes takes another power of ten, so that a sum shows which of them it contains.
            now_ns[0] += 10 ** len(self.said)

    profiler = make(clock_ns=lambda: now_ns[0], recorder=(slow := Slow()))
    for _ in range(2):
        with profiler.step("decode", 1), profiler.layer(0), profiler.brick("outer"), profiler.brick("inner"):
            now_ns[0] += 1
    took_ns = [(tag & 0xFFFFFF, end_ns - start_ns) for tag, start_ns, end_ns, _ in slow.records]
    assert took_ns == [(4, 1), (3, 10_001), (2, 11_001), (1, 11_101), (4, 1), (3, 1), (2, 1), (1, 1)]
    with profiler.step(tokens=1) as step, profiler.layer(0), profiler.brick("outer"):
        now_ns[0] += 1
        step.name = "named late"  # This step gets its name only at its end, after its layer and brick were recorded.
    assert [end_ns - start_ns for _, start_ns, end_ns, _ in slow.records[8:]] == [1, 1, 1]


def test_f105_a_disabled_pair_reads_no_clock_and_makes_nothing(make: MAKE) -> None:
    clock, memory = itertools.count(), Memory()
    profiler = make(enabled=False, clock_ns=clock.__next__, recorder=memory)
    for _ in range(3):
        assert profiler.start_brick(BrickId.RMS_NORM) is None
        profiler.stop_brick(None, 1)
        with profiler.brick(BrickId.RMS_NORM):
            pass
    assert (next(clock), memory.said, memory.records) == (0, [], [])
    sampled_out = make(sample_every=1 << 40, clock_ns=clock.__next__, recorder=memory)
    with sampled_out.step("decode", 1):
        pass
    with sampled_out.step("decode", 1):
        recorded, so_far = len(memory.records), next(clock)
        timer = sampled_out.start_brick(BrickId.RMS_NORM)
        sampled_out.stop_brick(timer, 1)
        assert (timer, len(memory.records), next(clock)) == (None, recorded, so_far + 1)
    # The only further record is the record of the step as a whole.
    assert (len(memory.records), next(clock)) == (recorded + 1, so_far + 3)


class CountedKey:
    """A key of a brick. It counts how often it is compared and hashed."""

    asked = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        type(self).asked += 1
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        type(self).asked += 1
        return isinstance(other, CountedKey) and self.number == other.number


def test_f106_finding_a_brick_takes_as_many_steps_among_many(make: MAKE) -> None:
    def asked_among(nodes: int) -> int:
        profiler = make(recorder=Memory())
        keys = [CountedKey(number) for number in range(nodes)]
        for key in keys:
            profiler.stop_brick(profiler.start_brick(key), 1)
        CountedKey.asked = 0
        profiler.stop_brick(profiler.start_brick(keys[nodes // 2]), 1)
        return CountedKey.asked

    assert asked_among(4) == asked_among(4000)


def test_f107_eight_threads_record_at_once_and_lose_nothing(profiler: BrickProfiler, runtime: Path) -> None:
    each, begin = 3000, threading.Barrier(8)

    def run(thread: int) -> None:
        begin.wait()
        with profiler.layer(thread):
            for number in range(each):
                with profiler.brick(BrickId.ACTIVATION, 1000 * number + thread):
                    pass
                profiler.stop_brick(profiler.start_brick(BrickId.SAMPLING), thread)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batch = reader_in(runtime).read()
    assert (len(batch.node), batch.overwritten) == (8 * (2 * each + 1), 0)
    assert (batch.end_ns >= batch.start_ns).all()
    found: dict[int, list[int]] = {}
    for node, elements in zip(batch.node.tolist(), batch.elements.tolist(), strict=True):
        found.setdefault(node, []).append(elements)
    assert len(found) == 24
    activations = [elements for elements in found.values() if len(elements) == each and len(set(elements)) == each]
    assert sorted(tuple(a) for a in activations) == [tuple(range(t, 1000 * each, 1000)) for t in range(8)]


def test_f108_a_timer_is_no_larger_than_32_bytes(profiler: BrickProfiler) -> None:
    timer = profiler.start_brick(BrickId.RMS_NORM)
    # The header of a Python object is not counted, because every object has one.
    assert timer.__sizeof__() - object().__sizeof__() <= 32


def test_f109_elapsed_time_never_goes_back(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    elapsed = [profiler.elapsed_ns() for _ in range(100)]
    assert elapsed == sorted(elapsed)
    fake = make(clock_ns=count(100, 50).__next__, recorder=RingRecorder(runtime))
    assert [fake.elapsed_ns(), fake.elapsed_ns()] == [0, 50]
    fake.reset_epoch()
    assert fake.elapsed_ns() == 50


@pytest.mark.parametrize("first", [0, 3, SEQUENCE_MASK - 20, (SEQUENCE_MASK << 1) - 3])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bursts=st.lists(st.integers(0, 40), max_size=8))
def test_records_are_read_once_in_order_or_counted_even_if_numbers_wrap(
    make: MAKE, runtime: Path, first: int, bursts: list[int]
) -> None:
    path = runtime / f"1-{time.time_ns()}-0.ring"
    profiler = make(clock_ns=count().__next__, recorder=NoFiles())
    profiler.parts.paths.host.attach(RingWriter(path, 8 * RECORD_BYTES, first))
    reader = RingReader(path)
    begun = reader.read(final=True)
    assert (len(begun.node), reader.read_to, reader.produced) == (0, first, first)
    seen = lost = written = 0
    for burst in bursts:
        for _ in range(burst):
            with profiler.brick("a", written):
                pass
            written += 1
        batch = reader.read()
        lost += batch.overwritten
        assert batch.elements.tolist() == list(range(seen + lost, written))
        seen += len(batch.node)
        assert seen + lost == written == reader.produced - first
    path.unlink()


def test_the_pair_the_with_form_and_the_recorder_write_into_one_count(profiler: BrickProfiler, runtime: Path) -> None:
    with profiler.brick("a", 1):
        pass
    profiler.stop_brick(profiler.start_brick("a"), 2)
    profiler.stop_brick(profiler.start_brick("a"), elements=3, failed=True)
    profiler.parts.recorder.record(1, 5, 6, 4)
    with profiler.brick("a") as span:
        span.elements = 5
    batch = reader_in(runtime).read()
    assert batch.elements.tolist() == [1, 2, 3, 4, 5]
    assert batch.flags.tolist() == [0, 0, FLAG_FAILED, 0, 0]
    assert batch.node.tolist() == [1] * 5


def test_a_killed_process_loses_no_complete_record(implementation: str, runtime: Path) -> None:
    script = (
        "from cbtop import BrickProfiler\n"
        "p = BrickProfiler(); n = 0\n"
        "while True:\n"
        "    with p.brick('a', n): n += 1\n"
        "    if n == 1000: print('go', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    reader = reader_in(runtime)
    batch = reader.read(final=True)
    assert reader.produced == len(batch.node) + batch.overwritten >= 1000
    # At most one record, the last one, is incomplete.
    first = int(batch.elements[0])
    assert batch.elements.tolist() == list(range(first, first + len(batch.node)))
    assert batch.overwritten in (first, first + 1)
    # The brick of this record has ended, so it must not be reported as running.
    flights = reader.in_flight()
    assert len(flights) <= (1 if implementation == "compiled" else 0)
    assert not {flight.start_ns for flight in flights} & set(batch.start_ns.tolist())


# Only the compiled hot path writes the current node of a thread into the ring.
@pytest.mark.parametrize("implementation", ["compiled"], indirect=True)
class TestInFlight:
    """The ring contains the current node of every thread, even after the process has died."""

    @pytest.fixture
    def in_flight(self, implementation: str, runtime: Path) -> Callable[[], dict[int, InFlight]]:
        return lambda: {flight.thread_id: flight for flight in reader_in(runtime).in_flight()}

    def test_a_killed_process_was_in_these_bricks(
        self, in_flight: Callable[[], dict[int, InFlight]], runtime: Path
    ) -> None:
        script = (
            "import sys, threading, time\n"
            "from cbtop import BrickProfiler\n"
            "p = BrickProfiler(); lock = threading.Barrier(5)\n"
            "def say(n):\n"
            "    node = p._path.position.scope.node\n"
            "    line = f'{threading.get_native_id()} {n} {node} {time.perf_counter_ns()}\\n'\n"
            "    sys.stdout.write(line); sys.stdout.flush()\n"
            "def run(n):\n"
            "    with p.step('decode', 1), p.layer(n):\n"
            "        for _ in range(10 * n):\n"
            "            with p.brick('before'): pass\n"
            "        if n != 3: p.start_brick(f'stuck {n}')\n"
            "        lock.wait(); say(n); time.sleep(100)\n"
            "for n in range(4): threading.Thread(target=run, args=(n,), daemon=True).start()\n"
            "p.stop_brick(p.start_brick('main is through'), 1); lock.wait(); time.sleep(100)\n"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            said = [list(map(int, process.stdout.readline().split())) for _ in range(4)]
            process.send_signal(signal.SIGKILL)
        found = in_flight()
        assert {thread_id: flight.node for thread_id, flight in found.items()} == {t: node for t, _, node, _ in said}
        for thread_id, number, _, said_ns in said:
            start_ns = found[thread_id].start_ns
            if number == 3:  # This node is the layer. Its start is unknown, because bricks in it have ended.
                assert start_ns is None
            else:
                assert start_ns is not None
                assert said_ns - 60e9 < start_ns < said_ns
        ended = set(reader_in(runtime).read(final=True).node.tolist())
        assert not ended & {flight.node for flight in found.values()}

    def test_it_follows_every_start_and_stop(
        self, in_flight: Callable[[], dict[int, InFlight]], profiler: BrickProfiler
    ) -> None:
        me = threading.get_native_id()

        def here() -> tuple[int, bool]:
            found = in_flight()
            return (found[me].node, found[me].start_ns is not None) if me in found else (NO_NODE, False)

        with profiler.layer(0):
            assert here() == (1, True)
            outer = profiler.start_brick("outer")
            inner = profiler.start_brick("inner")
            assert here() == (3, True)
            profiler.stop_brick(inner, 1)
            assert here() == (2, False)
            profiler.disable()
            assert here() == (2, False)
            # The end of this brick is not recorded. Nevertheless the thread is no longer in the brick.
            profiler.stop_brick(outer, 1)
            assert here() == (1, False)
        assert here() == (NO_NODE, False)
        profiler.enable()
        profiler.start_brick("outer")
        assert here() == (4, True)
        profiler.close()
        assert here() == (NO_NODE, False)

    def test_a_step_that_is_not_recorded_is_shown_with_its_tokens_while_it_runs(
        self, in_flight: Callable[[], dict[int, InFlight]], profiler: BrickProfiler
    ) -> None:
        me = threading.get_native_id()
        profiler.parts.steps.is_sampled = lambda key: False

        def here() -> tuple[int, int]:
            found = in_flight()
            return (found[me].node, found[me].size) if me in found else (NO_NODE, 0)

        # The name of this step is new, so the step has no node yet.
        with profiler.step("decode", 3):
            pass
        with profiler.step("decode", 48_000), profiler.brick("not recorded"):
            assert here() == (1, 48_000)
            assert in_flight()[me].start_ns is not None
        assert here() == (NO_NODE, 0)
        # Steps may be inside a step, as if an agent calls another model in its own step.
        with profiler.step("decode", 5):
            begins = []
            for _ in range(3):
                with profiler.step("inner", 1), profiler.step("innermost", 1):
                    assert here() == (1, 5)
                    begins.append(in_flight()[me].start_ns)
        assert len(set(begins)) == 3
        with profiler.brick("a server's loop"):
            assert here()[0] == 2
            with profiler.step("decode", -1):
                assert here() == (1, 0)
            # None of these values is a number. No method of these values may be called.
            for tokens in (1 << 70, "many", [1], True, None, Untrue()):
                with profiler.step("decode", cast(int, tokens)):
                    assert here() == (1, 0)
            with contextlib.suppress(RuntimeError), profiler.step("decode", 5):
                raise RuntimeError
            assert here() == (2, 0)
        profiler.parts.steps.is_sampled = lambda key: True
        with profiler.step("decode", 7), profiler.brick("recorded"):
            assert here() == (4, 7)

    def test_an_ended_threads_slot_is_reused_and_threads_beyond_the_slots_run_on(
        self, in_flight: Callable[[], dict[int, InFlight]], profiler: BrickProfiler
    ) -> None:
        def run(ready: threading.Barrier, go: threading.Event) -> None:
            with profiler.brick("a"):
                ready.wait()
                go.wait()

        for many in (SLOTS + 5, 10):
            ready, go = threading.Barrier(many + 1), threading.Event()
            threads = [threading.Thread(target=run, args=(ready, go)) for _ in range(many)]
            for thread in threads:
                thread.start()
            ready.wait()
            found = in_flight()
            assert len(found) == min(many, SLOTS)
            assert set(found) <= {thread.native_id for thread in threads}
            go.set()
            for thread in threads:
                thread.join()
            assert in_flight() == {}

    def test_a_forked_child_reports_its_own_place_and_keeps_its_parents_slots(
        self, in_flight: Callable[[], dict[int, InFlight]], runtime: Path
    ) -> None:
        script = (
            "import os, signal, threading\n"
            "from cbtop import BrickProfiler\n"
            "p = BrickProfiler(); running = threading.Event()\n"
            "def run():\n"
            "    p.start_brick('beside'); running.set(); threading.Event().wait()\n"
            "threading.Thread(target=run, daemon=True).start(); running.wait()\n"
            "p.start_brick('in the parent')\n"
            "receive, send = os.pipe()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    p.start_brick('in the child'); os.write(send, b'x'); signal.pause(); os._exit(1)\n"
            "os.read(receive, 1); os.kill(child, signal.SIGKILL); os.waitpid(child, 0)\n"
            "print(child, flush=True); signal.pause()\n"
        )
        command = [sys.executable, "-W", "ignore", "-c", script]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            child = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
        (of_child,) = runtime.glob(f"{child}-*.ring")
        (flight,) = RingReader(of_child).in_flight()
        assert (flight.thread_id, flight.node) == (child, 3)
        of_child.unlink()
        found = in_flight()
        assert found[process.pid].node == 2
        assert sorted(flight.node for flight in found.values()) == [1, 2]


class Index:
    def __index__(self) -> int:
        return 7


NO_COUNTS = [3.5, None, "4", 1 << 63, -(1 << 63) - 1, -1, object(), [].append]


@pytest.mark.parametrize("elements", NO_COUNTS)
def test_elements_that_are_no_count_are_said_once_and_the_call_is_timed(
    profiler: BrickProfiler, runtime: Path, elements: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with profiler.brick("a", elements):
        pass
    profiler.stop_brick(profiler.start_brick("a"), elements)
    with profiler.brick("a", Index()):  # type: ignore[arg-type]
        pass
    with profiler.brick("a", (1 << 63) - 1):
        pass
    batch = reader_in(runtime).read()
    assert batch.node.tolist() == [1] * 4
    assert batch.flags.tolist() == [FLAG_UNCOUNTED, FLAG_UNCOUNTED, 0, 0]
    assert batch.elements.tolist() == [0, 0, 7, (1 << 63) - 1]
    assert ((batch.end_ns > batch.start_ns) & (batch.start_ns > 0)).all()
    assert len(caplog.messages) == 1
    assert type(elements).__name__ in caplog.text


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __index__(self) -> int:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("odd"), RuntimeError("device lost"), OverflowError(), StopIteration()])
def test_elements_whose_index_raises_cost_neither_the_record_nor_the_host(
    profiler: BrickProfiler, runtime: Path, error: Exception
) -> None:
    elements: Any = Raising(error)
    profiler.stop_brick(profiler.start_brick("a"), 1)
    with profiler.brick("a", elements):
        pass
    profiler.stop_brick(profiler.start_brick("a"), elements)
    profiler.parts.recorder.record(1, 2, 3, elements)
    assert profiler.parts.paths.own.position.scope.node == NO_NODE
    batch = reader_in(runtime).read()
    assert (batch.node.tolist(), batch.overwritten) == ([1] * 4, 0)
    assert batch.flags.tolist() == [0] + [FLAG_UNCOUNTED] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_elements_are_asked_for_is_raised_and_recorded(
    profiler: BrickProfiler, runtime: Path, error: type[BaseException]
) -> None:
    elements: Any = Raising(error())
    profiler.stop_brick(profiler.start_brick("a"), 1)
    with pytest.raises(error):
        profiler.stop_brick(profiler.start_brick("a"), elements)
    with pytest.raises(error), profiler.brick("a", elements):
        pass
    with pytest.raises(error):
        profiler.parts.recorder.record(1, 2, 3, elements)
    assert profiler.parts.paths.own.position.scope.node == NO_NODE
    batch = reader_in(runtime).read()
    assert (batch.node.tolist(), batch.overwritten) == ([1] * 4, 0)


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()])
def test_elements_that_raise_where_a_lap_begins_harm_no_other_record(
    make: MAKE, runtime: Path, error: BaseException
) -> None:
    path = runtime / "1-2-0.ring"
    profiler = make(clock_ns=count().__next__, recorder=NoFiles())
    profiler.parts.paths.host.attach(RingWriter(path, 8 * RECORD_BYTES))
    reader = RingReader(path)
    elements: Any = Raising(error)
    for lap in range(3):
        with contextlib.nullcontext() if isinstance(error, Exception) else pytest.raises(KeyboardInterrupt):
            profiler.stop_brick(profiler.start_brick("a"), elements)
        for number in range(1, 8):
            profiler.stop_brick(profiler.start_brick("a"), number)
        assert reader.produced == 8 * (lap + 1)
        batch = reader.read()
        assert (batch.elements.tolist(), batch.overwritten) == (list(range(8)), 0)
        assert batch.flags.tolist() == [FLAG_UNCOUNTED] + [0] * 7
        assert batch.node.tolist() == [profiler.parts.paths.own.position.scope.children["a"].node] * 8


def test_arguments_have_the_same_names(profiler: BrickProfiler, runtime: Path) -> None:
    profiler.stop_brick(timer=profiler.start_brick("a"), elements=1, failed=False)
    profiler.stop_brick(failed=True, elements=2, timer=profiler.start_brick("a"))
    with profiler.brick(brick="a", elements=3):
        pass
    wrong: list[Callable[..., object]] = [
        lambda: profiler.start_brick(brick="a"),  # type: ignore[call-arg]
        lambda: profiler.layer(),
        lambda: profiler.parts.paths.own.set_recording(on=True),  # type: ignore[call-arg]
        lambda: profiler.parts.paths.host.attach(ring=None),  # type: ignore[call-arg]
        lambda: profiler.brick(),  # type: ignore[call-arg]
        lambda: profiler.brick("a", 1, 2),  # type: ignore[call-arg]
        lambda: profiler.brick("a", brick="a"),  # type: ignore[misc]
        lambda: profiler.stop_brick(None, 1, timer=None),  # type: ignore[misc]
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()
    batch = reader_in(runtime).read()
    assert (batch.elements.tolist(), batch.flags.tolist()) == ([1, 2, 3], [0, FLAG_FAILED, 0])


def test_elements_that_close_the_profiler_as_they_are_asked_for_harm_nothing(
    profiler: BrickProfiler, runtime: Path
) -> None:
    class Closing:
        def __index__(self) -> int:
            profiler.close()
            return 1

    with profiler.brick("a", 1):
        pass
    with profiler.brick("a", Closing()):  # type: ignore[arg-type]
        pass
    assert reader_in(runtime).read(final=True).elements.tolist()[:1] == [1]


@pytest.mark.parametrize("timer", [3, "timer", object(), ()])
def test_what_is_no_timer_is_refused(profiler: BrickProfiler, timer: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        profiler.stop_brick(timer, 1)


def test_misuse_is_an_error_or_a_record_and_never_a_crash(profiler: BrickProfiler, make: MAKE, runtime: Path) -> None:
    timer = profiler.start_brick("a")
    profiler.stop_brick(timer, 1)
    profiler.stop_brick(timer, 2)  # a second stop
    for wrong in ((), (timer,), (timer, 1, False, 4)):
        with pytest.raises(TypeError):
            profiler.stop_brick(*wrong)
    with pytest.raises(TypeError):
        profiler.stop_brick(timer, 1, cost=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        profiler.brick("a", steps=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        profiler.start_brick([])  # type: ignore[arg-type]
    other = make(recorder=RingRecorder(runtime))
    other.stop_brick(timer, 3)  # a timer of another profiler
    with profiler.brick("b") as span:
        del timer
        gc.collect()
    span.__exit__(None, None, None)
    with profiler.brick("a"):
        pass
    with pytest.raises((TypeError, AttributeError)):
        profiler.parts.paths.host.attach(3)  # type: ignore[arg-type]


def test_a_stop_in_another_thread_is_recorded_and_moves_the_starting_thread(
    profiler: BrickProfiler, runtime: Path
) -> None:
    with profiler.layer(0):
        timer = profiler.start_brick("handed over")
        span = profiler.brick("span").__enter__()
        layer = profiler.parts.paths.own.position.scope.parent

        def run() -> None:
            # End the brick of the other thread inside a new brick at the same path.
            with profiler.layer(0), profiler.brick("handed over"):
                inside = profiler.parts.paths.own.position.scope
                span.__exit__(None, None, None)
                profiler.stop_brick(timer, 5)
                assert profiler.parts.paths.own.position.scope is inside
                with profiler.brick("inside"):
                    pass

        failures: list[threading.ExceptHookArgs] = []
        hook, threading.excepthook = threading.excepthook, failures.append
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        threading.excepthook = hook
        assert failures == []
        assert profiler.parts.paths.own.position.scope is layer.parent  # type: ignore[union-attr]
        with profiler.brick("next"):
            pass
    batch = reader_in(runtime).read()
    assert batch.node.tolist() == [3, 2, 4, 2, 1, 5, 1]
    assert batch.elements.tolist() == [1, 5, 1, 1, 1, 1, 1]


def test_bricks_that_end_out_of_order_leave_the_thread_above_both(profiler: BrickProfiler, runtime: Path) -> None:
    outer = profiler.start_brick("outer")
    inner = profiler.start_brick("inner")
    profiler.stop_brick(outer, 1)
    profiler.stop_brick(inner, 2)
    with profiler.brick("outer"):
        pass
    assert reader_in(runtime).read().node.tolist() == [1, 2, 1]


def test_a_thread_is_where_its_own_bricks_have_brought_it(profiler: BrickProfiler) -> None:
    root = profiler.parts.paths.own.position.scope
    assert (root.node, root.key, root.parent) == (NO_NODE, None, None)
    with profiler.layer(0), profiler.brick("a"):
        place = profiler.parts.paths.own.position.scope
        assert (place.node, place.key) == (2, "a")
        assert place.parent is root.children[profiler.parts.paths.own.position.scope.parent.key]  # type: ignore[union-attr]
        elsewhere: list[object] = []
        thread = threading.Thread(target=lambda: elsewhere.append(profiler.parts.paths.own.position.scope))
        thread.start()
        thread.join()
        assert elsewhere == [root]
    assert profiler.parts.paths.own.position.scope is root


def test_whether_it_records_follows_the_switch(profiler: BrickProfiler) -> None:
    assert profiler.recording is True
    profiler.disable()
    assert profiler.recording is False
    profiler.enable()
    assert profiler.recording is True
    with pytest.raises(AttributeError):
        profiler.recording = False  # type: ignore[misc]


def test_bricks_in_any_order_land_where_a_plain_tree_would_have_them(profiler: BrickProfiler, runtime: Path) -> None:
    # The names are equal strings but different objects, and their order changes.
    random_ = random.Random(7)
    expected: dict[tuple[str, ...], int] = {}
    written: list[tuple[str, ...]] = []

    def run(path: tuple[str, ...], depth: int) -> None:
        for _ in range(random_.randrange(1, 6)):
            name = "".join(random_.choice("ab") for _ in range(2))
            inner = (*path, name)
            with profiler.brick(name):
                expected.setdefault(inner, profiler.parts.paths.own.position.scope.node)
                assert profiler.parts.paths.own.position.scope.node == expected[inner]
                if depth:
                    run(inner, depth - 1)
            written.append(inner)

    for _ in range(40):
        run((), 3)
    assert len(set(expected.values())) == len(expected)
    assert reader_in(runtime).read().node.tolist() == [expected[path] for path in written]


def test_threads_come_and_go(profiler: BrickProfiler, runtime: Path) -> None:
    def run() -> None:
        with profiler.layer(1), profiler.brick("a"):
            pass

    for _ in range(50):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert sorted(reader_in(runtime).read().node.tolist()) == [1] * 50 + [2] * 50


def test_a_profiler_that_nobody_holds_is_collected_with_all_that_hangs_on_it(make: MAKE, runtime: Path) -> None:
    for closed in (True, False, False):
        profiler = make(recorder=RingRecorder(runtime))
        with profiler.step("decode", 1), profiler.layer(0):
            profiler.start_brick("a")
        profiler.mine = profiler.brick("b")  # type: ignore[attr-defined]
        if closed:
            profiler.close()
        gone = weakref.ref(profiler)
        del profiler
        gc.collect()
        assert gone() is None


def test_nothing_is_left_of_a_graph_in_whatever_order_its_bricks_were_ended(make: MAKE, runtime: Path) -> None:
    random_ = random.Random(11)

    def use(profiler: BrickProfiler) -> None:
        timers: list[BrickTimer] = []
        for _ in range(400):
            match random_.randrange(6):
                case 0 | 1 | 2:  # A brick `a` that begins inside `a` continues at the node of the first one.
                    timers.append(profiler.start_brick(random_.choice("aabcd")))
                case 3 | 4 if timers:
                    profiler.stop_brick(timers.pop(random_.randrange(len(timers))), 1)
                case 5 if timers:
                    timers.pop(0)  # this timer is never stopped

    scope_type = type(make(recorder=Memory()).parts.paths.own.position.scope)

    def places() -> list[object]:
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, scope_type)]

    before = places()  # Keep a list of existing objects, so that no object of other tests is freed during this test.
    for _ in range(8):
        profiler = make(recorder=RingRecorder(runtime))
        use(profiler)
        thread = threading.Thread(target=use, args=(profiler,))
        thread.start()
        thread.join()
        assert len(places()) > len(before)
        del profiler
    assert len(places()) == len(before)


def test_recording_for_long_makes_nothing_grow(profiler: BrickProfiler) -> None:
    def many() -> None:
        for number in range(2000):
            with profiler.layer(number % 3), profiler.brick(BrickId.ACTIVATION, number):
                profiler.stop_brick(profiler.start_brick("a"), number)

    many()
    before = sys.getrefcount(None), sys.getrefcount(BrickId.ACTIVATION), sys.getrefcount(type(profiler))
    many()
    after = sys.getrefcount(None), sys.getrefcount(BrickId.ACTIVATION), sys.getrefcount(type(profiler))
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) < 100
