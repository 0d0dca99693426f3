"""Records the kernels of several steps in a row with one CUPTI window.

Opening and closing CUPTI takes 11 ms and more, however many steps are recorded in between. In a window, a launch
costs about 5 us, and a call of a module about 10 us of Python. On an H200, a step of a GPT (5 ms, 246 launches) cost
17 ms in a window of one step, and 12 ms in a window of four steps.

Rules
- The steps of a window follow each other, and the window is open between them. Kernels that are launched between two
  steps are in no step. A thread pool may run each step in another thread.
- A window is closed early if the thread captures or replays a graph between two steps, if another thread replays its
  first graph, or if no step follows soon. In the last case a thread of cbtop closes it, because the host's thread may
  wait for a long time. Between two steps, the window holds the lock `one_at_a_time`.
- A step that raises an exception is not recorded. If a signal handler raises one while cbtop begins or ends a step,
  the window is closed.
- The host does not wait for the device between the steps of a window.
"""

from __future__ import annotations

import _thread
import contextlib
import time
from _thread import get_ident
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from cbtop.profiler.definitions import OwningKey, own_operations
from cbtop.profiler.device.kernel_burst import KernelBurstResults, KernelWindow, Keys, LaunchedKernel
from cbtop.profiler.instrument.garbage import nothing_collected
from cbtop.profiler.instrument.kernel_bursts import KernelRecording, Owner, enter_instead, is_entered
from cbtop.profiler.instrument.torch_internals import is_in_bad_fork
from cbtop.protocol import clock
from cbtop.protocol.vocabulary import NodeKind

if TYPE_CHECKING:
    from cbtop.profiler.instrument.phases import Call

_BETWEEN: Keys = (None,)  # the place of kernels that are launched between two steps
LEAST_WAIT_NS, MOST_WAIT_NS = 20_000_000, 100_000_000  # how long a window waits for its next step
MOST_OPEN_NS = 250_000_000  # a window that has been open for this time gets no further step
WAIT_TIMES = 4  # a window waits this many times as long as the longest time between two of its steps


class RecordedStep:
    """One step of a window. Its kernels are known when the window is closed.

    `plain_ns` is the time of the plain step before it. `ended_ns` is the end of the model's call. If the step then
    waits for its token to be chosen, it ends at `closed_ns`.
    """

    __slots__ = ("began_ns", "burst", "call", "closed_ns", "elements", "ended_ns", "has_failed", "key", "plain_ns")

    def __init__(self, key: Hashable, call: Call, plain_ns: int) -> None:
        self.key = key
        self.call = call
        self.plain_ns = plain_ns
        self.began_ns = self.ended_ns = self.closed_ns = 0
        self.has_failed = False  # whether the step has raised an exception
        self.burst = KernelBurstResults()
        self.elements: Counter[Keys] = Counter()

    @property
    def busy_ns(self) -> int:
        """Total time of the step's kernels in ns."""
        return sum(durations.sum_ns for durations in self.burst.kernels.values())

    @property
    def took_ns(self) -> int:
        """Time of the whole step in ns, comparable to `plain_ns`."""
        return max(self.ended_ns, self.closed_ns) - self.began_ns

    @property
    def launches(self) -> int:
        return sum(durations.count for durations in self.burst.kernels.values())


class WindowResults(KernelBurstResults):
    """The kernels of a window. They are stored in `recorded`, the steps of the window.

    The first key of a kernel contains the number of its step in `recorded`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[RecordedStep] = []

    def key(self) -> Hashable:
        """Return the step key that all kernels of the newest step in `recorded` begin with."""
        number = len(self.recorded) - 1
        return OwningKey.of((NodeKind.STEP, number), own_operations(self.recorded[number].key))

    def add(self, keys: Keys, kernel: LaunchedKernel, duration_ns: int) -> None:
        first: Any = keys[0]
        if first is not None:
            step = self.recorded[first[1]]
            step.burst.add((step.key, *keys[1:]), kernel, duration_ns)


class WindowRecording(KernelRecording):
    """Records the kernels of up to `most` steps in a row with one window."""

    def __init__(self, bursts: Owner, window: KernelWindow, stream: int, most: int, lock: Any) -> None:
        super().__init__(bursts, window, None, stream)
        self.most = most
        self.results = WindowResults()
        self.steps = self.results.recorded
        self.begun_ns = clock.perf_counter_ns()
        self.opened_ns = self.closing_ns = 0
        self._lock = lock
        self._is_closing = False
        self._due_ns = 0  # the time when the window is closed if no step has begun
        self._longest_ns = 0  # the longest time between two steps
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def begin_step(self, step: RecordedStep, stream: int) -> None:
        """Begin to record `step`."""
        step.began_ns = clock.perf_counter_ns()
        if self.is_between:
            self.is_between = False
            if self.thread == get_ident():
                self.window.leave()
            else:  # the thread of the last step keeps its external id, so what it launches is still between two steps
                self.window.forget_entered()
                enter_instead(self)
            self.window.use(stream)
            self._longest_ns = max(self._longest_ns, step.began_ns - self.steps[-1].ended_ns)
        self.steps.append(step)
        self.step = self.results.key()

    def end_step(self) -> None:
        """End the step. If no further step can follow in this window, close it. In a forked child, do nothing."""
        if is_in_bad_fork() or not is_entered(self):
            return
        with self._lock:
            try:
                ended_ns = self.steps[-1].ended_ns = clock.perf_counter_ns()
                is_over = len(self.steps) >= self.most or ended_ns - self.begun_ns >= MOST_OPEN_NS
                is_over = is_over or not self.window.is_on or self.window.has_graphs
                if is_over or not self.bursts.is_running:
                    self._close(ended_ns)
                else:
                    self._wait_for_step(ended_ns)
            except BaseException:
                self.abandon()
                raise

    def _wait_for_step(self, now_ns: int) -> None:
        """Keep the window open for its next step."""
        self.window.enter(_BETWEEN)
        wait_ns = min(max(LEAST_WAIT_NS, WAIT_TIMES * self._longest_ns), MOST_WAIT_NS)
        self._due_ns = now_ns + wait_ns
        self.is_between = True
        if len(self.steps) == 1:
            try:
                _thread.start_new_thread(self._close_late, ())
            except RuntimeError:  # there are too many threads, or the interpreter exits
                self._close(now_ns)

    def abandon(self) -> None:
        """Close the window after an interrupted begin or end of a step. Drop the step unless it has ended."""
        with self._lock:
            if is_entered(self):
                if self.steps and not self.steps[-1].ended_ns:
                    self.steps[-1].has_failed = True
                self._close(clock.perf_counter_ns())

    def close(self) -> None:
        """Close the window if it is open between two steps. In a forked child, do nothing."""
        if is_in_bad_fork():
            return
        with self._lock:
            if self.is_between:
                self._close(clock.perf_counter_ns())

    def fail_step(self) -> None:
        """Drop the running step when it ends, because it has raised an exception."""
        self.steps[-1].has_failed = True

    def follows(self) -> bool:
        """Return whether another step may be added to this window."""
        return self.is_between

    def _close(self, now_ns: int) -> None:
        if self._is_closing or not is_entered(self):  # a signal handler that calls the model may close the window
            return
        self._is_closing = True
        was_between, self.is_between = self.is_between, False
        self.closing_ns = now_ns
        is_here = self.thread == get_ident()
        # Another thread may have another current device. And it must leave the garbage collector on, because the
        # host's thread may switch it off at the same time, and would find it on again.
        device = contextlib.nullcontext() if is_here or self._device is None else torch.cuda.device(self._device)
        try:
            # reading the records makes many objects, and drops most of them
            with nothing_collected() if is_here else contextlib.nullcontext(), device:
                if was_between and is_here:  # an external id belongs to the thread that has set it
                    self.window.leave()
                super().end_step()
        except BaseException:  # a signal handler has interrupted the wait, so the records were not read
            self._is_closing = False
            self.steps.clear()
            self.bursts.recorded(self.step)
            raise

    def _close_late(self) -> None:
        """Close the window if it waits too long for its next step. Runs in a thread of its own."""
        while self.window.is_on:
            now_ns = clock.perf_counter_ns()
            if self.is_between and now_ns >= self._due_ns:
                with self._lock:
                    if self.is_between and now_ns >= self._due_ns:
                        try:
                            self._close(now_ns)
                        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                            self.bursts.refuse(error)
                        return
            time.sleep(max(LEAST_WAIT_NS // 4, self._due_ns - now_ns) / 1e9)
