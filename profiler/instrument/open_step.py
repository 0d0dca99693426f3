"""The open steps of models. A step is open from the model's call until the step ends.

Rules
- In `generate` of transformers, a step begins with the preparation of its inputs and ends with its token. Work of the
  host between two steps, such as printing a token, is in no step.
- Each thread, task and greenlet has its own open steps (`Unit`).
- If cbtop's code fails, the step ends and the model is detached. The model's call continues.
"""

from __future__ import annotations

import functools
import sys
from _thread import get_ident
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol
from weakref import ref

import torch

from cbtop.profiler.definitions import BrickDefinition, OwningKey
from cbtop.profiler.instrument import phases
from cbtop.profiler.instrument.capturing import Capture, CapturedCall, capture_here, captures
from cbtop.profiler.instrument.classification import CATEGORIES, GENERATE_INPUTS
from cbtop.profiler.instrument.dynamo import without_dynamo
from cbtop.profiler.instrument.eager_stamps import Timing
from cbtop.profiler.instrument.host_steps import HostCalls
from cbtop.profiler.instrument.kernel_bursts import KernelRecording
from cbtop.profiler.instrument.kernel_windows import RecordedStep, WindowRecording
from cbtop.profiler.instrument.phases import VERIFY
from cbtop.profiler.instrument.placed_calls import PlacedCalls
from cbtop.profiler.instrument.step_contents import CountedStep
from cbtop.profiler.instrument.swapping import swapped_in, swaps
from cbtop.profiler.instrument.timed_model import TimedModel
from cbtop.profiler.instrument.wrapping import NotedCall
from cbtop.profiler.positions import finder
from cbtop.profiler.steps import ActiveStep
from cbtop.protocol import clock
from cbtop.protocol.vocabulary import WARM_UP, BrickId

if TYPE_CHECKING:
    from cbtop.profiler.hot_path import HotPath
    from cbtop.profiler.instrument.kernel_steps import KernelSteps
    from cbtop.profiler.path import Path

Arguments = ParamSpec("Arguments")


class Generation:
    """A running call of `generate`."""

    __slots__ = ("beams", "is_assisted", "length", "model", "own_ns", "prepared")

    def __init__(self, model: object) -> None:
        self.model = model  # the generating model
        self.is_assisted = False  # whether a draft model proposes tokens
        # Beam search: the number of beams per input, and how many of them `generate` returns.
        self.beams: tuple[int, int] | None = None
        # When the preparation of the next step's inputs began, and how long it took, both in ns. None before it
        # begins.
        self.prepared: tuple[int, int] | None = None
        self.length: int | None = None  # length of the sequences after the last token
        self.own_ns = 0  # ns that cbtop spent before the next step; counted as overhead of that step


class Unit:
    """The open steps and the running calls of `generate` in one thread, task or greenlet."""

    __slots__ = ("__weakref__", "generations", "open")

    def __init__(self) -> None:
        self.open: list[OpenStep] = []
        self.generations: list[Generation] = []

    @property
    def generation(self) -> Generation | None:
        """The innermost call of `generate`."""
        return self.generations[-1] if self.generations else None

    @property
    def waiting(self) -> OpenStep | None:
        """The step of the innermost `generate` that waits for its token, or None."""
        if not self.open:
            return None
        step, generations = self.open[-1], self.generations
        is_here = step.generation is (generations[-1] if generations else None)
        return step if is_here and step.waits and not step.is_running else None

    def end_generate(self, depth: int) -> None:
        """End the call of `generate` number `depth`. Also close its steps that wait for a token."""
        ended = self.generations[depth:]
        del self.generations[depth:]
        while self.open and self.open[-1].generation in ended:
            self.open[-1].close()


unit: Callable[[], Unit] = finder(Unit)
_INPUTS = BrickDefinition(GENERATE_INPUTS, CATEGORIES[GENERATE_INPUTS], backend="torch", label="prepared")


def recorded_here() -> HotPath | Path | Timing | Capture | None:
    """Return the path that times the caller's recorded step, or the running `Capture`. None if there is neither."""
    paths = set(swapped_in.values())
    if len(paths) == 1:  # if the hot path is compiled, `path.position` takes a tenth of the time of `unit()`
        path = paths.pop()
    elif (capture := capture_here()) is not None:
        path = capture
    else:
        here = unit().open
        if not here or not here[-1].is_recorded:
            return None
        path = here[-1].steps.times
    return None if path.position.step is None else path


def _unless_it_fails(
    method: Callable[Concatenate[OpenStep, Arguments], None],
) -> Callable[Concatenate[OpenStep, Arguments], None]:
    @functools.wraps(method)
    def guarded(self: OpenStep, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.steps.failed(error)

    return guarded


class Called(Protocol):
    """A model, or a runner with its model. Each of its calls is a step."""

    def describe(self, args: Any, kwargs: Any, generation: Generation | None) -> phases.Call:
        """Return the phase, tokens and sequences of a call with these arguments."""

    @property
    def waits(self) -> bool:
        """Whether a step outside of `generate` stays open after the model's call, until its token is chosen."""

    def may_wait(self, generation: Generation | None) -> bool:
        """Return whether a step inside the call `generation` stays open after the model's call, until its token is
        chosen.
        """


class OpenStep:
    """An open step of a model. It begins with the model's call."""

    __slots__ = (
        "_begun_ns",
        "_end_evaluation",
        "_in_burst",
        "_may_be_training",
        "_noting",
        "_sampling",
        "_unit",
        "active",
        "call",
        "generation",
        "is_recorded",
        "is_running",
        "profiler",
        "steps",
        "waits",
    )

    def __init__(self, steps: TimedModel, unit: Unit, called: Called, args: Any, kwargs: Any) -> None:
        self.steps = steps
        self.profiler = steps.profiler
        self.is_running = True  # False once the model's call has returned; the step may still be open then
        self.is_recorded = False
        generations = unit.generations
        self.generation = generation = generations[-1] if generations else None
        # Whether the step stays open after the model's call, until its token is chosen.
        self.waits = called.waits if generation is None else called.may_wait(generation)
        self._unit = unit
        self._sampling: Any = None
        self.call = called.describe(args, kwargs, generation)
        phase, tokens, sequences, cached = self.call
        is_later = self.waits and not unit.open and generation is not None and generation.length is not None
        if is_later and phase == phases.PREFILL and sequences:
            phase, tokens = phases.NO_CACHE, sequences
            self.call = phases.Call(phase, tokens, sequences, None)
        is_decode = self.waits and phase in (phases.DECODE, phases.NO_CACHE)
        if is_decode and generation is not None and generation.beams:
            beams, returned = generation.beams
            phase, tokens = phases.with_beams(phase, beams), sequences * returned // beams
            self.call = phases.Call(phase, tokens, sequences, self.call.cached)
        if steps.takes_turns and phase != VERIFY:
            phase = steps.with_adapter(phase)
            self.call = self.call._replace(phase=phase)
        self._begun_ns = clock.perf_counter_ns()
        warm_ups = steps.profiler_steps.warm_ups
        name = phase if warm_ups is None else warm_ups.named(phase, steps.model)
        # Whether this may be the forward pass of the first training step. cbtop cannot tell before an optimizer has
        # run.
        self._may_be_training = steps.training is None and torch.is_grad_enabled() and steps.may_begin_training()
        if self._may_be_training and not name.endswith(WARM_UP):
            name += WARM_UP
        step = self.active = ActiveStep(steps.profiler_steps, name, tokens, steps.model)
        step.sequences, step.cached = sequences or None, cached
        if steps.own is not None and not (steps.own.on_device or self.waits or steps.is_of_runner):
            # The step is the model's call, so the model's own operations belong to it.
            step.key = OwningKey.of(step.key, steps.own)
        self._in_burst: KernelRecording | HostCalls | CountedStep | None = None
        self._noting: Noting | None = None
        # Called when this step ends, if it has interrupted a training step (as an evaluation).
        self._end_evaluation: Callable[[], None] | None = None

    @property
    def has_calls(self) -> bool:
        """Whether this step times the calls of modules, or records which modules are called."""
        return self.is_recorded or self._noting is not None

    def begin(self) -> None:
        self._unit.open.append(self)
        if self.steps.training:
            self._end_evaluation = self.steps.training.begin_evaluation()
        by_kernels = self.steps.kernel_steps
        if by_kernels is not None:
            if not self._is_due(by_kernels):
                by_kernels.end_window()
                by_kernels = None
            elif not by_kernels.times_host:
                if self._begin_by_kernels(by_kernels):
                    return
                by_kernels = None
        bursts = self.steps.bursts
        is_asked = bursts.asked.asked_word[0] != bursts.looked_at and bursts.is_asked
        if is_asked and len(self._unit.open) == 1 and self._begin_in_burst():
            return
        self.active.__enter__()
        self.is_recorded = self.profiler.recording
        if self.waits and self.generation is not None and self.generation.prepared is not None:
            self.active.start_ns, duration_ns = self.generation.prepared
            if self.is_recorded:
                self.profiler.record_elapsed(_INPUTS, duration_ns, 0)
        steps = self.steps
        if self.is_recorded:
            if not steps.trains and torch.is_grad_enabled():
                steps.look_for_gradients()
            steps.looks += 1
            if steps.looks % steps.look_every == 0:
                steps.look_again()
            steps.follow(self)
        else:
            if steps.calls_are_in is not False:
                steps.follow(None)
            if by_kernels is not None and by_kernels.times_host:
                self._note_in(by_kernels.begin_host(self.active.key))
        is_counted = self.active.key[1].endswith(WARM_UP) and not self._may_be_training
        if is_counted and self._in_burst is None and len(self._unit.open) == 1:
            self._in_burst = steps.contents.begin(self.active.key[1], is_recorded=self.is_recorded)

    @_unless_it_fails
    def ended(self) -> None:
        """End the step, or leave it open until its token is chosen. The model's call has returned.

        Raises NotFiniteError if the guard stops the host.
        """
        returned_ns = clock.perf_counter_ns()
        if self._in_burst is not None and isinstance(self._in_burst, CountedStep):
            self._end_in_burst()
        if not self.waits:
            self.active.returned_ns = returned_ns
            self.close()
        else:
            self.is_running = False
            if self._in_burst is not None:
                self._end_in_burst()
            self.active.own_ns += clock.perf_counter_ns() - returned_ns
        if self.steps.guard is not None:
            self.steps.guard.end(self)

    def begin_sampling(self, called_ns: int) -> None:
        """Begin to choose a token, at `called_ns`. The code that chooses may call the model again."""
        try:
            self.is_running = True
            if self._sampling is None and self.is_recorded:
                self._sampling = self.steps.timing.start_brick(self.steps.labelled(BrickId.SAMPLING))
            self.active.own_ns += clock.perf_counter_ns() - called_ns
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.steps.failed(error)

    def end_sampling(self, length: int | None, returned_ns: int) -> None:
        """The tokens were chosen at `returned_ns`, so end the step.

        The sequences now have `length` tokens (None: unknown).
        """
        try:
            self.active.returned_ns = returned_ns
            if self._sampling is not None:
                self.steps.timing.stop_brick(self._sampling, self.call.sequences)
                self._sampling = None
            if self.generation is not None:
                before, self.generation.length = self.generation.length, length
                if length is not None and before is not None and self.call.phase == VERIFY:
                    self.active.tokens = self.call.sequences * max(0, length - before)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.steps.failed(error)
        self.close()

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """End the step. Steps that are still open inside it end first."""
        try:
            self.is_running = False
            if self._noting is not None and self._noting.recorded is not None:
                self._noting.recorded.closed_ns = clock.perf_counter_ns()
            if self.steps.guard is not None and kind is not None:
                self.steps.guard.drop(self)
            if self._in_burst is not None:
                if kind is not None and isinstance(self._in_burst, WindowRecording):
                    self._in_burst.fail_step()
                self._end_in_burst()
            if self._end_evaluation is not None:
                self._end_evaluation()
                self._end_evaluation = None
            opened = self._unit.open
            if self not in opened:
                return
            try:
                while opened[-1] is not self:
                    opened[-1].close()
                try:
                    self.active.__exit__(kind, error, trace)
                except BaseException:  # a signal handler has interrupted the end of the step, so repeat it
                    self.active.__exit__(kind, error, trace)
                    raise
                if kind is None and self.active.key[1].endswith(WARM_UP) and not self._may_be_training:
                    took_ns = clock.perf_counter_ns() - self._begun_ns
                    self.steps.profiler_steps.warm_ups.took(
                        self.call.phase, self.steps.model, took_ns, self.call.tokens or self.call.sequences
                    )
                for generation in self._unit.generations:
                    generation.prepared = None
            finally:
                if self in opened:
                    ended = opened[opened.index(self) :]
                    try:
                        for step in ended:
                            step.steps.recorded_steps.discard(step)
                    # A signal handler has interrupted the loop over the open steps, so repeat it.
                    except BaseException:
                        for step in ended:
                            step.steps.recorded_steps.discard(step)
                        raise
                    finally:
                        if self in opened:
                            del opened[opened.index(self) :]
        except Exception as trouble:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.steps.failed(trouble)

    def _is_due(self, by_kernels: KernelSteps) -> bool:
        """Return whether CUPTI records the kernels of this step, or the host's times are measured in it.

        Never True for a step inside another step, or for a warm-up step.
        """
        is_due = by_kernels.is_due(clock.perf_counter_ns())
        return is_due and len(self._unit.open) == 1 and not self.active.key[1].endswith(WARM_UP)

    def _begin_by_kernels(self, by_kernels: KernelSteps) -> bool:
        """Begin to record the kernels of this step. Returns False if that is not possible."""
        self.steps.follow(None)
        try:
            placed = by_kernels.begin(self.active.key, self.call)
            if placed is not None:
                self._note_in(placed, by_kernels.last_step)
        except BaseException:  # a signal handler has interrupted this method; `close` ends a recording in `_in_burst`
            if self._in_burst is None:
                by_kernels.abandon()
            raise
        return placed is not None

    def _note_in(self, calls: PlacedCalls | HostCalls, recorded: RecordedStep | None = None) -> None:
        self._in_burst = calls.recording
        noting = self._noting = Noting(self.steps, calls, recorded)
        captures[get_ident()] = noting.capture
        noting.begin(self.call)

    def _begin_in_burst(self) -> bool:
        """Begin to record this step for a command that asked for the kernels of a few steps. Returns False if that is
        not possible.
        """
        self.steps.follow(None)
        recording = self.steps.bursts.begin(self.active.key, self.steps, has_calls=True)
        if recording is None:
            return False
        self._note_in(PlacedCalls(recording, self.steps.labelled))
        return True

    def _end_in_burst(self) -> None:
        recording, self._in_burst = self._in_burst, None
        if recording is not None:
            try:
                if self._noting is not None:
                    captures.pop(get_ident(), None)
                    self._noting.end()
            finally:
                recording.end_step()


class Noting:
    """Makes `capture` record the calls of modules during one call of the model."""

    def __init__(self, model: TimedModel, capture: Capture, recorded: RecordedStep | None = None) -> None:
        self.capture = capture
        self.recorded = recorded  # the step of a window that the call is in; None if it is in no window
        self._model = model
        self._me, self._before = ref(model, swapped_in.pop), swapped_in.get(ref(model))
        self._noted: list[NotedCall] = []
        self._span: CapturedCall | None = None

    def begin(self, call: phases.Call) -> None:
        """Begin to record calls of modules. `call` describes the model's call."""
        capture = self.capture
        try:
            swaps.swap_in(self._me, capture)
            self._model.ask()  # before the calls are noted, because it may change their bricks
            self._noted += [one for one in [call.noted_by(capture) for call in self._model.calls] if one is not None]
            for one in self._noted:
                one.swap_in()
            if self._model.guard is not None:
                self._model.guard.swap_in()
            self._span = capture.begin_model(self._model, call)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            capture.failed(error)

    def end(self) -> None:
        """Stop recording. The model's call has returned."""
        try:
            self.capture.end(self._span)
            if self._model.guard is not None:
                self._model.guard.swap_out()
            for one in self._noted:
                one.swap_out()
            if self._before is None:
                swaps.swap_out(self._me)
            else:
                swaps.swap_in(self._me, self._before)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._model.failed(error)


class EndedAfterCall(Protocol):
    """A step, or a part of a step, that ends when a call returns."""

    def ended(self) -> None:
        """The call has returned."""

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """End the step: the call has raised an exception."""


def call_in(
    step: EndedAfterCall | None, called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `called`, then end `step`, if there is one."""
    try:
        result = called(*args, **kwargs)
        if step is not None:
            without_dynamo(step.ended)
    except BaseException:  # the model or a signal handler has raised this
        if step is not None:
            without_dynamo(step.close, *sys.exc_info())
        raise
    return result
