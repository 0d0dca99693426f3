"""Replaces the call of a model by a wrapper that makes each call a step."""

from __future__ import annotations

import functools
from _thread import get_ident
from collections.abc import Callable
from typing import Any

from torch import nn

from cbtop.profiler.instrument import phases
from cbtop.profiler.instrument.capturing import Capture, capture_here, captures, engine_runs
from cbtop.profiler.instrument.dynamo import is_compiling_here, without_dynamo
from cbtop.profiler.instrument.model_traits import (
    axis_of_sequences,
    has_words,
    is_called_encoder,
    looks_both_ways,
    positional_arguments,
    takes_a_cache,
)
from cbtop.profiler.instrument.open_step import Generation, Noting, OpenStep, call_in
from cbtop.profiler.instrument.phases import describe, describe_captured
from cbtop.profiler.instrument.sequence_axis import find_axis
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.torch_internals import dispatch_modes, is_tracing, without_torch_function
from cbtop.profiler.instrument.training import Forward, is_in_training
from cbtop.profiler.instrument.training_calls import StepCalls
from cbtop.profiler.instrument.wrapping import CallWrapper, is_symbolic
from cbtop.protocol import clock


class ModelCall(CallWrapper):
    """Replaces the call of a model. The call becomes a step, unless a step of this model is open.

    If the hot path is compiled, C code begins and ends most steps in the same way (compiled_steps.py).
    """

    __slots__ = ("_axis", "_names", "_steps", "_takes_ids", "has_cache", "without_cache")

    waits = False

    def __init__(self, module: nn.Module, steps: ModelSteps) -> None:
        super().__init__(module)
        self._steps = steps
        is_bidirectional = looks_both_ways(module)
        self.has_cache = not is_bidirectional and takes_a_cache(module)
        self.without_cache = phases.ENCODE if is_bidirectional or is_called_encoder(module) else phases.FORWARD
        self._names = positional_arguments(module)
        self._axis = axis_of_sequences(module)
        if self._axis is None:
            find_axis(self)
        self._takes_ids = has_words(module)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        called: Callable[..., Any] = self.plain
        step: OpenStep | Forward | None = None
        try:
            called, step = without_dynamo(self.begin, args, kwargs, clock.perf_counter_ns())
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._steps.failed(error)
        return call_in(step, called, args, kwargs)

    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], called_ns: int
    ) -> tuple[Callable[..., Any], OpenStep | Forward | None]:
        """Begin a step. Returns the callable for these arguments, and the step. The step is None if the call is not a
        step.

        The caller must then call the callable and end the step. So the C code leaves no Python frame of cbtop on the
        stack while the model runs.
        """
        called = self.instead
        if called is None:
            called = self.module()._call_impl  # type: ignore[union-attr]  # a module that is being called is alive
        steps = self._steps
        if is_compiling_here() or is_tracing() or (dispatch_modes() and is_symbolic()):
            return called, None
        if not steps.profiler.enabled and steps.calls_are_in is False:
            return called, None
        if steps.guard is not None:
            steps.guard.note_arguments(self._names, args, kwargs)
        if steps.training and is_in_training(steps):
            return called, steps.training.forward(steps, self.describe(args, kwargs, None))
        if captures:
            capture = capture_here()
            if isinstance(capture, StepCalls):
                return called, None  # another model is called inside a recorded training step
            if capture is not None:
                return functools.partial(self.call_captured, capture), None
        # An engine that warms up may call its model before cbtop has met its runner.
        if steps.is_of_runner or (engine_runs and get_ident() in engine_runs):
            steps.is_called_by_runner(called_ns)
            return called, None
        try:  # calls inside a step are frequent, so they skip `begun`
            here = steps.path.position.unit
            step = here.open[-1] if here is not None and here.open else None
            generation = here.generations[-1] if here is not None and here.generations else None
            if step is not None and step.steps is steps and step.is_running and step.generation is generation:
                step.active.own_ns += clock.perf_counter_ns() - called_ns
                return called, None
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            steps.failed(error)
        return called, steps.begun(self, args, kwargs, called_ns)

    def set_axis(self, axis: int) -> None:
        """Set which axis of the input has the sequences."""
        self._axis = axis

    def describe(self, args: Any, kwargs: Any, generation: Generation | None) -> phases.Call:
        is_assisted = generation is not None and generation.is_assisted
        if args:
            named = dict(zip(self._names, args, strict=False))
            args, kwargs = args[len(named) :], named | kwargs
        with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
            return describe(
                args,
                kwargs,
                has_cache=self.has_cache,
                without_cache=self.without_cache,
                is_assisted=is_assisted,
                is_generating=generation is not None,
                axis=self._axis,
                takes_ids=self._takes_ids,
            )

    def describe_captured(self, args: Any, kwargs: Any) -> phases.Call:
        """Describe this call, which is being captured in a graph. Each replay has this description."""
        named = dict(zip(self._names, args, strict=False))
        return describe_captured(
            args[len(named) :],
            named | kwargs,
            has_cache=self.has_cache,
            without_cache=self.without_cache,
            axis=self._axis,
            takes_ids=self._takes_ids,
        )

    def call_captured(self, capture: Capture, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model while a graph is captured, and record its calls in `capture`.

        The call is not a step, because the device runs nothing during a capture.
        """
        steps = self._steps
        if not steps.profiler.enabled or capture.is_in_call_of(steps):
            return self.plain(*args, **kwargs)
        noting = None
        try:
            noting = Noting(steps, capture)
            call = self.describe_captured(args, kwargs)
            without_dynamo(noting.begin, call)
            if steps.guard is not None and type(capture) is Capture:
                steps.guard.begin(noting, call.phase, is_counted=False, is_watched=True)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            capture.failed(error)
        try:
            return self.plain(*args, **kwargs)
        finally:
            if noting is not None:
                without_dynamo(noting.end)
                if steps.guard is not None:
                    capture.guarded.append(steps.guard.end_capture(noting))

    def may_wait(self, generation: Generation | None) -> bool:
        return generation is not None and generation.model is self.module()
