"""What a stamp in a graph costs, measured on the device: a graph of our own, with and without stamps in line.

A section of KERNELS kernels between two stamps, and one with a stamp behind each; the difference, for each stamp, is
what one costs. Some sections are of kernels of one block, some of many: how far they differ is the uncertainty.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from cbtop.profiler.device.device import Device
from cbtop.profiler.device.driver import Arguments, Driver

KERNELS = 16
ROUNDS = 5
BLOCKS = (1, 512)
_ROUND = 2 + 1 + KERNELS  # stamps: of the plain section, and of the other


@dataclass(frozen=True, slots=True)
class StampCost:
    """Of one stamp in line, in ns."""

    cost_ns: int
    error_ns: int


class Measurement:
    """One launch, half a millisecond on the caller's stream; what it found is read when it is through."""

    def __init__(self, device: Device, stream: int) -> None:
        self._device = device
        self._count = _ROUND * ROUNDS * len(BLOCKS)
        self._words = device.map_words(self._count)
        self._words.clear(self._count)
        arguments = Arguments([(self._words.address + 8 * at,) for at in range(self._count)])
        driver = device.driver
        with driver.relaxed():
            graph = driver.new_graph()
            try:
                _build(driver, graph, device, arguments)
                self._executable = driver.instantiate(graph)
            finally:
                driver.destroy_graph(graph)
        driver.launch_graph(self._executable, stream)

    def read(self) -> StampCost | None:
        """What was found; None while it runs."""
        if not self._words[self._count - 1]:
            return None
        times = self._words.first(self._count)
        found = []
        per_block = ROUNDS * _ROUND
        for first in range(0, self._count, per_block):
            costs = []
            for at in range(first, first + per_block, _ROUND):
                plain_ns = times[at + 1] - times[at]
                stamped_ns = times[at + _ROUND - 1] - times[at + 2]
                costs.append((stamped_ns - plain_ns) / (KERNELS - 1))
            found.append((min(costs), median(costs), max(costs)))
        middle = sum(cost for _, cost, _ in found) / len(found)
        low, high = min(low for low, _, _ in found), max(high for _, _, high in found)
        return StampCost(max(0, round(middle)), max(1, round(max(middle - low, high - middle))))

    def close(self) -> None:
        """Give back what it took; only once it was read."""
        self._device.driver.destroy_executable(self._executable)
        self._device.spare_words(self._words)


def _build(driver: Driver, graph: int, device: Device, arguments: Arguments) -> None:
    last: list[int] = []
    stamps = 0

    def stamp() -> None:
        nonlocal last, stamps
        last = [driver.add_kernel(graph, last, device.stamp, arguments.at(stamps))]
        stamps += 1

    for blocks in BLOCKS:
        for _ in range(ROUNDS):
            for stamps_each in (False, True):
                stamp()
                for _ in range(KERNELS):
                    last = [driver.add_kernel(graph, last, device.nothing, 0, blocks)]
                    if stamps_each:
                        stamp()
                if not stamps_each:
                    stamp()
