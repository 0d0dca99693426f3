"""Messages about properties of a process that do not vary by chance between equal runs.

These are the operations and allocations of a step, compiled code, and the conditions of the process.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_COUNT = 1 << 53  # Largest value of any count. Numbers up to this limit are exact in JSON.
MAX_OPERATIONS = 5_000  # most different operations of a phase; the same operation in two nodes counts twice
MAX_BREAKS = 100  # most reasons for graph breaks that are sent; if a reason occurs in two nodes, it counts twice
MAX_CONDITIONS = 64


@dataclass(frozen=True, slots=True)
class RunCondition:
    """One property of a process that may change its times, such as the version of a library.

    Examples: `name` is `Triton` and `value` is `3.7.0`, or `name` is `instructions` and `value` is `AVX512`.
    """

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Conditions:
    """All known conditions of a process. They replace the previous ones."""

    conditions: tuple[RunCondition, ...]

    def __post_init__(self) -> None:
        if len(self.conditions) > MAX_CONDITIONS or len({one.name for one in self.conditions}) < len(self.conditions):
            raise ValueError(f"{len(self.conditions)} conditions; expected up to {MAX_CONDITIONS}, named once")


@dataclass(frozen=True, slots=True)
class OperationCount:
    """The number of times that a step runs the operation `name` in the brick, layer or step `node`.

    `dtype` is the type of its first result, or "" if it returns no tensor. The number was between `fewest` and `most`
    in the counted steps.
    """

    node: int
    name: str
    dtype: str
    fewest: int
    most: int

    def __post_init__(self) -> None:
        _check_range(f"operation {self.name!r}", self.fewest, self.most)


@dataclass(frozen=True, slots=True)
class StepOperations:
    """The operations of torch in `steps` steps of a phase on a processor. Views of tensors are left out.

    A message replaces the previous one of the same phase and model. Steps of a warm-up are sent under the name of the
    phase that follows.
    """

    phase: str
    model: str
    steps: int
    operations: tuple[OperationCount, ...]

    def __post_init__(self) -> None:
        _check_range(f"steps of {self.phase!r}", 1, self.steps)
        if len(self.operations) > MAX_OPERATIONS:
            raise ValueError(f"{len(self.operations)} operations; at most {MAX_OPERATIONS} are taken")


@dataclass(frozen=True, slots=True)
class StepAllocations:
    """The number of times that a step allocates memory of a GPU from torch: `fewest` to `most` in `steps` steps.

    A message replaces the previous one of the same phase and model. Steps of a warm-up are sent under the name of the
    phase that follows.
    """

    phase: str
    model: str
    steps: int
    fewest: int
    most: int

    def __post_init__(self) -> None:
        _check_range(f"steps of {self.phase!r}", 1, self.steps)
        _check_range(f"allocations of {self.phase!r}", self.fewest, self.most)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A reason why Dynamo ended a graph early, and how often.

    `node` is the innermost step, layer or brick that ran then, or 0 if none ran.
    """

    reason: str
    count: int
    node: int = 0

    def __post_init__(self) -> None:
        _check_range("graph breaks", 1, self.count)


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """Dynamo's totals since the first call of a model in the process. A message replaces the previous one.

    A process that watches Dynamo sends this message even if nothing was compiled. `recompilations` counts the
    compilations of code that had been compiled before.
    """

    compilations: int
    recompilations: int
    breaks: tuple[GraphBreak, ...] = ()

    def __post_init__(self) -> None:
        _check_range("compilations", self.recompilations, self.compilations)
        if len(self.breaks) > MAX_BREAKS:
            raise ValueError(f"{len(self.breaks)} reasons for graph breaks; at most {MAX_BREAKS} are taken")

    @property
    def graph_breaks(self) -> int:
        return sum(one.count for one in self.breaks)


StructureMessage = Conditions | StepOperations | StepAllocations | CompiledCode
StructurePart = RunCondition | OperationCount | GraphBreak  # These messages exist only inside other messages.


def _check_range(what: str, least: int, most: int) -> None:
    if not 0 <= least <= most <= MAX_COUNT:
        raise ValueError(f"{what}: from {least} to {most}; expected counts up to {MAX_COUNT}, in order")
