"""Makes recorded processes for tests of exporters.

One has a real profiler and a fake clock. The other processes have random nodes and records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.recorded import process_of_files
from cbtop.exporters.records import Records, TimedRecord
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_FAILED, FLAG_PLAIN
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import BrickId, NodeKind

hostile_text = st.text(st.one_of(st.characters(), st.sampled_from('"\\,;\n\r\0\x1b\ud800=+-@<&')), max_size=8)


def record_run(directory: Path) -> tuple[Path, Path]:
    """Record two steps of 130 µs. Returns the paths of the ring and the catalog.

    Each step has two layers. Each layer has a brick of 10 µs and a brick of 50 µs, 5 µs apart. The last brick of each
    step fails.
    """
    now_ns = 4_000_000_000_123

    def clock_ns() -> int:
        return now_ns

    profiler = BrickProfiler(clock_ns=clock_ns, recorder=RingRecorder(directory))
    for _ in range(2):
        with profiler.step("decode", tokens=1):
            for index in range(2):
                with profiler.layer(index):
                    with profiler.brick(BrickId.RMS_NORM, elements=16):
                        now_ns += 10_000
                    timer = profiler.start_brick('q"k\\v, projection')
                    now_ns += 50_000
                    profiler.stop_brick(timer, 48, failed=index == 1)
                now_ns += 5_000
    profiler.close()
    (ring,), (catalog,) = directory.glob("*.ring"), directory.glob("*.catalog")
    return ring, catalog


def recorded_process(directory: Path) -> RecordedProcess:
    return process_of_files(*record_run(directory))


def batch_of(records: Sequence[TimedRecord]) -> Batch:
    columns = [np.array(column, np.int64) for column in zip(*records, strict=True)] or [np.zeros(0, np.int64)] * 6
    node, start_ns, end_ns, elements, failed, plain = columns
    return Batch(node, failed * FLAG_FAILED + plain * FLAG_PLAIN, start_ns, end_ns, elements, overwritten=0)


def records_of(records: Sequence[TimedRecord]) -> Records:
    """Return `records` as one chunk."""
    return Records([lambda: [batch_of(records)]])


@st.composite
def any_process(draw: st.DrawFn) -> RecordedProcess:
    """Generate random nodes and records. Records may overlap in any way, as with many threads or a coarse clock."""
    table = NodeTable()
    for number in range(1, draw(st.integers(1, 6)) + 1):
        above = draw(st.one_of(st.none(), st.integers(1, number - 1))) if number > 1 else None
        table.add(Node(number, above, draw(st.sampled_from(NodeKind)), draw(hostile_text)))
    records = []
    for node in draw(st.lists(st.integers(1, len(table)), max_size=25)):
        start_ns = draw(st.integers(0, 20))
        end_ns = start_ns + draw(st.integers(0, 10))
        elements, failed, plain = draw(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()))
        records.append(TimedRecord(node, start_ns, end_ns, elements, failed, plain))
    return RecordedProcess(
        draw(hostile_text), 42, table, records_of(records), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    )
