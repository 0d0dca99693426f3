"""Records some steps of an eager model on a CUDA device by the kernels that CUPTI sees.

Stamps between modules make a step of small kernels wait for the host, so stamps would time launches. Therefore CUPTI
records the kernels of some steps. The time of a brick is the sum of its kernels. The time of a step is that of the
plain step before it, or the sum of all its kernels if that is longer. In the rest of a step, the device is idle if it
was idle when the step began. Otherwise the device may run earlier work in that time.

Rules
- All other steps are plain. Each step is counted once.
- A window (one step with CUPTI open) costs the host 20 to 35 ms: for opening, waiting for the device, and closing.
  The next window is due when the costs of windows are within the allowed share, or within 5 % until FLOOR steps are
  recorded. After that, windows use half of the allowed share. Models that run at the same time divide the allowed
  share among them.
- The host's times are measured in a plain step half-way between two windows (host_steps.py). The next window comes at
  least two steps later, because the time of the step before a window counts as that of a plain step.
- Steps of a warm-up are not recorded.
- If a step replays a captured graph that cbtop does not clone, the kernels of this graph are not known, so the shares
  of the other kernels are not known, either. Such a step is dropped, and further steps of its phase are not recorded.
- If records of a step were lost, its figures would be too small. Such a step is dropped, too, and further steps of
  its phase are not recorded.
- If CUPTI is not available, or another tool holds it, one line is logged, and stamps time the model
  (eager_stamps.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Any

import torch

from cbtop.profiler.device.kernel_burst import KernelBurstResults, KernelWindow, Keys
from cbtop.profiler.instrument import kernel_bursts
from cbtop.profiler.instrument.governor import LEAST_OF_INTERVAL, SAMPLES, USED, interval_of
from cbtop.profiler.instrument.host_steps import HostCalls, HostSteps
from cbtop.profiler.instrument.kernel_bursts import KernelRecording, PlacedCalls, bursts_of
from cbtop.profiler.instrument.torch_internals import is_in_bad_fork
from cbtop.profiler.instrument.trouble import in_words, log_once, log_own_error
from cbtop.protocol import clock
from cbtop.protocol.messages import Sampling
from cbtop.protocol.vocabulary import BY_KERNELS, IDLE_BEFORE

LEAST_PAUSE_NS, MOST_PAUSE_NS = 250_000_000, 10_000_000_000
# Part of its share that a model uses once FLOOR steps are recorded. The rest is for costs that nothing measures, such
# as the slower steps after a window, and the noise of the program itself.
STEADY = 0.5
LEAST_WINDOWS = LEAST_OF_INTERVAL  # the cost of windows (steps with CUPTI open) is announced after this many
LEAST_TOLD = 3  # an idle device is announced only after this many windows (steps with CUPTI open)
MOSTLY = 0.8  # an idle device is announced if it was idle at the begin of at least this share of windows
KEPT = 3  # number of newest windows (steps with CUPTI open) with kernels that are shown
TOLD_EVERY = 8  # kernels are announced once in this number of windows (steps with CUPTI open)


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
        self.burst = KernelBurstResults()
        self._kept: deque[KernelBurstResults] = deque(maxlen=KEPT)
        self._elements: Counter[Keys] = Counter()
        self._windows = 0
        # For each window (step with CUPTI open): whether the device was idle when it began.
        self._were_idle: deque[bool] = deque(maxlen=SAMPLES)
        self._said = ""  # the method of measurement that was last announced to viewers
        # Costs in ns of the latest windows (steps with CUPTI open).
        self._costs_ns: deque[float] = deque(maxlen=SAMPLES)
        self._began_ns = self._first_ns = self._paid_ns = 0
        self._plain_ns = 0
        # Cost in ns of measuring the host's times since the last window (step with CUPTI open).
        self._host_paid_ns = 0
        self._call: Any = None
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
        return now_ns >= self._steps.kernels_due_ns and not self.has_failed

    def begin(self, key: Hashable, call: Any) -> PlacedCalls | None:
        """Begin to record the kernels of the step `key`, which begins now. Returns None if that is not possible."""
        self._began_ns = clock.perf_counter_ns()
        self._pause(LEAST_PAUSE_NS)
        if call.phase in self._unseen:
            return None
        plain_ns = self._governor.last_plain_ns(call.phase, self._steps.model)
        if plain_ns is None or is_in_bad_fork() or not kernel_bursts.is_on_cuda():
            return None
        if torch.cuda.is_current_stream_capturing() or not kernel_bursts.one_at_a_time.acquire(blocking=False):
            return None
        try:
            driver, stream = kernel_bursts.new_driver(), kernel_bursts.stream_here()
            self._were_idle.append(driver.is_done(stream))
            window = KernelWindow(kernel_bursts.new_cupti(), driver, has_calls=True)
            recording = KernelRecording(self, window, key, stream)
            window.begin()
            kernel_bursts.enter_here(recording)
        except BaseException as error:
            kernel_bursts.one_at_a_time.release()
            if not isinstance(error, Exception):
                raise
            self.refuse(error)
            return None
        self.is_running, self._plain_ns, self._call = True, plain_ns, call
        self._elements.clear()
        return PlacedCalls(recording, self._steps.labelled, self._elements)

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
        """Record `step` from the times of its kernels. The step has ended on the device."""
        burst, self.burst = self.burst, KernelBurstResults()
        self.is_running = False
        burst.end_step(step)
        if burst.lost:
            self._unseen.add(self._call.phase)
            why = f"{burst.lost:,} records were lost"
            log_once(f"{self._call.phase} steps have too many kernels, {why}: they have no bricks")
        is_known = self._call.phase not in self._unseen
        try:
            if burst.kernels and is_known:
                self._record(step, burst)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a step is not recorded by its kernels")
        if is_known:
            self._count(clock.perf_counter_ns())

    def records_around_unseen(self) -> bool:
        """Drop the step, because its kernels are not known, and record no further steps of its phase. Returns
        False.
        """
        self._unseen.add(self._call.phase)
        log_once(f"{self._call.phase} steps replay captured graphs that cbtop does not clone: they have no bricks")
        return False

    def refuse(self, error: Exception) -> None:
        """Stop recording kernels, because of `error`. From the next step on, stamps time the model."""
        self.is_running, self.has_failed = False, True
        self.burst = KernelBurstResults()
        self._steps.profiler.parts.by_kernels = False
        self._governor.models_by_kernels.discard(self._steps.model)
        why = in_words(error)
        log_once(f"kernels are not recorded ({why}): the device is timed by stamps, which slow the steps they are in")

    def _pause(self, pause_ns: int) -> None:
        self._steps.kernels_due_ns = clock.perf_counter_ns() + pause_ns

    def _count(self, ended_ns: int) -> None:
        """Count a window (a step with CUPTI open) that ended at `ended_ns`. Its cost decides when the next one is
        due.
        """
        governor = self._governor
        paid_ns = max(0, ended_ns - self._began_ns - self._plain_ns)
        self._first_ns = self._first_ns or self._began_ns
        self._paid_ns += paid_ns
        self._costs_ns.append(paid_ns)
        self._windows += 1
        self._say_measured()
        share = USED * governor.share_of(self._steps.model, self._windows, ended_ns, STEADY)
        pause_ns = round((paid_ns + self._host_paid_ns) / share)
        self._host_paid_ns = 0
        pause_ns = min(MOST_PAUSE_NS, max(LEAST_PAUSE_NS, pause_ns))
        self.times_host, self._half_pause_ns = True, pause_ns // 2
        self._pause(self._half_pause_ns)
        lived_ns = max(1, ended_ns - self._first_ns + pause_ns)
        percent = 100 * self._paid_ns / lived_ns
        every = max(1, round(pause_ns / max(1, self._plain_ns)))
        profiler = self._steps.profiler
        ends: tuple[float | None, float | None, float | None] = None, None, None
        if self._windows >= LEAST_WINDOWS:
            ends = percent, *interval_of(percent, self._costs_ns)
        profiler.announce(Sampling(every, *ends, governor.allowed_percent))
        if self._windows == KEPT or (self._windows > KEPT and self._windows % TOLD_EVERY == 0):
            try:
                self._bursts.announce(together(self._kept))
                if self._host:
                    self._bursts.announce_host_times(self._host.times(), len(self._host))
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(error, "kernels are not in the graph")

    def _say_measured(self) -> None:
        how = BY_KERNELS
        if self._windows >= LEAST_TOLD and sum(self._were_idle) >= MOSTLY * len(self._were_idle):
            how += IDLE_BEFORE
        if how != self._said:
            self._said = how
            self._steps.measured(how)

    def _record(self, step: Hashable, burst: KernelBurstResults) -> None:
        self._kept.append(burst)
        took_ns: dict[Keys, int] = {}
        for (keys, _), durations in burst.kernels.items():
            took_ns[keys[1:]] = took_ns.get(keys[1:], 0) + durations.sum_ns
        duration_ns = max(sum(took_ns.values()), self._plain_ns)
        now_ns = clock.perf_counter_ns()
        parts = parts_from(took_ns, now_ns - duration_ns, self._elements)
        call, steps = self._call, self._steps
        steps.profiler.parts.steps.record(
            call.phase,
            call.tokens,
            now_ns - duration_ns,
            now_ns,
            parts,
            model=steps.model,
            sequences=call.sequences or None,
        )


def parts_from(
    took_ns: dict[Keys, int], begin_ns: int, elements: dict[Keys, int]
) -> list[tuple[Keys, int, int, int]]:
    """Return the layers and bricks of a step as parts (keys, begin ns, end ns, elements).

    The parts follow each other in the order of their first kernels. `took_ns` maps keys to the time of their kernels.
    """
    inside: dict[Keys, list[Keys]] = {}
    for keys in took_ns:
        for length in range(1, len(keys) + 1):
            around, one = keys[: length - 1], keys[:length]
            siblings = inside.setdefault(around, [])
            if one not in siblings:
                siblings.append(one)
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


def together(bursts: deque[KernelBurstResults]) -> KernelBurstResults:
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
