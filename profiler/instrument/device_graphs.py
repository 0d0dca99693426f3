"""The captured graphs of each device, with the device's clock and the stamps around replays."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.driver import CudaDriver, Driver
from cbtop.profiler.device.in_line_cost import InLineCost
from cbtop.profiler.device.pairs import Pairs
from cbtop.profiler.device.stamp_cost import StampCost
from cbtop.profiler.instrument.capturing import Capture, Last
from cbtop.profiler.instrument.torch_internals import current_device, is_stream_captured, raw_stream_of
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol import clock

WAIT_S = 1.0  # longest wait for the device when the recording ends, in seconds
NAP_S = 1e-3


class DeviceGraph(Protocol):
    """The methods of a captured graph that `DeviceGraphs` uses (see `captured_graph.CapturedGraph`)."""

    steps: Any
    profiler: Any
    launches: deque[Any]

    @property
    def is_stamped(self) -> bool: ...

    @property
    def is_gone(self) -> bool: ...

    def settle(self, *, is_last: bool = False) -> None: ...

    def give_up(self) -> None: ...

    def close(self) -> bool: ...


class DeviceGraphs:
    """The captured graphs of one device, with the device's clock and the stamps around replays."""

    def __init__(self, driver: Driver, index: int) -> None:
        self.device = CudaDevice(driver)
        self.index = index
        #: Returns the caller's stream on this device, even if the stream is being captured.
        self.current_stream: Callable[[], int] = raw_stream_of(index)
        self._waiting: dict[DeviceGraph, None] = {}  # graphs with replays that were not read yet
        self._dropped: dict[DeviceGraph, None] = {}  # graphs to close after their last replay
        self._live: dict[DeviceGraph, None] = {}
        self.pairs = Pairs(self.device)
        self._in_line = InLineCost(self.device)
        self._settling = threading.Lock()

    def stream(self) -> int | None:
        """Return the caller's stream. None if it belongs to a different device, or is being captured."""
        if current_device() != self.index or is_stream_captured():
            return None
        return int(self.current_stream())

    def captured_last(self) -> Last:
        """Return the nodes in the caller's capture that the next captured node will depend on."""
        return self.device.driver.captured_last(self.current_stream())

    def cloned(self, capture: Capture) -> int:
        """Copy the graph that the caller is capturing, and make `capture` refer to the nodes of the copy.

        Returns the copy, or 0 if there is no graph. Raises DriverError if the graph cannot be copied.
        """
        driver = self.device.driver
        graph = driver.captured_graph(self.current_stream())
        if graph is None:
            return 0
        with driver.relaxed():
            clone = driver.clone(graph)
            try:
                capture.now_in(lambda node: driver.in_clone(node, clone))
            except BaseException:
                driver.destroy_graph(clone)
                raise
        return clone

    @property
    def stamped_graphs(self) -> int:
        return sum([graph.is_stamped for graph in list(self._live)])

    def add(self, graph: DeviceGraph) -> None:
        self._live[graph] = None
        for other in list(self._live):
            if other.is_gone:
                self.drop(other)

    def launched(self, graph: DeviceGraph) -> None:
        self._waiting[graph] = None

    def drop(self, graph: DeviceGraph) -> None:
        """Close `graph`, which is not replayed any longer, as soon as its last replay has ended."""
        self._dropped[graph] = None

    @property
    def stamp_ns(self) -> int:
        """The time in ns that the device needs for the two stamps around a replay, or 0 if it is unknown."""
        return 2 * (self._in_line.stamp_ns or 0)

    def settle(self, *, may_wait: bool = False) -> None:
        """Record finished replays, and close dropped graphs.

        If `may_wait`, first wait up to WAIT_S for running replays.
        """
        if self.device.is_of_parent or not (self._waiting or self._dropped):
            return
        # Another thread is already here, or this is a signal handler that has interrupted it.
        if not self._settling.acquire(blocking=False):
            return
        try:
            deadline = clock.monotonic() + WAIT_S
            with self.device.driver.within(self.device.context):
                while True:
                    self._settle(is_last=may_wait)
                    if not may_wait or not (self._waiting or self._dropped) or clock.monotonic() > deadline:
                        return
                    time.sleep(NAP_S)
        finally:
            self._settling.release()

    def _settle(self, *, is_last: bool) -> None:
        self.device.look_at_clocks()
        for graph in list(self._waiting):
            if graph.profiler.recording:  # False if the replay was in a step that is not recorded
                graph.settle(is_last=is_last)
            if not graph.launches:
                self._waiting.pop(graph, None)
        for graph in list(self._live):
            if graph.is_gone:
                self.drop(graph)
        for graph in list(self._dropped):
            if graph.close():
                for kept in (self._dropped, self._waiting, self._live):
                    kept.pop(graph, None)

    def say_how_measured(self, graph: DeviceGraph, cost: StampCost) -> None:
        """Announce how the times of `graph` are measured. `cost` is the cost of a stamp."""
        last = self.device.time.last
        clock = "" if last is None else f", its clock to {self.device.time.error_ns(last.device_ns) / 1000:.1f} us"
        stamps = f"less {cost.cost_ns / 1000:.2f} +- {cost.error_ns / 1000:.2f} us a stamp"
        graph.steps.measured(f"captured graphs on the device, {stamps}{clock}")

    def close(self) -> None:
        """Free all memory on the device, unless a replay still runs. Replays that were not read are lost."""
        if self.device.is_of_parent:
            return
        for graph in list(self._live):
            self.drop(graph)
        self.settle(may_wait=True)
        for graph in list(self._live):
            graph.give_up()
        if self.pairs.waiting:  # a replay is still running on the device, so keep the memory
            return
        self.settle()
        if not (self._waiting or self._dropped) and self._in_line.close():
            self.pairs.close()
            self.device.close()


_lock = threading.RLock()
devices: dict[int, DeviceGraphs] = {}


def settle(may_wait: bool) -> None:
    """Record the finished replays of all devices (see `DeviceGraphs.settle`)."""
    for device in list(devices.values()):
        try:
            device.settle(may_wait=may_wait)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "some steps of captured graphs are not recorded")


def device_here() -> DeviceGraphs:
    """Return the `DeviceGraphs` of the caller's device. Makes them at the first call for a device."""
    index = torch.cuda.current_device()
    with _lock:
        found = devices.get(index)
        if found is None:
            found = devices[index] = DeviceGraphs(CudaDriver(), index)
        return found


def _after_fork() -> None:
    """In a forked child, make a new lock. The old one may be held by a thread that the child does not have."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
