"""The message with sampled functions: what Python ran in the time that no brick covers."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.protocol.attributes import MAX_QUANTITY

MAX_SAMPLED_PLACES = 32
MAX_SAMPLED_FUNCTIONS = 16  # most functions of a place that are sent; the rest are in its number of samples
BETWEEN_STEPS = "between steps"  # the samples outside of all steps of the process
IN_NO_BRICK = "not instrumented"  # the samples in a recorded step, outside of its bricks


@dataclass(frozen=True, slots=True)
class SampledFunction:
    """A Python function that was sampled, and its line with the most samples.

    `asleep` is how many of its samples found the thread asleep: it waited for a lock, a file, a socket or a time. If
    the function belongs to a library, `called_from` is the line of the program that led there, as `file:line
    function`.
    """

    name: str
    file: str
    line: int
    samples: int
    asleep: int = 0
    called_from: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.asleep <= self.samples < MAX_QUANTITY or not 0 <= self.line < MAX_QUANTITY:
            raise ValueError(
                f"function {self.name!r}: {self.asleep} of {self.samples} samples asleep, line {self.line}"
            )


@dataclass(frozen=True, slots=True)
class SampledPlace:
    """The samples of one kind of untimed time: between steps, or outside of bricks in a phase of a model.

    `name` is BETWEEN_STEPS, IN_NO_BRICK, the row of a module's own operations, or a part of a training step. In
    `unread` samples the function is not known, and in `own` samples a function of cbtop ran.
    """

    phase: str
    model: str
    name: str
    samples: int
    unread: int = 0
    own: int = 0
    functions: tuple[SampledFunction, ...] = ()

    def __post_init__(self) -> None:
        if len(self.functions) > MAX_SAMPLED_FUNCTIONS:
            most = MAX_SAMPLED_FUNCTIONS
            raise ValueError(f"{self.name!r}: {len(self.functions)} functions; expected up to {most}")
        known = sum(one.samples for one in self.functions)
        if min(self.unread, self.own) < 0 or not self.unread + self.own + known <= self.samples < MAX_QUANTITY:
            raise ValueError(f"{self.name!r}: {self.samples} samples, of them {known}, {self.unread} and {self.own}")


@dataclass(frozen=True, slots=True)
class CpuSamples:
    """The samples between two times. The message replaces the previous one.

    The sampler looked `ticks` times, and took `cpu_ns` of processor time.
    """

    since_ns: int
    until_ns: int
    ticks: int
    cpu_ns: int
    places: tuple[SampledPlace, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.since_ns <= self.until_ns or not min(self.ticks, self.cpu_ns) >= 0:
            raise ValueError(f"{self.ticks} samples from {self.since_ns} to {self.until_ns}, in {self.cpu_ns} ns")
        keys = {(one.phase, one.model, one.name) for one in self.places}
        if len(self.places) > MAX_SAMPLED_PLACES or len(keys) < len(self.places):
            raise ValueError(f"{len(self.places)} places; expected up to {MAX_SAMPLED_PLACES}, named once")
