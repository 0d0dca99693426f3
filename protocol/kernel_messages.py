"""The messages about the kernels of a burst (the steps whose kernels CUPTI recorded), and about the times of the
host.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.protocol.attributes import MAX_QUANTITY


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """The times of the launches of one kernel in one phase, in ns.

    - `node` is the kernel's node in the graph, and `steps` is the number of recorded steps of the phase.
    - `deviation_ns` is the standard deviation of the durations.
    - A step has between `fewest` and `most` launches (None: not sent).
    - `maker` is the library that made the kernel, such as Triton. Hooks in this library report `maker` and `source`
      ("": unknown).
    """

    node: int
    steps: int
    launches: int
    mean_ns: float
    deviation_ns: float
    min_ns: int
    max_ns: int
    fewest: int | None = None
    most: int | None = None
    maker: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 <= (self.fewest or 0) <= (self.launches if self.most is None else self.most) <= self.launches:
            raise ValueError(f"kernel {self.node}: {self.fewest} to {self.most} of {self.launches} launches")
        times = (0, self.min_ns, self.mean_ns, self.max_ns, MAX_QUANTITY)
        if (
            min(self.steps, self.launches) < 1
            or not 0 <= self.deviation_ns < MAX_QUANTITY
            or list(times) != sorted(times)
        ):
            raise ValueError(f"kernel {self.node}: {self.launches} launches in {self.steps} steps of {times} ns")


@dataclass(frozen=True, slots=True)
class KernelBurst:
    """A burst: the kernels of a few steps that CUPTI recorded on request. It replaces the previous burst.

    `steps` is the number of steps, and `number` the number of the request. These steps are not in the statistics.

    - `unplaced` launches were outside every known call of a module.
    - `lost` launches were recorded by CUPTI but could not be read.
    - `left_out` launches did not get a node, because the graph was full.
    - `multiprocessors` and `architecture` (such as sm_90) describe the device.
    """

    number: int
    steps: int
    kernels: tuple[KernelTimes, ...]
    unplaced: int = 0
    lost: int = 0
    left_out: int = 0
    multiprocessors: int | None = None
    architecture: str = ""

    def __post_init__(self) -> None:
        if self.multiprocessors is not None and self.multiprocessors < 1:
            raise ValueError(f"{self.multiprocessors} multiprocessors; 1 or more are expected")


@dataclass(frozen=True, slots=True)
class BrickHostTime:
    """The median time in ns that the host spent in a call of the brick `node`, without the bricks inside it.

    `calls` is the number of calls.
    """

    node: int
    calls: int
    median_ns: float

    def __post_init__(self) -> None:
        if self.calls < 1 or not 0 <= self.median_ns < MAX_QUANTITY:
            raise ValueError(f"brick {self.node}: {self.calls} calls of {self.median_ns} ns")


@dataclass(frozen=True, slots=True)
class HostTimes:
    """The time that the host spent in each brick, in the newest `steps` steps with timed calls. Replaces the previous
    message.

    For a brick on a GPU, this is the time that the host needs to launch the brick's kernels. The times of the kernels
    are sent separately.
    """

    steps: int
    bricks: tuple[BrickHostTime, ...]
