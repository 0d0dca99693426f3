"""The guard checks the outputs of bricks while a model runs. It stops the run, counts faults or replaces faulty
outputs."""

# Rules
# - The logits of each step are checked. A value in a pass that is NaN or infinite makes the logits NaN or infinite,
#   too. The only exception is an infinite attention score, because a soft cap may make it finite.
# - If the logits are faulty, the pass runs again, and every brick is compared with its reference. The first faulty
#   brick is reported. If no brick is faulty in the second run, only the logits are reported.
# - If the reference has the same fault, the input or the weights have caused it. A second run reports the first brick
#   with such a fault. A sample does not report it.
# - Samples find faults with finite values: one brick after another is compared with its reference. Sampling pauses
#   when it has taken MAX_SHARE of the time. Its time is recorded as a brick, `Guard`.

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
FACTORS = "factors"
MAX_SHARE = 0.005  # checks of samples take at most this share of the time since the guard began

Calls = Sequence[Arguments]
Run = Callable[..., None]  # a function that runs a brick; it is called with (brick, elements, *calls)


class Reaction(Enum):
    """The guard's reaction to a fault."""

    STOP = "stop"
    LOG = "log"
    FALLBACK = "fallback"


class Fault(Enum):
    """The kinds of faults in an output."""

    NAN = "NaN"
    INFINITY = "infinity"
    OVERFLOW = "overflow"  # all values are finite, but one is larger than EXPLOSION_MAGNITUDE
    DIVERGENCE = "divergence"  # the output differs from the output of the float64 reference


@dataclass(frozen=True, slots=True)
class Met:
    """A fault that was found in an output. `finding` is the result of the failed assertion."""

    fault: Fault
    finding: AssertionResult


# Names of the faults NaN and infinity in an AssertionResult.
_NOT_FINITE = {Fault.NAN: "NaN", Fault.INFINITY: "infinity"}


def fault_of(output: Output) -> Fault | None:
    """Return the fault in the values of `output`, or None. Does not compare with a reference."""
    largest = float(np.abs(output).max(initial=0))  # the largest magnitude, which is NaN if the output contains NaN
    if largest <= EXPLOSION_MAGNITUDE or output.dtype.kind != "f":
        return None
    if np.isnan(largest):
        return Fault.NAN
    return Fault.INFINITY if np.isinf(largest) else Fault.OVERFLOW


def _fault_in(name: str, output: Output) -> Fault | None:
    """Return the fault of the output that the contract calls `name`, or None.

    Factors of int8 codes are not tested for overflow. They are sums of 32 numbers of the brick's main output, so they
    overflow only if the main output does.
    """
    fault = fault_of(output)
    return None if fault is Fault.OVERFLOW and name == FACTORS else fault


class JidokaGuard:
    """Watches the passes of a decoder. `places` maps its bricks to their layers (None: outside layers).

    `run` returns the function that runs the bricks of a pass. If `has_fault` is true afterwards, the caller must run
    the pass again with the function that `again` returns, and then call `finish_again`.

    If the reaction is to stop, a fault raises GuardError. `clock_s` measures the time of samples.
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
        self._of_pass: Fault | None = None
        self._not_found = 0  # number of passes with faulty logits, but without a faulty brick in the second run
        self._bears_all = False  # whether to report the next faulty brick even if its reference has the same fault
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._spent_s = 0.0
        self._times: dict[ComputeBrick, int] = {}
        # brick that its references replace because of a fault -> the fault, and the brick's place in the model
        self._fallen: dict[ComputeBrick, tuple[Met, str]] = {}
        self._checked: dict[tuple[str, str], bool] = {}
        # (brick, assertion) pairs that could not be checked, because the input was not finite
        self._spoilt: set[tuple[str, str]] = set()

    def run(self, run_brick: Run, position: int) -> Run:
        """Return a function that runs the bricks of the pass that begins at `position`.

        Unless sampling pauses, the function also checks one brick.
        """
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
        """Return whether the logits of a pass show a fault."""
        self._of_pass = fault_of(logits)
        return self._of_pass is not None

    def again(self, run_brick: Run) -> Run:
        """Return a function that runs the bricks of the same pass again and checks each of them."""
        self._bears_all = True

        def run(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
            self._check(run_brick, brick, elements, calls)

        return run

    def finish_again(self, last: ComputeBrick) -> None:
        """Report the fault of the first run if no brick was faulty in the second run.

        The report names `last`, the brick that computed the logits, but any brick may have caused the fault. The
        decoder continues with the results of the second run.
        """
        if not self._bears_all or self._of_pass is None:
            return
        self._not_found += 1
        met = Met(self._of_pass, AssertionResult(False, not_finite=_NOT_FINITE.get(self._of_pass, "")))
        note = f"{met.fault.value} in position {self._position}; met {_times(self._not_found)}"
        self._announce(last, met, f"{note}; no brick was wrong when the step ran again", LOGITS_CHECK)
        if self._reaction is Reaction.STOP:
            raise GuardError(None, None, self._position, met.fault.value)

    def finish(self) -> None:
        """Report the bricks that had a fault again after their references replaced them, and the assertions that were
        never checked.
        """
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
            with np.errstate(all="ignore"):  # do not warn about infinities, because the checks look for them
                met = self._compare(brick, calls, before)
                if met is not None:
                    self._react(brick, met, calls, before)
        finally:
            self._profiler.stop_brick(timer, elements)
            self._spent_s += ran_s - began_s + self._clock_s() - compared_s

    def _compare(self, brick: ComputeBrick, calls: Calls, before: Calls) -> Met | None:
        """Return the first fault of an output, or None.

        Announces each assertion when it is first evaluated, and again when it first fails.
        """
        first = None
        compared = list(brick.compared(calls, before))
        # The faults that the reference also has. These faults come from the input or the weights.
        given = {_fault_in(of, expected) for *_, expected, of in compared} - {None}
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
            # The output may still differ from the reference's output, although it is finite.
            if fault is None or (fault in given and not self._bears_all):
                fault = None if found.passed else Fault.DIVERGENCE
            if fault is not None and first is None and not is_spoilt:
                first = Met(fault, found)
        self._bears_all = self._bears_all and first is None
        return first

    def _react(self, brick: ComputeBrick, met: Met, calls: Calls, before: Calls) -> None:
        note = self._noted(brick, met.fault)
        if brick in self._fallen:  # the reference has the same fault; `finish` reports how often the fault was met
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
