"""Decides which calls of a model are steps, and begins these steps.

Rules
- A step is the outermost call of a model, or of a part that contains a stack of layers.
- If a model's call runs `generate`, this has its own steps. If code that chooses a token calls the model, the call
  belongs to the step of the token.
- If an engine's runner runs the model, the runner's calls are the steps, and the model's own calls are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

from cbtop.profiler.instrument.guard import Guard
from cbtop.profiler.instrument.open_step import Called, OpenStep, Unit, unit
from cbtop.profiler.instrument.swapping import swaps
from cbtop.profiler.instrument.timed_model import TimedModel
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol import clock
from cbtop.protocol.signals import reraise_host_error

if TYPE_CHECKING:
    from cbtop.profiler.guard_setting import GuardSetting
    from cbtop.profiler.profiler import BrickProfiler


class ModelSteps(TimedModel):
    """Begins the steps of one model, and ends steps that fail."""

    __slots__ = ("_keys", "_shared_with")

    _keys: tuple[object, ...]  # the key of the last step that C code has begun; only C code uses this

    def __init__(
        self,
        profiler: BrickProfiler,
        model: str,
        changed: Callable[[], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        super().__init__(profiler, model, changed, give_up)
        self._shared_with: dict[ref[ModelSteps], object] = {}  # other models that share a module with this model

    def after_fork(self) -> None:
        """In a forked child, make a new lock. Keep only the steps of the thread that forked."""
        swaps.lock = threading.RLock()
        self.recorded_steps.intersection_update(unit().open)

    def failed(self, error: Exception) -> None:
        """Stop showing this model after `error` in cbtop's code.

        The model stays shown if the host caused the error, or if the host's stack is full. The model's steps in this
        thread that wait for a token are ended, because nothing else may end them.
        """
        reraise_host_error(error)
        if not isinstance(error, RecursionError):
            try:
                self.give_up(error)
                for step in [step for step in unit().open if step.steps is self and not step.is_running]:
                    step.close()
            except Exception as trouble:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(trouble, "a model cannot be detached")

    def open_in(self, here: Unit) -> OpenStep | None:
        """Return the innermost step of this model that is open in `here`, or None."""
        mine = None
        for step in here.open:
            if step.steps is self:
                mine = step
        return mine

    def is_called_by_runner(self, called_ns: int) -> None:
        """Begin a call of the model by its runner. Without an open step it is a warm-up, and is not timed."""
        try:
            step = self.open_in(unit())
            if step is None:
                self.follow(None)
            else:
                step.active.own_ns += clock.perf_counter_ns() - called_ns
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.failed(error)

    def begun(self, call: Called, args: tuple[Any, ...], kwargs: dict[str, Any], called_ns: int) -> OpenStep | None:
        """Begin the step that `call` describes, and return it. The call began at `called_ns`.

        Returns None inside a step of this model, or after an error of cbtop.
        """
        step: OpenStep | None = None
        try:
            if not self.profiler.enabled:
                self.follow(None)
                return None
            by_kernels = self.kernel_steps
            if self.timing.is_over or (by_kernels is not None and by_kernels.has_failed):
                self.kernel_steps, self.kernels_due_ns = None, 0
                self.changed()
            position = self.path.position
            here = position.unit
            if here is None:
                here = position.unit = unit()
            mine = None
            for one in here.open:
                if one.steps is self:
                    mine = one
            if mine is not None:
                if not mine.is_running:
                    # The last step still waited for its token when the next call of the model began.
                    mine.close()
                else:
                    generation = here.generations[-1] if here.generations else None
                    if mine.generation is generation or not call.may_wait(generation):
                        mine.active.own_ns += clock.perf_counter_ns() - called_ns
                        # This call belongs to the open step. It would be a step only if a `generate` inside the
                        # model's call had made it.
                        return None
            if self._shared_with:
                others = [ref(step.steps) for step in here.open if step.is_running]
                if not self._shared_with.keys().isdisjoint(others):
                    return None
            step = OpenStep(self, here, call, args, kwargs)
            step.begin()
            if self.guard is not None:
                self.guard.begin(step, step.call.phase, is_watched=step.has_calls)
            own_ns = clock.perf_counter_ns() - called_ns
            if step.generation is not None:
                own_ns += step.generation.own_ns
                step.generation.own_ns = 0
            step.active.own_ns = own_ns
        except BaseException as error:
            if step is not None:
                step.close()
            if not isinstance(error, Exception):
                raise
            self.failed(error)
            return None
        return step

    def guard_by(self, setting: GuardSetting | None) -> None:
        """From the next step on, let the guard check the model's values. Does nothing if `setting` is None."""
        if setting is not None:
            self.follow(None)
            self.guard = Guard(self, setting)
            # C code does not call the guard when a step ends, so Python must end steps from now on.
            self.in_python = True

    def share(self, other: ModelSteps) -> None:
        """Store that `other` shares a module with this model. Calls during a step of `other` are not steps of this
        model.
        """
        self._shared_with[ref(other, self._shared_with.pop)] = None
