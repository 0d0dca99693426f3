"""Tests of a rank's time slices in the last seconds.

The slices stay right if the process begins a new phase meanwhile.
"""

from __future__ import annotations

from pathlib import Path

from cbtop.client.busy import BusySlices
from cbtop.client.store import Store
from tests.cbtop.recorded import Clock, apply, profiler_in, source_of


def test_a_phase_that_began_after_some_slices_has_only_later_ones(runtime: Path) -> None:
    clock, busy, store = Clock(), BusySlices(), Store()
    profiler = profiler_in(runtime, clock)

    def ran(phase: str, at_ns: int) -> None:
        with profiler.step(phase, tokens=1), profiler.brick("a", 8):
            clock.sleep_us(100)
        source.poll()
        apply(store, [*(source.delta() if store.sources else source.snapshot())])
        record = store.sources[source.key]
        busy.tick(at_ns, record.nodes, record.stats)

    with profiler.step("prefill", tokens=1):
        clock.sleep_us(100)
    source = source_of(runtime)
    for at, phase in enumerate(["prefill", "prefill", "prefill", "decode", "decode"], 1):
        ran(phase, at * 1_000_000_000)
    nodes = store.sources[source.key].nodes
    assert [found.steps for found in busy.slices(nodes, "decode")] == [1, 1]
    assert [found.steps for found in busy.slices(nodes, "prefill")] == [1, 1]
