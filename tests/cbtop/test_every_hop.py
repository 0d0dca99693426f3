"""Tests of records that are lost in the ring, by rejection and on the wire.

A viewer always knows how many records are lost.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.store import Store
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.ended import EndedProcess
from cbtop.protocol.ring import RECORD_BYTES
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import apply, source_of

RING_RECORDS = 32

hops = st.one_of(
    # 80 records are more than the ring holds, so old ones are overwritten.
    st.tuples(st.just("record"), st.integers(1, 80)),
    # The daemon rejects records with an unknown node, and records with an end before their begin.
    st.tuples(st.just("nonsense"), st.integers(1, 5)),
    st.tuples(st.just("new brick"), st.integers(1, 3)),
    st.tuples(st.just("poll"), st.none()),
    st.tuples(st.just("a delta arrives"), st.none()),
    st.tuples(st.just("a delta is lost"), st.none()),
    st.tuples(st.just("the first viewer loses a delta"), st.none()),
    st.tuples(st.just("keyframe"), st.none()),
    st.tuples(st.just("heartbeat"), st.none()),
    st.tuples(st.just("another viewer"), st.none()),
)


@given(story=st.lists(hops, max_size=30), ends=st.sampled_from(["goodbye", "none"]))
def test_produced_is_received_plus_dropped_at_every_moment_for_every_viewer(
    story: list[tuple[str, int | None]], ends: str
) -> None:
    directory = Path(os.environ["CBTOP_RUNTIME_DIR"])
    recorder = RingRecorder(directory, RING_RECORDS * RECORD_BYTES)
    profiler = BrickProfiler(recorder=recorder)
    with profiler.step("decode", tokens=1):
        pass
    written, bricks = 1, 0
    source, viewers = source_of(directory), [Store()]
    source.poll()
    apply(viewers[0], source.snapshot())
    source.delta()
    for hop, number in story:
        match hop:
            case "record":
                for _ in range(number or 0):
                    with profiler.step("decode", tokens=1):
                        pass
                written += number or 0
            case "nonsense":
                for at in range(number or 0):
                    recorder.record(*((9999, 0, 1, 1) if at % 2 else (1, 5, 4, 1)))
                written += number or 0
            case "new brick":
                for _ in range(number or 0):
                    bricks += 1
                    with profiler.brick(f"brick {bricks}"):
                        pass
                written += number or 0
            case "poll":
                source.poll()
            case "a delta arrives":
                delta = source.delta()
                for viewer in viewers:
                    apply(viewer, delta)
            case "a delta is lost":
                source.delta()
            case "the first viewer loses a delta":
                delta = source.delta()
                for viewer in viewers[1:]:
                    apply(viewer, delta)
            case "keyframe":
                for viewer in viewers:
                    apply(viewer, source.snapshot())
            case "heartbeat":
                for viewer in viewers:
                    apply(viewer, [source.state_message()])
            case "another viewer":
                viewers.append(Store())
                apply(viewers[-1], source.snapshot())
        state = source.state_message()
        assert state.produced == state.received + state.overwritten + state.rejected
        for viewer in viewers:
            loss = source_view(viewer.sources[source.key]).loss
            assert loss.produced == loss.received + loss.dropped
            assert loss.produced <= state.produced <= written
            assert min(loss.dropped, loss.on_the_wire, loss.received) >= 0

    if ends == "goodbye":
        profiler.close()
    source.poll()
    state = source.state_message()
    assert state.produced + state.unread == written
    for viewer in viewers:
        apply(viewer, source.snapshot())
        loss = source_view(viewer.sources[source.key]).loss
        assert (loss.produced, loss.received) == (state.produced, state.received)
        assert (loss.dropped, loss.on_the_wire) == (state.overwritten + state.rejected, 0)
    profiler.close()
    source.close()
    EndedProcess(source.ring_path, 0, 0).remove()
