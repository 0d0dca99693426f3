"""Tests of time stamps in a clone of a captured graph: they are in order.

Each time stamp is at a place that all work of the graph passes.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.graph_surgery import END, START, StampedGraph, StampSites
from tests.profiler.device.fake_driver import KERNEL_NS, FakeDriver

STREAM = 7


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver) -> CudaDevice:
    return CudaDevice(driver, driver.now_ns)


def chain(driver: FakeDriver, *durations_ns: int) -> tuple[int, list[int]]:
    graph, nodes = driver.new_graph(), list[int]()
    for duration_ns in durations_ns:
        nodes.append(driver.add(graph, nodes[-1:], duration_ns))
    return graph, nodes


def run(driver: FakeDriver, stamped: StampedGraph) -> list[int]:
    stamped.launch(STREAM)
    assert stamped.is_running
    driver.pass_time(1_000_000)
    times = stamped.read()
    assert times is not None
    return times


def test_a_chain_of_kernels_copies_and_child_graphs_is_stamped_at_any_node(
    driver: FakeDriver, device: CudaDevice
) -> None:
    graph, nodes = chain(driver, 3_000, 500, 20_000, 100)
    shape = StampSites.of(driver, graph)
    assert list(shape.places) == [START, *nodes]
    assert shape.end == nodes[-1]
    stamped = StampedGraph(device, graph, list(shape.places), STREAM)
    times = run(driver, stamped)
    took = [after - before - KERNEL_NS for before, after in pairwise(times)]
    assert took == pytest.approx([3_000, 500, 20_000, 100], abs=2)


def test_the_hosts_graph_is_not_touched_and_all_is_given_back(driver: FakeDriver, device: CudaDevice) -> None:
    graph, nodes = chain(driver, *[1_000] * 6)
    before = (dict(driver.graphs[graph].nodes), list(driver.graphs[graph].edges))
    for _ in range(50):
        stamped = StampedGraph(device, graph, [START, nodes[2], nodes[5]], STREAM)
        run(driver, stamped)
        stamped.close()
    assert (driver.graphs[graph].nodes, driver.graphs[graph].edges) == before
    assert list(driver.graphs) == [graph]
    assert not driver.executables
    device.close()
    assert driver.left == [graph]


def test_a_launch_is_read_once_it_has_got_through_and_can_be_launched_again(
    driver: FakeDriver, device: CudaDevice
) -> None:
    graph, nodes = chain(driver, 5_000, 5_000)
    stamped = StampedGraph(device, graph, [START, *nodes], STREAM)
    stamped.launch(STREAM)
    assert stamped.read() is None
    driver.pass_time(100_000)
    first = stamped.read()
    second = run(driver, stamped)
    assert first is not None
    assert second[0] > first[-1]


def test_between_parallel_branches_no_stamp_may_stand(driver: FakeDriver) -> None:
    graph, (first, second) = chain(driver, 1_000, 1_000)
    left, right = driver.add(graph, [second]), driver.add(graph, [second])
    longer = driver.add(graph, [left])
    joined = driver.add(graph, [longer, right])
    last = driver.add(graph, [joined])
    shape = StampSites.of(driver, graph)
    assert list(shape.places) == [START, first, second, joined, last]
    assert shape.place_of([left, right]) is None
    assert shape.place_of([left]) is None
    assert shape.place_of([]) == START
    assert shape.place_of(None) is None


def test_where_work_comes_back_from_another_stream_the_place_is_behind_it(driver: FakeDriver) -> None:
    graph, (first,) = chain(driver, 1_000)
    collective = driver.add(graph, [first])
    # Kernels of NCCL have such edges: the kernel waits for an event, and later kernels wait for both the event and
    # the kernel.
    then = driver.add(graph, [first, collective])
    shape = StampSites.of(driver, graph)
    assert list(shape.places) == [START, first, collective, then]
    assert shape.place_of([first, collective]) == shape.place_of([collective, first]) == collective
    assert shape.place_of([first, 12345]) is None


def test_nccl_events_next_to_a_chain_take_no_place_away(driver: FakeDriver, device: CudaDevice) -> None:
    graph, (first,) = chain(driver, 1_000)
    waited = driver.add(graph, [], 0)  # for work outside the graph
    collective = driver.add(graph, [first, waited], 5_000)
    recorded = driver.add(graph, [collective], 0)
    then = driver.add(graph, [collective], 2_000)
    another = driver.add(graph, [then], 3_000)
    driver.add(graph, [another, recorded], 0)
    shape = StampSites.of(driver, graph)
    assert list(shape.places.items()) == [(START, 0), (first, 1), (collective, 2), (then, 3), (another, 4)]
    assert shape.nodes == 4
    times = run(driver, StampedGraph(device, graph, list(shape.places), STREAM))
    took = [after - before - KERNEL_NS for before, after in pairwise(times)]
    assert took == pytest.approx([1_000, 5_000, 2_000, 3_000], abs=2)


def test_a_graph_of_events_alone_is_no_shape(driver: FakeDriver) -> None:
    graph = driver.new_graph()
    driver.add(graph, [], 0)
    with pytest.raises(ValueError, match="nothing runs"):
        StampSites.of(driver, graph)


def test_a_graph_with_several_ends_and_beginnings_is_stamped_around_them(
    driver: FakeDriver, device: CudaDevice
) -> None:
    graph = driver.new_graph()
    heads = [driver.add(graph), driver.add(graph)]
    middle = driver.add(graph, heads)
    for _ in range(2):
        driver.add(graph, [middle])
    shape = StampSites.of(driver, graph)
    assert list(shape.places) == [START, middle, END]
    times = run(driver, StampedGraph(device, graph, list(shape.places), STREAM))
    assert times == sorted(times)


def test_where_kernels_are_let_to_overlap_no_stamp_may_stand(driver: FakeDriver) -> None:
    graph, nodes = chain(driver, 1_000, 1_000)
    last = driver.add(graph, nodes[-1:], is_plain=False)
    assert list(StampSites.of(driver, graph).places) == [START, nodes[0], last]


def test_a_graph_of_which_no_node_can_be_read_is_no_shape(driver: FakeDriver) -> None:
    with pytest.raises(ValueError, match="no nodes"):
        StampSites.of(driver, driver.new_graph())


def test_what_cannot_be_instantiated_leaves_nothing(driver: FakeDriver, device: CudaDevice) -> None:
    graph, nodes = chain(driver, 1_000, 1_000)
    driver.most_nodes = 3
    with pytest.raises(DriverError):
        StampedGraph(device, graph, [START, *nodes], STREAM)
    assert list(driver.graphs) == [graph]
    assert not driver.executables


@given(st.integers(1, 14), st.integers(0, 20), st.integers(0, 1 << 30))
def test_every_other_node_comes_before_a_place_or_behind_it(count: int, edges: int, seed: int) -> None:
    chance, driver = random.Random(seed), FakeDriver()
    device = CudaDevice(driver, driver.now_ns)
    graph = driver.new_graph()
    nodes: list[int] = []
    before: dict[int, set[int]] = {}
    for _ in range(count):
        after = chance.sample(nodes, min(len(nodes), chance.choice([0, 1, 1, 1, 2, 3])))
        node = driver.add(graph, after)
        before[node] = set(after).union(*(before[one] for one in after))
        nodes.append(node)
    places = [place for place in StampSites.of(driver, graph).places if place not in (START, END)]
    through = {
        node
        for node in nodes
        if all(other in before[node] or node in before[other] for other in nodes if other != node)
    }
    assert set(places) == through
    last = chance.sample(nodes, chance.randint(1, count))
    place = StampSites.of(driver, graph).place_of(last)
    behind_all = [node for node in last if node in through and before[node] | {node} >= set(last)]
    assert [place] == (behind_all or [None])
    all_places = list(StampSites.of(driver, graph).places)
    times = run(driver, StampedGraph(device, graph, all_places, STREAM))
    assert times == sorted(times)
    assert len(times) == len(all_places)


def test_what_runs_is_not_launched_again_until_it_was_read(driver: FakeDriver, device: CudaDevice) -> None:
    graph, nodes = chain(driver, 5_000)
    stamped = StampedGraph(device, graph, [START, *nodes], STREAM)
    assert stamped.launch(STREAM)
    assert not stamped.launch(STREAM)
    driver.pass_time(100_000)
    assert not stamped.launch(STREAM)
    assert stamped.read() == stamped.read()
    assert stamped.launch(STREAM)
