"""Counts page faults, context switches and events of the processor in a part of the bricks, and announces them.

Rules
- It is opt-in (CBTOP_COUNTERS=1), because a read of the counters costs 0.4 to 3 µs, and a counted call needs two.
- It may use a tenth of the allowed overhead. The compiled hot path keeps to that (_counters.h).
- Only bricks that the host's clock times are counted, and only the thread that calls them.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbtop.protocol import clock
from cbtop.protocol.counter_messages import MAX_COUNTED_BRICKS, BrickCounters, CountedBrick
from cbtop.protocol.signals import reraise_host_error
from cbtop.protocol.vocabulary import NodeKind

if TYPE_CHECKING:
    from cbtop.profiler.recorder import RingRecorder
    from cbtop.protocol.messages import Node

#: The variable that switches counting on.
SWITCH, ON = "CBTOP_COUNTERS", "1"
COST_OF_ALLOWED = 0.1  # the part of the allowed overhead that counting may use
TELL_NS = 1_000_000_000
NEVER_NS = 1 << 63
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")

_log = logging.getLogger("cbtop")
# Types and numbers of events, from Linux's uapi/linux/perf_event.h.
HARDWARE, CACHE = 0, 3
CYCLES, INSTRUCTIONS, BRANCH_MISSES = (HARDWARE, 0), (HARDWARE, 1), (HARDWARE, 5)
L1_READ_MISSES = CACHE, 0 | 1 << 16
LAST_LEVEL_READS, LAST_LEVEL_READ_MISSES = (CACHE, 2), (CACHE, 2 | 1 << 16)
Groups = tuple[tuple[tuple[int, int], ...], ...]
# Two groups, because a processor may have only four counters. A group is counted as a whole.
GROUPS: Groups = (CYCLES, INSTRUCTIONS, BRANCH_MISSES, L1_READ_MISSES), (LAST_LEVEL_READS, LAST_LEVEL_READ_MISSES)
GROUP_NAMES = "cycles, instructions, branch and L1 misses", "L2 and L3 misses"
# Columns of a row of the hot path after the node: calls and system counts, the first group, the second one.
SYSTEM, FIRST, SECOND = slice(1, 6), slice(6, 11), slice(11, 14)


class Counting:
    """Counts the bricks of `hot_path`, and announces the counters once a second with `recorder`."""

    def __init__(self, recorder: RingRecorder, hot_path: Any, share: float, groups: Groups = GROUPS) -> None:
        self._recorder = recorder
        self._hot_path = hot_path
        self._since_ns = clock.perf_counter_ns()
        self._due_ns = 0
        self._can_count = hasattr(hot_path, "count")
        if self._can_count:
            hot_path.count(groups, share)

    def tell_if_due(self) -> None:
        """Announce the counters if that was not done for a second."""
        now_ns = clock.perf_counter_ns()
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + TELL_NS
        try:
            self.tell()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            reraise_host_error(error)
            self._due_ns = NEVER_NS
            _log.warning("cbtop announces no counters: %s: %s", type(error).__name__, error)

    def tell(self) -> None:
        """Announce the counters since the beginning, or why there are none."""
        over_ns = max(0, clock.perf_counter_ns() - self._since_ns)
        if not self._can_count:
            self._recorder.announce(BrickCounters(over_ns, 0, (), "the compiled part of cbtop is missing"))
            return
        cost_ns, _, errors, rows = self._hot_path.counted()
        if rows:
            bricks = counted_bricks(rows, self._recorder.nodes())
            self._recorder.announce(BrickCounters(over_ns, cost_ns, bricks, why_not(errors)))


def counted_bricks(rows: Iterable[Sequence[int]], nodes: Sequence[Node]) -> tuple[CountedBrick, ...]:
    """Add up the rows of the hot path by step, name and category of the brick, those with most calls first."""
    first_of: dict[tuple[int, str, object], int] = {}
    sums: dict[int, list[int]] = {}
    for row in rows:
        node = step = nodes[row[0] - 1] if row[0] <= len(nodes) else None
        if node is None or node.kind is not NodeKind.BRICK:
            continue
        while step is not None and step.parent is not None:
            step = nodes[step.parent - 1]
        first = first_of.setdefault((step.id if step else 0, node.name, node.category), node.id)
        before = sums.get(first)
        sums[first] = list(row[1:]) if before is None else [a + b for a, b in zip(before, row[1:], strict=True)]
    found = [
        CountedBrick(node, *row[SYSTEM], *row[FIRST], *row[SECOND])
        for node, counts in sums.items()
        for row in [(node, *counts)]
    ]
    return tuple(sorted(found, key=lambda brick: -brick.calls)[:MAX_COUNTED_BRICKS])


def why_not(errors: Sequence[int]) -> str:
    """Return why groups of events are missing, from the errno of each group. "" if all are there."""
    missing = [name for name, error in zip(GROUP_NAMES, errors, strict=False) if error]
    error = next((error for error in errors if error), 0)
    if not error:
        return ""
    reason = os.strerror(error)
    if error in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.EINVAL):
        reason = "this processor, or the virtual machine, has no such counters"
    elif error in (errno.EACCES, errno.EPERM):
        reason = f"perf_event_open is not permitted ({_paranoid()}a container may also forbid it)"
    elif error == errno.ENOSYS:
        reason = "the kernel has no perf_event_open"
    return f"{' and '.join(missing)}: {reason}"


def _paranoid() -> str:
    try:
        return f"{PARANOID} is {PARANOID.read_text().strip()}, expected 2 or less; "
    except OSError:
        return ""


def begin(recorder: RingRecorder, hot_path: Any, allowed_share: float) -> Counting | None:
    """Count the bricks of `hot_path` until the recorder closes. Returns None if that is not switched on."""
    if os.environ.get(SWITCH) != ON:
        return None
    counting = Counting(recorder, hot_path, COST_OF_ALLOWED * allowed_share)
    recorder.at_flush.append(counting.tell_if_due)
    recorder.before_goodbye(counting.tell)
    return counting
