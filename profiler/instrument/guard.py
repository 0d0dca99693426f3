"""Finds the first brick of a model with an output that is NaN, Inf or over a bound. Checks the recorded steps.

Rules
- The inputs and the first output of each brick and layer are looked at where they are computed (guard_flags.py).
  Their smallest and largest values are read when the model's call returns: on a CPU at once, on a device later.
- The guard names the first call to end with a faulty output. If the input of this call was finite, this call made the
  fault. Otherwise code outside of bricks made it, or it came with the input of the model.
- For the reaction `dump`, the values are read right after each call, which waits for the device.
- Nothing is checked while the host observes the operations of its thread: with a dispatch mode, in a trace, in a
  transform of functorch, or with torch's profiler.
- If code of cbtop fails, the guard ends, and the host goes on.
"""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, finalize, ref

import torch

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.guard_setting import GuardSetting, NotFiniteError
from cbtop.profiler.instrument.guard_dump import dump
from cbtop.profiler.instrument.guard_flags import (
    INF,
    FlagArray,
    GuardedRun,
    StepFigures,
    StepFlags,
    fault_at,
    fault_of,
    is_looked_at,
    range_in,
)
from cbtop.profiler.instrument.guard_padding import Hiding, Mask, hidings, mask_in, tokens_of
from cbtop.profiler.instrument.guarded_calls import GuardedCall
from cbtop.profiler.instrument.parameter_names import modules_by_name, name_of_module
from cbtop.profiler.instrument.swapping import swaps
from cbtop.profiler.instrument.torch_internals import (
    is_profiled,
    is_stream_captured,
    is_tracing,
    is_transforming,
    modes_of_host,
    own_buffers,
    own_parameters,
    without_dispatch,
    without_torch_function,
)
from cbtop.profiler.instrument.trouble import in_words, log_once, log_own_error
from cbtop.profiler.positions import finder
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol import clock
from cbtop.protocol.guard_messages import FAULTY, FINITE, UNKNOWN, GuardedSteps, GuardFault
from cbtop.protocol.vocabulary import BrickId

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.wrapping import BrickCall

ANNOUNCE_NS = 1_000_000_000  # between two announcements
EARLY = 1, 4, 16  # the guard announces its state after these numbers of checked steps
MAX_WAITING = 8  # at most this many steps wait for figures from a device
READ_EVERY_NS = 100_000_000  # ns between two readings of the flags of a captured graph


class GuardedModel(Protocol):
    """The parts of a model's steps that the guard uses."""

    calls: Sequence[BrickCall]
    model: str
    profiler: Any
    root: Callable[[], nn.Module | None]


class OpenGuard:
    """A step that one thread has open and the guard checks. `owner` begins and ends it."""

    __slots__ = ("file", "flags", "guard", "has_dumped", "owner", "phase", "step")

    def __init__(self, guard: Guard, owner: object, phase: str, step: int, flags: StepFlags) -> None:
        self.guard, self.owner, self.phase, self.step, self.flags = guard, owner, phase, step, flags
        self.file = ""  # path of the file with the saved inputs of a faulty call; "" if none
        self.has_dumped = False  # whether the guard has tried to save the inputs of a faulty call


class ThreadGuard:
    """The open steps of one thread, task or greenlet that the guard checks, outermost first."""

    __slots__ = ("__weakref__", "mask", "open", "spare")

    def __init__(self) -> None:
        self.open: list[OpenGuard] = []
        self.spare: list[StepFlags] = []  # flags of ended steps, to be used again
        self.mask: Mask | None = None  # the padding mask among the arguments of the model's call that begins now


class _Waiting(NamedTuple):
    """A checked step. Its figures may still be on their way from the device."""

    phase: str
    step: int
    runs: list[GuardedRun]
    figures: StepFigures
    file: str


class _Found(NamedTuple):
    """A call with a faulty output. If its input is faulty too, `inside` is the innermost call around it with a finite
    input.
    """

    run: GuardedRun
    kind: str
    given: str
    inside: GuardedRun | None


guarded_here: Callable[[], ThreadGuard] = finder(ThreadGuard)


class Guard:
    """Checks the steps of one model for values that are not finite."""

    def __init__(self, steps: GuardedModel, setting: GuardSetting) -> None:
        self._steps, self._profiler = ref(steps), ref(steps.profiler)
        at_end = finalize(steps, self._tell)  # the finalizer runs when the model is freed, or when the process ends
        setattr(at_end, "atexit", False)  # noqa: B010 - typeshed does not declare this attribute
        recorder = steps.profiler.parts.recorder
        if isinstance(recorder, RingRecorder):
            recorder.before_goodbye(at_end)
        self._setting = setting
        self._calls: dict[int, GuardedCall] = {}  # id of a module -> the wrapper that looks at its calls
        self._followed: Sequence[BrickCall] = ()
        self._users = 0  # number of steps and captures that need these wrappers
        self._counts: Counter[str] = Counter()  # phase -> number of steps in this phase
        self._seen = 0  # number of all steps, checked or not
        self._latest = "", 0  # the phase and the number of the latest checked step
        self._is_latest_faulty = False
        self._waiting: deque[_Waiting] = deque(maxlen=MAX_WAITING)
        self._report = GuardedSteps(steps.model, 0)
        self._told_ns = 0
        self._has_failed = False
        self._own_ns = 0  # time in ns that the guard has taken since the last `take_own_ns`

    @property
    def is_gone(self) -> bool:
        return self._steps() is None

    # --- the calls that are looked at

    def _follow(self, calls: Sequence[BrickCall]) -> None:
        """Look at the calls of the modules in `calls` from now on, and at no others."""
        self._followed = calls
        before, self._calls = self._calls, {}
        for call in calls:
            module = call.module()
            if module is not None:
                known = before.pop(id(module), None)
                is_same = known is not None and known.module() is module
                self._calls[id(module)] = known if is_same else GuardedCall(module, call.key, self)  # type: ignore[assignment]
        for call_before in before.values():
            call_before.swap_out()
        steps = self._steps()
        root = None if steps is None else steps.root()
        found = {} if root is None else hidings(modules_by_name(root))
        for key, guarded in self._calls.items():
            guarded.hiding = found.get(key, Hiding.NEVER)

    def swap_in(self) -> None:
        """Begin to look at the timed calls. Their timing wrappers must be in place already."""
        self._users += 1
        self._look_again()
        self._put_in()

    def swap_out(self) -> None:
        """Stop looking at calls, unless another step or capture needs the wrappers."""
        self._users = max(0, self._users - 1)
        if not self._users:
            for call in self._calls.values():
                call.swap_out()

    def remove(self) -> None:
        """Stop looking at calls for good, and drop the wrappers."""
        self._users = 0
        for call in self._calls.values():
            call.remove()
        self._calls, self._followed = {}, ()

    def _look_again(self) -> bool:
        """Look at the model's new timed calls, if they have changed. Returns whether they have."""
        steps = self._steps()
        is_new = steps is not None and steps.calls is not self._followed
        if steps is not None and is_new:
            self._follow(steps.calls)
        return is_new

    def _put_in(self) -> None:
        for call in self._calls.values() if not self._has_failed else ():
            call.swap_in()

    # --- steps

    def note_arguments(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the padding mask among the arguments of the model. The next `begin` uses it."""
        guarded_here().mask = mask_in(names, args, kwargs)

    def begin(self, owner: object, phase: str, *, is_counted: bool = True, is_watched: bool) -> None:
        """Begin a step of `phase`. If `is_watched` is False, the step is counted but not checked."""
        self._counts[phase] += is_counted
        self._seen += is_counted
        here = guarded_here()
        mask, here.mask = here.mask, None
        if not is_watched or self._has_failed:
            return
        try:
            if self._look_again():
                with swaps.lock:
                    self._put_in()
            flags = here.spare.pop() if here.spare else StepFlags()
            with without_torch_function(), without_dispatch():
                padding = None if _is_observed() else tokens_of(mask)
                flags.restart(padding, has_bound=self._setting.bound < math.inf)
            here.open.append(OpenGuard(self, owner, phase, self._counts[phase], flags))
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._failed(error)

    def end(self, owner: object) -> None:
        """End the step of `owner`, and read the figures that have arrived.

        Raises NotFiniteError if a value is faulty and the guard must stop the host.
        """
        opened = self._taken(owner)
        if opened is None or self._has_failed:
            return
        begun_ns = clock.perf_counter_ns()
        stop: NotFiniteError | None = None
        try:
            with without_torch_function(), torch.no_grad():
                flags = opened.flags
                self._waiting.append(_Waiting(opened.phase, opened.step, flags.ended, flags.figures(), opened.file))
                stop = self._read()
                flags.restart(None)
                guarded_here().spare.append(flags)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._failed(error)
        self._own_ns += clock.perf_counter_ns() - begun_ns
        if stop is not None:
            raise stop

    def drop(self, owner: object) -> None:
        """Drop the step of `owner` without a check, because it has failed."""
        self._taken(owner)

    def _taken(self, owner: object) -> OpenGuard | None:
        """Close the step of `owner` and all steps inside it. Returns the step, or None if it is not open."""
        here = guarded_here()
        here.mask, opened = None, here.open  # forget the padding mask; a call inside the step may have set it
        for at, one in enumerate(opened):
            if one.owner is owner:
                del opened[at:]
                return one
        return None

    def count_earlier(self, phase: str) -> None:
        """Count a step of `phase`. Its phase is known only now, at its end."""
        self._counts[phase] += 1

    def take_own_ns(self) -> int:
        """Return the time that the guard has taken since the last call of this function."""
        own_ns, self._own_ns = self._own_ns, 0
        return own_ns

    # --- captured graphs

    def end_capture(self, owner: object) -> GraphFlags | None:
        """End the capture of a call of the model. Returns the captured flags. Each replay computes them again."""
        opened = self._taken(owner)
        return None if opened is None or self._has_failed else GraphFlags(self, opened)

    def replayed(self, flags: StepFlags, phase: str, *, is_read: bool) -> None:
        """Count a replay of a captured step. If `is_read`, read its flags, too. Raises NotFiniteError like `end`."""
        self._counts[phase] += 1
        self._seen += 1
        if self._has_failed or not is_read:
            return
        stop: NotFiniteError | None = None
        try:
            with without_torch_function(), torch.no_grad():
                self._waiting.append(_Waiting(phase, self._counts[phase], flags.ended, flags.figures(), ""))
                stop = self._read()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._failed(error)
        if stop is not None:
            raise stop

    # --- looking at a call

    def before(self, call: GuardedCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> GuardedRun | None:
        """Look at the arguments of a call. Returns None if no step of this model is being checked."""
        try:
            here = guarded_here().open
            if not here or here[-1].guard is not self or _is_observed():
                return None
            begun_ns = clock.perf_counter_ns()
            with without_torch_function(), without_dispatch():
                run = here[-1].flags.begin(call, args, kwargs, call.hiding)
            if run is not None and self._setting.dumps:
                run.values = args, kwargs or {}
            self._own_ns += clock.perf_counter_ns() - begun_ns
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._failed(error)
            return None
        return run

    def after(self, run: GuardedRun, result: Any) -> None:
        """Look at the result of a call."""
        try:
            here = guarded_here().open
            if not here or here[-1].guard is not self or _is_observed():
                return
            begun_ns = clock.perf_counter_ns()
            with without_torch_function(), without_dispatch():
                here[-1].flags.end(run, result)
                if run.values is not None:
                    self._dump(here[-1], run)
            self._own_ns += clock.perf_counter_ns() - begun_ns
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._failed(error)

    def _dump(self, opened: OpenGuard, run: GuardedRun) -> None:
        """Save the arguments of a call, if it is the first faulty one."""
        (args, kwargs), run.values = run.values or ((), {}), None
        if (
            self._report.fault is not None
            or opened.has_dumped
            or run.output is None
            or _is_captured(run.output.flags)
        ):
            return
        flags = [run.output, run.output.without_infinity]
        kinds = [fault_of(flag.flags.values_of(flag.row), self._setting.bound) for flag in flags if flag is not None]
        kind = next(filter(None, kinds), "")
        steps, key = self._steps(), run.call.key
        if not kind or steps is None:
            return
        brick, layer = _brick_of(key), _layer_of(run)
        module = _name_of(run, steps)
        facts = {"module": module, "brick": brick, "layer": layer, "phase": opened.phase, "step": opened.step}
        name = f"{os.getpid()}-{opened.phase}-{opened.step}-{module or brick}".replace("/", "_").replace(" ", "_")
        opened.has_dumped = True
        try:
            opened.file = str(dump(self._setting.directory, name, {**facts, "kind": kind}, args, kwargs))
        except (OSError, ValueError) as error:
            log_once(f"the inputs of a faulty brick were not saved: {in_words(error)}")

    # --- the meaning of the figures

    def _read(self) -> NotFiniteError | None:
        """Read the smallest and largest values that have arrived from a device. Returns the error to raise, or
        None.
        """
        stop = None
        while self._waiting and (figures := self._waiting[0].figures.read()) is not None:
            waiting = self._waiting.popleft()
            found = first_fault(waiting.runs, figures, self._setting.bound)
            line = self._take(waiting, found)
            if line and self._setting.stops and stop is None:
                stop = NotFiniteError(line)
        return stop

    def _take(self, waiting: _Waiting, found: _Found | None) -> str:
        """Count a checked step, and announce it. Returns a line about the fault if this is the first faulty step.

        The micro-batches of a training step are checked one by one, and count as one step.
        """
        report, line = self._report, ""
        is_new = self._latest != (waiting.phase, waiting.step)
        is_newly_faulty = found is not None and (is_new or not self._is_latest_faulty)
        self._latest = waiting.phase, waiting.step
        self._is_latest_faulty = found is not None or (self._is_latest_faulty and not is_new)
        fault = report.fault
        if found is not None and fault is None:
            fault = self._fault(waiting, found)
            line = sentence(fault)
            log_once(line)
        elif found is not None and fault is not None and fault.phase == waiting.phase:
            fault = replace(fault, last_step=max(fault.last_step, waiting.step))
        report = self._report = replace(
            report,
            checked=report.checked + is_new,
            faulty=report.faulty + is_newly_faulty,
            fault=fault,
            steps=max(self._seen, report.checked + is_new),
        )
        now_ns = clock.perf_counter_ns()
        if line or report.checked in EARLY or now_ns - self._told_ns >= ANNOUNCE_NS:
            self._told_ns = now_ns
            self._tell()
        return line

    def _tell(self) -> None:
        """Announce the numbers of steps, and the fault if one was found."""
        profiler = self._profiler()
        if profiler is not None and self._seen:
            profiler.announce(replace(self._report, steps=max(self._seen, self._report.checked)))

    def _fault(self, waiting: _Waiting, found: _Found) -> GuardFault:
        run, steps = found.run, self._steps()
        return GuardFault(
            waiting.phase,
            waiting.step,
            found.kind,
            _brick_of(run.call.key),
            _name_of(run, steps),
            _layer_of(run),
            found.given,
            waiting.step,
            "" if found.inside is None else _name_of(found.inside, steps),
            _faulty_weight(run.call.module()),
            waiting.file,
        )

    def _failed(self, error: Exception) -> None:
        self._has_failed = True
        log_own_error(error, "the guard has ended")


class GraphFlags:
    """The flags (smallest and largest values) in a captured graph. Each replay computes them. The guard reads them
    only sometimes.
    """

    def __init__(self, guard: Guard, opened: OpenGuard) -> None:
        self._guard = ref(guard)
        self._flags, self._phase = opened.flags, opened.phase
        self._read_ns = 0

    def replayed(self) -> None:
        """Count a launched replay, and read its flags if it is time. Raises NotFiniteError like `Guard.end`."""
        guard, now_ns = self._guard(), clock.perf_counter_ns()
        if guard is not None:
            is_read = now_ns - self._read_ns >= READ_EVERY_NS and not is_stream_captured()
            self._read_ns = now_ns if is_read else self._read_ns
            guard.replayed(self._flags, self._phase, is_read=is_read)


#: The flags in captured graphs, by graph.
graph_flags: WeakKeyDictionary[Any, list[GraphFlags]] = WeakKeyDictionary()


def first_fault(runs: Sequence[GuardedRun], figures: dict[FlagArray, list[float]], bound: float) -> _Found | None:
    """Return the first call of a step with a faulty output, or None. `runs` are the calls in the order of their
    ends.
    """

    def of_output(run: GuardedRun) -> str:
        return "" if run.output is None else fault_at(figures, run.output, bound)

    def has_infinity(run: GuardedRun) -> bool:
        return run.output is not None and range_in(figures, run.output)[0] == -math.inf

    def given_to(run: GuardedRun) -> str:
        ranges = [range_in(figures, flag) for flag in run.others]
        if any([fault_of(one, math.inf) for one in ranges]):
            return FAULTY
        first = (0.0, 0.0) if run.inputs is None else range_in(figures, run.inputs)
        if fault_of(first, bound) or first[0] == -math.inf:
            return FAULTY
        hidden = [flag.with_padding for flag in (run.inputs, *run.others) if flag is not None]
        is_hidden = any([flag is not None and fault_of(range_in(figures, flag), math.inf) for flag in hidden])
        return UNKNOWN if run.is_unsure or is_hidden else FINITE

    faulty = next((run for run in runs if of_output(run)), None)
    if faulty is None:
        return None
    kind, given = of_output(faulty), given_to(faulty)
    # An earlier brick may have made -Inf. This is a fault only because it has become NaN or Inf here.
    if given == FAULTY:
        before = next((run for run in runs if run is faulty or has_infinity(run)), faulty)
        if before is not faulty:
            faulty, kind, given = before, INF, given_to(before)
    around = faulty.around if given == FAULTY else None
    while around is not None and not (around.has_ended and of_output(around) and given_to(around) == FINITE):
        around = around.around
    return _Found(faulty, kind, given, around)


def sentence(fault: GuardFault) -> str:
    """Return one line about a fault for the log and the exception."""
    where = fault.module or fault.brick
    layer = "" if fault.layer is None else f" in layer {fault.layer}"
    about = f" ({fault.brick}{layer})" if fault.brick else f" (layer {fault.layer})" if layer else ""
    line = f"the output of {where}{about} is {fault.kind} in step {fault.step} of {fault.phase}"
    line += {FINITE: "; its input was finite", FAULTY: "; its input was faulty already"}.get(fault.given, "")
    line += f"; its {fault.weight} is not finite" if fault.weight else ""
    line += f"; the input of {fault.inside} around it was finite" if fault.inside else ""
    return line + (f"; its input is in {fault.file}" if fault.file else "")


def _is_observed() -> bool:
    """Whether the host would notice the guard's operations in this thread."""
    return modes_of_host() > 0 or is_tracing() or is_profiled() or is_transforming()


def _is_captured(array: FlagArray) -> bool:
    return array.is_cuda and is_stream_captured()


def _brick_of(key: Hashable) -> str:
    """Return the name of the brick that a call belongs to, or "" for a layer."""
    if isinstance(key, BrickDefinition):
        return f"{key.name} {key.label}" if key.label else key.name
    return key.display_name if isinstance(key, BrickId) else ""


def _name_of(run: GuardedRun, steps: GuardedModel | None) -> str:
    """Return the name of the called module in the model, or "" if the module or the model was freed."""
    root, module = None if steps is None else steps.root(), run.call.module()
    return "" if root is None or module is None else name_of_module(root, module)


def _layer_of(run: GuardedRun) -> int | None:
    """Return the number of the layer that a call belongs to, or None outside of layers."""
    inner: GuardedRun | None = run
    while inner is not None:
        key = inner.call.key
        if isinstance(key, tuple):
            return int(key[1])
        inner = inner.around
    return None


def _faulty_weight(module: nn.Module | None) -> str:
    """Return the name of the first weight or buffer of `module` itself that is not finite now, or "".

    This waits for the device, once for each model.
    """
    if module is None:
        return ""
    weights = own_parameters(module)
    for name, weight in (*weights.items(), *own_buffers(module).items()):
        if weight is not None and is_looked_at(weight):
            lowest, highest = map(float, torch.aminmax(weight))
            if fault_of((lowest, highest), math.inf) or (lowest == -math.inf and name in weights):
                return name
    return ""
