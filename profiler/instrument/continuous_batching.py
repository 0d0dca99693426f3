"""Follows the requests of transformers' continuous batching (`generate_batch`, `transformers serve`).

Rules
- CONTRACT lists the classes, methods and parameters of transformers that this file needs, and SEEN_IN the versions
  that it was compared with. If a method has other parameters, nothing is wrapped, and one line says so.
- The data comes from the thread of the generation loop, which has the scheduler. `request_id`, tokens and moments are
  the engine's own.
- The scheduled requests describe the model's next call: phase, tokens without padding, and sequences.
- The hooks read attributes of transformers' objects, and change none.
- No hook runs once for each request of a step. With 256 requests that took 0.3 ms of each step.
"""

from __future__ import annotations

import functools
import weakref
from _thread import get_ident
from collections.abc import Callable
from typing import Any

from cbtop.profiler.instrument import phases
from cbtop.profiler.instrument.attachment import installed
from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.engine_methods import Contract, owners_of
from cbtop.profiler.instrument.functions import TimedFunctions
from cbtop.profiler.instrument.generation import Function
from cbtop.profiler.instrument.serving import MODEL, OUTPUTS, SCHEDULER, ServingLog, tell_at_end
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol import clock

ENGINE = "transformers"
SEEN_IN = ("5.23.0",)  # the transformers versions that CONTRACT was compared with
FOLDER = "transformers.generation.continuous_batching"
PROCESSOR = f"{FOLDER}.continuous_api", "ContinuousBatchProcessor"
ROUTER = f"{FOLDER}.continuous_api", "OutputRouter"
QUEUE = f"{FOLDER}.scheduler", "Scheduler"
INPUTS = f"{FOLDER}.input_outputs", "ContinuousBatchingIOs"
# (module, class) -> {method to wrap: its first parameters after `self`}.
CONTRACT: Contract = {
    PROCESSOR: {"prepare_next_batch": (), "_generation_step": ("model",), "update_batch": ()},
    ROUTER: {"fail_and_deliver": ("state", "error")},
    QUEUE: {"add_waiting_request": ("state",), "clear_cancelled_requests": (), "finish_request": ("request_id",)},
    INPUTS: {"prepare_batch_tensors": ("requests_in_batch",), "prepare_batch_update": ()},
}
# class -> the attributes that cbtop reads.
ATTRIBUTES = {
    "ContinuousBatchProcessor": ("scheduler",),
    "Scheduler": ("active_requests", "waiting_requests", "cache"),
    "RequestState": (
        "request_id",
        "initial_tokens",
        "generated_tokens",
        "max_new_tokens",
        "created_time",
        "position_offset",
        "status",
    ),
    "FutureRequestState": ("state", "query_length", "has_new_token"),
}
PENDING, FINISHED = 0, 3  # values of RequestStatus; requests between them get their new tokens
LOST = "the requests of transformers' continuous batching, or their times, are not shown"
WARM_UP = "__warmup_"  # ids of the engine's own requests begin with this

_functions = TimedFunctions()


class Loop:
    """The generation loop of one scheduler, with the log of all requests of the process."""

    def __init__(self, log: ServingLog) -> None:
        self.log = log
        self.call: phases.Call | None = None  # describes the model's next call
        self.decoding: set[str] = set()  # requests whose prompt is in the cache
        # In the running `update_batch`: the requests that get a token, and the requests that have ended, each with
        # the reason.
        self.updated: list[str] | None = None
        self.ended: list[tuple[str, str]] = []


_loops: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()  # by scheduler
_running: dict[int, Loop] = {}  # by thread, while a method of ContinuousBatchProcessor runs
# The profiler and its log. Each `generate_batch` has a new scheduler, and the requests of all are numbered together.
_log: list[tuple[BrickProfiler, ServingLog]] = []


def follow() -> None:
    """Wrap the methods in CONTRACT when transformers imports its continuous batching."""
    once_imported(PROCESSOR[0], _wrap)


def _wrap() -> None:
    lost = "the requests of its continuous batching are not shown, and steps with several prompts count as mixed"
    owners = owners_of(CONTRACT, ENGINE, SEEN_IN, lost)
    if not owners:
        return
    wrappers: dict[tuple[str, str], dict[str, Callable[[Function], Function]]] = {
        PROCESSOR: {
            "prepare_next_batch": functools.partial(_runs, part=SCHEDULER),
            "_generation_step": functools.partial(_runs, part=MODEL, calls_model=True),
            "update_batch": functools.partial(_runs, part=OUTPUTS, ends=True),
        },
        ROUTER: {"fail_and_deliver": _fails},
        QUEUE: {"add_waiting_request": _adds, "clear_cancelled_requests": _cancels, "finish_request": _finishes},
        INPUTS: {"prepare_batch_tensors": _prepares, "prepare_batch_update": _updates},
    }
    for key, methods in wrappers.items():
        for name, wrapper in methods.items():
            _functions.replace(owners[key], name, wrapper)


def loop_of(scheduler: Any) -> Loop | None:
    """Return the loop of `scheduler`, or None if this process is not recorded. The first call makes it."""
    loop = _loops.get(scheduler)
    profiler = installed()
    if profiler is None or (loop is not None and _log[0][0] is profiler):
        return loop
    if not _log or _log[0][0] is not profiler:
        log = ServingLog(ENGINE, profiler.announce, _load)
        _log[:] = [(profiler, log)]
        tell_at_end(profiler, log)
    loop = _loops[scheduler] = Loop(_log[0][1])
    return loop


def _load() -> tuple[int, int, float | None]:
    """Return the load of all schedulers together. The use of the cache is the use of the fullest cache."""
    running, waiting, percent = 0, 0, None
    for scheduler in list(_loops):
        running += len(scheduler.active_requests)
        waiting += len(scheduler.waiting_requests)
        percent = max(percent or 0.0, min(100.0, 100.0 - 100.0 * scheduler.cache.compute_free_capacity()))
    return running, waiting, percent


def _guarded(do: Callable[..., Any], *args: Any) -> Any:
    """Call `do`. If it fails, log one line, and return None."""
    try:
        return do(*args)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, LOST)
        return None


def _runs(original: Function, part: int, *, calls_model: bool = False, ends: bool = False) -> Function:
    """Wrap a method of the processor that is `part` of the loop.

    `calls_model` says that the method calls the model, and `ends` that it ends an iteration.
    """

    def begin(processor: Any) -> tuple[Loop, int] | None:
        loop = loop_of(processor.scheduler)
        if loop is None:
            return None
        _running[get_ident()] = loop
        if calls_model and loop.call is not None:
            phases.announced[get_ident()] = loop.call
        return loop, loop.log.enter(part)

    def end(loop: Loop, before: int) -> None:
        names, ended, loop.updated, loop.ended = loop.updated, loop.ended, None, []
        if ends and names is not None:
            loop.log.outputs(names, [1] * len(names), ended)
        loop.log.leave(before)

    @functools.wraps(original)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        begun = _guarded(begin, self)
        if begun is None:
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            _running.pop(get_ident(), None)
            phases.announced.pop(get_ident(), None)
            _guarded(end, *begun)

    return run


def _arrive(loop: Loop, state: Any) -> None:
    ago_ns = clock.perf_counter_ns() - round(1e9 * state.created_time)  # also a time of perf_counter
    loop.log.arrived(state.request_id, ago_ns, len(state.initial_tokens))


def _adds(original: Function) -> Function:
    def arrived(scheduler: Any, state: Any) -> None:
        loop = loop_of(scheduler)
        if loop is None or state.request_id.startswith(WARM_UP):
            return
        loop.decoding.discard(state.request_id)
        if loop.log.follows(state.request_id):  # the request was stopped to free memory, and waits again
            loop.log.scheduled((), (state.request_id,))
        else:
            _arrive(loop, state)

    @functools.wraps(original)
    def add_waiting_request(self: Any, state: Any, /, *args: Any, **kwargs: Any) -> Any:
        _guarded(arrived, self, state)
        return original(self, state, *args, **kwargs)

    return add_waiting_request


def _prepares(original: Function) -> Function:
    def scheduled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        loop, batch = _running.get(get_ident()), args[0] if args else kwargs["requests_in_batch"]
        if loop is None or not batch:
            return
        names = [one.state.request_id for one in batch]
        new = loop.log.unscheduled(names)
        if new:
            states = [one.state for one in batch if one.state.request_id in new]
            for state in states:
                if not loop.log.follows(state.request_id):  # forked from another request, so it never waited
                    _arrive(loop, state)
            loop.log.scheduled([(state.request_id, state.position_offset) for state in states], ())
        loop.call = described(batch, names, loop.decoding)

    @functools.wraps(original)
    def prepare_batch_tensors(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        _guarded(scheduled, args, kwargs)
        loop = _running.get(get_ident())
        if loop is None:
            return original(self, *args, **kwargs)
        before = loop.log.enter(MODEL)
        try:
            return original(self, *args, **kwargs)
        finally:
            loop.log.leave(before)

    return prepare_batch_tensors


def described(batch: list[Any], names: list[str], decoding: set[str]) -> phases.Call:
    """Describe the model's call for a batch of `FutureRequestState`, before its tensors are prepared.

    `names` has the ids of its requests. `decoding` has those whose prompt is in the cache, and gets more of them.
    """
    tokens = sum([one.query_length for one in batch])
    cached = {one.state.position_offset for one in batch}
    new = set(names) - decoding
    if not new and tokens == len(batch):
        phase = phases.DECODE
    else:
        found = []
        for one in batch:
            before = one.state.position_offset
            writes = before >= len(one.state.initial_tokens)
            found.append(phases.of_sequence(one.query_length, before, writes=writes))
            if writes:
                decoding.add(one.state.request_id)
        phase = phases.of_several(found)
    return phases.Call(phase, tokens, len(batch), cached.pop() if len(cached) == 1 else None)


def _updates(original: Function) -> Function:
    def updated(batch: list[Any]) -> None:
        loop = _running.get(get_ident())
        if loop is not None:
            loop.updated = [
                one.state.request_id for one in batch if one.has_new_token and PENDING < one.state.status < FINISHED
            ]

    @functools.wraps(original)
    def prepare_batch_update(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _guarded(lambda: updated(result[0]))
        return result

    return prepare_batch_update


def _finishes(original: Function) -> Function:
    def finishes(scheduler: Any, name: str) -> None:
        loop = _running.get(get_ident())
        state = scheduler.active_requests.get(name)
        if loop is not None:
            loop.decoding.discard(name)
        if loop is None or loop.updated is None or state is None or state.status != FINISHED:
            return
        tokens, limit = len(state.generated_tokens), state.max_new_tokens
        loop.ended.append((name, "length" if limit is not None and tokens >= limit else "stop"))
        if not tokens:  # with a limit of 0 tokens, transformers discards the token
            loop.updated.remove(name)

    @functools.wraps(original)
    def finish_request(self: Any, request_id: str, /, *args: Any, **kwargs: Any) -> Any:
        _guarded(finishes, self, request_id)
        return original(self, request_id, *args, **kwargs)

    return finish_request


def _fails(original: Function) -> Function:
    def failed(state: Any) -> None:
        if _log:
            _log[0][1].ended(state.request_id, "error")

    @functools.wraps(original)
    def fail_and_deliver(self: Any, state: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = original(self, state, *args, **kwargs)
        _guarded(failed, state)
        return result

    return fail_and_deliver


def _cancels(original: Function) -> Function:
    def ended(scheduler: Any, cancelled: Any) -> None:
        loop = _loops.get(scheduler)
        if loop is not None:
            for state in cancelled:
                loop.decoding.discard(state.request_id)
                loop.log.ended(state.request_id, "abort")

    @functools.wraps(original)
    def clear_cancelled_requests(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        cancelled = original(self, *args, **kwargs)
        _guarded(ended, self, cancelled)
        return cancelled

    return clear_cancelled_requests
