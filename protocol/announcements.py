"""The announcements of a profiled process.

If two announcements have the same key, the new one replaces the earlier one.

The number and the size of announcements are bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar, assert_never

from cbtop.protocol.counter_messages import BrickCounters
from cbtop.protocol.errors import LimitError
from cbtop.protocol.guard_messages import GuardedSteps
from cbtop.protocol.kernel_messages import HostTimes, KernelBurst
from cbtop.protocol.memory_messages import BrickMemories, TrainingMemory
from cbtop.protocol.messages import (
    Activity,
    CatalogMessage,
    Ceiling,
    CheckResult,
    Compilation,
    Dependency,
    Goodbye,
    HostHello,
    Manifest,
    Node,
    Sampling,
    TraceSummary,
    Training,
)
from cbtop.protocol.sample_messages import CpuSamples
from cbtop.protocol.serving_messages import (
    MAX_LOADS,
    MAX_SERVED,
    EngineLoad,
    EngineSchedules,
    EngineTimes,
    EngineWorker,
    ServedRequest,
)
from cbtop.protocol.structure_messages import CompiledCode, Conditions, StepAllocations, StepOperations
from cbtop.protocol.training_messages import GradientFault, GradientNorm, LossScale, TrainingTimes

MAX_ANNOUNCED = 10_000  # at most this many announcements of each kind are kept
MAX_COMPILATIONS = 64  # most messages about compilations that are kept; a new message replaces the oldest one
MAX_ANNOUNCED_BYTES = 16 << 20  # limit for the encoded size of all announcements together
# Limit for the announcements that a viewer or a recording keeps, added up over all sources. Each takes about 700
# bytes of memory.
MAX_KEPT = 1_000_000

# The messages that a host may announce.
Announcement = (
    Node
    | Dependency
    | Manifest
    | Ceiling
    | CheckResult
    | TraceSummary
    | Activity
    | Sampling
    | Compilation
    | Training
    | KernelBurst
    | HostTimes
    | TrainingTimes
    | GradientNorm
    | GradientFault
    | LossScale
    | TrainingMemory
    | BrickMemories
    | GuardedSteps
    | Conditions
    | StepOperations
    | StepAllocations
    | CompiledCode
    | ServedRequest
    | EngineLoad
    | EngineSchedules
    | EngineTimes
    | EngineWorker
    | CpuSamples
    | BrickCounters
)
Kept = TypeVar("Kept")
Key = tuple[type, Hashable]


def key_of(message: CatalogMessage) -> Key:
    """Return the key of `message`. If a later message has the same key, it replaces `message`."""
    match message:
        case Node():
            about: Hashable = message.id
        case Dependency():
            about = message
        case Ceiling():
            about = message.name
        case CheckResult():
            about = message.brick, message.assertion
        case TraceSummary():
            about = message.trace
        case Compilation():
            about = message.number % MAX_COMPILATIONS
        case ServedRequest():
            about = message.number % MAX_SERVED
        case EngineLoad():
            about = message.number % MAX_LOADS
        case TrainingTimes() | GradientNorm() | GradientFault() | LossScale() | TrainingMemory():
            about = message.phase, message.model
        case StepOperations() | StepAllocations() | BrickMemories():
            about = message.phase, message.model
        case GuardedSteps():
            about = message.model
        case Activity() | Sampling() | Training() | KernelBurst() | HostTimes() | Conditions() | CompiledCode():
            about = None
        case Manifest() | HostHello() | Goodbye() | EngineTimes() | EngineSchedules() | EngineWorker():
            about = None
        case CpuSamples() | BrickCounters():
            about = None
        case _:
            assert_never(message)
    return type(message), about


def comes_to_fail(message: CatalogMessage, before: CatalogMessage | None) -> bool:
    """Return whether a check that passed in `before` fails in `message`.

    An earlier failure may cause a later one. So callers move a newly failed check after all earlier failures.
    """
    if not isinstance(message, CheckResult) or message.passed:
        return False
    return isinstance(before, CheckResult) and before.passed


class Announcements(Generic[Kept]):
    """Stores one value for each key, with the newest message. The keys remain in the order in which they arrived.

    In the profiled process, the value is the encoded message. In the daemon, the value is the message itself. Both
    have the same bounds.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, tuple[Kept, int]] = {}
        self._of_kind: Counter[type] = Counter()
        self._size_bytes = 0

    def __iter__(self) -> Iterator[Kept]:
        """Yield the value of each key, the oldest key first."""
        return (kept for kept, _ in self._kept.values())

    def get(self, key: Key) -> Kept | None:
        """Return the value that is kept under `key`, or None."""
        found = self._kept.get(key)
        return None if found is None else found[0]

    def keep(self, key: Key, kept: Kept, size_bytes: int, *, last: bool = False) -> bool:
        """Keep the value `kept` under `key`. Returns whether there was room.

        `kept` replaces the old value of the key. The key keeps its position. If `last` is true, the key moves to the
        end.
        """
        before = self._kept.get(key)
        grown_bytes = size_bytes - (before[1] if before else 0)
        if self._size_bytes + grown_bytes > MAX_ANNOUNCED_BYTES:
            return False
        if before is None:
            if self._of_kind[key[0]] >= MAX_ANNOUNCED:
                return False
            self._of_kind[key[0]] += 1
        self._size_bytes += grown_bytes
        if last:
            self._kept.pop(key, None)
        self._kept[key] = kept, size_bytes
        return True


class AnnouncedTotal:
    """The number of kept announcements of all sources together. It is at most MAX_KEPT."""

    def __init__(self) -> None:
        self._of_source: dict[str, int] = {}
        self._kept = 0

    def set(self, source: str, kept: int) -> None:
        """Set how many announcements of `source` are kept. Raises LimitError if the total of all sources is too
        large.
        """
        self._kept += kept - self._of_source.get(source, 0)
        self._of_source[source] = kept
        if self._kept > MAX_KEPT:
            raise LimitError(
                f"{self._kept:,} nodes and announcements of all sources together, over the limit of {MAX_KEPT:,}"
            )

    def forget(self, source: str) -> None:
        """Subtract the announcements of `source` from the total.

        Call this method when the announcements are dropped.
        """
        self._kept -= self._of_source.pop(source, 0)
