"""Records kernel bursts: if a command requests it, the kernels of a few steps are recorded by CUPTI and shown under
their bricks.

Rules
- A process checks once per step whether there is a request (`cbtop.protocol.requests`). If not, it does nothing else.
- A step of a burst is a call of a model or of its runner, or a replay of a captured graph outside of both. Such a
  step is in no statistics, because it takes longer than other steps. Its module calls are recorded in the same way as
  during the capture of a graph (capturing.py).
- At the end of each step, the host waits for the device. So a burst is for diagnosis, not for production.
- If cbtop does not clone a captured graph, the host replays the graph with CUPTI closed, and no kernels of this graph
  are shown.
- Any failure ends the burst with one logged line and an answer to the request. The host's step runs as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import statistics
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from cbtop.profiler.definitions import KernelDefinition
from cbtop.profiler.device.cupti import Cupti, CuptiError, TorchsCupti
from cbtop.profiler.device.driver import CudaDriver, Driver
from cbtop.profiler.device.graph_surgery import Order
from cbtop.profiler.device.kernel_burst import KernelBurstResults, KernelWindow, Keys, left_on
from cbtop.profiler.instrument.capturing import OTHER, CapturedCall, keys_inside, place
from cbtop.profiler.instrument.host_steps import Times
from cbtop.profiler.instrument.kernel_makers import Maker, makers_of
from cbtop.profiler.instrument.torch_internals import is_in_bad_fork, raw_stream_of
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.instrument.wrapping import TimedSteps
from cbtop.profiler.recorder import NOT_ASKED, RingRecorder
from cbtop.protocol.kernel_messages import BrickHostTime, HostTimes, KernelTimes
from cbtop.protocol.kernel_messages import KernelBurst as Found
from cbtop.protocol.requests import Answer, Request, State, number_of, request_of
from cbtop.protocol.ring import NO_NODE

if TYPE_CHECKING:
    from cbtop.profiler.profiler import BrickProfiler

BACKEND = "cuda, by CUPTI"
_FAILED = "kernels are not recorded"

# Functions that tests without a device replace.
new_cupti: Callable[[], Cupti] = TorchsCupti
new_driver: Callable[[], Driver] = CudaDriver
is_on_cuda: Callable[[], bool] = torch.cuda.is_initialized


def _device_here() -> tuple[int | None, str]:
    """Return the number of multiprocessors and the architecture of torch's current device. Returns (None, "") without
    a device.
    """
    if not torch.cuda.is_initialized():
        return None, ""
    known = torch.cuda.get_device_properties(torch.cuda.current_device())  # pragma: no cover - gpu
    return known.multi_processor_count, f"sm_{known.major}{known.minor}"  # pragma: no cover - gpu


device_here: Callable[[], tuple[int | None, str]] = _device_here

# This lock is held while CUPTI is in use, because a process can use CUPTI only once at a time.
one_at_a_time = threading.Lock()
_here: dict[int, KernelRecording] = {}  # id of a thread -> the recording of its current step
replaying: set[int] = set()  # ids of the threads that have replayed captured graphs
_is_left_on = False


class Owner(Protocol):
    """The interface of an object that wants the kernels of steps recorded, and receives the results: `Bursts` or
    `KernelSteps`.
    """

    burst: KernelBurstResults

    @property
    def is_running(self) -> bool:
        """Whether more steps are to be recorded."""

    def recorded(self, step: Hashable) -> None:
        """Count a recorded step with the key `step`."""

    def refuse(self, error: Exception) -> None:
        """Stop recording kernels, because of `error`."""

    def records_around_unseen(self) -> bool:
        """Return whether to record the rest of a step that has replayed a graph that cbtop does not clone."""


class KernelRecording:
    """Records the kernels of one step, in the thread that runs the step."""

    def __init__(self, bursts: Owner, window: KernelWindow, step: Hashable, stream: int) -> None:
        self.bursts = bursts
        self.window = window
        self.step = step  # the step's key
        self.stream = stream  # the CUDA stream that the step runs on
        self.thread = get_ident()
        self.is_between = False  # whether the window is open between two of its steps (kernel_windows.py)

    def launch(self, graph: int, places: GraphNodePlaces, stream: int) -> None:
        """Launch cbtop's own clone of a captured graph, so that each kernel can be assigned to its node in the
        graph.
        """
        self.window.launch(graph, lambda node: places.of(node, self.step), stream)

    def end_step(self) -> None:
        """End the step: wait for the device, and store the kernel records in the owner's `burst`."""
        global _is_left_on
        error: Exception | None = None
        try:
            self.window.end(self.stream, self.bursts.burst)
        except Exception as trouble:  # noqa: BLE001 - an error of cbtop must not reach the host
            error = trouble
        finally:
            _here.pop(self.thread, None)
            _is_left_on |= self.window.is_left_on
            one_at_a_time.release()
        if error is None:
            self.bursts.recorded(self.step)
        else:
            self.bursts.refuse(error)

    def close(self) -> None:
        """Stop recording, and store the kernel records in the owner's `burst`."""
        self.end_step()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Close CUPTI inside this context, and open it again after it: `with recording.paused():`."""
        goes_on = self.bursts.records_around_unseen()
        try:
            self.window.end(self.stream, self.bursts.burst)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.bursts.refuse(error)
        try:
            yield
        finally:
            if goes_on and self.bursts.is_running and not self.window.is_left_on:
                try:
                    self.window.begin()
                except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                    self.bursts.refuse(error)


class _Nobody:
    """Takes the place of a recorder without a ring, which cannot receive requests."""

    asked_word = NOT_ASKED


class Bursts:
    """Handles the requests for kernel bursts that reach one profiler. Announces the results, and answers the
    requests.
    """

    def __init__(self, profiler: BrickProfiler) -> None:
        self._profiler = weakref.ref(profiler)
        recorder = profiler.parts.recorder
        self._recorder = recorder if isinstance(recorder, RingRecorder) else None
        #: The current request is in `asked_word` of this object. If it equals `looked_at`, there is no new request.
        #: So a step can check for requests without a call.
        self.asked: Any = self._recorder or _Nobody
        self.looked_at = 0  # the word with the last request that was handled
        self._request: Request | None = None
        self.burst = KernelBurstResults()
        if self._recorder is not None:
            self._recorder.answer(Answer(0, State.LISTENING).word())

    @property
    def is_asked(self) -> bool:
        """Whether the step that begins now is to be recorded for a burst."""
        recorder = self._recorder
        if recorder is None:
            return False
        word = recorder.asked
        return word != self.looked_at and self._look(word)

    @property
    def is_running(self) -> bool:
        return self._request is not None

    def _look(self, word: int) -> bool:
        if self._request is not None and self._request.word() == word:
            return True
        self._request, self.looked_at = None, word
        if not word:  # the command has withdrawn its request
            return False
        request = request_of(word)
        if request is None:
            self._answer(Answer(number_of(word), State.NOT_UNDERSTOOD))
            return False
        self._request, self.looked_at = request, 0
        self.burst = KernelBurstResults()
        self._answer(Answer(request.number, State.RUNNING))
        return True

    def begin(self, step: Hashable, steps: TimedSteps, *, has_calls: bool) -> KernelRecording | None:
        """Begin to record the step with the key `step`, which begins now.

        Returns None if that is not possible. If an error is the reason, the error is also the answer to the request.
        """
        if _is_left_on:
            self.refuse(left_on())
            return None
        if not is_on_cuda():
            self.refuse(CuptiError("its model does not lie on a CUDA device", State.NOT_ON_CUDA))
            return None
        if is_in_bad_fork() or not one_at_a_time.acquire(blocking=False):
            return None
        try:
            window = KernelWindow(new_cupti(), new_driver(), has_calls=has_calls)
            recording = KernelRecording(self, window, step, stream_here())
            window.begin()
            enter_here(recording)
            around: Any = steps.path.position.step
            if around is not None:  # the burst makes the outer step longer, so do not record the outer step
                around.cancel()
        except BaseException as error:
            one_at_a_time.release()
            if not isinstance(error, Exception):
                raise
            self.refuse(error)
            return None
        return recording

    def recorded(self, step: Hashable) -> None:
        """Count a recorded step with the key `step`."""
        request = self._request
        if request is None:
            return
        self.burst.end_step(step)
        done = sum(self.burst.steps.values())
        if done < request.steps:
            self._answer(Answer(request.number, State.RUNNING, done))
            return
        self._request, self.looked_at = None, request.word()
        burst, self.burst = self.burst, KernelBurstResults()
        try:
            self.announce(burst, request.number)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, _FAILED)
            self._answer(Answer(request.number, State.FAILED))
        else:
            self._answer(Answer(request.number, State.DONE, done))

    def refuse(self, error: Exception) -> None:
        """End the burst because of `error`, and answer the request with it."""
        request, self._request = self._request, None
        if request is not None:
            self.looked_at = request.word()
            state = error.state if isinstance(error, CuptiError) else State.FAILED
            self._answer(Answer(request.number, state))
        log_own_error(error, _FAILED)

    def records_around_unseen(self) -> bool:
        """Return True: the kernels around a replay of a graph that cbtop does not clone are still worth showing."""
        return True

    def announce(self, burst: KernelBurstResults, number: int = 0) -> None:
        """Announce the measurements of all kernels. Each kernel becomes a node under its brick.

        `number` is the number of the request, or 0 without a request.
        """
        profiler = self._profiler()
        if profiler is None:
            return
        found = []
        makers = makers_of({kernel for _, kernel in burst.kernels})
        for (keys, kernel), durations in burst.kernels.items():
            definition = KernelDefinition(
                kernel.name,
                BACKEND,
                grid=kernel.grid,
                block=kernel.block,
                shared_memory_bytes=kernel.dynamic_bytes,
                static_shared_memory_bytes=kernel.static_bytes,
                registers=kernel.registers,
                local_memory_bytes=kernel.local_bytes,
            )
            node = node_at(profiler, (*keys, definition))
            if node <= NO_NODE:
                burst.left_out += durations.count
                continue
            fewest, most = burst.launches_in_step(keys, durations)
            maker, source = makers.get(kernel, Maker("", ""))
            found.append(
                KernelTimes(
                    node=node,
                    steps=burst.steps[keys[0]],
                    launches=durations.count,
                    mean_ns=durations.mean_ns,
                    deviation_ns=durations.deviation_ns,
                    min_ns=durations.min_ns,
                    max_ns=durations.max_ns,
                    fewest=fewest,
                    most=most,
                    maker=maker,
                    source=source,
                )
            )
        steps = sum(burst.steps.values())
        multiprocessors, architecture = device_here()
        profiler.announce(
            Found(
                number,
                steps,
                tuple(found),
                burst.unplaced,
                burst.lost,
                burst.left_out,
                multiprocessors=multiprocessors,
                architecture=architecture,
            )
        )

    def announce_host_times(self, times: Times, steps: int) -> None:
        """Announce the host's times of the bricks, measured in `steps` steps."""
        profiler = self._profiler()
        if profiler is None:
            return
        found = [
            BrickHostTime(node, len(all_ns), statistics.median(all_ns))
            for node, all_ns in [(node_at(profiler, keys), one) for keys, one in times.items()]
            if node > NO_NODE
        ]
        profiler.announce(HostTimes(steps, tuple(found)))

    def _answer(self, answer: Answer) -> None:
        if self._recorder is not None:
            self._recorder.answer(answer.word())


def node_at(profiler: BrickProfiler, keys: Keys) -> int:
    """Return the id of the node with these `keys`, from the step inwards.

    Returns NO_NODE if there is no room for a node.
    """
    scope: Any = profiler.parts.paths.own.position.scope
    while scope.parent is not None:
        scope = scope.parent
    for key in keys:
        scope = scope.children.get(key) or profiler.parts.scopes.define(scope, key)
    return int(scope.node)


_bursts: weakref.WeakKeyDictionary[BrickProfiler, Bursts] = weakref.WeakKeyDictionary()


def bursts_of(profiler: BrickProfiler) -> Bursts:
    """Return the `Bursts` of `profiler`. Makes them at the first call."""
    found = _bursts.get(profiler)
    if found is None:
        found = _bursts[profiler] = Bursts(profiler)
    return found


def enter_here(recording: KernelRecording) -> None:
    """Store `recording` for the step of the calling thread. `KernelRecording.end_step` removes it."""
    _here[get_ident()] = recording


def enter_instead(recording: KernelRecording) -> None:
    """Let the calling thread take over `recording` from the thread that ran its last step."""
    del _here[recording.thread]
    recording.thread = get_ident()
    _here[recording.thread] = recording


def is_entered(recording: KernelRecording) -> bool:
    """Return whether `recording` was stored by `enter_here` and has not ended."""
    return _here.get(recording.thread) is recording


def recording_here() -> KernelRecording | None:
    """Return the `KernelRecording` of the step that the calling thread runs, or None.

    If the thread is between two steps of a window, the window is closed, because the caller captures or replays a
    graph, which is not a part of the window's steps.
    """
    recording = _here.get(get_ident()) if _here else None
    if recording is not None and recording.is_between:
        recording.close()
        return None
    return recording


def close_between_steps() -> None:
    """Close the windows of all threads that are open between two steps."""
    for recording in list(_here.values()):
        if recording.is_between:
            recording.close()


def note_replay() -> None:
    """Note that the calling thread replays captured graphs. Later windows of other threads have a single step.

    At the first replay, close a window of another thread if it is open between two steps.
    """
    thread = get_ident()
    if thread not in replaying:
        replaying.add(thread)
        close_between_steps()


def others_replay() -> bool:
    """Return whether threads other than the calling thread have replayed captured graphs."""
    return bool(replaying - {get_ident()})


_open: list[weakref.ref[KernelRecording]] = []  # the latest recording, which is closed when the interpreter exits


def close_at_exit(recording: KernelRecording) -> None:
    """Close `recording` when the interpreter exits, if it is still open then."""
    if not _open:
        atexit.register(_close, os.getpid())
    _open[:] = [weakref.ref(recording)]


def _close(pid: int) -> None:
    """Close a recording that is still open. Do nothing in a process that has not opened the recording."""
    recording = _open[0]() if os.getpid() == pid else None
    if recording is not None and recording.window.is_on:
        recording.close()


def stream_here() -> int:
    """Return torch's current stream on the current device."""
    return raw_stream_of(torch.cuda.current_device())()


# --- captured graphs ------------------------------------------------------------------------------------------------


class GraphNodePlaces:
    """Knows the place of each node of a captured graph: the keys of its layer and brick."""

    def __init__(self, driver: Driver, graph: int, spans: Sequence[CapturedCall]) -> None:
        order = Order(driver, graph)
        self._of: dict[int, Keys] = dict.fromkeys(order.nodes, (OTHER,))
        self._put(order, spans, ())

    def of(self, node: int, step: Hashable) -> Keys:
        """Return the keys that lead from `step` to `node`, outermost first."""
        return (step, *self._of.get(node, (OTHER,)))

    def _put(self, order: Order, spans: Sequence[CapturedCall], around: Keys) -> None:
        for span in spans:
            keys = keys_inside(around, span.key)
            if span.begin is not None and span.end is not None:
                for node in order.between(span.begin, span.end):
                    self._of[node] = place(keys, span.own)
            self._put(order, span.inside, keys)
