"""Verdicts about an engine whose requests wait: for its limit, one at a time, or for room in its KV cache."""

from __future__ import annotations

from cbtop.protocol.vocabulary import QueueReason
from cbtop.units import count, counted, number, percent
from cbtop.viewmodels.serving import QueueRow, SchedulesView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

MIN_SCHEDULES = 64  # a burst of requests is over after fewer schedules
# Requests wait after at least this percentage of the schedules. Less is a burst.
OFTEN_PERCENT = 50.0
# Up to this use of the KV cache, twice as many requests fit.
ROOM_PERCENT = 50.0
ALONE = 1.5  # below this mean number of requests, most schedules run one request
# A stopped request is computed again. One in a hundred schedules costs little.
STOPPED_PERCENT = 1.0


def _schedules(view: SourceView) -> SchedulesView | None:
    """Return the latest schedules if there are enough. None if only the last seconds are shown, without requests."""
    found, load = (view.serving.schedules, view.serving.load) if view.serving else (None, None)
    is_over = view.window is not None and load is not None and not load.running + load.waiting
    return found if found is not None and found.count >= MIN_SCHEDULES and not is_over else None


def _queue(found: SchedulesView) -> QueueRow | None:
    """Return the most frequent reason of long waits. None if a full step is the reason."""
    often = [one for one in found.queues if one.percent >= OFTEN_PERCENT and one.reason != QueueReason.TOKENS]
    return often[0] if often else None


def _subject(view: SourceView) -> Subject:
    return Subject(About.SOURCE, view.serving.engine if view.serving else "")


def _evidence(found: SchedulesView, queue: QueueRow) -> tuple[Evidence, ...]:
    shown = [
        Evidence("schedules after which requests waited", queue.percent, "%"),
        Evidence("mean running requests", queue.mean_running, "requests"),
        Evidence("mean waiting requests", queue.mean_waiting, "requests"),
    ]
    if found.max_running is not None:
        shown.append(Evidence("limit of running requests", found.max_running, "requests"))
    if queue.cache_percent is not None:
        shown.append(Evidence("KV cache in use", queue.cache_percent, "%"))
    return tuple(shown)


def _waits(found: SchedulesView, queue: QueueRow) -> str:
    return (
        f"{number(queue.mean_waiting)} requests waited on average after {percent(queue.percent)} of the latest "
        f"{counted(found.count, 'schedule')}"
    )


def _find_limit(view: SourceView) -> Finding | None:
    found = _schedules(view)
    queue = _queue(found) if found else None
    if found is None or queue is None or queue.reason != QueueReason.LIMIT or queue.mean_running < ALONE:
        return None
    if queue.cache_percent is None or queue.cache_percent > ROOM_PERCENT:
        return None
    limit = count(found.max_running)
    return Finding(
        f"{_waits(found, queue)}, because at most {limit} may run, and {percent(queue.cache_percent)} of the KV "
        "cache was in use",
        _evidence(found, queue),
        _subject(view),
    )


def _find_alone(view: SourceView) -> Finding | None:
    found = _schedules(view)
    queue = _queue(found) if found else None
    if found is None or queue is None or queue.mean_running >= ALONE:
        return None
    return Finding(
        f"One request ran at a time, and {_waits(found, queue)} (reason: {queue.reason})",
        _evidence(found, queue),
        _subject(view),
    )


def _find_stopped(view: SourceView) -> Finding | None:
    found = _schedules(view)
    if found is None or 100 * found.preemptions / found.count < STOPPED_PERCENT or found.preemptions < 2:
        return None
    full = [one for one in found.queues if one.reason == QueueReason.CACHE]
    use = full[0].cache_percent if full else None
    of_use = "" if use is None else f"; {percent(use)} of the cache was in use while requests waited for it"
    return Finding(
        f"The KV cache is too small: requests were stopped {count(found.preemptions)} times in the latest "
        f"{counted(found.count, 'schedule')}, and computed again{of_use}",
        (
            Evidence("stopped requests", found.preemptions, "requests"),
            Evidence("schedules", found.count, "schedules"),
            Evidence("mean running requests", found.mean_requests, "requests"),
            *(() if use is None else (Evidence("KV cache in use", use, "%"),)),
        ),
        _subject(view),
    )


CACHE_TOO_SMALL = Rule(
    id="cache-too-small",
    severity=Severity.WARNING,
    means="An engine stops running requests, because its KV cache has no room for their next tokens. It computes "
    "them again later.",
    fires=f"{STOPPED_PERCENT:g} or more requests in 100 schedules were stopped (preempted), and at least 2, in at "
    f"least {MIN_SCHEDULES} schedules.",
    advice="Give the KV cache more memory (gpu_memory_utilization, kv_cache_dtype, VLLM_CPU_KVCACHE_SPACE), or let "
    "fewer requests run (max_num_seqs).",
    find=_find_stopped,
)
BATCH_OF_ONE = Rule(
    id="batch-of-one",
    severity=Severity.WARNING,
    means="An engine runs one request at a time, although others wait. A step with several requests takes little "
    "longer, because the weights are read once.",
    fires=f"Requests wait after {OFTEN_PERCENT:g} % or more of the latest schedules, at least {MIN_SCHEDULES}, for "
    f"one reason, and fewer than {ALONE:g} requests run in these on average. Not if the step is full (its tokens are "
    "those of a long prompt).",
    advice="Let more requests run (max_num_seqs). If the reason is the KV cache, give it more memory. Otherwise look "
    "at prompts longer than the rest of the cache, limits of adapters, structured output, transfers of the cache.",
    find=_find_alone,
)
QUEUE_AT_LIMIT = Rule(
    id="queue-at-limit",
    severity=Severity.WARNING,
    means="An engine lets requests wait because of its limit of running requests, although its KV cache has room.",
    fires=f"Requests wait after {OFTEN_PERCENT:g} % or more of the latest schedules, at least {MIN_SCHEDULES}, "
    f"because the limit is reached, and at most {ROOM_PERCENT:g} % of the KV cache is in use then.",
    advice="Raise max_num_seqs: the cache has room for twice as many requests. Each token then takes longer, and "
    "requests wait less.",
    find=_find_limit,
)
