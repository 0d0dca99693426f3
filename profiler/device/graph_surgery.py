"""Puts stamps (kernels that store the device's time) into a clone of a captured graph.

Rules
- The host's graph is never changed. An executable of a clone runs instead.
- A stamp is put after a node only if every other node comes before or after that place. So parallel branches have no
  stamps: a stamp in one would wait for free resources of the device, and its time would include this wait.
- There is no stamp after a kernel that may overlap the next kernel (programmatic dependencies).
- Events take no time, so they may be parallel to a place. For example, NCCL lets each collective record an event for
  which no node in the graph waits.
- A place is named by the node before it. START is before all nodes. END is after all nodes, if no single node is
  last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.driver import Arguments, Driver
from cbtop.profiler.device.graph_driver import DependencyEdge

START, END = 0, -1  # Places without a node before them. No node's handle has these values.
MAX_NODES = 8192


@dataclass(frozen=True, slots=True)
class StampSites:
    """The possible places of stamps in a graph, numbered in order of execution."""

    places: dict[int, int]  # place (a node, START or END) -> number of timed nodes before it
    # Node that takes time -> its index. It is higher than the index of any node that it waits for.
    positions: dict[int, int]

    @property
    def nodes(self) -> int:
        """The number of nodes that take time. Events take none."""
        return len(self.positions)

    @classmethod
    def of(cls, driver: Driver, graph: int) -> StampSites:
        """Return the possible places of stamps in `graph`. Raises ValueError if it has no nodes or too many."""
        nodes, edges = driver.nodes(graph), driver.edges(graph)
        order, ahead, behind = _in_order(nodes, edges)
        overlaps = {edge.first for edge in edges if not edge.is_plain}
        timed = [node for node in order if driver.takes_time(node)]
        if not timed:
            raise ValueError("nothing runs in it")
        earlier = _reachable(order, ahead, timed)
        later = _reachable(order[::-1], behind, timed)
        places = {
            node: index + 1
            for index, node in enumerate(timed)
            if earlier[node].bit_count() == index
            and later[node].bit_count() == len(timed) - 1 - index
            and node not in overlaps
        }
        found = {START: 0} | places
        if timed[-1] not in found:
            found[END] = len(timed)
        return cls(found, {node: index for index, node in enumerate(timed)})

    @property
    def end(self) -> int:
        """The place after all nodes of the graph."""
        return next(reversed(self.places))

    def place_of(self, last: Sequence[int] | None) -> int | None:
        """Return the place after the nodes `last`, or None if there can be no stamp."""
        if last is None or not self.positions.keys() >= set(last):
            return None  # a node without an index is an event, and does not tell which timed nodes are before it
        # If work on another stream joins the caller's stream, `last` has several nodes. If one of them is a place,
        # all others come before it.
        place = max(last, key=self.positions.__getitem__, default=START)
        return place if place in self.places else None


class Order:
    """The nodes of a graph in topological order, with their predecessors. Raises ValueError if it has no nodes or too
    many.
    """

    def __init__(self, driver: Driver, graph: int) -> None:
        self.nodes = driver.nodes(graph)
        order, ahead, _ = _in_order(self.nodes, driver.edges(graph))
        earlier = _reachable(order, ahead, order)
        self._up_to = {node: earlier[node] | 1 << index for index, node in enumerate(order)}
        self._order = order

    def between(self, first: Sequence[int], last: Sequence[int]) -> list[int]:
        """Return the nodes that a capture added between two moments. `first` and `last` were its last nodes at these
        moments.
        """
        bits = self._all_of(last) & ~self._all_of(first)
        return [node for index, node in enumerate(self._order) if bits >> index & 1]

    def _all_of(self, last: Sequence[int]) -> int:
        bits = 0
        for node in last:
            bits |= self._up_to.get(node, 0)
        return bits


def _in_order(
    nodes: Sequence[int], edges: Sequence[DependencyEdge]
) -> tuple[list[int], dict[int, list[int]], dict[int, list[int]]]:
    """Return `nodes` in topological order, the predecessors of each node, and the successors of each node.

    Raises ValueError without nodes or with too many.
    """
    if not 0 < len(nodes) <= MAX_NODES:
        raise ValueError(f"it has {len(nodes) or 'no'} nodes")
    ahead: dict[int, list[int]] = {node: [] for node in nodes}
    behind: dict[int, list[int]] = {node: [] for node in nodes}
    for edge in edges:
        behind[edge.first].append(edge.then)
        ahead[edge.then].append(edge.first)
    waits = {node: len(first) for node, first in ahead.items()}
    order = []
    ready = [node for node in nodes if not waits[node]]
    while ready:
        node = ready.pop()
        order.append(node)
        for then in behind[node]:
            waits[then] -= 1
            if not waits[then]:
                ready.append(then)
    return order, ahead, behind


def _reachable(order: Sequence[int], ahead: dict[int, list[int]], counted: Sequence[int]) -> dict[int, int]:
    """Return a bit mask for each node: which of the `counted` nodes come before it.

    `ahead` has the predecessors of each node. `order` has each node after its predecessors.
    """
    bit = {node: 1 << index for index, node in enumerate(counted)}
    found: dict[int, int] = {}
    for node in order:
        bits = 0
        for one in ahead[node]:
            bits |= found[one] | bit.get(one, 0)
        found[node] = bits
    return found


class StampedGraph:
    """A clone of `graph` that can be launched. It has a stamp at each of `places`, which are in order of execution.

    Making it takes 10 to 60 ms, and some megabytes on the device. Raises DriverError if the driver refuses a call.
    """

    def __init__(self, device: CudaDevice, graph: int, places: Sequence[int], stream: int) -> None:
        self._device = device
        self._count = len(places)
        self._words = device.map_words(self._count)
        self._words.clear(self._count)
        self._times: list[int] | None = None  # the device's times of the last launch; None until they were read
        self._running = threading.Lock()  # locked from a launch until its times were read
        arguments = Arguments([(self._words.address + 8 * at,) for at in range(self._count)])
        driver = device.driver
        try:
            with driver.relaxed():
                clone = driver.clone(graph)
                try:
                    _insert(device, graph, clone, places, arguments)
                    self._executable = driver.instantiate(clone)
                finally:
                    driver.destroy_graph(clone)
                try:
                    driver.upload(self._executable, stream)
                except BaseException:
                    driver.destroy_executable(self._executable)
                    raise
        except BaseException:
            device.spare_words(self._words)
            raise

    @property
    def is_running(self) -> bool:
        """Whether the times of the last launch were not read yet."""
        return self._running.locked()

    def launch(self, stream: int) -> bool:
        """Launch the executable on `stream`, unless it is running. Returns whether it was launched."""
        if not self._running.acquire(blocking=False):
            return False
        try:
            self._times = None
            self._device.driver.launch_graph(self._executable, stream)
        except BaseException:
            self._running.release()
            raise
        return True

    def read(self) -> list[int] | None:
        """Return the device's times at the stamps of the last launch, or None if it has not finished."""
        # The times are known if an earlier call had read them before a signal interrupted it.
        if self._times is None:
            if not self._words[self._count - 1]:
                return None
            times = self._words.first(self._count)
            if not all(times):
                return None
            self._times = times
        # Clear the words now. Before the next launch, the device would have to wait for it.
        self._words.clear(self._count)
        if self._running.locked():
            self._running.release()
        return self._times

    def close(self) -> None:
        """Release the memory and the executable, which must not be running."""
        if not self._device.is_of_parent:
            self._device.driver.destroy_executable(self._executable)
            self._device.spare_words(self._words)


def _insert(device: CudaDevice, graph: int, clone: int, places: Iterable[int], arguments: Arguments) -> None:
    driver = device.driver
    nodes, edges = driver.nodes(graph), driver.edges(graph)
    followers: dict[int, list[int]] = {}
    for edge in edges:
        followers.setdefault(edge.first, []).append(edge.then)
    waiting = {edge.then for edge in edges}
    cloned: dict[int, int] = {}

    def in_clone(node: int) -> int:
        found = cloned.get(node)
        if found is None:
            found = cloned[node] = driver.in_clone(node, clone)
        return found

    for at, place in enumerate(places):
        if place == START:
            before, after = [], [node for node in nodes if node not in waiting]
        elif place == END:
            before, after = [node for node in nodes if node not in followers], []
        else:
            before, after = [place], followers.get(place, [])
        ahead, behind = [in_clone(node) for node in before], [in_clone(node) for node in after]
        stamp = driver.add_kernel(clone, ahead, device.stamp, arguments.at(at))
        driver.remove_edges(clone, [(one, other) for one in ahead for other in behind])
        driver.add_edges(clone, [(stamp, node) for node in behind])
