"""Tests of the counters of bricks, with the events that the system counts on every machine."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbtop.profiler import counting
from cbtop.profiler.counting import Counting, counted_bricks, why_not
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.counter_messages import BrickCounters, CountedBrick
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind

SOFTWARE = 1
# Page faults twice: perf_event_open must count as many as getrusage. The clock of the task stands for cycles.
FAULTS_BY_SYSTEM = (((SOFTWARE, 2), (SOFTWARE, 1)),)
NO_SUCH_EVENT = (((SOFTWARE, 10_000),),)
PAGES = 64
is_compiled = BrickProfiler().implementation == "compiled"
compiled = pytest.mark.skipif(not is_compiled, reason="the hot path is not compiled here")


def touch(pages: int = PAGES) -> None:
    """Touch fresh pages, which is a page fault for each of them."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(pages):
            memory[page * mmap.PAGESIZE] = 1


class Counted:
    """A profiler whose bricks are counted, and what it has announced."""

    def __init__(self, directory: Path, groups: Any = (), share: float = 1.0) -> None:
        self.recorder = RingRecorder(directory)
        self.profiler = BrickProfiler(recorder=self.recorder)
        self.hot_path: Any = self.profiler.parts.paths.host.hot_path
        self.counting = Counting(self.recorder, self.hot_path, share, groups)

    def run(self, work: Callable[[], object], steps: int = 200) -> CountedBrick:
        """Run `work` in a brick inside a layer, in many steps. Returns the counters of the brick."""
        for step in range(steps):
            with self.profiler.step("decode", 1), self.profiler.layer(step % 2), self.profiler.brick("Linear"):
                work()
        return self.announced().bricks[0]

    def announced(self) -> BrickCounters:
        self.counting.tell()
        assert self.recorder.path is not None
        catalog = self.recorder.path.with_suffix(".catalog")
        self.recorder.close("")
        return [one for one in CatalogReader(catalog).read() if isinstance(one, BrickCounters)][-1]


@compiled
def test_page_faults_of_a_brick_are_counted_in_its_calls(tmp_path: Path) -> None:
    brick = Counted(tmp_path).run(touch)
    assert brick.calls <= 200
    assert PAGES * brick.calls <= brick.page_faults <= (PAGES + 8) * brick.calls


@compiled
def test_a_brick_that_waits_has_voluntary_switches(tmp_path: Path) -> None:
    brick = Counted(tmp_path).run(lambda: time.sleep(0.0005), steps=100)
    assert brick.voluntary_switches >= brick.calls


@compiled
def test_groups_of_events_count_the_page_faults_of_getrusage(tmp_path: Path) -> None:
    counted = Counted(tmp_path, FAULTS_BY_SYSTEM)
    brick = counted.run(touch)
    if counted.hot_path.counted()[2] != [0]:
        pytest.skip("perf_event_open is not permitted here, not even for events of the system")
    assert brick.core_calls == brick.calls
    # The first column of the group is page faults here. The kernel's own faults are only in getrusage.
    assert PAGES * brick.calls <= brick.cycles <= brick.page_faults
    assert brick.instructions > 0


@compiled
def test_an_event_that_does_not_exist_leaves_the_rest_counted(tmp_path: Path) -> None:
    counted = Counted(tmp_path, NO_SUCH_EVENT)
    brick = counted.run(touch)
    assert counted.hot_path.counted()[2][0] in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSYS)
    assert brick.core_calls == brick.cycles == 0
    assert brick.page_faults >= PAGES * brick.calls


@compiled
def test_files_that_the_host_opens_at_our_numbers_are_not_read(tmp_path: Path) -> None:
    counted = Counted(tmp_path, FAULTS_BY_SYSTEM)
    before = set(os.listdir("/proc/self/fd"))
    counted.run(touch, steps=20)
    links = {fd: Path("/proc/self/fd", fd) for fd in set(os.listdir("/proc/self/fd")) - before}
    own = [int(fd) for fd, link in links.items() if link.is_symlink() and "perf_event" in os.readlink(link)]
    if not own:
        pytest.skip("perf_event_open is not permitted here, not even for events of the system")
    reading, writing = os.pipe()
    os.write(writing, b"x" * 4096)
    for fd in own:
        os.dup2(reading, fd)
    for _ in range(100):
        with counted.profiler.step("decode", 1), counted.profiler.brick("Linear"):
            touch()
    assert len(os.read(reading, 8192)) == 4096
    for fd in (*own, reading, writing):
        os.close(fd)


@compiled
def test_counting_keeps_to_its_share_of_the_time(tmp_path: Path) -> None:
    counted = Counted(tmp_path, FAULTS_BY_SYSTEM, share=0.01)
    since_ns = time.perf_counter_ns()
    for _ in range(2000):
        with counted.profiler.step("decode", 1), counted.profiler.brick("Linear"):
            pass
    cost_ns, read_ns, _, rows = counted.hot_path.counted()
    calls = sum(row[1] for row in rows)
    opening_ns = 32 * read_ns + 32  # reads when the counters are opened, which measure what a read costs
    assert cost_ns == pytest.approx(opening_ns + 2 * read_ns * calls, abs=64)
    assert cost_ns <= max(opening_ns, 0.01 * (time.perf_counter_ns() - since_ns)) + 2 * read_ns


@compiled
def test_each_thread_counts_for_itself(tmp_path: Path) -> None:
    counted = Counted(tmp_path)
    stop = threading.Event()

    def fault() -> None:
        while not stop.is_set():
            touch()

    other = threading.Thread(target=fault)
    other.start()
    brick = counted.run(lambda: sum(range(1000)))
    stop.set()
    other.join()
    assert brick.page_faults < PAGES * brick.calls


@compiled
def test_a_call_that_raises_is_not_counted(tmp_path: Path) -> None:
    counted = Counted(tmp_path)
    for _ in range(100):
        with pytest.raises(ZeroDivisionError), counted.profiler.step("decode", 1), counted.profiler.brick("Bad"):
            1 / 0  # noqa: B018
    assert counted.hot_path.counted()[3] == []


@compiled
def test_a_forked_child_counts_from_zero(tmp_path: Path) -> None:
    counted = Counted(tmp_path, FAULTS_BY_SYSTEM)
    counted.run(touch, steps=50)
    child = os.fork()
    if child == 0:
        os._exit(len(counted.hot_path.counted()[3]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert counted.hot_path.counted()[3]


def test_places_of_a_brick_are_added_up_by_step() -> None:
    nodes = [
        Node(1, None, NodeKind.STEP, "prefill"),
        Node(2, 1, NodeKind.LAYER, "0"),
        Node(3, 2, NodeKind.BRICK, "Linear"),
        Node(4, 1, NodeKind.BRICK, "Linear"),
        Node(5, None, NodeKind.STEP, "decode"),
        Node(6, 5, NodeKind.BRICK, "Linear"),
    ]
    rows = [(node, 10, node, 0, 0, 0, *[9] * 5, *[8] * 5) for node in (2, 3, 4, 6, 99)]
    first, second = counted_bricks(rows, nodes)
    assert (first.node, first.calls, first.page_faults, first.cycles, first.l3_misses) == (3, 20, 7, 18, 16)
    assert (second.node, second.calls, second.page_faults) == (6, 10, 6)


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        ([0, 0], ""),
        ([0, errno.ENOENT], "L2 and L3 misses: this processor, or the virtual machine, has no such counters"),
        ([errno.EACCES, errno.EACCES], "perf_event_open is not permitted"),
        ([errno.ENOSYS, errno.ENOSYS], "the kernel has no perf_event_open"),
    ],
)
def test_one_line_says_why_counters_are_missing(errors: list[int], wanted: str) -> None:
    assert wanted in why_not(errors)
    assert bool(wanted) == bool(why_not(errors))


def test_without_the_compiled_part_the_reason_is_announced(tmp_path: Path) -> None:
    recorder = RingRecorder(tmp_path)
    recorder.open()
    Counting(recorder, object(), 1.0).tell()
    assert recorder.path is not None
    recorder.close("")
    said = list(CatalogReader(recorder.path.with_suffix(".catalog")).read())
    assert BrickCounters in map(type, said)
    assert "compiled part" in next(one.why_not for one in said if isinstance(one, BrickCounters))


def test_nothing_is_counted_unless_it_is_switched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RingRecorder(tmp_path)
    monkeypatch.delenv(counting.SWITCH, raising=False)
    assert counting.begin(recorder, object(), 0.03) is None
    assert recorder.at_flush == []
    monkeypatch.setenv(counting.SWITCH, counting.ON)
    assert counting.begin(recorder, object(), 0.03) is not None
    assert len(recorder.at_flush) == 1
