"""The guard: checks what bricks compute while a model runs, and stops, counts or mends faults."""

# Rules
# - Each step's logits are checked, because a value that is not finite anywhere in a pass reaches them. The pass then
#   runs again with every brick compared with its reference, to name the brick that began it. If no brick is wrong
#   this time, the logits are reported without a brick. Only an infinite score may not reach them: a soft cap of
#   scores ends it.
# - A fault that the reference computes, too, comes from the input or the weights. In such a second run the first
#   brick that shows it is blamed, in a sample no brick is.
# - Finite faults are found by samples: one brick at a time, in turn, is compared with its reference. Samples rest
#   once they have taken MAX_SHARE of the time. Their time is recorded as a brick of its own, `Guard`.

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from cbtop.compute.brick import ComputeBrick, Profiler
from cbtop.compute.checks import AssertionResult, Output
from cbtop.compute.errors import GuardError
from cbtop.compute.kernels.base import Arguments, with_copies
from cbtop.profiler.traces.activations import EXPLOSION_MAGNITUDE
from cbtop.protocol.messages import CheckResult
from cbtop.protocol.vocabulary import GUARD_CHECK, LOGITS_CHECK

GUARD_BRICK = "Guard"
FACTORS = "factors"  # the contracts' name
MAX_SHARE = 0.005  # share of the time since the guard began that samples may take

Calls = Sequence[Arguments]
Run = Callable[..., None]  # (brick, elements, *calls)


class Reaction(Enum):
    """The guard's reaction to a fault."""

    STOP = "stop"
    LOG = "log"
    FALLBACK = "fallback"


class Fault(Enum):
    """The kinds of fault of an output."""

    NAN = "NaN"
    INFINITY = "infinity"
    OVERFLOW = "overflow"  # finite, but larger than EXPLOSION_MAGNITUDE or than its type holds
    DIVERGENCE = "divergence"  # an assertion that compares with the float64 reference does not hold


@dataclass(frozen=True, slots=True)
class Met:
    """A fault of an output, with its finding, which may have a measured error."""

    fault: Fault
    finding: AssertionResult


_NOT_FINITE = {Fault.NAN: "NaN", Fault.INFINITY: "infinity"}  # the findings' names


def fault_of(output: Output) -> Fault | None:
    """Return the fault that the numbers of `output` show by themselves, if any."""
    largest = float(np.abs(output).max(initial=0))  # NaN if it contains one
    if largest <= EXPLOSION_MAGNITUDE or output.dtype.kind != "f":
        return None
    if np.isnan(largest):
        return Fault.NAN
    return Fault.INFINITY if np.isinf(largest) else Fault.OVERFLOW


def _fault_in(name: str, output: Output) -> Fault | None:
    """Return the fault of an output of that name. The overflow of int8 factors does not count: they are sums of 32
    numbers in an output of the same brick, and only too large if that output is."""
    fault = fault_of(output)
    return None if fault is Fault.OVERFLOW and name == FACTORS else fault


class JidokaGuard:
    """Watches the passes of a decoder. `places` names its bricks with their layers (None: outside layers).

    `run` returns the function that runs the bricks of a pass. `has_fault` says whether the pass must run again, with
    `again`, and then `finish_again`. `clock_s` measures the cost of samples. All of them raise GuardError if the
    reaction is to stop.
    """

    def __init__(
        self,
        reaction: Reaction,
        profiler: Profiler,
        places: Mapping[ComputeBrick, int | None],
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._reaction = reaction
        self._profiler = profiler
        self._places = places
        self._in_turn = tuple(places)
        self._turn = 0
        self._position = 0
        self._of_pass: Fault | None = None  # the fault of the pass's logits
        self._not_found = 0  # passes with faulty logits whose second run found no wrong brick
        self._bears_all = False  # whether the next brick is blamed even if its reference shows the fault
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._spent_s = 0.0
        self._times: dict[ComputeBrick, int] = {}
        self._fallen: dict[ComputeBrick, tuple[Met, str]] = {}  # the fault that made it fall back
        self._checked: dict[tuple[str, str], bool] = {}
        self._spoilt: set[tuple[str, str]] = set()  # not checked, because the input was not finite

    def run(self, run_brick: Run, position: int) -> Run:
        """Return `run_brick` for the bricks of the pass that begins at `position`, with one brick checked when it is
        due."""
        self._position = position
        self._bears_all = False
        if self._spent_s > MAX_SHARE * (self._clock_s() - self._began_s):
            return run_brick
        due = self._in_turn[self._turn % len(self._in_turn)]
        self._turn += 1

        def run(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
            if brick is due:
                self._check(run_brick, brick, elements, calls)
            else:
                run_brick(brick, elements, *calls)

        return run

    def has_fault(self, logits: Output) -> bool:
        """Return whether the logits of a pass show that something in it was wrong."""
        self._of_pass = fault_of(logits)
        return self._of_pass is not None

    def again(self, run_brick: Run) -> Run:
        """Return a function that runs the bricks of the same pass again, each checked."""
        self._bears_all = True

        def run(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
            self._check(run_brick, brick, elements, calls)

        return run

    def finish_again(self, last: ComputeBrick) -> None:
        """If no brick was wrong in the second run, report the first run's logits under `last`, which computed them:
        any brick may have begun it. The second run's results are kept."""
        if not self._bears_all or self._of_pass is None:
            return
        self._not_found += 1
        met = Met(self._of_pass, AssertionResult(False, not_finite=_NOT_FINITE.get(self._of_pass, "")))
        note = f"{met.fault.value} in position {self._position}; met {_times(self._not_found)}"
        self._announce(last, met, f"{note}; no brick was wrong when the step ran again", LOGITS_CHECK)
        if self._reaction is Reaction.STOP:
            raise GuardError(None, None, self._position, met.fault.value)

    def finish(self) -> None:
        """Report how often bricks that fell back were still wrong, and which assertions were never checked: they are
        skipped."""
        for brick, (met, where) in self._fallen.items():
            if (times := self._times[brick]) > 1:
                self._announce(brick, met, f"{where}; met {times} times, computed in float64, too")
        for brick in self._in_turn:
            for assertion in brick.spec.assertions:
                name = _sampled(assertion.name)
                if (brick.spec.name, name) not in self._checked:
                    self._checked[brick.spec.name, name] = True
                    reason = f"no sample: they rest at {100 * MAX_SHARE:g} % of the time"
                    if (brick.spec.name, name) in self._spoilt:
                        reason = "its input was not finite each time"
                    self._profiler.announce(CheckResult(brick.spec.name, name, True, None, None, skipped=reason))

    def _check(self, run_brick: Run, brick: ComputeBrick, elements: int, calls: Calls) -> None:
        began_s = self._clock_s()
        timer = self._profiler.start_brick(GUARD_BRICK)
        before = [with_copies(call, kernel.outputs) for kernel, call in zip(brick.kernels, calls, strict=True)]
        self._profiler.stop_brick(timer, elements)
        ran_s = self._clock_s()
        run_brick(brick, elements, *calls)
        compared_s = self._clock_s()
        timer = self._profiler.start_brick(GUARD_BRICK)
        try:
            with np.errstate(all="ignore"):  # a reference warns of the infinities that this looks for
                met = self._compare(brick, calls, before)
                if met is not None:
                    self._react(brick, met, calls, before)
        finally:
            self._profiler.stop_brick(timer, elements)
            self._spent_s += ran_s - began_s + self._clock_s() - compared_s

    def _compare(self, brick: ComputeBrick, calls: Calls, before: Calls) -> Met | None:
        """Return the first fault of an output. Announces each assertion the first time, and when it fails."""
        first = None
        compared = list(brick.compared(calls, before))
        given = {_fault_in(of, expected) for *_, expected, of in compared} - {None}  # given by the input
        is_spoilt = not self._bears_all and not given.isdisjoint(_NOT_FINITE)
        for name, found, output, _, of in compared:
            key = brick.spec.name, _sampled(name)
            if is_spoilt and not found.passed:
                self._spoilt.add(key)
            elif key not in self._checked or (self._checked[key] and not found.passed):
                self._checked[key] = found.passed
                result = CheckResult(*key, found.passed, found.max_error, found.tolerance, found.not_finite)
                self._profiler.announce(result)
            fault = _fault_in(of, output)
            if fault is None or (fault in given and not self._bears_all):  # too large and also wrong?
                fault = None if found.passed else Fault.DIVERGENCE
            if fault is not None and first is None and not is_spoilt:
                first = Met(fault, found)
        self._bears_all = self._bears_all and first is None
        return first

    def _react(self, brick: ComputeBrick, met: Met, calls: Calls, before: Calls) -> None:
        note = self._noted(brick, met.fault)
        if brick in self._fallen:  # its reference shows it, too: `finish` reports how often
            return
        if self._reaction is Reaction.FALLBACK:
            note += "; computed in float64 from here on"
        self._announce(brick, met, note)
        self._stop_if_asked(brick, met.fault)
        if self._reaction is Reaction.FALLBACK:
            self._fallen[brick] = met, self._where(brick, met.fault)
            brick.fall_back()
            brick.use_reference_outputs(calls, before)

    def _noted(self, brick: ComputeBrick, fault: Fault) -> str:
        times = self._times[brick] = self._times.get(brick, 0) + 1
        return f"{self._where(brick, fault)}; met {_times(times)}"

    def _where(self, brick: ComputeBrick, fault: Fault) -> str:
        layer = self._places[brick]
        return f"{fault.value} in {'' if layer is None else f'layer {layer}, '}position {self._position}"

    def _stop_if_asked(self, brick: ComputeBrick, fault: Fault) -> None:
        if self._reaction is Reaction.STOP:
            raise GuardError(brick.spec.name, self._places[brick], self._position, fault.value)

    def _announce(self, brick: ComputeBrick, met: Met, note: str, check: str = GUARD_CHECK) -> None:
        found = met.finding
        result = CheckResult(
            brick.spec.name, check, False, found.max_error, found.tolerance, found.not_finite, note=note
        )
        self._profiler.announce(result)


def _times(count: int) -> str:
    return f"{count} time{'s' * (count > 1)}"


def _sampled(assertion: str) -> str:
    return f"{assertion}, while it runs"
