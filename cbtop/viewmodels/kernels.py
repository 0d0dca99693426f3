"""The kernels of a burst (a few steps recorded on request) as rows, summed over a brick's layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.machine_code.occupancy import BlockShape, occupancy_of
from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.kernel_messages import KernelBurst, KernelTimes
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.kernel_makers import NO_MAKER, KernelMaker, maker_of


@dataclass(frozen=True, slots=True)
class Waves:
    """The waves of a launch on the device, by NVIDIA's rules of occupancy (derived).

    A wave is as many blocks as all multiprocessors run at once. `tail` is the filled share of the last wave, above 0
    and at most 1.
    """

    multiprocessors: int
    blocks_per_multiprocessor: int
    blocks: int
    waves: float
    tail: float

    @property
    def empty(self) -> float:
        """The empty share of the room for blocks in all waves, below 1."""
        return 1 - self.waves / math.ceil(self.waves)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel of a brick with one launch configuration, with its times in a burst."""

    name: str
    launches_per_step: float
    kernel: KernelAttributes
    mean_us: float
    deviation_us: float | None  # standard deviation of the launches; None for a single launch
    min_us: float
    max_us: float
    maker: KernelMaker = NO_MAKER
    waves: Waves | None = None  # None if the device, the launch or its limits are unknown

    @property
    def us_per_step(self) -> float:
        """Time of all launches of this kernel in one step, in µs."""
        return self.mean_us * self.launches_per_step


@dataclass(frozen=True, slots=True)
class BrickKernels:
    """The kernels of one brick in a burst, in the order of their first launch."""

    brick: str
    label: str
    layers: int  # number of layers with this brick; 0 outside of layers
    kernels: tuple[KernelRow, ...]

    @property
    def launches_per_step(self) -> float:
        return sum(row.launches_per_step for row in self.kernels)

    @property
    def us_per_step(self) -> float:
        return sum(row.us_per_step for row in self.kernels)


@dataclass(frozen=True, slots=True)
class PhaseKernels:
    """The kernels of one phase in a burst of `steps` steps."""

    phase: str
    steps: int
    bricks: tuple[BrickKernels, ...]

    @property
    def launches_per_step(self) -> float:
        return sum(brick.launches_per_step for brick in self.bricks)

    @property
    def us_per_step(self) -> float:
        return sum(brick.us_per_step for brick in self.bricks)


@dataclass(frozen=True, slots=True)
class BurstView:
    """The kernels that a burst recorded in one process."""

    source: str
    pid: int
    steps: int
    unplaced: int
    lost: int
    left_out: int
    phases: tuple[PhaseKernels, ...]


def burst_view(source: str, pid: int, nodes: Sequence[Node], burst: KernelBurst) -> BurstView:
    """Return the view of the kernels in `burst`. The process has this pid, and the key `source`."""
    phases = kernels_of(nodes, burst)
    return BurstView(source, pid, burst.steps, burst.unplaced, burst.lost, burst.left_out, phases)


def kernels_of(nodes: Sequence[Node], burst: KernelBurst) -> tuple[PhaseKernels, ...]:
    """Return the kernels of `burst`, by phase and brick. Unknown nodes, and nodes that are not kernels, are left
    out.
    """
    phases: dict[int, dict[tuple[str, str], dict[tuple[str, KernelAttributes], list[KernelTimes]]]] = {}
    layers: dict[tuple[int, str, str], set[int]] = {}
    for times in burst.kernels:
        path = path_of(nodes, times.node)
        if len(path) < 3 or path[-1].kind is not NodeKind.KERNEL or path[0].kind is not NodeKind.STEP:
            continue
        step, kernel, brick = path[0], path[-1], path[-2]
        of_brick = phases.setdefault(step.id, {}).setdefault((brick.name, brick.label), {})
        of_brick.setdefault((kernel.name, kernel.kernel), []).append(times)
        inside = layers.setdefault((step.id, brick.name, brick.label), set())
        inside.update(one.id for one in path if one.kind is NodeKind.LAYER)
    return tuple(
        PhaseKernels(
            display_name(nodes[step - 1]),
            max(one.steps for kernels in bricks.values() for found in kernels.values() for one in found),
            tuple(
                BrickKernels(
                    brick,
                    label,
                    len(layers[step, brick, label]),
                    tuple(_row(name, attributes, found, burst) for (name, attributes), found in kernels.items()),
                )
                for (brick, label), kernels in bricks.items()
            ),
        )
        for step, bricks in phases.items()
    )


def path_of(nodes: Sequence[Node], node: int) -> list[Node]:
    """Return `node` and all nodes around it, outermost first."""
    found: list[Node] = []
    at: int | None = node
    while at is not None and 1 <= at <= len(nodes):
        found.append(nodes[at - 1])
        at = nodes[at - 1].parent
    return found[::-1]


def waves_of(kernel: KernelAttributes, burst: KernelBurst) -> Waves | None:
    """Return the waves of a launch in `burst`. None if the device, the launch or its limits are unknown."""
    if kernel.grid is None or kernel.block is None or burst.multiprocessors is None:
        return None
    threads, blocks = math.prod(kernel.block), math.prod(kernel.grid)
    shared_bytes = (kernel.static_shared_memory_bytes or 0) + (kernel.shared_memory_bytes or 0)
    if not threads or not blocks or not kernel.registers:
        return None
    occupancy = occupancy_of(burst.architecture, BlockShape(threads, kernel.registers, shared_bytes))
    if occupancy is None or not occupancy.blocks:
        return None
    waves = blocks / (occupancy.blocks * burst.multiprocessors)
    return Waves(burst.multiprocessors, occupancy.blocks, blocks, waves, waves - math.ceil(waves) + 1)


def _row(name: str, attributes: KernelAttributes, found: Sequence[KernelTimes], burst: KernelBurst) -> KernelRow:
    launches = sum(one.launches for one in found)
    mean_ns = sum(one.launches * one.mean_ns for one in found) / launches
    squares = sum(one.launches * (one.deviation_ns**2 + one.mean_ns**2) for one in found) / launches
    return KernelRow(
        name=name,
        launches_per_step=sum(one.launches / one.steps for one in found),
        kernel=attributes,
        mean_us=mean_ns / 1e3,
        deviation_us=math.sqrt(max(0.0, squares - mean_ns**2)) / 1e3 if launches > 1 else None,
        min_us=min(one.min_ns for one in found) / 1e3,
        max_us=max(one.max_ns for one in found) / 1e3,
        maker=maker_of(name, attributes, found[0]),
        waves=waves_of(attributes, burst),
    )
