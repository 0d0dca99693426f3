"""Times the bricks inside captured CUDA graphs. In some replays, a clone of the graph with stamps runs instead.

Capture
- While a model on CUDA is attached, the methods of `torch.cuda.CUDAGraph` are replaced. They work as before, and also
  report captures and replays. They are restored when the last model is detached.
- Just before a capture ends, cbtop clones the graph. Only the clone gets stamps.
- For each call during a capture, cbtop stores the first and last graph node (capturing.py, compiled_code.py). The
  first call of the model decides the phase of a replay: one new token per sequence makes a decode.

Replay
- A replay inside a step gives this step its layers and bricks. A replay outside of steps is a step.
- The profiler decides which replays are recorded. A replay outside of steps that is not recorded is a plain step. Its
  time comes from a stamp before the graph and one after it, minus their usual distance from the graph.
- If timing plain steps is too expensive, only recorded replays are steps. They get a different name, because they are
  not all replays.
- If the device is idle, it waits while cbtop works before a replay. cbtop then only decides whether to record, finds
  the stream and enqueues a stamp, in C. The rest follows after the replay. The device counts as idle if it has
  reached the last replay's second stamp. This overstates cbtop's cost if the host has enqueued other work since.
- The host never waits for the device. Stamps are read at the next replay, or when the recording ends.

Times
- Stamps inside a graph make it slower (stamp_cost.py). This cost is subtracted from each interval. Nothing is
  recorded before the cost is known.
- The time between bricks is the brick "Other kernels", so that bricks add up to the step.
- If every step is recorded, COPIES clones take turns, because the host may be ahead of its device.
- No stamp is possible while kernels run concurrently, so calls that begin or end there are left out.
- A graph is not timed if it draws random numbers, if two models are called in it, or if cbtop's code fails. cbtop
  then logs one line, and the host's own graph runs.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable
from typing import Any

import torch
from torch import _C

from cbtop.profiler.instrument import compiled_code, kernel_makers
from cbtop.profiler.instrument.captured_graph import CapturedGraph
from cbtop.profiler.instrument.capturing import Capture, captures, engine_runs
from cbtop.profiler.instrument.device_graphs import device_here, devices, settle
from cbtop.profiler.instrument.guard import graph_flags
from cbtop.profiler.instrument.kernel_bursts import close_between_steps, note_replay, recording_here
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.trouble import log_once, log_own_error
from cbtop.profiler.instrument.work import device_of

_lock = threading.RLock()
# the host's `torch.cuda.CUDAGraph` -> the graph with timed replays
graphs: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()
# Graphs that draw random numbers from generators that the host has registered.
_random: weakref.WeakSet[Any] = weakref.WeakSet()
# (class, name of a method) -> the original method, or None if the class inherits it.
_replaced: dict[tuple[Any, str], Any] = {}
_users: weakref.WeakSet[ModelSteps] = weakref.WeakSet()


def look_into(steps: ModelSteps, *modules: Any) -> None:
    """Time the captured graphs of a model on CUDA from now on. Does nothing for a model on another device.

    Called when the model is attached.
    """
    if device_of(*modules) != "cuda":
        return
    with _lock:
        _users.add(steps)
        if settle not in steps.profiler.parts.paths.settlers:
            # `settlers` are called in order to record work that the device has finished. Captured graphs come first,
            # because steps of other settlers wait for the calls in them.
            steps.profiler.parts.paths.settlers.insert(0, settle)
        if _replaced:
            return
        if not hasattr(torch.cuda, "CUDAGraph"):
            return
        kind = torch.cuda.CUDAGraph
        methods = [(kind, name, ours) for name, ours in _METHODS.items()]
        for owner, name, ours in [*methods, (torch.autograd.profiler.profile, "_prepare_trace", _prepares)]:
            if hasattr(owner, name):
                _replaced[owner, name] = vars(owner).get(name)
                setattr(owner, name, ours(getattr(owner, name)))
        compiled_code.follow()
        kernel_makers.follow()
        atexit.register(_at_exit)


def look_no_more(steps: ModelSteps) -> None:
    """Stop timing the CUDA graphs of a detached model.

    After the last model, restore torch's class and free the memory on the device.
    """
    with _lock:
        if steps not in _users:
            return
        _users.discard(steps)
        for graph, captured in list(graphs.items()):
            if captured.steps is steps:
                graphs.pop(graph, None)
                captured.on.drop(captured)
        settle(True)
        if not len(_users):
            _put_back()


def _put_back() -> None:
    for (owner, name), was in _replaced.items():
        if was is None:
            delattr(owner, name)
        else:
            setattr(owner, name, was)
    _replaced.clear()
    atexit.unregister(_at_exit)
    compiled_code.follow_no_more()
    kernel_makers.follow_no_more()
    for device in devices.values():
        try:
            device.close()
        except Exception as error:  # noqa: BLE001 - the device may be lost: nothing can be freed on it
            log_own_error(error, "what timed captured graphs is left on their device")
    devices.clear()
    graphs.clear()
    graph_flags.clear()


def end() -> None:
    """Stop timing the graphs of all models, including models that the host has dropped."""
    for steps in list(_users):
        look_no_more(steps)
    with _lock:
        _put_back()


def _at_exit() -> None:
    """Stop timing graphs, and free all clones. Called when the interpreter ends.

    If a process group was not destroyed, its destruction now waits until no graph contains its collectives. cbtop no
    longer learns when the host frees its graphs, so it frees all clones here.
    """
    with _lock:
        for captured in list(graphs.values()):
            captured.is_left_alone = True
            captured.on.drop(captured)
        settle(True)


def _capture_begin(original: Callable[..., None]) -> Callable[..., None]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        _forget(self)
        device = None
        recording_here()  # closes a window that is open between two steps
        try:
            device = device_here()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a captured graph is not looked into")
        original(self, *args, **kwargs)
        thread = get_ident()
        run = engine_runs.get(thread)
        if device is not None and (run is not None or thread not in engine_runs):
            capture = captures[thread] = Capture(device.captured_last)
            if run is not None:
                capture.begin_model(*run)
            compiled_code.watch(capture)

    return capture_begin


def _capture_end(original: Callable[..., None]) -> Callable[..., None]:
    def capture_end(self: Any) -> None:
        capture = captures.pop(get_ident(), None)
        device, clone = None, 0
        try:
            if capture is None or _ended(capture):
                pass
            elif capture.steps is None:
                log_once(
                    "a captured graph in which no call of a model was seen, as when it was compiled before that was "
                    "attached, is not looked into"
                )
            elif capture.steps in _users:
                device = device_here()
                clone = device.cloned(capture)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a captured graph is not looked into")
        try:
            original(self)
        except BaseException:
            if device is not None and clone:
                device.device.driver.destroy_graph(clone)
            raise
        try:
            flags = [] if capture is None else [one for one in capture.guarded if one is not None]
            if flags:
                graph_flags[self] = flags
            if capture is not None and device is not None and clone:
                if self in _random:
                    capture.why_not = "it has generators of random numbers of its own"
                captured = CapturedGraph(self, clone, capture, device, capture.steps)
                device.add(captured)
                graphs[self] = captured
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a captured graph is not looked into")

    return capture_end


def _ended(capture: Capture) -> bool:
    """Handle the end of `capture`.

    Returns whether the graph is empty. The first graph that inductor captures is empty.
    """
    capture.ended()
    if capture.open and get_ident() in engine_runs:
        capture.end(capture.open[0])  # the engine captured a single call, which ends with the graph
    return capture.last() == []


def _replay(original: Callable[..., None]) -> Callable[..., None]:
    def replay(self: Any) -> None:
        timed(self)
        for flags in graph_flags.get(self, ()):
            flags.replayed()

    def timed(self: Any) -> None:
        captured = graphs.get(self)
        if getattr(self, "_tracker", None) is not None:
            captured = None
        if captured is not None and captured.on.index != _C._cuda_getDevice():
            # Make the graph's device current during the replay, as torch's own replay does.
            with torch.cuda.device(captured.on.index):
                timed(self)
            return
        note_replay()
        recording = recording_here()
        if captured is not None and recording is not None:
            captured.replay_recorded(original, self, recording)
        elif captured is not None:
            captured.replay(original, self)
        elif recording is not None:
            with recording.paused():
                original(self)
        else:
            original(self)

    return replay


def _prepares(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _prepare_trace(self: Any, *args: Any, **kwargs: Any) -> None:
        close_between_steps()  # torch's profiler uses CUPTI, too, and a process can use it only once at a time
        original(self, *args, **kwargs)

    return _prepare_trace


def _reset(original: Callable[..., None]) -> Callable[..., None]:
    def reset(self: Any) -> None:
        _forget(self)
        original(self)

    return reset


def _instantiate(original: Callable[..., None]) -> Callable[..., None]:
    def instantiate(self: Any) -> None:
        captured = graphs.get(self)
        if captured is not None and captured.is_stamped:
            # The clone is of the old graph, and the new graph may differ.
            captured.leave_alone("its host has made it anew")
        original(self)

    return instantiate


def _register(original: Callable[..., None]) -> Callable[..., None]:
    def register_generator_state(self: Any, *args: Any, **kwargs: Any) -> None:
        _random.add(self)
        original(self, *args, **kwargs)

    return register_generator_state


def _forget(graph: Any) -> None:
    graph_flags.pop(graph, None)
    captured = graphs.pop(graph, None)
    if captured is not None:
        captured.on.drop(captured)
        settle(False)


_METHODS: dict[str, Callable[[Callable[..., None]], Callable[..., None]]] = {
    "capture_begin": _capture_begin,
    "capture_end": _capture_end,
    "instantiate": _instantiate,
    "register_generator_state": _register,
    "replay": _replay,
    "reset": _reset,
}


def _after_fork() -> None:
    """In a forked child, make a new lock and forget all captures, because their threads do not exist in the child."""
    global _lock
    _lock = threading.RLock()
    captures.clear()


os.register_at_fork(after_in_child=_after_fork)
