"""The store believes whole, consistent messages and survives every other kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cbtop.client import store as store_module
from cbtop.client.store import CELLS_END, Store
from cbtop.profiler.histograms import BUCKETS, MAX_CELLS
from cbtop.protocol.columns import pack_columns
from cbtop.protocol.errors import DecodeError, VersionError
from cbtop.protocol.messages import (
    Activity,
    CheckResult,
    DaemonHello,
    Goodbye,
    Node,
    Packed,
    SourceCatalog,
    SourceGone,
    StatsUpdate,
)
from cbtop.protocol.vocabulary import NodeKind
from tests.cbtop.recorded import Clock, apply, profiler_in, source_of

HELLO = DaemonHello(1, 0, 1, "here", "boot", "0.1.0", 0, 0)


def test_a_lost_update_is_healed_by_the_next_keyframe(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    with profiler.brick("a"):
        pass
    source, store = source_of(runtime), Store()
    source.poll()
    apply(store, [*source.snapshot()])
    source.delta()
    for name in "abc":
        with profiler.brick(name):
            pass
        source.poll()
        source.delta()  # lost
    apply(store, [*source.snapshot()])
    assert store.sources[source.key].stats.column("count")[1:].tolist() == [2, 1, 1]
    assert [node.name for node in store.sources[source.key].nodes.nodes] == ["a", "b", "c"]


def test_a_daemon_of_another_major_version_is_refused_with_both_versions() -> None:
    with pytest.raises(VersionError, match=r"speaks protocol 2\.3, this viewer 1\.1"):
        Store().apply(dataclasses.replace(HELLO, protocol_major=2, protocol_minor=3))


def test_what_comes_of_an_unknown_source_is_passed_over() -> None:
    store = Store()
    store.apply(update())
    store.apply(SourceGone("nobody"))
    assert store.sources == {}


def test_a_new_daemon_starts_from_nothing(runtime: Path) -> None:
    profiler_in(runtime, Clock()).announce(Activity("x"))
    source, store = source_of(runtime), Store()
    source.poll()
    apply(store, [*source.snapshot()])
    apply(store, [HELLO])
    assert (store.sources, store.daemon) == ({}, HELLO)


def test_a_catalog_message_by_itself_is_refused() -> None:
    with pytest.raises(DecodeError, match="Goodbye outside a catalog"):
        Store().apply(Goodbye("x"))


@pytest.mark.parametrize(
    "lie",
    [
        {"count": b""},
        {"node": np.array([-1], "<i8").tobytes()},
        {"node": np.array([1 << 40], "<i8").tobytes()},
        {"total_ns": np.array([-1], "<i8").tobytes()},
        {"elements": np.array([(1 << 63) - 1], "<i8").tobytes()},
        *(
            {"cells": pack_columns((np.array(step), np.array(count)))}
            for step, count in (
                ([BUCKETS], [-1]),
                ([BUCKETS - 1], [1]),  # of no node
                ([CELLS_END], [1]),
                ([CELLS_END - 1, 1], [1, 1]),
                ([BUCKETS, 0], [1, 1]),  # twice the same
                ([BUCKETS, -1], [1, 1]),
                ([1 << 62, 1 << 62, 1 << 62], [1, 1, 1]),
            )
        ),
        {"cells": b"\x01"},
        {"cells": b"\x01\x01" + bytes(2 * MAX_CELLS + 2)},
    ],
)
def test_columns_that_lie_are_refused_before_anything_is_allocated(runtime: Path, lie: dict[str, bytes]) -> None:
    profiler = profiler_in(runtime, Clock())
    with profiler.brick("a"):
        pass
    source, store = source_of(runtime), Store()
    source.poll()
    apply(store, [*source.snapshot()])
    with pytest.raises(DecodeError):
        store.apply(dataclasses.replace(update(), source=source.key, **lie))
    assert store.sources[source.key].stats.column("count").tolist() == [0, 1]


def update() -> StatsUpdate:
    one = np.array([1], "<i8").tobytes()
    return StatsUpdate("nobody", 1, 0, 1, one, one, one, one, one, one, one, one, Packed(b""))


def test_a_daemon_that_says_ever_more_of_a_source_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_ANNOUNCED", 3)
    store = Store()
    first, second, third = (
        SourceCatalog(
            "host:1:2:0",
            complete=not number,
            messages=tuple(CheckResult(f"brick {number}", name, True, None, None) for name in ("finite", "bounds")),
        )
        for number in range(3)
    )
    store.apply(first)
    with pytest.raises(DecodeError, match="more than 3 announcements of a kind"):
        store.apply(second)
    with pytest.raises(DecodeError):
        store.apply(third)
    assert len(store.sources["host:1:2:0"].checks) == 5


def test_news_whose_forerunner_was_lost_waits_for_the_keyframe() -> None:
    store, key = Store(), "host:1:2:0"
    nodes = tuple(Node(number, None, NodeKind.BRICK, f"brick {number}") for number in (1, 2, 3))
    store.apply(SourceCatalog(key, complete=True, messages=nodes[:1]))
    store.apply(SourceCatalog(key, complete=False, messages=nodes[2:]))
    assert len(store.sources[key].nodes) == 1
    store.apply(SourceCatalog(key, complete=True, messages=nodes))
    assert len(store.sources[key].nodes) == 3
