"""Follows vLLM's requests, scheduler and engine core, and times what its front end does with tokens.

Rules
- This file imports nothing of vLLM.
- Its names are in vllm_contract.py. A class with other methods or parameters is not wrapped, and one line says so.
- The data comes from the scheduler. Each engine core has one, even if vLLM's own statistics are off.
- The hooks read attributes of vLLM's objects, and change none.
- A process has one log. It follows one engine at a time: a new one when the engine before has no request any longer.
- If the front end is in another process than the engine core, it has no requests here. Its work on tokens is the
  brick `Detokenize`, outside of steps.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import weakref
from collections.abc import Callable
from typing import Any

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.attachment import installed
from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.functions import TimedFunctions
from cbtop.profiler.instrument.generation import Function
from cbtop.profiler.instrument.serving import DETOKENISE, MODEL, OUTPUTS, SCHEDULER, Schedule, ServingLog, tell_at_end
from cbtop.profiler.instrument.trouble import log_once, log_own_error
from cbtop.profiler.instrument.vllm_contract import (
    ENGINE_CORE,
    FRONT_END,
    VLLM_SCHEDULER,
    is_as_expected,
    needed_of,
)
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol import clock
from cbtop.protocol.serving_messages import EngineWorker
from cbtop.protocol.vocabulary import BrickCategory, QueueReason

FULL_PERCENT = 90.0  # a request of average length needs some percent of the cache
DETOKENIZE = BrickDefinition("Detokenize", BrickCategory.OTHER, backend="vLLM")

_functions = TimedFunctions()


class FollowedEngine:
    """The log of this process for `profiler`, and the scheduler that it follows."""

    def __init__(self, profiler: BrickProfiler) -> None:
        self.profiler = profiler
        self.scheduler: Callable[[], Any] = lambda: None
        self.log = ServingLog("vLLM", profiler.announce, self.load)
        tell_at_end(profiler, self.log)

    def load(self) -> tuple[int, int, float | None]:
        scheduler = self.scheduler()
        if scheduler is None:
            return 0, 0, None
        return len(scheduler.running), _waiting(scheduler), _cache_percent(scheduler)

    def follow(self, scheduler: Any) -> bool:
        """Follow `scheduler` from now on. Returns False if the scheduler before has requests that run."""
        if self.scheduler() is None:
            for name in self.log.names():  # this engine was dropped with its requests
                self.log.ended(name, "engine ended")
        if not self.log.is_idle:
            log_once("vLLM: a second engine runs in this process, and its requests are not shown")
            return False
        self.scheduler = weakref.ref(scheduler)
        self.log.begins(_max_running(scheduler))
        return True


_engine: list[FollowedEngine] = []  # the one of this process


def follow() -> None:
    """Wrap the methods of the scheduler, the engine core and the front end when vLLM imports their modules."""
    wrappers: dict[tuple[str, str], dict[str, Callable[[Function], Function]]] = {
        VLLM_SCHEDULER: {
            "add_request": _adds,
            "schedule": _schedules,
            "update_from_output": _updates,
            "finish_requests": _finishes,
        },
        ENGINE_CORE: {"step": _steps, "step_with_batch_queue": _steps},
        FRONT_END: {"process_outputs": _detokenises},
    }
    for (module, kind), methods in wrappers.items():
        once_imported(module, functools.partial(_wrap, module, kind, methods))


def _wrap(module: str, kind: str, methods: dict[str, Callable[[Function], Function]]) -> None:
    owner = getattr(sys.modules[module], kind, None)
    if is_as_expected(owner, needed_of((module, kind))):
        for name, wrapper in methods.items():
            _functions.replace(owner, name, wrapper)


def log_of(scheduler: Any) -> ServingLog | None:
    """Return the log that follows `scheduler`, or None."""
    return _engine[0].log if _engine and _engine[0].scheduler() is scheduler else None


def _log_for(scheduler: Any) -> ServingLog | None:
    """Return the log for a new request of `scheduler`, or None if it is not followed or not recorded."""
    profiler = installed()
    if profiler is None:
        return None
    if not _engine or _engine[0].profiler is not profiler:
        _engine[:] = [FollowedEngine(profiler)]
    if _engine[0].scheduler() is not scheduler and not _engine[0].follow(scheduler):
        return None
    return _engine[0].log


def names_engine(original: Function) -> Function:
    """Wrap the constructor of a runner, which runners for all devices call.

    If the engine core is not in this process, it is in the parent process. The wrapper then announces the parent.
    """

    def announce() -> None:
        parent, profiler = multiprocessing.parent_process(), installed()
        if parent is not None and parent.pid is not None and profiler is not None and not _engine:
            profiler.announce(EngineWorker(parent.pid))

    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        _guarded(announce)

    return construct


def _waiting(scheduler: Any) -> int:
    # The second queue has requests that wait for something else. Its name depends on the version.
    others: Any = getattr(scheduler, "kv_holding_waiting", None) or getattr(scheduler, "skipped_waiting", ())
    return len(scheduler.waiting) + len(others)


def _cache_percent(scheduler: Any) -> float:
    return float(min(100.0, 100.0 * scheduler.kv_cache_manager.usage))


def _max_running(scheduler: Any) -> int:
    # Since 0.32, fewer requests than the runner has places may be allowed.
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def _queue_reason(scheduler: Any, output: Any, cache_percent: float) -> QueueReason:
    """Return why requests wait after a schedule."""
    if len(scheduler.running) >= _max_running(scheduler):
        return QueueReason.LIMIT
    if output.total_num_scheduled_tokens >= scheduler.max_num_scheduled_tokens:
        return QueueReason.TOKENS
    return QueueReason.CACHE if cache_percent >= FULL_PERCENT else QueueReason.OTHER


def _guarded(do: Callable[..., Any], *args: Any) -> Any:
    """Call `do`. If it fails, log one line, and return None."""
    try:
        return do(*args)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, "vLLM's requests, or their times, are not shown")
        return None


def _adds(original: Function) -> Function:
    def arrived(scheduler: Any, request: Any) -> None:
        log = _log_for(scheduler)
        if log is not None:
            ago_ns = round(1e9 * (clock.time() - request.arrival_time))
            log.arrived(request.request_id, ago_ns, request.num_prompt_tokens)

    @functools.wraps(original)
    def add_request(self: Any, request: Any, /, *args: Any, **kwargs: Any) -> Any:
        _guarded(arrived, self, request)
        return original(self, request, *args, **kwargs)

    return add_request


def _schedules(original: Function) -> Function:
    def scheduled(log: ServingLog, scheduler: Any, output: Any) -> None:
        new = [(one.req_id, one.num_computed_tokens) for one in output.scheduled_new_reqs]
        preempted = getattr(output, "preempted_req_ids", None) or ()
        if new or preempted:
            log.scheduled(new, preempted)
        running, waiting = len(output.num_scheduled_tokens), _waiting(scheduler)
        if running and waiting:
            cache_percent = _cache_percent(scheduler)
            reason = QueueReason.CACHE if preempted else _queue_reason(scheduler, output, cache_percent)
            log.ran(Schedule(running, len(preempted), waiting, reason, cache_percent))
        elif running:
            log.ran(Schedule(running, len(preempted)))

    @functools.wraps(original)
    def schedule(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        log = _guarded(log_of, self)
        if log is None:
            return original(self, *args, **kwargs)
        before = log.enter(SCHEDULER)
        try:
            output = original(self, *args, **kwargs)
            _guarded(scheduled, log, self, output)
        finally:
            log.leave(before)
        return output

    return schedule


def _updates(original: Function) -> Function:
    def updated(log: ServingLog, result: Any) -> None:
        found = [one for outputs in result.values() for one in outputs.outputs]
        log.outputs(
            [one.request_id for one in found],
            [len(one.new_token_ids) for one in found],
            [(one.request_id, one.finish_reason) for one in found if one.finish_reason is not None],
        )

    @functools.wraps(original)
    def update_from_output(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        log = _guarded(log_of, self)
        if log is None:
            return original(self, *args, **kwargs)
        before = log.enter(OUTPUTS)
        try:
            result = original(self, *args, **kwargs)
            _guarded(updated, log, result)
        finally:
            log.leave(before)
        return result

    return update_from_output


def _finishes(original: Function) -> Function:
    def finished(scheduler: Any) -> None:
        log = log_of(scheduler)
        if log is None:
            return
        known = scheduler.requests
        for name in log.names():
            request = known.get(name)
            if request is None or request.is_finished():
                log.ended(name, "abort")

    @functools.wraps(original)
    def finish_requests(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _guarded(finished, self)
        return result

    return finish_requests


def _steps(original: Function) -> Function:
    @functools.wraps(original)
    def step(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        log = _guarded(lambda: log_of(self.scheduler))
        if log is None:
            return original(self, *args, **kwargs)
        before = log.enter(MODEL)
        try:
            return original(self, *args, **kwargs)
        finally:
            log.leave(before)

    return step


def _detokenises(original: Function) -> Function:
    def begun() -> tuple[BrickProfiler | None, Any]:
        profiler = installed()
        return profiler, None if profiler is None else profiler.start_brick(DETOKENIZE)

    def tokens_of(outputs: Any) -> int:
        return sum([len(one.new_token_ids) for one in outputs])

    @functools.wraps(original)
    def process_outputs(self: Any, engine_core_outputs: Any, /, *args: Any, **kwargs: Any) -> Any:
        log = _engine[0].log if _engine else None
        profiler, timer = _guarded(begun) or (None, None)
        before = None if log is None else log.enter(DETOKENISE)
        try:
            return original(self, engine_core_outputs, *args, **kwargs)
        finally:
            if log is not None and before is not None:
                log.leave(before)
            if profiler is not None:
                tokens = _guarded(tokens_of, engine_core_outputs)
                _guarded(profiler.stop_brick, timer, tokens or 0)

    return process_outputs
