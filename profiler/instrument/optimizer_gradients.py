"""Follows the gradients of one optimizer. Announces their norm, and the first gradient that is NaN or Inf.

Rules
- If the program clips the gradients by their L2 norm, that norm is announced. Otherwise the norm is measured before
  the optimizer's step, so rarely that measuring takes at most SHARE of the time.
- On a CPU, a few small gradients, spread over the model, are checked in every step. If steps are short, they are
  checked so rarely that this takes at most SMALL_SHARE of the time. A NaN in one layer spreads to the layers before
  it in the backward pass, so some of the small gradients have it, too. If one of them is not finite, all gradients
  are measured in the same step.
- If a gradient scaler skips a step, the step is not reported as faulty.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from cbtop.profiler.instrument.gradients import (
    Gradients,
    Measurement,
    ThreadGradients,
    gradients_here,
    is_observed,
    measured,
    seem_finite,
    small_gradients,
)
from cbtop.profiler.instrument.module_tree import dictionary_of
from cbtop.profiler.instrument.parameter_names import name_of_last
from cbtop.protocol import clock
from cbtop.protocol.training_messages import MAX_TIMED_STEPS, GradientFault, GradientNorm

if TYPE_CHECKING:
    from cbtop.profiler.instrument.timed_model import TimedModel

ANNOUNCE_NS = 1_000_000_000  # least time in ns between two announcements
EARLY = 4, 16  # after these numbers of norms, the norm is announced without waiting
MAX_WAITING = 4  # at most this many measurements may be on their way from a device
SMALL = 8  # number of small gradients that are checked


@dataclass(slots=True)
class _Fault:
    """The first step with a gradient that is not finite. Has the fields of a `GradientFault`."""

    name: str
    kind: str
    step: int
    finite_step: int
    last_step: int
    faulty: int
    parameters: int


class OptimizerGradients:
    """The gradients of one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = ref(optimizer)
        self.steps = 0  # number of steps of the optimizer that have ended
        self.phase = ""  # phase of the latest training step
        self.model: ref[TimedModel] | None = None
        self._norms: deque[float] = deque(maxlen=MAX_TIMED_STEPS)
        # The number and the norm of the newest step with a known norm.
        self._newest: tuple[int, Gradients] | None = None
        self._waiting: deque[tuple[int, Measurement]] = deque(maxlen=MAX_WAITING)
        self._small: list[ref[Any]] = []  # the parameters with small gradients that are checked
        self._small_step = 0  # number of the latest step with all gradients of `_small` finite
        # The latest step with all gradients finite, and the latest step with measured gradients.
        self._finite_step = self._checked_step = 0
        self._is_doubtful = False  # True if a norm was infinite, but the gradients may be finite
        self._fault: _Fault | None = None
        self._told_ns = 0
        # The last announced step with a norm, and the last announced step with a fault.
        self._told: tuple[int, int] = 0, 0

    def is_due(self) -> bool:
        """Return whether `look` has anything to do in the current step."""
        here, now_ns = gradients_here(), clock.perf_counter_ns()
        is_small_due = bool(self._small) and here.small_budget.is_due(now_ns)
        return is_small_due or here.has_clips or here.budget.is_due(now_ns) or bool(self._waiting)

    def look(self, model: TimedModel) -> None:
        """Look at the gradients of the current step, which trains `model`.

        Called when a step of the optimizer begins or ends.
        """
        here, step = gradients_here(), self.steps + 1
        while self._waiting and (arrived := self._waiting[0][1].read()) is not None:
            self._take(model, self._waiting.popleft()[0], arrived)
        clipped = here.clipped
        found, is_clipped = here.take()
        # If the program has clipped only some gradients, their norm is not the norm of all. So measure again.
        if found is None or clipped < self._count:
            found = self._measured(step, here)
            if found is not None and is_clipped:
                found.clipping = "after"
        if isinstance(found, Measurement):
            self._waiting.append((step, found))
        elif found is not None:
            self._take(model, step, found)

    def ended(self, phase: str, model: TimedModel | None, *, is_first: bool) -> None:
        """Count an ended step of the optimizer, and announce its gradients if it is time.

        If several optimizers use the gradients of one backward, only the first announces a norm.
        """
        self.steps += 1
        if model is None:
            return
        self.phase, self.model = phase, ref(model)
        now_ns = clock.perf_counter_ns()
        norm_step = 0 if self._newest is None else self._newest[0]
        fault_step = 0 if self._fault is None else self._fault.step
        is_new = (norm_step == self.steps and len(self._norms) in EARLY) or fault_step > self._told[1]
        if now_ns - self._told_ns < ANNOUNCE_NS and not is_new:
            return
        self._told_ns = now_ns
        if is_first and norm_step > self._told[0]:
            model.profiler.announce(self._norm_message(model))
        if self._fault is not None:
            model.profiler.announce(self._fault_message(model, self._fault))
        self._told = norm_step, fault_step

    @property
    def _is_faulty(self) -> bool:
        """Whether the last measurement found a gradient that was not finite."""
        return self._fault is not None and self._fault.last_step == self._checked_step

    @property
    def _count(self) -> int:
        """Number of the optimizer's parameters."""
        optimizer = self._optimizer()
        groups = () if optimizer is None else dictionary_of(optimizer).get("param_groups", ())
        return sum(len(group["params"]) for group in groups)

    def _measured(self, step: int, here: ThreadGradients) -> Gradients | Measurement | None:
        """Measure the gradients if a measurement is due, or if a small gradient is not finite.

        Otherwise returns None.
        """
        optimizer = self._optimizer()
        if optimizer is None or is_observed():
            return None
        begun_ns, is_small_finite = clock.perf_counter_ns(), None
        if here.small_budget.is_due(begun_ns):
            is_small_finite = seem_finite([one for small in self._small if (one := small()) is not None])
            here.small_budget.spend(begun_ns)
        if is_small_finite:
            self._small_step = step
        elif is_small_finite is False and self._is_faulty:
            return Gradients(None, is_again=True)
        begun_ns = clock.perf_counter_ns()
        if not here.budget.is_due(begun_ns) and is_small_finite is not False:
            return None
        attributes = dictionary_of(optimizer)
        parameters = [one for group in attributes.get("param_groups", ()) for one in group["params"]]
        scale, overflow = attributes.get("grad_scale"), attributes.get("found_inf")
        is_scaled = scale is not None or overflow is not None
        scaling = (1.0 if scale is None else scale, 0.0 if overflow is None else overflow) if is_scaled else ()
        found = measured(parameters, is_exact=self._is_doubtful, scaling=scaling)
        if isinstance(found, Gradients):
            self._small = [ref(one) for one in small_gradients(parameters, SMALL)]
        here.budget.spend(begun_ns)
        return found

    def _take(self, model: TimedModel, step: int, found: Gradients) -> None:
        """Store the measured gradients of `step`."""
        if found.is_skipped:
            return
        self._checked_step = step
        self._is_doubtful = found.is_doubtful
        if found.is_doubtful:
            return
        if found.is_again:
            if self._fault is not None:
                self._fault.last_step = step
        elif found.faulty:
            self._note(model, step, found)
        else:
            self._finite_step = step
            if found.norm is not None:
                self._norms.append(found.norm)
                self._newest = step, found

    def _note(self, model: TimedModel, step: int, found: Gradients) -> None:
        """Store that some gradients of `step` are not finite."""
        if self._fault is not None:
            self._fault.last_step = step
            return
        root = model.root()
        name = "" if root is None else name_of_last(root, found.faulty)
        # Some gradients are finite, so no weight was NaN one step before. A NaN weight would make every gradient NaN.
        was_finite = len(found.faulty) < found.parameters and self._small_step == step - 1
        finite_step = step - 1 if was_finite else self._finite_step
        self._fault = _Fault(name, found.kind, step, finite_step, step, len(found.faulty), found.parameters)

    def _norm_message(self, model: TimedModel) -> GradientNorm:
        step, newest = self._newest or (0, Gradients(None))
        return GradientNorm(
            self.phase,
            model.model,
            step,
            self._norms[-1],
            statistics.median(self._norms),
            max(self._norms),
            len(self._norms),
            newest.clipping,
            newest.is_shard,
        )

    def _fault_message(self, model: TimedModel, fault: _Fault) -> GradientFault:
        return GradientFault(
            self.phase,
            model.model,
            fault.name,
            fault.kind,
            fault.step,
            fault.finite_step,
            fault.last_step,
            max(self._checked_step, fault.last_step),
            fault.faulty,
            fault.parameters,
        )
