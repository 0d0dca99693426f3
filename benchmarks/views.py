"""Measure the cost of making a view of a large graph, compared with writing the names and counts of its nodes as
JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.base import Figure, Ratio
from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.viewmodels.graph import rows_at
from cbtop.viewmodels.source import source_view

LAYERS, BRICKS = 909, 10  # A model of this size has 10,000 nodes.
SHOWN, ROUNDS = 40, 25
LIMIT_MS = 50.0  # A view may take this many ms, which is a tenth of the time between two redraws.


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        profiler = BrickProfiler(recorder=RingRecorder(Path(directory), 8 << 20))
        with profiler.step("decode", tokens=1):
            for layer in range(LAYERS):
                with profiler.layer(layer):
                    for brick in range(BRICKS):
                        with profiler.brick(f"Brick{brick}", 64):
                            pass
        (ring,) = Path(directory).glob("*.ring")
        source, store = Source(ring), Store()
        source.poll()
        while source.is_behind:
            source.poll()
        for message in source.snapshot():
            store.apply(message)
        record = store.sources[source.key]

        def view() -> None:
            assert all(row.label for row in rows_at(source_view(record).graph, range(SHOWN)))

        def names() -> None:
            count = record.stats.column("count").tolist()
            json.dumps([{"name": node.name, "count": count[node.id]} for node in record.nodes.nodes])

        used_s, peer_s = [], []
        for _ in range(ROUNDS):
            used_s.append(_time_s(view))
            peer_s.append(_time_s(names))
        profiler.close()
    used_ms = 1e3 * sorted(used_s)[ROUNDS // 2]
    return [
        Figure(
            f"view of {len(record.nodes):,} nodes, {SHOWN} drawn", used_ms, "ms", "json", Ratio.of(used_s, peer_s)
        ),
        Figure(f"  of its {LIMIT_MS:g} ms", 100 * used_ms / LIMIT_MS, "%"),
    ]


def _time_s(call: Callable[[], None]) -> float:
    """Return the processor time (s) of one call in this process. Other programs do not count."""
    begun_s = time.process_time()
    call()
    return time.process_time() - begun_s
