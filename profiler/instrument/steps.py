"""Steps of a model that is called: when each begins and ends, and when its bricks are timed.

Rules
- The outermost call of a model, or of a part of it that holds a stack, is a step. In `generate` of transformers it
  stays open until the token has been chosen, and begins where its inputs began to be prepared: what the host does
  between two steps, such as to print a token, is in none.
- A `generate` inside a model's call has steps of its own there; what is called to choose a token belongs to its step.
- Of a model that an engine's runner runs, the runner's call is the step: the model's own calls are none.
- Each thread, task and greenlet has its own open steps (`Unit`).
- Calls of modules are swapped in where a step is recorded, and out again at the next that is not.
- Where something of ours fails, the step ends, the model is detached, and its call goes on.
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
from cbtop.profiler.instrument.capturing import Capture, Span, capture_here, captures
from cbtop.profiler.instrument.classification import CATEGORIES, GENERATE_INPUTS
from cbtop.profiler.instrument.eager_stamps import Timing
from cbtop.profiler.instrument.kernel_bursts import PlacedCalls, Recording, bursts_of
from cbtop.profiler.instrument.module_tree import attributes_of, children_of, holders_of, modules_of
from cbtop.profiler.instrument.multiplied import AUTOCAST_DEVICES, Mode
from cbtop.profiler.instrument.phases import VERIFY, describe, describe_captured
from cbtop.profiler.instrument.swapping import swapped_in, swaps
from cbtop.profiler.instrument.trouble import ours
from cbtop.profiler.instrument.wrapping import BrickCall, Call, NotedCall, is_symbolic
from cbtop.profiler.positions import finder
from cbtop.profiler.steps import Step
from cbtop.protocol import clock
from cbtop.protocol.messages import Training
from cbtop.protocol.signals import let_through
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
        self.model = model  # whose tokens are chosen
        self.is_assisted = False  # a draft proposes tokens
        # When the inputs of the next step began to be prepared, and how long that took; None once a step has ended.
        self.prepared: tuple[int, int] | None = None
        self.length: int | None = None  # of its sequences, when the last token was chosen


class Unit:
    """What is open in one thread, task or greenlet: steps, and calls of `generate` one inside another."""

    __slots__ = ("__weakref__", "generations", "open")

    def __init__(self) -> None:
        self.open: list[OpenStep] = []
        self.generations: list[Generation] = []

    @property
    def generation(self) -> Generation | None:
        """The innermost."""
        return self.generations[-1] if self.generations else None

    def end_generate(self, depth: int) -> None:
        """The call of `generate` with so many around it has ended: close what waited for a token in it."""
        ended = self.generations[depth:]
        del self.generations[depth:]
        while self.open and self.open[-1].generation in ended:
            self.open[-1].close()


unit: Callable[[], Unit] = finder(Unit)
_INPUTS = BrickDefinition(GENERATE_INPUTS, CATEGORIES[GENERATE_INPUTS], backend="torch", label="prepared")
LOOK_EVERY = 8  # recorded steps: to look through 400 modules takes as long as timing them does
MODULES_PER_STEP = 200  # looked through per recorded step, on average: 0.3 ms


def recorded_here() -> HotPath | Path | Timing | Capture | None:
    """What times the recorded step that the caller is in, or notes what is captured; None outside of these."""
    paths = set(swapped_in.values())
    if len(paths) == 1:  # the compiled path knows its position for a tenth of what `unit` costs
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
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            self.steps.failed(error)

    return guarded


class Called(Protocol):
    """What is called as a step: a model, or a runner with its model."""

    def describe(self, args: Any, kwargs: Any, generation: Generation | None) -> phases.Call:
        """What the call with these arguments does."""

    @property
    def waits(self) -> bool:
        """Whether a token may be chosen after the call, in the same step, outside of `generate`."""

    def may_wait(self, generation: Generation | None) -> bool:
        """The same, wherever it is."""


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
        self.is_running = True  # the model's call has not returned yet
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
        step = self._step = Step(steps._steps, name, tokens, steps.model)
        step.sequences, step.cached = sequences or None, cached
        self._in_burst: Recording | None = None
        self._noting: Noting | None = None

    def begin(self) -> None:
        self._unit.open.append(self)
        by_kernels = self.steps.kernel_steps
        if by_kernels is not None and self._begin_by_kernels(by_kernels):
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
        elif steps._are_in is not False:
            steps.follow(None)

    @_unless_it_fails
    def ended(self) -> None:
        """End the step, or let it wait for its token: the model's call has returned."""
        if self.waits:
            self.returned()
        else:
            self._step.returned_ns = clock.perf_counter_ns()
            self.close()

    def returned(self) -> None:
        """The model's call has, and its token is waited for."""
        self.is_running = False
        if self._in_burst is not None:
            self._end_in_burst()

    @_unless_it_fails
    def begin_sampling(self) -> None:
        """The scores are looked at: from here on a token is chosen; the model may be called for that, too."""
        self.is_running = True
        if self._sampling is None and self.is_recorded:
            self._sampling = self.steps.timing.start_brick(self.steps.labelled(BrickId.SAMPLING))

    @_unless_it_fails
    def end_sampling(self, length: int | None) -> None:
        """A token of each sequence, or several of one, has been chosen: the sequences are `length` long now."""
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
        """So many tokens have come of it: those of a draft that were accepted, and one of each sequence."""
        if self.call.phase == VERIFY:
            self._step.tokens = tokens

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """End it, and what is still open inside."""
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
                except BaseException:  # of a signal handler: what has ended by then ends no more
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

    def _begin_by_kernels(self, by_kernels: KernelSteps) -> bool:
        """Let this step be recorded by its kernels; gives whether it is."""
        is_due = by_kernels.is_due(clock.perf_counter_ns())
        if not is_due or len(self._unit.open) > 1 or (self._step._name or "").endswith(WARM_UP):
            return False
        self.steps.follow(None)
        placed = by_kernels.begin(self._step._key, self.call)
        if placed is None:
            return False
        self._note_in(placed)
        return True

    def _note_in(self, placed: PlacedCalls) -> None:
        self._in_burst = placed.recording
        noting = self._noting = Noting(self.steps, placed)
        captures[get_ident()] = noting.capture
        noting.begin(self.call)

    def _begin_in_burst(self) -> bool:
        """Let its kernels be recorded instead of its times; gives whether they are."""
        self.steps.follow(None)
        recording = self.steps.bursts.begin(self._step._key, self.steps, has_calls=True)
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
                recording.end()


class Noting:
    """The calls of a model are noted by `capture`, from the beginning of one of its own to the end."""

    def __init__(self, steps: ModelSteps, capture: Capture) -> None:
        self.capture = capture
        self._steps = steps
        self._me, self._before = ref(steps, swapped_in.pop), swapped_in.get(ref(steps))
        self._noted: list[NotedCall] = []
        self._span: Span | None = None

    def begin(self, call: phases.Call) -> None:
        """The model is called, which `call` describes."""
        capture = self.capture
        try:
            swaps.swap_in(self._me, capture)
            self._noted += [one for one in [call.noted_by(capture) for call in self._steps.calls] if one is not None]
            for one in self._noted:
                one.swap_in()
            self._steps.ask()
            self._span = capture.begin_model(self._steps, call)
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            capture.failed(error)

    def end(self) -> None:
        """It has returned."""
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

    _keys: tuple[object, ...]  # of the last plain step; kept in C

    def __init__(
        self,
        profiler: BrickProfiler,
        model: str,
        changed: Callable[[], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        self.profiler = profiler
        self.time_on(Timing(profiler._host_path))
        self.model = model
        self.changed = changed  # plans anew where the model is no longer what it was
        self.give_up = give_up
        self.bursts = bursts_of(profiler)
        self.kernel_steps: KernelSteps | None = None  # records steps by their kernels; None: not done
        self.kernels_due_ns = 0  # when the next one is to be, on the host's clock; 0: never; read in C
        self.calls: Sequence[BrickCall] = ()
        self.is_of_runner = False  # the model's own calls are no steps
        self.on_device: dict[Hashable, Hashable] = {}  # of bricks that the host times, what they are on the device
        self.measured: Callable[[str], None] = lambda how: None  # is told how the device's times come about
        self.root: Callable[[], nn.Module | None] = lambda: None  # the model
        # Called with the type of autocast and the adapters, if they have changed since the last step.
        self.follow_mode: Callable[[torch.dtype | None, object], None] = lambda autocast, adapters: None
        self._asked: tuple[torch.dtype | None, object] = (None, None)
        self._device = ""  # its autocast is asked for
        self._adapted: ref[nn.Module] | None = None  # this layer's adapters are asked for
        self.trains = False  # gradients are computed between its steps
        self.weight_version: int | None = None  # of its first weight that can have a gradient
        self._looks = 0  # recorded steps that have begun
        self.look_every = LOOK_EVERY  # recorded steps
        self._shared_with: dict[ref[ModelSteps], object] = {}  # models that have a part of this one, too
        self._are_in: bool | None = False  # None: some of them may be
        self._recorded: set[OpenStep] = set()  # that run

    def time_on(self, timing: Timing) -> None:
        """Time its steps and their bricks so from now on."""
        self.timing, self.labelled = timing.path, timing.labelled
        #: What times calls of modules, and of functions: the hot path itself where it can be, which is called in C.
        self.path: HotPath | Path = getattr(timing.path, "_hot_path", timing.path)
        self.times = timing if timing.backend and not timing.by_kernels else self.path
        self._steps = self.profiler._steps_on(timing.path)

    def after_fork(self) -> None:
        """In a child nobody holds the lock, and of the steps that ran those of this thread are left."""
        swaps.lock = threading.RLock()
        self._recorded.intersection_update(unit().open)

    def failed(self, error: Exception) -> None:
        """Something of ours has, and this model is shown no longer; unless it is the host's, or its stack is full.

        Its step that waits for a token here ends: nobody may come to end it.
        """
        let_through(error)
        if not isinstance(error, RecursionError):
            try:
                self.give_up(error)
                for step in [step for step in unit().open if step.steps is self and not step.is_running]:
                    step.close()
            except Exception as trouble:  # noqa: BLE001 - as in _unless_it_fails
                ours(trouble, "a model cannot be detached")

    def open_in(self, here: Unit) -> OpenStep | None:
        """The step of this model that is open there."""
        found = [step for step in here.open if step.steps is self]
        return found[-1] if found else None

    def is_called_by_runner(self) -> None:
        """Time nothing in a warm-up of a runner, which calls its model outside of any step."""
        try:
            if self.open_in(unit()) is None:
                self.follow(None)
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            self.failed(error)

    def noted(self, capture: Capture, call: ModelCall, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model while a graph is captured: nothing runs: it is no step, and `capture` notes the calls."""
        if not self.profiler.enabled or capture.is_in_call_of(self):
            return call.plain(*args, **kwargs)
        noting = None
        try:
            noting = Noting(self, capture)
            noting.begin(call.describe_captured(args, kwargs))
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            capture.failed(error)
        try:
            return call.plain(*args, **kwargs)
        finally:
            if noting is not None:
                noting.end()

    def run(
        self, call: Called, called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], called_ns: int
    ) -> Any:
        """Call `called`, which `call` stands in for, as a step; inside a step of its model it is only called.

        `called_ns` is when that was asked for.
        """
        return call_in(self.begun(call, args, kwargs, called_ns), called, args, kwargs)

    def begun(self, call: Called, args: tuple[Any, ...], kwargs: dict[str, Any], called_ns: int) -> OpenStep | None:
        """The step that begins; None inside one of this model, and where it cannot."""
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
                    mine.close()  # it waited for a token, and the next call has come
                else:
                    generation = here.generations[-1] if here.generations else None
                    if mine.generation is generation or not call.may_wait(generation):
                        mine._step.own_ns += clock.perf_counter_ns() - called_ns
                        return None  # else it generates inside
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
        """Swap the calls in for a step that is recorded, and out for one that is not, where no other is running."""
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
        """Update the bricks for this step, if autocast or the adapters have changed.

        Takes 0.2 us, under autocast 0.35 us: too long for each brick.
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
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            self.failed(error)

    def ask_of(self, device: str, adapted: nn.Module | None, mode: Mode) -> None:
        """Ask for autocast on `device` and for the adapters of `adapted` from now on; now they are as in `mode`."""
        self._device = device if device in AUTOCAST_DEVICES else ""
        self._adapted = None if adapted is None else ref(adapted)
        self._asked = mode.autocast, mode.adapters

    def look_through(self, modules: int) -> None:
        """Let looking again take a time per recorded step that does not grow with the number of modules."""
        self.look_every = LOOK_EVERY * max(1, modules // (MODULES_PER_STEP * LOOK_EVERY))  # C asks each LOOK_EVERY

    def look_again(self) -> None:
        """Whether the model is what it was."""
        if not self._recorded and not self.is_of_runner:
            with torch._C.DisableTorchFunction():  # the host's do not see that we ask
                self.changed()

    def look_for_gradients(self) -> None:
        """Announce that the process trains if the first weight that can have a gradient has one, or has changed.

        Optimizers change weights in place, which torch counts, and most clear gradients before the next step.
        """
        root = self.root()
        if root is None:
            return
        with torch._C.DisableTorchFunction():  # the host's do not see that we ask
            for weight in root.parameters():
                if weight.requires_grad:
                    if not weight.is_leaf:
                        return  # computed, in its place: it has no gradient, and torch warns whoever asks for one
                    before, self.weight_version = self.weight_version, weight._version
                    if weight.grad is not None or before not in (None, self.weight_version):
                        self.trains = True
                        self.profiler.announce(Training())
                    return

    def share(self, other: ModelSteps) -> None:
        """A part of this model is one of `other`, too: called in a step of that one, it is no step of this one."""
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
    except BaseException:  # of the model, or of a signal handler
        if step is not None:
            step.close(*sys.exc_info())
        raise
    return result


class ModelCall(Call):
    """Stands in for a call that is a step of its own where none of this model is open.

    On a compiled hot path usual steps begin and end in C, which does the same: see compiled_steps.py.
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
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            self._steps.failed(error)
        return call_in(step, called, args, kwargs)

    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], called_ns: int
    ) -> tuple[Callable[..., Any], OpenStep | None]:
        """Return what to call with these arguments, and the step that has begun, to be ended after it.

        The caller does both, so that the model runs in no frame of ours if C code is the caller.
        """
        called = self.instead
        if called is None:
            called = self.module()._call_impl  # type: ignore[union-attr]  # it is being called: it lives
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
        try:  # as in `begun`, without the frames of that: each step has such calls
            here = steps.path.position.unit
            step = here.open[-1] if here is not None and here.open else None
            generation = here.generations[-1] if here is not None and here.generations else None
            if step is not None and step.steps is steps and step.is_running and step.generation is generation:
                step._step.own_ns += clock.perf_counter_ns() - called_ns
                return called, None
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            steps.failed(error)
        return called, steps.begun(self, args, kwargs, called_ns)

    def describe(self, args: Any, kwargs: Any, generation: Generation | None) -> phases.Call:
        is_assisted = generation is not None and generation.is_assisted
        if args:
            named = dict(zip(self._names, args, strict=False))
            args, kwargs = args[len(named) :], named | kwargs
        with torch._C.DisableTorchFunction():  # the host's do not see that we ask
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
        """What a replay of the call does, which is captured now."""
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
    """Whether a cache is an argument of `module`, or of what it only wraps."""
    known = set(_CACHE_ARGUMENTS)
    if not type(module).__module__.startswith("transformers."):
        known.remove("state")  # in a model written by hand it may be the state of any recurrent network
    return any([not known.isdisjoint(parameters) for parameters in _parameters(module)])


def _has_words(module: nn.Module) -> bool:
    """Whether `module` looks up rows of a table, or something in it is called so: its whole numbers may be ids."""
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
    """Whether `module` says that none of its attention is causal."""
    modules = holders_of(module, "is_causal") + holders_of(module, "is_decoder")
    pairs = zip(attributes_of(modules, "is_causal"), attributes_of(modules, "is_decoder"), strict=True)
    flags = [is_decoder if is_causal is None else is_causal for is_causal, is_decoder in pairs]
    known = [flag for flag in flags if isinstance(flag, bool)]
    return bool(known) and not any(known)


def _is_called_encoder(module: nn.Module) -> bool:
    """Whether `module`, or what it only wraps, is an encoder by the name of its class."""
    inner: nn.Module | None = module
    while inner is not None:
        if "Encoder" in type(inner).__name__ and "Decoder" not in type(inner).__name__:
            return True
        children = children_of(inner)
        inner = children[0][1] if len(children) == 1 else None
    return False


def _axis_of_sequences(module: nn.Module) -> int | None:
    """The axis of sequences in what `module` is given, by its own `batch_first`; of torch's own encoders by their
    attention's. None: it does not say."""
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    flags = attributes_of(modules_of(module) if is_of_torch else [module], "batch_first")
    axes = {int(not flag) for flag in flags if isinstance(flag, bool)}
    return axes.pop() if len(axes) == 1 else None


def _positional(module: nn.Module) -> tuple[str, ...]:
    """What the arguments are called that `module`, or what it only wraps, is given by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [
        tuple(name for name, parameter in parameters.items() if parameter.kind in by_position)
        for parameters in _parameters(module)
    ]
    return ([names for names in named if names] or [()])[0]


def _parameters(module: nn.Module) -> list[dict[str, inspect.Parameter]]:
    """Of the call of `module`, and of those it only wraps: what only wraps another passes on what it is given."""
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
