"""The store accepts only whole, consistent messages. Other messages do not damage it."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from cbtop.client import announcements
from cbtop.client import store as store_module
from cbtop.client.source_record import MAX_PHASES
from cbtop.client.stats_update import CELLS_END
from cbtop.client.store import Budget, Store
from cbtop.profiler.analysis.histograms import BUCKETS, MAX_CELLS, SUB_BUCKETS
from cbtop.profiler.analysis.node_columns import COLUMNS
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.columns import pack_columns
from cbtop.protocol.device_messages import Device, DeviceSample, Unknown
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
from cbtop.protocol.training_messages import PartTime, TrainingTimes
from cbtop.protocol.vocabulary import DeviceKind, NodeKind
from tests.cbtop.recorded import Clock, apply, profiler_in, source_of

HELLO = DaemonHello(2, 0, 1, "here", "boot", "0.1.0", 0, 0)


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
        source.delta()  # This delta is lost on the way to the viewer.
    apply(store, [*source.snapshot()])
    assert store.sources[source.key].stats.column("count")[1:].tolist() == [2, 1, 1]
    assert [node.name for node in store.sources[source.key].nodes.nodes] == ["a", "b", "c"]


def test_a_daemon_of_another_major_version_is_refused_with_both_versions() -> None:
    with pytest.raises(VersionError, match=r"speaks protocol 1\.3, this viewer 2\.9"):
        Store().apply(dataclasses.replace(HELLO, protocol_major=1, protocol_minor=3))


def test_what_comes_of_an_unknown_source_is_passed_over() -> None:
    store = Store()
    store.apply(update())
    store.apply(SourceGone("nobody"))
    assert store.sources == {}


def test_a_new_daemon_starts_from_nothing(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    profiler.announce(Activity("x"))
    source, store = source_of(runtime), Store()
    source.poll()
    apply(store, [*source.snapshot()])
    apply(store, [HELLO])
    assert (store.sources, store.daemon) == ({}, HELLO)


def test_what_samplers_tell_is_bounded_and_a_new_daemon_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_TOLD", 3)
    device = Device("cpu", DeviceKind.CPU, 0, "cpu", unknown=(Unknown("clock_mhz", "no"),))
    store = Store()
    store.apply(DeviceSample("cpu", 1, devices=(device,)))
    store.apply(DeviceSample("cpu", 2, devices=(device,)))
    for sampler in ("cpu", "nvml"):
        with pytest.raises(DecodeError, match="of 2 devices"):
            store.apply(DeviceSample(sampler, 3, devices=(device,) * (2 if sampler == "cpu" else 1)))
    for name in ("a", "b", "c"):
        store.apply(DeviceSample(name, 1))
    with pytest.raises(DecodeError, match="5 samplers"):
        store.apply(DeviceSample("d", 1))
    assert [known.newest.monotonic_ns for known in store.devices.values()] == [2, 1, 1, 1]
    store.apply(HELLO)
    assert store.devices == {}


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
                ([BUCKETS - 1], [1]),  # This histogram cell belongs to no node.
                ([CELLS_END], [1]),
                ([CELLS_END - 1, 1], [1, 1]),
                ([BUCKETS, 0], [1, 1]),  # This message contains one cell twice.
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
    monkeypatch.setattr(announcements, "MAX_ANNOUNCED", 3)
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


def training_times(model: str, wall_ns: int) -> TrainingTimes:
    return TrainingTimes("train", model, 2, wall_ns, (PartTime("forward", wall_ns, 1),))


def test_training_times_replace_those_of_the_same_model_only() -> None:
    store, key = Store(), "host:1:2:0"
    store.apply(SourceCatalog(key, complete=True, messages=(training_times("G", 10), training_times("D", 20))))
    store.apply(SourceCatalog(key, complete=False, messages=(training_times("G", 30),)))
    times = store.sources[key].training_times
    assert {model: found.wall_ns for (_, model), found in times.items()} == {"G": 30, "D": 20}
    assert store.sources[key].kept() == 4
    store.apply(SourceCatalog(key, complete=True, messages=(training_times("D", 40),)))
    assert list(times) == [("train", "D")]


def test_the_number_of_training_times_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "MAX_ANNOUNCED", 3)
    many = tuple(training_times(str(number), 10) for number in range(4))
    with pytest.raises(DecodeError, match="more than 3 announcements of a kind"):
        Store().apply(SourceCatalog("host:1:2:0", complete=True, messages=many))


def test_news_whose_forerunner_was_lost_waits_for_the_keyframe() -> None:
    store, key = Store(), "host:1:2:0"
    nodes = tuple(Node(number, None, NodeKind.BRICK, f"brick {number}") for number in (1, 2, 3))
    store.apply(SourceCatalog(key, complete=True, messages=nodes[:1]))
    store.apply(SourceCatalog(key, complete=False, messages=nodes[2:]))
    assert len(store.sources[key].nodes) == 1
    store.apply(SourceCatalog(key, complete=True, messages=nodes))
    assert len(store.sources[key].nodes) == 3


def test_a_catalog_said_again_leaves_the_nodes_that_are_known() -> None:
    store, key = Store(), "host:1:2:0"
    nodes = tuple(Node(number, None, NodeKind.BRICK, f"brick {number}") for number in (1, 2, 3))
    store.apply(SourceCatalog(key, complete=True, messages=nodes[:2]))
    inside = store.sources[key].nodes.inside(None)
    store.apply(SourceCatalog(key, complete=True, messages=nodes[:2]))
    assert store.sources[key].nodes.inside(None) is inside
    store.apply(SourceCatalog(key, complete=True, messages=nodes))
    assert [node.id for node in store.sources[key].nodes.inside(None).nodes] == [1, 2, 3]


def said_of(key: str, nodes: int, name: str = "brick") -> SourceCatalog:
    names = [f"{at} {name}" for at in range(1, nodes + 1)]
    return SourceCatalog(
        key, True, tuple(Node(at, None, NodeKind.BRICK, said, said, backend=said) for at, said in enumerate(names, 1))
    )


def cells_of(key: str, nodes: int) -> StatsUpdate:
    """Return a message of statistics for `nodes` nodes. The message takes three bytes per node.

    Each node has one call in every octave of its histogram of durations.
    """
    cell = np.arange(BUCKETS, (nodes + 1) * BUCKETS, SUB_BUCKETS)
    packed = pack_columns((np.diff(cell, prepend=0), np.ones(len(cell), np.int64)))
    none = b""
    return StatsUpdate(key, 1, 0, 1, none, none, none, none, none, none, none, none, Packed(packed))


def test_what_is_over_the_budget_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_BYTES", 1 << 20)
    store = Store()
    for number in range(40):
        apply(store, [said_of(f"h:{number}:1:0", 20), cells_of(f"h:{number}:1:0", 20)])
    assert 0 < store.size_bytes <= 1 << 20
    assert len(store.sources) + len(store.left_out) == 40
    assert 3 < len(store.left_out) < 37
    names = ", ".join(list(store.left_out)[:3])
    assert store.complaint() == f"{len(store.left_out)} sources left out: {names}, … (more than 1 MiB)"
    again = next(iter(store.left_out))
    apply(store, [said_of(again, 20)])  # the next complete message (keyframe) of this process
    assert again not in store.sources
    apply(store, [SourceGone(again)])
    assert again not in store.left_out
    apply(store, [HELLO])
    assert (store.size_bytes, store.complaint()) == (0, "")


def test_a_hostile_daemon_costs_the_sources_of_another_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_BYTES", 4 << 20)
    budget = Budget()
    honest, hostile = Store(budget=budget), Store(budget=budget)
    apply(honest, [said_of("here:1:1:0", 300), cells_of("here:1:1:0", 10)])
    for number in range(60):
        apply(hostile, [said_of(f"there:{number}:1:0", 5), cells_of(f"there:{number}:1:0", 100)])
    assert honest.size_bytes + hostile.size_bytes <= 4 << 20
    assert list(honest.sources) == ["here:1:1:0"]
    assert honest.complaint() == ""
    assert len(hostile.left_out) > 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("brick", marks=pytest.mark.slow), 256 * "𝔹"], ids=["short names", "wide names"]
)
def test_the_size_that_is_counted_is_about_that_which_is_taken(name: str) -> None:
    store = Store()
    tracemalloc.start()
    before_bytes = tracemalloc.get_traced_memory()[0]
    for number in range(10):
        apply(store, [said_of(f"h:{number}:1:0", 500, name), cells_of(f"h:{number}:1:0", 200)])
    taken_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    tracemalloc.stop()
    assert taken_bytes / 1.5 < store.size_bytes < taken_bytes * 2


def test_windows_become_shorter_before_a_source_is_left_out(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    apply(store, [said_of("h:1:1:0", 30)])
    for second in range(9):
        many = np.full(30, second + 1, "<i8").tobytes()
        node = np.arange(1, 31, dtype="<i8").tobytes()
        at_ns = second * 1_000_000_000
        update = StatsUpdate("h:1:1:0", 1, at_ns, 1, node, many, many, many, many, many, many, many, Packed(b""))
        apply(store, [update])
        if second == 4:
            monkeypatch.setattr(store_module, "MAX_WINDOW_BYTES", store.window_bytes)
    record = store.sources["h:1:1:0"]
    assert record.window.size_bytes == store.window_bytes <= store_module.MAX_WINDOW_BYTES
    assert record.window.statistics(record.stats)[1].covers_s == 4.0
    assert store.complaint() == ""


def test_a_source_is_left_out_if_there_is_no_memory_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    apply(store, [said_of("h:1:1:0", 3), said_of("h:2:1:0", 3)])

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(NodeStats, "take_over", no_memory)
        apply(store, [cells_of("h:1:1:0", 3)])
    apply(store, [cells_of("h:2:1:0", 3)])
    assert list(store.sources) == ["h:2:1:0"]
    assert store.complaint() == "1 source left out: h:1:1:0 (no memory)"


def test_the_tokens_of_endless_phases_are_not_remembered() -> None:
    store = Store()
    steps = tuple(Node(at, None, NodeKind.STEP, f"phase {at}") for at in range(1, 201))
    apply(store, [SourceCatalog("h:1:1:0", True, steps), dataclasses.replace(update(), source="h:1:1:0")])
    node = np.arange(1, 201, dtype="<i8").tobytes()
    apply(store, [dataclasses.replace(update(), source="h:1:1:0", **dict.fromkeys(COLUMNS, node), node=node)])
    assert len(store.sources["h:1:1:0"].history) == MAX_PHASES


def test_records_fill_the_available_room_and_the_largest_source_drops_first(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_RECENT_BYTES", 4_000)
    budget = Budget()
    few, many = Store(budget=budget), Store(budget=budget)
    for store, name, steps in ((few, "few", 5), (many, "many", 300)):
        (runtime / name).mkdir()
        profiler, store_before = profiler_in(runtime / name, Clock()), store.size_bytes
        for _ in range(steps):
            with profiler.brick("a"):
                pass
        source = source_of(runtime / name)
        source.poll()
        store.keep_records(True)
        apply(store, [*source.snapshot(), *source.records()])
        assert store.size_bytes > store_before
    assert few.recent_bytes + many.recent_bytes <= 4_000
    assert [len(record.recent) for record in few.sources.values()] == [5]
    assert [len(record.recent) for record in many.sources.values()] == [75]  # the newest records
    before = many.size_bytes
    many.keep_records(False)
    assert (many.recent_bytes, before - many.size_bytes) == (0, 75 * 40)
