"""Records some training steps of a model on a CUDA device by the kernels that CUPTI sees.

The host launches kernels long before they run, so its times say little about a training step on a GPU. In a recorded
step, CUPTI records all kernels. A kernel of the forward belongs to the module that launched it. In the backward, a
hook (training_calls.py) runs before the nodes of each call, in autograd's thread. It assigns the following kernels of
this thread to that call. Other kernels belong to the part of the step that the loop is in.

Rules
- A window covers one step or several in a row (training_windows.py), and begins at the end of the step before it.
  Before the window, the host waits until the device has finished all earlier work.
- The host may be many steps ahead of the device. So the time of a plain step is measured on the device, from the end
  of the step before it to its own end. The first step after an evaluation has the host's time instead.
- The time of a recorded step is the mean of the latest plain steps. The time of a part is the time of its kernels. If
  kernels overlap, their common time counts once. In the rest of the step, no kernel runs.
- While the program waits for data, or does other work, it launches no kernels of the model. An event before and an
  event after this wait measure how long the device is idle. The idle time counts as a part of the wait.
- If CUPTI is not available, the parts of a step are the host's times, and bricks are not recorded. The same applies
  if records of a step were lost, because the kernels that are missing would look like time without a kernel.
"""

from __future__ import annotations

import functools
import statistics
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any

import torch

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.device.cupti import CuptiError
from cbtop.profiler.device.kernel_burst import KernelBurstResults, KernelWindow, Keys
from cbtop.profiler.instrument import kernel_bursts
from cbtop.profiler.instrument.capturing import OTHER, captures, keys_inside, place
from cbtop.profiler.instrument.communication_times import StepCommunication
from cbtop.profiler.instrument.governor import FLOOR, FLOOR_SHARE
from cbtop.profiler.instrument.kernel_bursts import bursts_of, close_at_exit, node_at
from cbtop.profiler.instrument.kernel_steps import KEPT, STEADY, TOLD_EVERY, parts_from, together
from cbtop.profiler.instrument.step_clock import Parts
from cbtop.profiler.instrument.step_memory import RecordedMemory, StepMemory
from cbtop.profiler.instrument.torch_internals import is_in_bad_fork
from cbtop.profiler.instrument.training import (
    BRICKS,
    EndedStep,
    StepTimes,
    ThreadTraining,
    TrainingSteps,
)
from cbtop.profiler.instrument.training_calls import (
    BACKWARD_END,
    GRADIENT_SYNC,
    LOSS,
    LOSS_BACKWARD,
    StepCalls,
    layers_of,
    renamed,
)
from cbtop.profiler.instrument.training_windows import (
    FIRST_NS,
    TrainedStep,
    TrainingResults,
    TrainingWindow,
    dated,
)
from cbtop.profiler.instrument.trouble import in_words, log_once, log_own_error
from cbtop.profiler.steps import STEP
from cbtop.protocol import clock
from cbtop.protocol.memory_messages import TrainingMemory
from cbtop.protocol.training_messages import MAX_TIMED_STEPS
from cbtop.protocol.vocabulary import (
    BACKWARD,
    BY_KERNELS,
    IDLE_BEFORE,
    RECOMPUTE,
    WARM_UP,
    BrickCategory,
    TrainingPart,
)

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.timed_model import TimedModel
    from cbtop.profiler.profiler import BrickProfiler

_LOOP = BrickDefinition("Loop", BrickCategory.OTHER, backend="torch", label="between the parts of a step")
# Number of steps that are not measured after a recorded step. In these steps, the host is not ahead of the device
# yet.
UNSETTLED = 2
# Parts of a step in which the program launches no kernels of the model.
WAITS = TrainingPart.DATA_WAIT, TrainingPart.OTHER
# Once FLOOR steps are measured, only one in this number of steps is measured, because an event costs the host 3 us.
MEASURED_EVERY = 4
MOST_RUNNING = 64  # at most this many steps may be unfinished on the device
MOST_STAYS = 16  # maximum number of measured waits (parts in WAITS) in one step
SETTLE_S = 1.0  # longest wait for the device, in seconds, before a step is recorded
LEAST_PAUSE_NS, MOST_PAUSE_NS = 250_000_000, 10_000_000_000


class StepKernels(StepCalls):
    """Records the kernels of one training step. Each kernel belongs to the call that has launched it."""

    def __init__(self, labelled: Callable[[Any], Any], recording: TrainingWindow) -> None:
        super().__init__(labelled)
        self.recording = recording
        self._number = recording.step = len(recording.steps)  # the step's number in its window
        # Place of a call -> the part of the step that the call belongs to.
        self.part_of: dict[Keys, TrainingPart] = {}
        self.elements: Counter[Keys] = Counter()  # place of a call -> elements of all calls in this place
        self._called: list[Keys] = []  # for each call: the keys that lead from the step down to the call
        self._where: list[Keys] = []  # for each call: the keys that its kernels are counted for
        self._in_backward = LOSS  # the call that the running nodes of the backward belong to
        self._of_owner: dict[int, Keys] = {}  # for each call: the keys of its backward
        self._threads: list[int] = []  # threads of autograd that have run nodes in this backward pass
        # Memory is measured in the first step of a window only: a read of the counters takes 30 us.
        self.memory = None if recording.steps else StepMemory()
        self._moved: Keys = ()  # the place outside of calls
        self.enter_part(TrainingPart.OTHER)

    def enter_part(self, part: TrainingPart) -> None:
        if part is TrainingPart.FORWARD:
            brick = OTHER
        elif part is TrainingPart.BACKWARD:
            brick = LOSS_BACKWARD
        elif part is TrainingPart.COMMUNICATION:
            brick = GRADIENT_SYNC
        else:
            brick = BRICKS.get(part, _LOOP)
        self._move((brick,), part)

    def begin(self, key: Hashable, module: nn.Module | None) -> int | None:
        number = super().begin(key, module)
        if number is not None:
            around = self._around[number]
            keys = keys_inside(self._called[around] if around >= 0 else (), key)
            self._called.append(keys)
            is_again = self._repeats[number]
            where = place(keys, self._owns[number])
            if is_again:
                if not layers_of(keys) and self._in_backward >= 0:
                    where = (*layers_of(self._called[self._in_backward]), *where)
                where = renamed(where, RECOMPUTE)
            self._where.append(where)
            self.part_of[where] = TrainingPart.BACKWARD if is_again else TrainingPart.FORWARD
            self.recording.window.enter((self._number, *where))
            self._remember(where)
        return number

    def end(self, span: int | None, elements: int = 0) -> None:
        before = len(self._running)
        super().end(span, elements)
        if span is not None and len(self._running) < before:
            self.elements[self._where[span]] += self._elements[span]
        for _ in range(before - len(self._running)):
            self.recording.window.leave()
        if len(self._running) < before:
            self._remember(self._where[self._running[-1]] if self._running else self._moved)

    def _places(self) -> list[Keys]:
        return self._where

    def _remember(self, keys: Keys) -> None:
        if self.memory is not None:
            self.memory.enter(keys)

    def backward_ended(self, handles: Any) -> None:
        super().backward_ended(handles)
        for thread in self._threads:
            captures.pop(thread, None)
        self._threads.clear()

    def _reached(self, owner: int, gradients: Any) -> None:
        try:
            thread = get_ident()
            # The call is in autograd's thread, where a checkpoint may recompute modules.
            if captures.get(thread) is not self:
                captures[thread] = self
                self._threads.append(thread)
            self._in_backward = owner
            keys = self._of_owner.get(owner)
            if keys is None:
                keys = (
                    (LOSS_BACKWARD,)
                    if owner < 0
                    else renamed(place(self._called[owner], self._owns[owner]), BACKWARD, self.backward_scale(owner))
                )
                self._of_owner[owner] = keys
                self.elements[keys] += 0 if owner < 0 else self._elements[owner]
            self._move(keys, TrainingPart.BACKWARD)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host's backward
            self.failed(error)

    def _nodes_ended(self) -> None:
        try:
            self._move((BACKWARD_END,), TrainingPart.BACKWARD)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host's backward
            self.failed(error)

    def _move(self, keys: Keys, part: TrainingPart) -> None:
        self.part_of[keys] = part
        self.recording.window.move((self._number, *keys))
        self._moved = keys
        self._remember(keys)

    def drop(self) -> None:
        self.has_failed = True
        if self.recording.window.is_on:
            self.recording.end_step()


class IdleTimes:
    """Measures how long the device is idle while the host waits.

    A wait is one of the parts WAITS. Two events are recorded for each wait.
    """

    def __init__(self) -> None:
        self._steps = self._known = 0
        # The events at the begin and the end of each wait. The same events are used again for later steps.
        self._events: list[tuple[Any, Any]] = []
        self._parts: list[TrainingPart] = []  # the part of each wait in the measured step
        self._is_inside = self._is_measured = self._is_complete = False

    def begin_step(self) -> None:
        """Begin a step. The first FLOOR steps are measured, then one in MEASURED_EVERY.

        If the device has not finished the previous measured step, the step is not measured.
        """
        self._steps += 1
        self._is_measured = not self._is_complete and (self._known < FLOOR or self._steps % MEASURED_EVERY == 0)
        self._is_inside = False
        if self._is_measured:
            self._parts.clear()
            self.changed(TrainingPart.OTHER)

    def changed(self, part: TrainingPart) -> None:
        """The training loop is in `part` from now on."""
        if self._is_measured and torch.cuda.is_current_stream_capturing():
            self._is_measured = False  # during a capture, an event would have no time, so make none
        if not self._is_measured:
            return
        if self._is_inside:
            self._events[len(self._parts) - 1][1].record()
            self._is_inside = False
        if part in WAITS and len(self._parts) < MOST_STAYS:
            if len(self._events) == len(self._parts):
                event: Callable[[], Any] = functools.partial(torch.cuda.Event, enable_timing=True)
                self._events.append((event(), event()))
            self._parts.append(part)
            self._events[len(self._parts) - 1][0].record()
            self._is_inside = True

    def end_step(self, *, follows: bool = True) -> dict[TrainingPart, int] | None:
        """Return the idle times of the last measured step, in ns by part.

        Returns None if no step was measured, or if the device still runs the measured step. If `follows` is False, an
        evaluation or the end of an epoch came after the measurement began and before the step began. Such a step
        counts as not measured.
        """
        if self._is_measured:
            self.changed(TrainingPart.FORWARD)  # this ends a running wait, because the part FORWARD is not in WAITS
            self._is_measured, self._is_complete = False, bool(self._parts) and follows
        if not self._is_complete or not self._events[len(self._parts) - 1][1].query():
            return None
        self._is_complete = False
        self._known += 1
        found = dict.fromkeys(WAITS, 0)
        for part, (begin, end) in zip(self._parts, self._events, strict=False):
            found[part] += round(1e6 * begin.elapsed_time(end))
        return found


class StepEvents:
    """Measures the time from the end of one step to the end of the next on the device, with one event per step.

    The host may be many steps ahead of the device, so steps can take far more or far less time on the host.
    """

    def __init__(self) -> None:
        self._free: list[Any] = []  # CUDA events that are not in use and can be used again
        self._before: Any = None  # the event at the end of the latest step that the device has finished
        # Time when the device finished its latest step, in ns on the host's clock. The next step begins at this time.
        self._end_ns = 0
        self._running: deque[tuple[Any, bool, str, EndedStep]] = deque()

    def restart(self, now_ns: int) -> None:
        """Let the next step begin now, at `now_ns`. The device must have nothing to run."""
        if self._before is not None:
            self._before.record()
        self._end_ns = now_ns

    def ended(self, name: str, step: EndedStep, *, follows: bool) -> list[tuple[str, EndedStep]]:
        """Note that the host ends `step` now. Returns the steps that the device has ended since the last call.

        If `follows` is True, the step began when the previous step ended, and it gets the device's times. Otherwise
        the step keeps the host's times.
        """
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._running.append((event, follows, name, step))
        found = []
        while self._running and (self._running[0][0].query() or len(self._running) > MOST_RUNNING):
            event, follows, name, step = self._running.popleft()
            before, self._before = self._before, event
            if follows and before is not None and event.query():
                end_ns = self._end_ns + max(1, round(1e6 * before.elapsed_time(event)))
                step = step._replace(begun_ns=self._end_ns, ended_ns=end_ns)
            self._end_ns = step.ended_ns
            if before is not None:
                self._free.append(before)
            found.append((name, step))
        return found


class GpuTrainingSteps(TrainingSteps):
    """The training steps of one model on a CUDA device."""

    is_measured = True
    steady = STEADY

    def __init__(self, steps: TimedModel) -> None:
        super().__init__(steps)
        self._bursts = bursts_of(steps.profiler)
        self.burst: KernelBurstResults = TrainingResults()
        self.is_running = False
        self._has_failed = False
        # True if the last step was recorded; the measurement of the device's times must then start again.
        self._is_anew = False
        self._unsettled = 0
        self._walls_ns: dict[str, deque[int]] = {}  # phase -> wall times in ns of the latest plain steps
        # Phase -> idle times in ns of the device in the latest measured steps.
        self._idle_ns: dict[str, deque[Parts]] = {}
        # Phase -> times in ns of the kernels in the latest recorded steps.
        self._windows: dict[str, deque[Parts]] = {}
        self._kept: deque[KernelBurstResults] = deque(maxlen=KEPT)
        self._memories: dict[str, RecordedMemory] = {}  # by phase
        self._idle = IdleTimes()
        self._events = StepEvents()
        self._told = 0  # number of steps whose kernels were recorded
        self._most = 1  # at most this many steps in the next window
        self._window: TrainingWindow | None = None  # the open window

    def _calls(self, model: TimedModel, here: ThreadTraining, now_ns: int) -> StepCalls | None:
        return here.calls

    def _prepare(self, model: TimedModel, here: ThreadTraining, now_ns: int) -> None:
        here.clock.changed = None
        if not self._has_failed:
            if self._is_anew:
                self._is_anew = False
                self._events.restart(clock.perf_counter_ns())
            window = kernel_bursts.recording_here()
            if not isinstance(window, TrainingWindow):
                is_due = not self._unsettled and any(self._walls_ns.values()) and self._is_due(model, now_ns)
                window = self._begin_window(now_ns) if is_due else None
            if window is None:
                self._idle.begin_step()
            else:
                here.calls = StepKernels(model.labelled, window)
            here.clock.changed = self._idle.changed if here.calls is None else here.calls.enter_part

    def _begin_window(self, now_ns: int) -> TrainingWindow | None:
        if is_in_bad_fork() or not kernel_bursts.is_on_cuda() or torch.cuda.is_current_stream_capturing():
            return None
        if not kernel_bursts.one_at_a_time.acquire(blocking=False):
            return None
        recording = None
        try:
            driver, stream = kernel_bursts.new_driver(), kernel_bursts.stream_here()
            window = KernelWindow(kernel_bursts.new_cupti(), driver, has_calls=True)
            if window.settle(stream, SETTLE_S):
                self.burst = TrainingResults()
                window.begin()
                recording = self._window = TrainingWindow(self, window, stream, self._most, now_ns)
                kernel_bursts.enter_here(recording)
                close_at_exit(recording)
                self.is_running = True
                return recording
        except BaseException as error:
            if recording is not None:
                recording.end_step()
            else:
                kernel_bursts.one_at_a_time.release()
            if not isinstance(error, Exception):
                raise
            self.refuse(error)
            return None
        kernel_bursts.one_at_a_time.release()
        return None

    def records_around_unseen(self) -> bool:
        """Return True: a step is still recorded if it replays unknown graphs, because most of a training step is
        outside of captured graphs.
        """
        return True

    def recorded(self, step: Hashable) -> None:
        """Record the steps of the closed window."""
        self.is_running = False
        whole, self.burst = self.burst, TrainingResults()
        window, self._window = self._window, None
        if window is None or not isinstance(whole, TrainingResults):
            return
        try:
            self._record_window(window, whole)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "the kernels of a training step are not recorded")

    def _record_window(self, window: TrainingWindow, whole: TrainingResults) -> None:
        trained = window.steps
        if whole.lost and len(trained) > 1:
            trained, self._most = [], 1
        elif whole.lost:
            self.refuse(CuptiError(f"a step has too many kernels, {whole.lost:,} records were lost"))
            trained = []
        for one in window.steps:
            one.steps.count_earlier(one.model, one.name, one.ended, window)
        each = [(one, whole.of(number)) for number, one in enumerate(trained)]
        if each:
            each[-1][1].unplaced = whole.unplaced
        begins, next_ns = [], clock.perf_counter_ns()
        for one, burst in reversed(each):  # no step ends after the step that follows it begins
            ended_ns = min(next_ns, one.ended.ended_ns)
            next_ns = ended_ns - one.steps.length_ns(one.ended.phase, burst)
            begins.append((next_ns, ended_ns))
        for (one, burst), (begun_ns, ended_ns) in zip(each, reversed(begins), strict=True):
            one.steps.record_kernels(one, burst, begun_ns, ended_ns)
        if window.steps:
            self.restart(0)
        self._pay_for(window, whole)
        for one in window.steps:
            one.steps.restart(self._due_ns)

    def _pay_for(self, window: TrainingWindow, whole: TrainingResults) -> None:
        """Count the cost of a window. All models with steps in it wait for the same time until their next window."""
        walls = [wall for each in self._walls_ns.values() for wall in each]
        plain_ns = statistics.fmean(walls) if walls else 0.0
        closed_ns = clock.perf_counter_ns()
        paid_ns = window.paid_ns(plain_ns, closed_ns)
        model = self._steps()
        if model is not None:
            self._count_paid(model, paid_ns, closed_ns, len(window.steps))
        if not whole.lost:
            left_ns = FLOOR_SHARE * FIRST_NS - self._paid_ns
            self._most = window.most_next(whole.launches, plain_ns, paid_ns, FLOOR - self._recorded, left_ns)

    def _pause_ns(self, pause_ns: int) -> int:
        return min(max(pause_ns, LEAST_PAUSE_NS), MOST_PAUSE_NS)

    def restart(self, due_ns: int) -> None:
        """Measure the device's times again from the next step on. The next window is due at `due_ns`, or later."""
        self._is_anew, self._unsettled, self._due_ns = True, UNSETTLED, max(self._due_ns, due_ns)

    def count_earlier(
        self, model: TimedModel, name: str, step: EndedStep, window: TrainingWindow | None = None
    ) -> None:
        """Count the plain steps that the device has ended. Neither `step` nor the steps of `window` are plain."""
        others = [step, *(one.ended for one in window.steps)] if window else [step]
        for before, of_device in self._events.ended(name, step, follows=False):
            if not any(of_device is other for other in others):
                self._count_plain(model, before, of_device)

    def refuse(self, error: Exception) -> None:
        """Stop recording kernels, because of `error`."""
        self.is_running, self._has_failed, self._window = False, True, None
        self._windows.clear()
        log_once(
            f"kernels of training steps are not recorded ({in_words(error)}): parts of a step are the host's times"
        )

    def _record(self, model: TimedModel, name: str, step: EndedStep, calls: StepCalls | None) -> None:
        if self._has_failed:
            if calls is not None:
                calls.drop()
            super()._record(model, name, step, None)
            return
        if isinstance(calls, StepKernels):
            window = calls.recording
            if calls.has_failed or not window.window.is_on:
                if window.window.is_on:  # the kernels of the next step would count as those of this one
                    window.end_step()
                self.count_earlier(model, name, step)
                self.restart(0)
                return
            if calls.memory is not None:
                self._memories.setdefault(step.phase, RecordedMemory()).add(calls.memory, calls.part_of, self._seen)
                self._bricks.add(step.phase, calls.memory.by_place(calls.outputs()))
            window.steps.append(TrainedStep(self, model, name, step, calls))
            if not window.goes_on:
                window.end_step()
            return
        follows = step.begun_ns == self._next_ns
        idle_ns = self._idle.end_step(follows=follows)
        if idle_ns is not None:
            self._idle_ns.setdefault(step.phase, deque(maxlen=MAX_TIMED_STEPS)).append(idle_ns)
        for before, of_device in self._events.ended(name, step, follows=follows):
            self._count_plain(model, before, of_device)

    def _count_plain(self, model: TimedModel, name: str, step: EndedStep) -> None:
        """Count a plain step. Its time was measured on the device, if that is known."""
        self._write(model, name, step, None)
        if name.endswith(WARM_UP):
            return
        if self._unsettled:
            self._unsettled -= 1
        # without this test, the time of the evaluation would count as `no kernel`
        elif TrainingPart.EVALUATION not in step.times.parts:
            self._walls_ns.setdefault(step.phase, deque(maxlen=MAX_TIMED_STEPS)).append(step.wall_ns)

    def length_ns(self, phase: str, burst: KernelBurstResults) -> int:
        """Return the time of a recorded step in ns. It is the time of a plain step, or the sum of all kernels of the
        recorded step if that is longer.
        """
        busy_ns = sum(durations.sum_ns for durations in burst.kernels.values())
        walls = self._walls_ns.get(phase)
        return max(busy_ns, round(statistics.fmean(walls))) if walls else busy_ns

    def record_kernels(self, trained: TrainedStep, whole: KernelBurstResults, begun_ns: int, ended_ns: int) -> None:
        _, model, name, step, calls = trained
        if step.phase not in self._walls_ns or self._has_failed:
            return
        burst = dated(whole, (STEP, name, model.model) if model.model else (STEP, name))
        self._kept.append(burst)
        took_ns: dict[Keys, int] = {}
        for (keys, _), durations in burst.kernels.items():
            took_ns[keys[1:]] = took_ns.get(keys[1:], 0) + durations.sum_ns
        placed = step._replace(begun_ns=begun_ns, ended_ns=ended_ns)
        self._write(model, name, placed, parts_from(took_ns, begun_ns, calls.elements))
        parts: Parts = {}
        for keys, covered_ns in (whole.covered_ns or {}).items():
            part = calls.part_of.get(keys[1:], TrainingPart.OTHER)
            parts[part] = parts.get(part, 0) + covered_ns
        windows = self._windows.setdefault(step.phase, deque(maxlen=MAX_TIMED_STEPS))
        windows.append(parts)
        if self._is_time_to_tell(step.phase, len(windows)):
            self._tell(step.phase, self._closed(step.phase))
        self._told += 1
        if self._told == 1:
            model.measured(BY_KERNELS + IDLE_BEFORE)
        if self._told == KEPT or self._told % TOLD_EVERY == 0:
            self._bursts.announce(together(self._kept))

    def _closed(self, phase: str) -> list[StepTimes]:
        """Return the times of the latest plain steps.

        Each step gets the mean wall time of these steps and the mean kernel times of the recorded steps. Its idle
        times in waits are its own. The remaining time of a step counts as time without a kernel.
        """
        windows = self._windows[phase]
        kernels: Parts = {}
        for parts in windows:
            for part, took_ns in parts.items():
                kernels[part] = kernels.get(part, 0) + took_ns
        kernels = {part: round(took_ns / len(windows)) for part, took_ns in kernels.items()}
        busy_ns = sum(kernels.values())
        walls_ns = self._walls_ns[phase]
        rest_ns = max(0, round(statistics.fmean(walls_ns)) - busy_ns)
        found = []
        communication = _communication()
        for idle in self._idle_ns.get(phase) or [{}] * len(walls_ns):
            left_ns, waits = rest_ns, {}
            for part in WAITS:
                waits[part] = kernels.get(part, 0) + min(left_ns, idle.get(part, 0))
                left_ns -= min(left_ns, idle.get(part, 0))
            parts = kernels | waits | {TrainingPart.NO_KERNEL: left_ns}
            found.append(StepTimes(busy_ns + rest_ns, parts, communication))
        return found

    def _memory(self, profiler: BrickProfiler, phase: str) -> TrainingMemory | None:
        memories = self._memories.get(phase)
        if memories is None and not self._has_failed:
            return None
        step = (STEP, phase, self._model) if self._model else (STEP, phase)
        return (memories or RecordedMemory()).message(
            phase, self._model, lambda place: node_at(profiler, (step, *place)) if place else 0
        )

    def _steps_by_kernels(self, phase: str) -> int:
        return len(self._windows.get(phase, ()))

    def _known(self) -> dict[str, Collection[StepTimes]]:
        return super()._known() | {phase: self._closed(phase) for phase in self._windows}

    def _pay(self, model: TimedModel, calls: StepCalls, now_ns: int) -> None:
        """Do nothing: the cost of a window is counted when it is closed."""


def _communication() -> StepCommunication:
    """Return the communication of a step on a GPU. Its times are unknown, because the communication runs on the
    device.
    """
    found = StepCommunication()
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        found.unknown = "it runs on the GPU"
    return found
