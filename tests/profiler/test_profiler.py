"""Tests of BrickProfiler: it times what runs, records where it runs, and never disturbs its program."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
from itertools import count, product
from pathlib import Path
from types import ModuleType

import pytest

from cbtop.profiler import scopes
from cbtop.profiler.analysis.budget import TokenBudget
from cbtop.profiler.analysis.graph.node_table import MAX_DEPTH
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.profiler.scopes import MAX_RECURSION, SURE_RECURSION
from cbtop.protocol.attributes import Work
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import Activity, Goodbye, HostHello, Node, TraceSummary
from cbtop.protocol.ring import FLAG_FAILED
from cbtop.protocol.ring_reader import RingReader
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind
from tests.profiler.memory import Memory, is_plain


@pytest.fixture(autouse=True)
def both(profiler_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test twice: with the hot path of the profiler in C and in Python."""
    monkeypatch.setitem(globals(), "BrickProfiler", profiler_module.BrickProfiler)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def profiler(memory: Memory) -> BrickProfiler:
    return BrickProfiler(clock_ns=count(100, 50).__next__, recorder=memory)


def test_a_brick_is_one_record_between_two_looks_at_the_clock(profiler: BrickProfiler, memory: Memory) -> None:
    timer = profiler.start_brick(BrickId.RMS_NORM)
    profiler.stop_brick(timer, 4096)
    assert memory.records == [(1, 100, 150, 4096)]
    assert memory.nodes == [(1, None, NodeKind.BRICK, "RmsNorm")]


def test_the_graph_grows_as_things_run_inside_one_another(profiler: BrickProfiler, memory: Memory) -> None:
    for _ in range(2):
        with profiler.step("decode", tokens=1), profiler.layer(3), profiler.brick(BrickId.ACTIVATION, 8):
            pass
    assert memory.nodes == [
        (1, None, NodeKind.STEP, "decode"),
        (2, 1, NodeKind.LAYER, "3"),
        (3, 2, NodeKind.BRICK, "Activation"),
    ]
    assert [record[0] for record in memory.records] == [3, 2, 1] * 2


def test_a_definition_brings_its_kernels_and_its_work(profiler: BrickProfiler, memory: Memory) -> None:
    definition = BrickDefinition.of(
        BrickId.QKV_PROJECTION,
        backend="numba",
        work=Work(flops_per_call=8, bytes_per_element=2),
        kernels=(
            KernelDefinition(
                "gemv", "cuda", grid=(32, 1, 1), block=(256, 1, 1), shared_memory_bytes=4096, ptx_hash=99
            ),
        ),
        budget=TokenBudget(6.0),
    )
    with profiler.brick(definition):
        pass
    brick, kernel = (n for n in memory.said if isinstance(n, Node))
    assert (brick.work.flops_per_call, brick.work.bytes_per_element, brick.budget_us_per_token) == (8, 2, 6.0)
    assert (kernel.parent, kernel.kernel.grid, kernel.kernel.block, kernel.kernel.shared_memory_bytes) == (
        1,
        (32, 1, 1),
        (256, 1, 1),
        4096,
    )


def test_two_definitions_of_one_brick_are_two_nodes_and_a_name_is_one(
    profiler: BrickProfiler, memory: Memory
) -> None:
    before, after = (BrickDefinition.of(BrickId.RMS_NORM) for _ in range(2))
    for brick in (before, after, "ResidualAdd", "ResidualAdd"):
        with profiler.brick(brick):
            pass
    assert [(node[0], node[3]) for node in memory.nodes] == [(1, "RmsNorm"), (2, "RmsNorm"), (3, "ResidualAdd")]
    dynamic = memory.said[-1]
    assert isinstance(dynamic, Node)
    assert dynamic.category is BrickCategory.OTHER


def test_an_exception_closes_the_brick_and_marks_it_failed(profiler: BrickProfiler, memory: Memory) -> None:
    with pytest.raises(ZeroDivisionError), profiler.layer(0), profiler.brick(BrickId.SAMPLING):
        raise ZeroDivisionError
    assert [(tag & 0xFFFFFF, bool(tag & FLAG_FAILED)) for tag, *_ in memory.records] == [(2, True), (1, True)]
    with profiler.brick(BrickId.SAMPLING):
        pass
    # This node is at the root again, although the previous brick has failed.
    assert memory.nodes[-1][:2] == (3, None)


def test_disabled_it_records_nothing_and_reads_no_clock(memory: Memory) -> None:
    def no_clock() -> int:
        raise AssertionError("the clock was read")

    profiler = BrickProfiler(enabled=False, clock_ns=no_clock, recorder=memory)
    with profiler.step("decode", tokens=1), profiler.brick(BrickId.RMS_NORM):
        profiler.start_brick(BrickId.ACTIVATION)
    assert (memory.records, memory.said) == ([], [])


def test_switching_on_and_off_inside_a_step_keeps_the_place_in_the_graph(
    profiler: BrickProfiler, memory: Memory
) -> None:
    profiler.disable()
    with profiler.step("decode", tokens=1):
        profiler.enable()
        with profiler.layer(0):
            profiler.disable()
    profiler.enable()
    with profiler.brick(BrickId.SAMPLING):
        pass
    assert memory.nodes == [(1, None, NodeKind.LAYER, "0"), (2, None, NodeKind.BRICK, "Sampling")]
    assert [record[0] for record in memory.records] == [2]


def test_of_many_steps_every_kth_is_recorded(memory: Memory) -> None:
    profiler = BrickProfiler(recorder=memory, sample_every=3)
    for tokens in range(7):
        with profiler.step("decode", tokens), profiler.brick(BrickId.SAMPLING, tokens):
            pass
    found = [(elements, is_plain(tag)) for tag, *_, elements in memory.records]
    assert [elements for elements, plain in found if not plain] == [0, 0, 3, 3, 6, 6]
    assert [elements for elements, plain in found if plain] == [1, 2, 4, 5]
    profiler.disable()
    for _ in range(3):
        with profiler.step("decode", 9):
            pass
    assert len(memory.records) == 10
    for wrong in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match=f"sample_every={wrong!r}"):
            BrickProfiler(sample_every=wrong)  # type: ignore[arg-type]


def test_a_host_that_loses_stops_does_not_grow_the_graph_for_ever(profiler: BrickProfiler, memory: Memory) -> None:
    for _ in range(50):
        profiler.start_brick(BrickId.GATE_PROJECTION)
        # Neither of the two bricks is stopped. So each new brick begins inside the previous brick.
        profiler.start_brick(BrickId.UP_PROJECTION)
    assert len(memory.nodes) <= 2 * MAX_RECURSION


def test_bricks_that_call_each_other_in_any_order_make_a_bounded_number_of_nodes(
    profiler: BrickProfiler, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(left: int, order: int) -> None:
        with profiler.brick(BrickId.GATE_PROJECTION if order & 1 else BrickId.UP_PROJECTION):
            if left:
                call(left - 1, order >> 1)

    monkeypatch.setattr(scopes, "MAX_DEEP_NODES", 100)
    for order in range(1 << 10):
        call(9, order)
    shallow = sum(math.comb(a + b, a) for a, b in product(range(SURE_RECURSION + 1), repeat=2)) - 1
    assert len(memory.nodes) == shallow + 100


def test_each_thread_has_its_own_place_in_the_graph(memory: Memory) -> None:
    profiler, both_inside = BrickProfiler(recorder=memory), threading.Barrier(2)

    def run(layer: int) -> None:
        with profiler.layer(layer):
            both_inside.wait()
            for _ in range(200):
                with profiler.brick(BrickId.ACTIVATION, layer):
                    pass

    threads = [threading.Thread(target=run, args=(layer,)) for layer in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    layer_of = {node: int(memory.nodes[parent - 1][3]) for node, parent, _, _ in memory.nodes if parent}
    bricks = [(layer_of[tag], elements) for tag, _, _, elements in memory.records if tag in layer_of]
    assert bricks.count((0, 0)) == bricks.count((1, 1)) == 200


def test_past_the_bound_on_nodes_records_name_no_node(
    memory: Memory, profiler_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "MAX_NODES", 2)
    profiler = BrickProfiler(recorder=memory)
    for name in "abcd":
        with profiler.brick(name):
            pass
    assert [record[0] for record in memory.records] == [1, 2, 0, 0]


def test_it_loads_neither_numpy_nor_zmq_nor_anything_heavy() -> None:
    script = (
        "import sys, cbtop; from cbtop import BrickProfiler, BrickId\n"
        "with BrickProfiler().brick(BrickId.RMS_NORM): pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'numpy', 'zmq', 'numba', 'textual', 'cupy', 'rich'}))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_a_process_says_hello_records_and_says_goodbye(runtime: Path, implementation: str) -> None:
    script = (
        "from cbtop import BrickProfiler, BrickId\n"
        "p = BrickProfiler()\n"
        "for _ in range(3):\n"
        "    with p.brick(BrickId.RMS_NORM, 16): pass\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    (ring,) = runtime.glob("*.ring")
    hello, node, goodbye = CatalogReader(ring.with_suffix(".catalog")).read()
    assert isinstance(hello, HostHello)
    assert hello.recorder == implementation
    assert ring.name == f"{hello.pid}-{hello.process_start}-0.ring"
    assert isinstance(node, Node)
    assert goodbye == Goodbye("exit")
    assert RingReader(ring).read(final=True).elements.tolist() == [16, 16, 16]


def test_a_forked_child_writes_its_own_ring_and_says_again_what_was_said(runtime: Path) -> None:
    script = (
        "import os, warnings; from cbtop import BrickProfiler, BrickId\n"
        "from cbtop.protocol.messages import Activity\n"
        "p = BrickProfiler()\n"
        "p.announce(Activity('serving'))\n"
        "with p.brick(BrickId.RMS_NORM, 1): pass\n"
        "pid = os.fork()\n"
        "with p.brick(BrickId.RMS_NORM, 2 if pid else 3): pass\n"
        "if pid: os.waitpid(pid, 0)\n"
        "else: os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    found = {}
    for ring in runtime.glob("*.ring"):
        hello, *said = CatalogReader(ring.with_suffix(".catalog")).read()
        assert isinstance(hello, HostHello)
        assert RingReader(ring).pid == hello.pid
        assert Activity("serving") in said
        found[tuple(RingReader(ring).read(final=True).elements.tolist())] = said[-1]
    assert found[1, 2] == Goodbye("exit")
    assert (3,) in found


@pytest.mark.parametrize("trouble", ["no such place", "mode"])
def test_without_a_safe_runtime_directory_the_host_goes_on_and_is_told_once(
    trouble: str, runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if trouble == "mode":
        runtime.chmod(0o777)
    else:
        (runtime / "file").touch()
        monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(runtime / "file" / "below"))
    profiler = BrickProfiler()
    for _ in range(3):
        with profiler.brick(BrickId.RMS_NORM):
            pass
    assert len(caplog.messages) == 1
    assert "records nothing in process" in caplog.messages[0]
    runtime.chmod(0o700)


def test_two_profilers_of_one_process_do_not_meet(runtime: Path) -> None:
    first, second = BrickProfiler(), BrickProfiler()
    for profiler, elements in ((first, 1), (second, 2)):
        with profiler.brick(BrickId.RMS_NORM, elements):
            pass
    rings = list(runtime.glob("*.ring"))
    assert sorted(RingReader(ring).read().elements.tolist() for ring in rings) == [[1], [2]]
    assert {ring.name.split("-")[0] for ring in rings} == {str(os.getpid())}


def test_after_close_nothing_is_recorded_and_nothing_breaks(runtime: Path) -> None:
    profiler = BrickProfiler()
    with profiler.brick(BrickId.RMS_NORM):
        pass
    with profiler.brick(BrickId.SAMPLING):
        profiler.close("enough")
    profiler.enable()
    with profiler.brick(BrickId.RMS_NORM):
        pass
    profiler.close()
    (ring,) = runtime.glob("*.ring")
    assert len(RingReader(ring).read().node) == 1
    assert CatalogReader(ring.with_suffix(".catalog")).read()[-1] == Goodbye("enough")


def test_a_brick_may_run_inside_itself(profiler: BrickProfiler, memory: Memory) -> None:
    with profiler.brick("a"), profiler.brick("a"):
        pass
    assert memory.nodes == [(1, None, NodeKind.BRICK, "a"), (2, 1, NodeKind.BRICK, "a")]


def test_what_lies_too_deep_is_counted_and_the_rest_recorded(runtime: Path) -> None:
    profiler = BrickProfiler()
    with contextlib.ExitStack() as stack:
        for depth in range(MAX_DEPTH + 8):
            stack.enter_context(profiler.brick(f"level {depth}"))
    (ring,) = runtime.glob("*.ring")
    nodes = RingReader(ring).read().node
    assert 0 < (nodes == 0).sum() < len(nodes) == MAX_DEPTH + 8


def test_a_message_that_cannot_be_said_is_logged_and_harms_nothing(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = BrickProfiler()
    profiler.announce(Activity(object()))  # type: ignore[arg-type]
    with profiler.brick(BrickId.RMS_NORM):
        pass
    profiler.announce(Activity("fine"))
    assert [message for message in caplog.messages if "cannot say a Activity" in message]
    (catalog,) = runtime.glob("*.catalog")
    assert Activity("fine") in CatalogReader(catalog).read()


def test_a_ring_that_cannot_be_made_leaves_no_file_behind(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with BrickProfiler().brick(BrickId.RMS_NORM):
        pass
    assert list(runtime.iterdir()) == []


def test_a_child_of_multiprocessing_says_goodbye(runtime: Path) -> None:
    script = (
        "import multiprocessing; from cbtop import BrickProfiler\n"
        "p = BrickProfiler()\n"
        "def work():\n"
        "    with p.brick('a'): pass\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('fork').Process(target=work)\n"
        "    child.start(); child.join()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    (catalog,) = runtime.glob("*.catalog")
    assert CatalogReader(catalog).read()[-1] == Goodbye("exit")


def test_a_child_is_told_only_the_last_of_each_trace(runtime: Path) -> None:
    recorder = RingRecorder(runtime)
    for forwards in (1, 2, 3):
        recorder.announce(TraceSummary("MLT-01", "activations", "about", forwards, (), ()))
    recorder.forget()  # Call this function as a forked child would.
    recorder.announce(Activity("serving"))
    second = max(runtime.glob("*.catalog"), key=lambda path: int(path.stem.split("-")[2]))
    said = CatalogReader(second).read()
    assert [message.forwards for message in said if isinstance(message, TraceSummary)] == [3]
