"""Steps of a model: when each begins and ends, and when its bricks are timed.

Rules
- The outermost call of a model, or of a part of it that holds a stack, is a step. In `generate` of transformers, it
  begins as its inputs begin to be prepared, and stays open until the token has been chosen. The host's work between
  two steps, such as printing a token, is in no step.
- A `generate` inside a model's call has its own steps there. A call made to choose a token is in that token's step.
- If an engine's runner runs the model, the runner's call is the step, and the model's own calls are not steps.
- Each thread, task and greenlet has its own open steps (`Unit`).
- Timed calls of modules are swapped in for a recorded step, and out again at the next step that is not recorded.
- If cbtop's code fails, the step ends, the model is detached, and the model's call continues.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol
from weakref import ref

import torch
from torch import get_autocast_dtype, is_autocast_enabled
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument import phases
from cbtop.profiler.instrument.adapters import state_of_adapters
from cbtop.profiler.instrument.capturing import Capture, CapturedCall, capture_here, captures
from cbtop.profiler.instrument.classification import CATEGORIES, GENERATE_INPUTS
from cbtop.profiler.instrument.eager_stamps import Timing
from cbtop.profiler.instrument.host_steps import HostCalls
from cbtop.profiler.instrument.kernel_bursts import PlacedCalls, Recording, bursts_of
from cbtop.profiler.instrument.module_tree import attributes_of, children_of, holders_of, modules_of
from cbtop.profiler.instrument.multiplied import AUTOCAST_DEVICES, Mode
from cbtop.profiler.instrument.phases import VERIFY, describe, describe_captured
from cbtop.profiler.instrument.swapping import swapped_in, swaps
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.instrument.wrapping import BrickCall, CallWrapper, NotedCall, is_symbolic
from cbtop.profiler.positions import finder
from cbtop.profiler.steps import ActiveStep
from cbtop.protocol import clock
from cbtop.protocol.messages import Training
from cbtop.protocol.signals import reraise_host_error
from cbtop.protocol.vocabulary import WARM_UP, BrickId

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.hot_path import HotPath
    from cbtop.profiler.instrument.kernel_steps import KernelSteps
    from cbtop.profiler.path import Path
    from cbtop.profiler.profiler import BrickProfiler

Arguments = ParamSpec("Arguments")


class Generation:
    """One call of `generate`."""

    __slots__ = ("is_assisted", "length", "model", "prepared")

    def __init__(self, model: object) -> None:
        self.model = model  # the one that generates
        self.is_assisted = False  # a draft proposes tokens
        # When the preparation of the next step's inputs began, and how long it took. None after a step has ended.
        self.prepared: tuple[int, int] | None = None
        self.length: int | None = None  # length of its sequences when the last token was chosen


class Unit:
    """The open steps and the nested calls of `generate` of one thread, task or greenlet."""

    __slots__ = ("__weakref__", "generations", "open")

    def __init__(self) -> None:
        self.open: list[OpenStep] = []
        self.generations: list[Generation] = []

    @property
    def generation(self) -> Generation | None:
        """The innermost call of `generate`."""
        return self.generations[-1] if self.generations else None

    def end_generate(self, depth: int) -> None:
        """End the call of `generate` at `depth`: close the steps in it that waited for a token."""
        ended = self.generations[depth:]
        del self.generations[depth:]
        while self.open and self.open[-1].generation in ended:
            self.open[-1].close()


unit: Callable[[], Unit] = finder(Unit)
_INPUTS = BrickDefinition(GENERATE_INPUTS, CATEGORIES[GENERATE_INPUTS], backend="torch", label="prepared")
LOOK_EVERY = 8  # recorded steps: looking through 400 modules takes as long as timing them
MODULES_PER_STEP = 200  # to look through per recorded step, on average: 0.3 ms


def recorded_here() -> HotPath | Path | Timing | Capture | None:
    """Return the path that times the caller's recorded step, or notes its capture. None outside of both."""
    paths = set(swapped_in.values())
    if len(paths) == 1:  # the compiled path finds its position at a tenth of the cost of `unit`
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
    """A callable whose call is a step: a model, or a runner with its model."""

    def describe(self, args: Any, kwargs: Any, generation: Generation | None) -> phases.Call:
        """Return the phase, tokens and sequences of the call with these arguments."""

    @property
    def waits(self) -> bool:
        """Whether a token may be chosen after the call, in the same step, outside of `generate`."""

    def may_wait(self, generation: Generation | None) -> bool:
        """Return whether a token may be chosen after the call, in the same step, inside `generation` or outside."""


class OpenStep:
    """A step from the model's call to its end."""

    __slots__ = (
        "_begun_ns",
        "_in_burst",
        "_noting",
        "_sampling",
        "_step",
        "_unit",
        "call",
        "generation",
        "is_recorded",
        "is_running",
        "profiler",
        "steps",
        "waits",
    )

    def __init__(self, steps: ModelSteps, unit: Unit, called: Called, args: Any, kwargs: Any) -> None:
        self.steps = steps
        self.profiler = steps.profiler
        self.is_running = True  # the model's call has not returned
        self.is_recorded = False
        generations = unit.generations
        self.generation = generation = generations[-1] if generations else None
        self.waits = called.waits if generation is None else called.may_wait(generation)  # for its token to be chosen
        self._unit = unit
        self._sampling: Any = None
        self.call = called.describe(args, kwargs, generation)
        phase, tokens, sequences, cached = self.call
        is_later = self.waits and not unit.open and generation is not None and generation.length is not None
        if is_later and phase == phases.PREFILL and sequences:
            phase, tokens = phases.NO_CACHE, sequences
            self.call = phases.Call(phase, tokens, sequences, None)
        self._begun_ns = clock.perf_counter_ns()
        warm_ups = steps._steps.warm_ups
        name = phase if warm_ups is None else warm_ups.named(phase, steps.model)
        step = self._step = ActiveStep(steps._steps, name, tokens, steps.model)
        step.sequences, step.cached = sequences or None, cached
        self._in_burst: Recording | HostCalls | None = None
        self._noting: Noting | None = None

    def begin(self) -> None:
        self._unit.open.append(self)
        by_kernels = self.steps.kernel_steps
        if by_kernels is not None:
            if not self._is_due(by_kernels):
                by_kernels = None
            elif not by_kernels.times_host and self._begin_by_kernels(by_kernels):
                return
        bursts = self.steps.bursts
        is_asked = bursts.asked.asked_word[0] != bursts.looked_at and bursts.is_asked
        if is_asked and len(self._unit.open) == 1 and self._begin_in_burst():
            return
        self._step.__enter__()
        self.is_recorded = self.profiler.recording
        if self.waits and self.generation is not None and self.generation.prepared is not None:
            self._step.start_ns, duration_ns = self.generation.prepared
            if self.is_recorded:
                self.profiler.record_elapsed(_INPUTS, duration_ns, 0)
        steps = self.steps
        if self.is_recorded:
            if not steps.trains and torch.is_grad_enabled():
                steps.look_for_gradients()
            steps._looks += 1
            if steps._looks % steps.look_every == 0:
                steps.look_again()
            steps.follow(self)
        else:
            if steps._are_in is not False:
                steps.follow(None)
            if by_kernels is not None and by_kernels.times_host:
                self._note_in(by_kernels.begin_host(self._step.key))

    @_unless_it_fails
    def ended(self) -> None:
        """End the step after the model's call, or let it wait for its token."""
        if self.waits:
            self.returned()
        else:
            self._step.returned_ns = clock.perf_counter_ns()
            self.close()

    def returned(self) -> None:
        """Note that the model's call has returned, and that the step waits for its token."""
        self.is_running = False
        if self._in_burst is not None:
            self._end_in_burst()

    @_unless_it_fails
    def begin_sampling(self) -> None:
        """Begin the choice of a token from the scores. The model may be called for that, too."""
        self.is_running = True
        if self._sampling is None and self.is_recorded:
            self._sampling = self.steps.timing.start_brick(self.steps.labelled(BrickId.SAMPLING))

    @_unless_it_fails
    def end_sampling(self, length: int | None) -> None:
        """End the choice: each sequence has a token more, or one has several, and sequences are `length` long."""
        if self._sampling is not None:
            self.steps.timing.stop_brick(self._sampling, self.call.sequences)
            self._sampling = None
        if self.generation is not None:
            before, self.generation.length = self.generation.length, length
            if length is not None and before is not None:
                self.accept(self.call.sequences * max(0, length - before))
        self.close()

    @_unless_it_fails
    def accept(self, tokens: int) -> None:
        """Set the tokens of a verifying step: the accepted tokens of the draft, and one for each sequence."""
        if self.call.phase == VERIFY:
            self._step.tokens = tokens

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """End the step, and the steps that are still open inside it."""
        try:
            self.is_running = False
            if self._in_burst is not None:
                self._end_in_burst()
            opened = self._unit.open
            if self not in opened:
                return
            try:
                while opened[-1] is not self:
                    opened[-1].close()
                try:
                    self._step.__exit__(kind, error, trace)
                except BaseException:  # of a signal handler: parts that have ended by then do not end again
                    self._step.__exit__(kind, error, trace)
                    raise
                if kind is None and (self._step._name or "").endswith(WARM_UP):
                    took_ns = clock.perf_counter_ns() - self._begun_ns
                    self.steps._steps.warm_ups.took(
                        self.call.phase, self.steps.model, took_ns, self.call.tokens or self.call.sequences
                    )
                for generation in self._unit.generations:
                    generation.prepared = None
            finally:
                if self in opened:
                    ended = opened[opened.index(self) :]
                    try:
                        for step in ended:
                            step.steps._recorded.discard(step)
                    except BaseException:  # as above
                        for step in ended:
                            step.steps._recorded.discard(step)
                        raise
                    finally:
                        if self in opened:
                            del opened[opened.index(self) :]
        except Exception as trouble:  # noqa: BLE001 - as in _unless_it_fails
            self.steps.failed(trouble)

    def _is_due(self, by_kernels: KernelSteps) -> bool:
        """Return whether to look closer at this step, which is outside of others and no warm-up."""
        is_due = by_kernels.is_due(clock.perf_counter_ns())
        return is_due and len(self._unit.open) == 1 and not (self._step._name or "").endswith(WARM_UP)

    def _begin_by_kernels(self, by_kernels: KernelSteps) -> bool:
        """Record this step by its kernels. Returns whether that is possible."""
        self.steps.follow(None)
        placed = by_kernels.begin(self._step.key, self.call)
        if placed is None:
            return False
        self._note_in(placed)
        return True

    def _note_in(self, calls: PlacedCalls | HostCalls) -> None:
        self._in_burst = calls.recording
        noting = self._noting = Noting(self.steps, calls)
        captures[get_ident()] = noting.capture
        noting.begin(self.call)

    def _begin_in_burst(self) -> bool:
        """Record its kernels instead of its times. Returns whether they are recorded."""
        self.steps.follow(None)
        recording = self.steps.bursts.begin(self._step.key, self.steps, has_calls=True)
        if recording is None:
            return False
        self._note_in(PlacedCalls(recording, self.steps.labelled))
        return True

    def _end_in_burst(self) -> None:
        recording, self._in_burst = self._in_burst, None
        if recording is not None:
            try:
                captures.pop(get_ident(), None)
                if self._noting is not None:
                    self._noting.end()
            finally:
                recording.end_step()


class Noting:
    """Lets `capture` note the calls of a model during one call of the model."""

    def __init__(self, steps: ModelSteps, capture: Capture) -> None:
        self.capture = capture
        self._steps = steps
        self._me, self._before = ref(steps, swapped_in.pop), swapped_in.get(ref(steps))
        self._noted: list[NotedCall] = []
        self._span: CapturedCall | None = None

    def begin(self, call: phases.Call) -> None:
        """Begin to note: the model is called as `call` describes."""
        capture = self.capture
        try:
            swaps.swap_in(self._me, capture)
            self._noted += [one for one in [call.noted_by(capture) for call in self._steps.calls] if one is not None]
            for one in self._noted:
                one.swap_in()
            self._steps.ask()
            self._span = capture.begin_model(self._steps, call)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            capture.failed(error)

    def end(self) -> None:
        """End the noting: the model's call has returned."""
        try:
            self.capture.end(self._span)
            for one in self._noted:
                one.swap_out()
            if self._before is None:
                swaps.swap_out(self._me)
            else:
                swaps.swap_in(self._me, self._before)
        except Exception as error:  # noqa: BLE001 - as above
            self._steps.failed(error)


class ModelSteps:
    """The steps of one model, and the calls that are timed in them."""

    __slots__ = (
        "__weakref__",
        "_adapted",
        "_are_in",
        "_asked",
        "_device",
        "_keys",
        "_looks",
        "_recorded",
        "_shared_with",
        "_steps",
        "bursts",
        "calls",
        "changed",
        "follow_mode",
        "give_up",
        "is_of_runner",
        "kernel_steps",
        "kernels_due_ns",
        "labelled",
        "look_every",
        "measured",
        "model",
        "on_device",
        "path",
        "profiler",
        "root",
        "times",
        "timing",
        "trains",
        "weight_version",
    )

    _keys: tuple[object, ...]  # of the last plain step; stored by C code

    def __init__(
        self,
        profiler: BrickProfiler,
        model: str,
        changed: Callable[[], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        self.profiler = profiler
        self.time_on(Timing(profiler.parts.paths.host))
        self.model = model
        self.changed = changed  # plans anew if the model has changed
        self.give_up = give_up
        self.bursts = bursts_of(profiler)
        self.kernel_steps: KernelSteps | None = None  # records steps by their kernels, if not None
        self.kernels_due_ns = 0  # when the next such step is due, on the host's clock; 0: never; read by C code
        self.calls: Sequence[BrickCall] = ()
        self.is_of_runner = False  # True: the model's own calls are not steps
        self.on_device: dict[Hashable, Hashable] = {}  # bricks timed by the host: the same on the device
        self.measured: Callable[[str], None] = lambda how: None  # receives how the device's times are measured
        self.root: Callable[[], nn.Module | None] = lambda: None  # the model
        # Called with the type of autocast and the adapters, if they have changed since the last step.
        self.follow_mode: Callable[[torch.dtype | None, object], None] = lambda autocast, adapters: None
        self._asked: tuple[torch.dtype | None, object] = (None, None)
        self._device = ""  # the device whose autocast is checked
        self._adapted: ref[nn.Module] | None = None  # the layer whose adapters are checked
        self.trains = False  # gradients are computed between its steps
        self.weight_version: int | None = None  # the version of its first weight that can have a gradient
        self._looks = 0  # recorded steps that have begun
        self.look_every = LOOK_EVERY  # recorded steps
        self._shared_with: dict[ref[ModelSteps], object] = {}  # models that share a part with this one
        self._are_in: bool | None = False  # whether the timed calls are; None: some of them may be
        self._recorded: set[OpenStep] = set()  # recorded steps that run

    def time_on(self, timing: Timing) -> None:
        """Use `timing` for its steps and their bricks from now on."""
        self.timing, self.labelled = timing.path, timing.labelled
        #: Times the calls of modules and functions. It is the hot path itself, called from C, if there is one.
        self.path: HotPath | Path = getattr(timing.path, "_hot_path", timing.path)
        self.times = timing if timing.backend and not timing.by_kernels else self.path
        self._steps = self.profiler.parts.steps.on(timing.path)

    def after_fork(self) -> None:
        """Make a new lock in a child process, and keep only this thread's steps: other threads are gone."""
        swaps.lock = threading.RLock()
        self._recorded.intersection_update(unit().open)

    def failed(self, error: Exception) -> None:
        """Stop showing this model after `error` in cbtop's code, unless the host caused it or its stack is full.

        A step of it that waits for a token here ends, because it may never be ended otherwise.
        """
        reraise_host_error(error)
        if not isinstance(error, RecursionError):
            try:
                self.give_up(error)
                for step in [step for step in unit().open if step.steps is self and not step.is_running]:
                    step.close()
            except Exception as trouble:  # noqa: BLE001 - as in _unless_it_fails
                log_own_error(trouble, "a model cannot be detached")

    def open_in(self, here: Unit) -> OpenStep | None:
        """Return the innermost open step of this model in `here`, or None."""
        found = [step for step in here.open if step.steps is self]
        return found[-1] if found else None

    def is_called_by_runner(self) -> None:
        """Time nothing if a runner's warm-up calls the model, which is outside any step."""
        try:
            if self.open_in(unit()) is None:
                self.follow(None)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.failed(error)

    def noted(self, capture: Capture, call: ModelCall, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model while a graph is captured. Nothing runs, so it is not a step; `capture` notes the calls."""
        if not self.profiler.enabled or capture.is_in_call_of(self):
            return call.plain(*args, **kwargs)
        noting = None
        try:
            noting = Noting(self, capture)
            noting.begin(call.describe_captured(args, kwargs))
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            capture.failed(error)
        try:
            return call.plain(*args, **kwargs)
        finally:
            if noting is not None:
                noting.end()

    def run(
        self, call: Called, called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], called_ns: int
    ) -> Any:
        """Call `called` as a step that `call` describes. Inside a step of the same model, only call it.

        `called_ns` is the time when the host made the call.
        """
        return call_in(self.begun(call, args, kwargs, called_ns), called, args, kwargs)

    def begun(self, call: Called, args: tuple[Any, ...], kwargs: dict[str, Any], called_ns: int) -> OpenStep | None:
        """Begin a step and return it. Returns None inside a step of this model, or if it fails."""
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
                    mine.close()  # it waited for a token, but this is already the next call
                else:
                    generation = here.generations[-1] if here.generations else None
                    if mine.generation is generation or not call.may_wait(generation):
                        mine._step.own_ns += clock.perf_counter_ns() - called_ns
                        return None  # otherwise the model calls `generate` inside its own call
            if self._shared_with:
                others = [ref(step.steps) for step in here.open if step.is_running]
                if not self._shared_with.keys().isdisjoint(others):
                    return None
            step = OpenStep(self, here, call, args, kwargs)
            step.begin()
            step._step.own_ns = clock.perf_counter_ns() - called_ns
        except BaseException as error:
            if step is not None:
                step.close()
            if not isinstance(error, Exception):
                raise
            self.failed(error)
            return None
        return step

    def follow(self, recorded: OpenStep | None) -> None:
        """Swap timed calls in for a recorded step, and out for another step if no recorded one is running."""
        if recorded is None and self._are_in is False:
            return
        with swaps.lock:
            if recorded is not None:
                self._recorded.add(recorded)
            elif self._recorded:
                return
            if self._are_in is (recorded is not None):
                return
            if recorded is None and self.timing.held_steps is not None:
                self.timing.held_steps.settle()
            self._are_in = None
            if recorded is not None:
                swaps.swap_in(ref(self, swapped_in.pop), self.times)
                for call in self.calls:
                    call.swap_in()
            else:
                for call in self.calls:
                    call.swap_out()
                swaps.swap_out(ref(self))
            self._are_in = recorded is not None

    def ask(self) -> None:
        """Update the bricks for this step if autocast or the adapters have changed.

        It takes 0.2 us, or 0.35 us under autocast, which is too long for each brick.
        """
        try:
            device, autocast, adapters = self._device, None, None
            if device and is_autocast_enabled(device):
                autocast = get_autocast_dtype(device)
            if self._adapted is not None:
                layer = self._adapted()
                adapters = None if layer is None else state_of_adapters(layer)
            if (autocast, adapters) != self._asked:
                self._asked = autocast, adapters
                self.follow_mode(autocast, adapters)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.failed(error)

    def ask_of(self, device: str, adapted: nn.Module | None, mode: Mode) -> None:
        """Check autocast on `device` and the adapters of `adapted` from now on. Their state now is `mode`."""
        self._device = device if device in AUTOCAST_DEVICES else ""
        self._adapted = None if adapted is None else ref(adapted)
        self._asked = mode.autocast, mode.adapters

    def look_through(self, modules: int) -> None:
        """Set how often to look again, so that the time per recorded step does not grow with `modules`."""
        self.look_every = LOOK_EVERY * max(1, modules // (MODULES_PER_STEP * LOOK_EVERY))  # C checks each LOOK_EVERY

    def look_again(self) -> None:
        """Check whether the model has changed."""
        if not self._recorded and not self.is_of_runner:
            with torch._C.DisableTorchFunction():  # the host's torch functions must not see this
                self.changed()

    def look_for_gradients(self) -> None:
        """Announce that the process trains if the first weight that can have a gradient has one, or has changed.

        Optimizers change weights in place, which torch counts, and most clear gradients before the next step.
        """
        root = self.root()
        if root is None:
            return
        with torch._C.DisableTorchFunction():  # the host's torch functions must not see this
            for weight in root.parameters():
                if weight.requires_grad:
                    if not weight.is_leaf:
                        return  # a computed tensor has no gradient, and torch warns if it is read
                    before, self.weight_version = self.weight_version, weight._version
                    if weight.grad is not None or before not in (None, self.weight_version):
                        self.trains = True
                        self.profiler.announce(Training())
                    return

    def share(self, other: ModelSteps) -> None:
        """Note that `other` shares a part with this model: a call in a step of `other` is not a step of this one."""
        self._shared_with[ref(other, self._shared_with.pop)] = None

    def remove(self) -> None:
        """Time nothing from now on."""
        with swaps.lock:
            swaps.swap_out(ref(self))
            for call in self.calls:
                call.remove()
            self.calls = ()
            self._are_in = False


def call_in(step: OpenStep | None, called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `called`, and end `step` after it, if there is one."""
    try:
        result = called(*args, **kwargs)
        if step is not None:
            step.ended()
    except BaseException:  # from the model, or from a signal handler
        if step is not None:
            step.close(*sys.exc_info())
        raise
    return result


class ModelCall(CallWrapper):
    """Replaces the call of a model. The call is a step if no step of this model is open.

    On a compiled hot path, C code begins and ends usual steps in the same way (see compiled_steps.py).
    """

    __slots__ = ("_axis", "_names", "_steps", "_takes_ids", "has_cache", "without_cache")

    waits = False

    def __init__(self, module: nn.Module, steps: ModelSteps) -> None:
        super().__init__(module)
        self._steps = steps
        looks_both_ways = _looks_both_ways(module)
        self.has_cache = not looks_both_ways and _takes_a_cache(module)
        self.without_cache = phases.ENCODE if looks_both_ways or _is_called_encoder(module) else phases.FORWARD
        self._names = _positional(module)
        self._axis = _axis_of_sequences(module)
        self._takes_ids = _has_words(module)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        called: Callable[..., Any] = self.plain
        step: OpenStep | None = None
        try:
            called, step = self.begin(args, kwargs, clock.perf_counter_ns())
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._steps.failed(error)
        return call_in(step, called, args, kwargs)

    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], called_ns: int
    ) -> tuple[Callable[..., Any], OpenStep | None]:
        """Return what to call with these arguments, and the step that has begun, to be ended after it.

        The caller does both, so that no frame of cbtop is around the model if C code is the caller.
        """
        called = self.instead
        if called is None:
            called = self.module()._call_impl  # type: ignore[union-attr]  # it exists, because it is being called
        steps = self._steps
        if is_compiling() or _is_tracing() or (_len_torch_dispatch_stack() and is_symbolic()):
            return called, None
        if not steps.profiler.enabled and steps._are_in is False:
            return called, None
        if captures:
            capture = capture_here()
            if capture is not None:
                return functools.partial(steps.noted, capture, self), None
        if steps.is_of_runner:
            steps.is_called_by_runner()
            return called, None
        try:  # as in `begun`, but without its frames, because each step has such calls
            here = steps.path.position.unit
            step = here.open[-1] if here is not None and here.open else None
            generation = here.generations[-1] if here is not None and here.generations else None
            if step is not None and step.steps is steps and step.is_running and step.generation is generation:
                step._step.own_ns += clock.perf_counter_ns() - called_ns
                return called, None
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            steps.failed(error)
        return called, steps.begun(self, args, kwargs, called_ns)

    def describe(self, args: Any, kwargs: Any, generation: Generation | None) -> phases.Call:
        is_assisted = generation is not None and generation.is_assisted
        if args:
            named = dict(zip(self._names, args, strict=False))
            args, kwargs = args[len(named) :], named | kwargs
        with torch._C.DisableTorchFunction():  # the host's torch functions must not see this
            return describe(
                args,
                kwargs,
                has_cache=self.has_cache,
                without_cache=self.without_cache,
                is_assisted=is_assisted,
                axis=self._axis,
                takes_ids=self._takes_ids,
            )

    def describe_captured(self, args: Any, kwargs: Any) -> phases.Call:
        """Return what a replay of this captured call does."""
        named = dict(zip(self._names, args, strict=False))
        return describe_captured(
            args[len(named) :],
            named | kwargs,
            has_cache=self.has_cache,
            without_cache=self.without_cache,
            axis=self._axis,
            takes_ids=self._takes_ids,
        )

    def may_wait(self, generation: Generation | None) -> bool:
        return generation is not None and generation.model is self.module()


def _takes_a_cache(module: nn.Module) -> bool:
    """Return whether `module`, or the module it only wraps, takes a cache as an argument."""
    known = set(_CACHE_ARGUMENTS)
    if not type(module).__module__.startswith("transformers."):
        known.remove("state")  # in a model written by hand it may be the state of any recurrent network
    return any([not known.isdisjoint(parameters) for parameters in _parameters(module)])


def _has_words(module: nn.Module) -> bool:
    """Return whether `module` has a lookup table, or a part named like one, so that integer inputs may be ids."""
    if any([isinstance(rows, int) for rows in attributes_of(holders_of(module, "num_embeddings"), "num_embeddings")]):
        return True
    names: set[str] = set()
    for one in modules_of(module):
        if one._modules:
            names.update(one._modules.keys())  # a scripted module has no dictionaries here
        if one._parameters:
            names.update(one._parameters.keys())
    return any([part in name.lower() for name in names for part in ("emb", "wte", "vocab", "tok")])


def _looks_both_ways(module: nn.Module) -> bool:
    """Return whether the flags of `module` say that none of its attention is causal."""
    modules = holders_of(module, "is_causal") + holders_of(module, "is_decoder")
    pairs = zip(attributes_of(modules, "is_causal"), attributes_of(modules, "is_decoder"), strict=True)
    flags = [is_decoder if is_causal is None else is_causal for is_causal, is_decoder in pairs]
    known = [flag for flag in flags if isinstance(flag, bool)]
    return bool(known) and not any(known)


def _is_called_encoder(module: nn.Module) -> bool:
    """Return whether `module`, or the module it only wraps, is an encoder by its class name."""
    inner: nn.Module | None = module
    while inner is not None:
        if "Encoder" in type(inner).__name__ and "Decoder" not in type(inner).__name__:
            return True
        children = children_of(inner)
        inner = children[0][1] if len(children) == 1 else None
    return False


def _axis_of_sequences(module: nn.Module) -> int | None:
    """Return the axis of sequences in the input of `module`, from its `batch_first`, or None if that is unknown.

    For torch's own encoders it comes from their parts.
    """
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    flags = attributes_of(modules_of(module) if is_of_torch else [module], "batch_first")
    axes = {int(not flag) for flag in flags if isinstance(flag, bool)}
    return axes.pop() if len(axes) == 1 else None


def _positional(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional arguments of `module`, or of the module it only wraps."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [
        tuple(name for name, parameter in parameters.items() if parameter.kind in by_position)
        for parameters in _parameters(module)
    ]
    return ([names for names in named if names] or [()])[0]


def _parameters(module: nn.Module) -> list[dict[str, inspect.Parameter]]:
    """Return the parameters of `module` and of each module it only wraps, because a wrapper passes them on."""
    found = []
    inner: nn.Module | None = module
    while inner is not None:
        forward = getattr(type(inner), "forward", None)  # a scripted module's class has none
        if forward is not None:
            _, *parameters = inspect.signature(forward).parameters.items()  # the first is the module
            found.append(dict(parameters))
        children = children_of(inner)
        inner = children[0][1] if len(children) == 1 else None
    return found


_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state", "past_key_value", "layer_past", *phases.POSITIONS)
