"""Tests with CuPy on a real device: time stamps on its streams agree with its own events."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.memory import Memory

pytestmark = pytest.mark.gpu
cupy: Any = pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.mark.filterwarnings("ignore")  # warnings of CuPy
def test_a_brick_on_a_stream_of_cupy_takes_as_long_as_events_around_it_say() -> None:
    if not cupy.cuda.is_available():
        pytest.skip("there is no CUDA device")
    from cbtop.profiler.instrument.cupy_clock import cupy_clock

    memory = Memory()
    profiler = BrickProfiler(recorder=memory, device_clock=cupy_clock())
    theirs = []
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            matrix = cupy.random.random((8192, 8192), dtype=cupy.float32)
            matrix @ matrix
            begun, ended = cupy.cuda.Event(), cupy.cuda.Event()
            for _ in range(5):
                with profiler.step("mine", tokens=1):
                    for _ in range(20):  # Enqueue so much work that the device lags behind the host.
                        matrix @ matrix
                    begun.record()
                    with profiler.brick("product"):
                        matrix @ matrix
                    ended.record()
                ended.synchronize()
                theirs.append(1e6 * cupy.cuda.get_elapsed_time(begun, ended))
    profiler.finalize()
    nodes = {said.id: said for said in memory.said if isinstance(said, Node)}
    ours = [end - start for tag, start, end, _ in memory.records if nodes[tag & 0xFFFFFF].kind is NodeKind.BRICK]
    assert len(ours) == 10
    assert median(ours) == pytest.approx(median(theirs), rel=0.02, abs=10_000)
