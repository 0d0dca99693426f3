"""Records some steps of an eager model on a CUDA device by the kernels that CUPTI sees.

Stamps between modules make a step of small kernels wait for the host, so stamps would time launches. Therefore CUPTI
records the kernels of some steps. The time of a brick is the sum of its kernels. The time of a step is the time of
the plain step before it. If the step's kernels take longer in sum, it is their sum. In the rest of a step, the device
is idle if it was idle when the step began. Otherwise the device may run earlier work in that time.

Rules
- All other steps are plain. Each step is counted once.
- A window (up to MOST_STEPS steps in a row with CUPTI open, see kernel_windows.py) costs the host 11 to 35 ms: for
  opening, waiting for the device, and closing. Each of its steps costs a few ms more. The next window is due when the
  costs of windows are within the allowed share, or within 5 % until FLOOR steps are recorded. After that, windows use
  half of the allowed share. Models that run at the same time divide the allowed share among them.
- Other models may run while a window is open. Their kernels are in no step of the window, their steps are not plain
  steps, and the time that the window adds to those in its thread is a part of its cost.
- A window has one step if other threads replay captured graphs, which must not run while CUPTI is open.
- The host's times are measured in a plain step half-way between two windows (host_steps.py). The next window comes at
  least two steps later, because the time of the step before a window counts as that of a plain step.
- A cost is a share of the time that the model runs. If no step begins for IDLE_NS, that time does not count, or a
  server that waits for requests would pay for a window as soon as one comes.
- Steps of a warm-up are not recorded.
- If a step replays a captured graph that cbtop does not clone, the kernels of this graph are not known, so the shares
  of the other kernels are not known, either. Such a step is dropped, and further steps of its phase are not recorded.
- If records of a window were lost, its figures would be too small. So its steps are dropped, and the next windows
  have one step. If records of a single step were lost, further steps of its phase are not recorded.
- If CUPTI is not available, or another tool holds it, one line is logged, and stamps time the model
  (eager_stamps.py).
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cbtop.profiler.device.kernel_burst import MAX_RECORDS, KernelBurstResults, KernelWindow, Keys
from cbtop.profiler.instrument import kernel_bursts
from cbtop.profiler.instrument.governor import FLOOR, LEAST_OF_INTERVAL, SAMPLES, USED, interval_of
from cbtop.profiler.instrument.host_steps import HostCalls, HostSteps
from cbtop.profiler.instrument.kernel_bursts import bursts_of, close_at_exit
from cbtop.profiler.instrument.kernel_windows import MOST_OPEN_NS, RecordedStep, WindowRecording
from cbtop.profiler.instrument.placed_calls import MAX_PLACES, CallPlaces, PlacedCalls
from cbtop.profiler.instrument.torch_internals import is_in_bad_fork
from cbtop.profiler.instrument.trouble import in_words, log_once, log_own_error
from cbtop.protocol import clock
from cbtop.protocol.messages import Sampling
from cbtop.protocol.vocabulary import BY_KERNELS, IDLE_BEFORE

if TYPE_CHECKING:
    from cbtop.profiler.instrument.phases import Call

LEAST_PAUSE_NS, MOST_PAUSE_NS = 250_000_000, 60_000_000_000
CHECK_NS, IDLE_NS = 250_000_000, 100_000_000  # how often steps look for idle time, and the least time that is idle
# Part of its share that a model uses once FLOOR steps are recorded. The rest is for costs that nothing measures, such
# as the slower steps after a window, and the noise of the program itself.
STEADY = 0.5
MOST_STEPS = 8  # at most this many steps in a window
RECORDS_PER_LAUNCH = 5
# Number of windows with a single step after records were lost.
ALONE = 8
LEAST_WINDOWS = LEAST_OF_INTERVAL  # the cost of windows has an interval after this many of them
LEAST_TOLD = 3  # an idle device is announced only after this many windows
MOSTLY = 0.8  # an idle device is announced if it was idle at the start of at least this share of windows
KEPT = 3  # number of newest recorded steps with kernels that are shown
TOLD_EVERY = 8  # kernels are announced after KEPT windows, and then once in this number of windows


class KernelSteps:
    """Decides which steps of one model are recorded by their kernels, and records them."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps  # the ModelSteps of the recorded model
        self._bursts = bursts_of(steps.profiler)
        self.has_failed = False
        self.is_running = False
        # The steps of these phases are not recorded any longer, because they replay graphs that cbtop does not clone,
        # or because records were lost.
        self._unseen: set[str] = set()
        self._lock = threading.RLock()  # held while a window, or a step of it, begins or ends
        self._recording: WindowRecording | None = None  # the open window
        self._places = CallPlaces()
        self.burst = KernelBurstResults()
        self._kept: deque[KernelBurstResults] = deque(maxlen=KEPT)
        self._windows = self._recorded = 0  # number of windows, and of steps recorded in them
        self._most = 1  # at most this many steps in the next window
        self._alone = 0  # number of next windows that have a single step
        # For each window: whether the device was idle when it began.
        self._were_idle: deque[bool] = deque(maxlen=SAMPLES)
        self._said = ""  # the method of measurement that was last announced to viewers
        self._costs_ns: deque[float] = deque(maxlen=SAMPLES)  # costs in ns of the latest windows
        self._first_ns = self._paid_ns = 0
        self._due_ns = 0  # when the next window is due, or the measurement of the host's times
        self._idle_ns = 0  # idle time in ns since the first window
        self._lived_ns = 0  # the time of all steps in ns when idle time was last looked for
        self._plain_ns = 0  # mean time in ns of the plain steps before the steps of the last window
        self._host_paid_ns = 0  # cost in ns of measuring the host's times since the last window
        self.times_host = False  # whether the next step that is due measures the host's times, and not the kernels
        self._host = HostSteps()
        self._half_pause_ns = LEAST_PAUSE_NS
        profiler: Any = steps.profiler
        self._governor = profiler.governor
        self._governor.models_by_kernels.add(steps.model)

    def is_due(self, now_ns: int) -> bool:
        """Return whether the step that begins now is due to be recorded by its kernels, or to measure the host's
        times.
        """
        late_ns = now_ns - self._steps.kernels_due_ns
        if late_ns < 0 or self.has_failed:
            return False
        if self._recording is None and self._windows:
            idle_ns = late_ns - (self._governor.lived_ns - self._lived_ns)
            if idle_ns > IDLE_NS:
                self._idle_ns += idle_ns
                self._due_ns += idle_ns
            if now_ns < self._due_ns:
                self._check_at(min(self._due_ns, now_ns + CHECK_NS))
                return False
        return True

    def begin(self, key: Hashable, call: Call) -> PlacedCalls | None:
        """Begin to record the kernels of the step `key`, which begins now. Returns None if that is not possible."""
        if is_in_bad_fork():
            return None
        with self._lock:
            try:
                return self._begin(key, call)
            except BaseException:  # a signal handler has interrupted the start of the step
                self.abandon()
                raise

    def _begin(self, key: Hashable, call: Call) -> PlacedCalls | None:
        if self._recording is not None and not self._may_follow(self._recording, call):
            if not self._recording.is_between:  # a signal handler has interrupted the end of this thread's last step
                self.abandon()
            self.end_window()
            return None
        plain_ns = self._governor.last_plain_ns(call.phase, self._steps.model)
        if self._recording is None:
            # Another thread may have closed the window while this thread waited for the lock. Then no step is due.
            is_due = self.is_due(clock.perf_counter_ns()) and not self.times_host
            if not is_due or not self._open(call, plain_ns):
                return None
        recording = self._recording
        if recording is None:
            return None
        step = RecordedStep(key, call, plain_ns)
        recording.begin_step(step, kernel_bursts.stream_here())
        return PlacedCalls(recording, self._steps.labelled, step.elements, self._places)

    @property
    def last_step(self) -> RecordedStep | None:
        """The step of the open window that began last."""
        return None if self._recording is None else self._recording.steps[-1]

    def abandon(self) -> None:
        """Close the window of the calling thread, after an interruption while a step began."""
        recording = self._recording
        if recording is not None and recording.thread == get_ident():
            recording.abandon()

    def end_window(self) -> None:
        """Close the window if it is open between two steps."""
        recording = self._recording
        if recording is not None:
            recording.close()

    def _may_follow(self, recording: WindowRecording, call: Call) -> bool:
        """Return whether the step of `call`, which begins now, can be the next step of an open window."""
        if call.phase in self._unseen or torch.cuda.is_current_stream_capturing():
            return False
        return recording.follows() and self._governor.last_plain_ns(call.phase, self._steps.model) is not None

    def _open(self, call: Call, plain_ns: int | None) -> bool:
        """Open a window. Returns whether it is open."""
        self._pause(LEAST_PAUSE_NS)
        if call.phase in self._unseen or plain_ns is None:
            return False
        if not kernel_bursts.is_on_cuda() or torch.cuda.is_current_stream_capturing():
            return False
        if not kernel_bursts.one_at_a_time.acquire(blocking=False):
            return False
        recording = None
        try:
            driver, stream = kernel_bursts.new_driver(), kernel_bursts.stream_here()
            self._were_idle.append(driver.is_done(stream))
            window = KernelWindow(kernel_bursts.new_cupti(), driver, has_calls=True)
            most = 1 if self._alone or kernel_bursts.others_replay() else self._most
            recording = WindowRecording(self, window, stream, most, self._lock)
            window.begin()
            kernel_bursts.enter_here(recording)
            self.burst, self.is_running, self._recording = recording.results, True, recording
            self._governor.window_opened()
        except BaseException as error:
            if recording is not None and recording.window.is_on:
                kernel_bursts.enter_here(recording)
                recording.abandon()
            else:
                kernel_bursts.one_at_a_time.release()
            if not isinstance(error, Exception):
                raise
            self.refuse(error)
            return False
        if len(self._places.where) > MAX_PLACES:
            self._places = CallPlaces()
        recording.opened_ns = clock.perf_counter_ns()
        if most > 1:
            close_at_exit(recording)
            self._steps.kernels_due_ns = 1  # the next step is due, because it may be the next step of the window
        return True

    def begin_host(self, key: Hashable) -> HostCalls:
        """Begin to measure the host's times in the step `key`, which begins now."""
        self.times_host = False
        begun_ns = clock.perf_counter_ns()
        self._pause(self._half_pause_ns)

        def ended(calls: HostCalls) -> None:
            ended_ns = clock.perf_counter_ns()
            try:
                self._host.add(key, calls)
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(error, "the host's times of a step are not known")
            paid_ns = clock.perf_counter_ns() - ended_ns + max(0, ended_ns - begun_ns - self._plain_ns)
            self._paid_ns += paid_ns
            self._host_paid_ns = paid_ns
            self._pause(max(self._half_pause_ns, 2 * (ended_ns - begun_ns)))

        return HostCalls(self._steps.labelled, ended)

    def recorded(self, step: Hashable) -> None:
        """Record the steps of the window from the times of their kernels. The steps have ended on the device."""
        recording, self._recording = self._recording, None
        burst, self.burst = self.burst, KernelBurstResults()
        self.is_running = False
        self._governor.window_closed()
        self._pause(LEAST_PAUSE_NS)
        if recording is None:
            return
        if burst.lost and len(recording.steps) == 1:
            phase = recording.steps[0].call.phase
            self._unseen.add(phase)
            log_once(f"{phase} steps have too many kernels, {burst.lost:,} records were lost: they have no bricks")
        elif burst.lost:  # windows with a single step show which phase has too many kernels
            self._alone = ALONE
        seen = [one for one in recording.steps if one.call.phase not in self._unseen]
        steps = [one for one in seen if not (one.has_failed or burst.lost)]
        try:
            self._record(steps, burst)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a step is not recorded by its kernels")
        if seen:
            self._count(recording, steps, clock.perf_counter_ns())

    def records_around_unseen(self) -> bool:
        """Drop the step, because its kernels are not known, and record no further steps of its phase. Returns
        False.
        """
        recording = self._recording
        if recording is None:
            return False
        phase = recording.steps[-1].call.phase
        self._unseen.add(phase)
        log_once(f"{phase} steps replay captured graphs that cbtop does not clone: they have no bricks")
        return False

    def refuse(self, error: Exception) -> None:
        """Stop recording kernels, because of `error`. From the next step on, stamps time the model."""
        self.is_running, self.has_failed = False, True
        self._governor.window_closed()
        if self._recording is not None and not self._recording.window.is_on:
            self._recording = None
        self._steps.profiler.parts.by_kernels = False
        self._governor.models_by_kernels.discard(self._steps.model)
        why = in_words(error)
        log_once(f"kernels are not recorded ({why}): the device is timed by stamps, which slow the steps they are in")

    def _pause(self, pause_ns: int) -> None:
        now_ns = clock.perf_counter_ns()
        self._due_ns = now_ns + pause_ns
        self._check_at(now_ns + min(pause_ns, CHECK_NS))

    def _check_at(self, due_ns: int) -> None:
        self._lived_ns = self._governor.lived_ns
        self._steps.kernels_due_ns = due_ns

    def _count(self, recording: WindowRecording, steps: list[RecordedStep], ended_ns: int) -> None:
        """Count a window that ended at `ended_ns`, and its completed `steps`. Its cost decides when the next one is
        due.
        """
        governor = self._governor
        open_ns, close_ns = recording.opened_ns - recording.begun_ns, ended_ns - recording.closing_ns
        plain_ns = sum(step.plain_ns for step in steps)
        inside_ns = sum(step.took_ns for step in steps)
        paid_ns = max(0, open_ns + inside_ns + close_ns - plain_ns) + governor.beside_ns
        self._first_ns = self._first_ns or recording.begun_ns
        self._paid_ns += paid_ns
        self._costs_ns.append(paid_ns)
        self._windows += 1
        self._recorded += len(steps)
        all_plain_ns = sum(step.plain_ns for step in recording.steps)
        self._plain_ns = all_plain_ns // len(recording.steps)
        self._alone = max(0, self._alone - 1)
        self._most = steps_for(steps, open_ns + close_ns, FLOOR - self._recorded)
        self._say_measured()
        share = USED * governor.share_of(self._steps.model, self._recorded, ended_ns, STEADY)
        pause_ns = round((paid_ns + self._host_paid_ns) / share)
        self._host_paid_ns = 0
        pause_ns = min(MOST_PAUSE_NS, max(LEAST_PAUSE_NS, pause_ns))
        lived_ns = max(1, ended_ns - self._first_ns - self._idle_ns + pause_ns)
        percent = 100 * self._paid_ns / lived_ns
        every = max(1, round(pause_ns / max(1, all_plain_ns)))
        profiler = self._steps.profiler
        ends: tuple[float | None, float | None, float | None] = None, None, None
        if self._windows >= LEAST_WINDOWS:
            ends = percent, *interval_of(percent, self._costs_ns)
        elif self._windows > 1:
            ends = percent, None, None
        profiler.announce(Sampling(every, *ends, governor.allowed_percent))
        if self._windows == KEPT or (self._windows > KEPT and self._windows % TOLD_EVERY == 0):
            try:
                self._bursts.announce(together(self._kept))
                if self._host:
                    self._bursts.announce_host_times(self._host.times(), len(self._host))
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(error, "kernels are not in the graph")
        # This comes last, because another thread may begin to measure the host's times from now on.
        self.times_host, self._half_pause_ns = True, pause_ns // 2
        self._pause(self._half_pause_ns)

    def _say_measured(self) -> None:
        how = BY_KERNELS
        if self._windows >= LEAST_TOLD and sum(self._were_idle) >= MOSTLY * len(self._were_idle):
            how += IDLE_BEFORE
        if how != self._said:
            self._said = how
            self._steps.measured(how)

    def _record(self, recorded: list[RecordedStep], window: KernelBurstResults) -> None:
        """Record the steps of a window, the last one first. No step ends after the step that follows it begins."""
        steps, next_ns = self._steps, clock.perf_counter_ns()
        for step in recorded:
            step.burst.end_step(step.key)
            self._kept.append(step.burst)
        if recorded:
            recorded[-1].burst.unplaced += window.unplaced
        parts: list[tuple[RecordedStep, int, int]] = []
        for step in reversed(recorded):
            ended_ns = min(next_ns, max(step.ended_ns, step.began_ns))
            next_ns = ended_ns - max(step.busy_ns, step.plain_ns)
            parts.append((step, next_ns, ended_ns))
        for step, began_ns, ended_ns in reversed(parts):
            took_ns: dict[Keys, int] = {}
            for (keys, _), durations in step.burst.kernels.items():
                took_ns[keys[1:]] = took_ns.get(keys[1:], 0) + durations.sum_ns
            if took_ns:
                steps.profiler.parts.steps.record(
                    step.call.phase,
                    step.call.tokens,
                    began_ns,
                    ended_ns,
                    parts_from(took_ns, began_ns, step.elements),
                    model=steps.model,
                    sequences=step.call.sequences or None,
                )


def steps_for(steps: Sequence[RecordedStep], fixed_ns: int, missing: int) -> int:
    """Return how many steps the next window may have, after a window with `steps` whose opening and closing took
    `fixed_ns`.

    The more steps a window has, the less each of them costs. So while steps are `missing` for reliable figures, a
    window has as many as possible. Later, it has so many that they cost as much as opening and closing.
    """
    count = len(steps)
    took_ns = sum(step.took_ns for step in steps)
    plain_ns, busy_ns = sum(step.plain_ns for step in steps), sum(step.busy_ns for step in steps)
    launches = sum(step.launches for step in steps)
    wanted = missing if missing > 0 else -(-fixed_ns * count // max(1, took_ns - plain_ns))
    by_time = MOST_OPEN_NS * count // max(1, took_ns, busy_ns)
    by_records = MAX_RECORDS // 2 * count // max(1, RECORDS_PER_LAUNCH * launches)
    return max(1, min(MOST_STEPS, wanted, by_time, by_records))


def parts_from(
    took_ns: dict[Keys, int], begin_ns: int, elements: dict[Keys, int]
) -> list[tuple[Keys, int, int, int]]:
    """Return the layers and bricks of a step as parts (keys, begin ns, end ns, elements).

    The parts follow each other in the order of their first kernels. `took_ns` maps keys to the time of their kernels.
    """
    inside: dict[Keys, dict[Keys, None]] = {}  # keys -> the keys directly inside, in the order of their first kernels
    for keys in took_ns:
        for length in range(len(keys), 0, -1):
            siblings = inside.setdefault(keys[: length - 1], {})
            if keys[:length] in siblings:
                break
            siblings[keys[:length]] = None
    parts: list[tuple[Keys, int, int, int]] = []

    def place(keys: Keys, at_ns: int) -> int:
        begun_ns = at_ns
        at_ns += took_ns.get(keys, 0)
        for one in inside.get(keys, ()):
            at_ns = place(one, at_ns)
        if keys:
            parts.append((keys, begun_ns, at_ns, elements.get(keys, 0)))
        return at_ns

    place((), begin_ns)
    return parts


def together(bursts: Iterable[KernelBurstResults]) -> KernelBurstResults:
    """Return the sum of the results of several bursts."""
    found = KernelBurstResults()
    for burst in bursts:
        found.steps.update(burst.steps)
        found.unplaced += burst.unplaced
        found.lost += burst.lost
        found.left_out += burst.left_out
        for place, durations in burst.kernels.items():
            there = found.kernels.get(place)
            if there is None:
                found.kernels[place] = durations.copy()
            else:
                there.merge(durations)
    return found
