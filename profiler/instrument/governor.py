"""Keeps what instrumentation costs within a share of the program's time, by recording fewer of its steps.

Rules
- The cost is measured in the process itself, beside steps that are not recorded: of steps of one kind (their name,
  model and tokens) it takes those that are recorded, the one that follows each (in it the timed calls are swapped
  out again), and the plain ones between. Medians; their interval is that of order statistics, 95 % each.
- What a recorded step costs is (recorded - plain) + (the one after - plain). One step in k is recorded: k is so large
  that the upper end of the interval, spread over k steps, is within the share allowed.
- Until that is known one step in FIRST_EVERY is recorded; it is never more than that, for plain steps are needed.
- What a plain step pays (the look whether it is its turn) is in no difference, and so not in the figure.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import Recorder
from cbtop.profiler.steps import Step, Steps
from cbtop.protocol.messages import Sampling

FIRST_EVERY = 4  # recorded, the one after, and two plain ones
MOST_EVERY = 10_000
WARM_UP = 8  # steps of a kind, which fill caches and compile
SAMPLES = 61  # of each sort, the newest
ENOUGH = 11  # of each sort
LOOK_AFTER = 256  # steps of a kind, from one decision to the next
MAX_KINDS = 256
Z_95 = 1.96


class Kind:
    """Steps that do the same work: how long they took, in ns, by sort."""

    __slots__ = ("after", "look_at", "plain", "recorded", "seen", "total_ns", "was_recorded")

    def __init__(self) -> None:
        self.seen = self.total_ns = self.look_at = 0
        self.was_recorded = False
        self.recorded, self.after, self.plain = (deque[int](maxlen=SAMPLES) for _ in range(3))

    @property
    def is_known(self) -> bool:
        """Whether enough of them were seen to say what recording one costs."""
        return min(len(self.recorded), len(self.after), len(self.plain)) >= ENOUGH

    def cost_ns(self) -> tuple[float, float, float]:
        """What recording one of them costs: between the ends of its interval, the estimate."""
        recorded, after, plain = (_median(sorted(sort)) for sort in (self.recorded, self.after, self.plain))
        low, middle, high = (recorded[at] + after[at] - 2 * plain[2 - at] for at in range(3))
        return low, middle, high


class Governor:
    """Decides which steps are recorded; `every`: one in so many."""

    def __init__(self, allowed_percent: float, announce: Callable[[Sampling], None]) -> None:
        self.every = FIRST_EVERY
        self._allowed_percent = allowed_percent
        self._announce = announce
        self._turns: dict[object, int] = {}
        self._kinds: dict[object, Kind] = {}

    def is_sampled(self, key: object) -> bool:
        """Whether the step `key` that begins now is recorded: the first, and every k-th after it."""
        if len(self._turns) >= MAX_KINDS:
            self._turns.clear()
        turn = self._turns.get(key, 0)
        self._turns[key] = 0 if turn + 1 >= self.every else turn + 1
        return turn == 0

    def ended(self, key: object, duration_ns: int, *, recorded: bool) -> None:
        """A step has ended; steps with the same `key` do the same work."""
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:  # what comes seldom tells nothing
                self._kinds = {key: kind for key, kind in self._kinds.copy().items() if kind.is_known}
                if len(self._kinds) >= MAX_KINDS:
                    return
            kind = self._kinds[key] = Kind()
        follows, kind.was_recorded = kind.was_recorded, recorded
        kind.seen += 1
        kind.total_ns += duration_ns
        if kind.seen <= WARM_UP:
            return
        (kind.recorded if recorded else kind.after if follows else kind.plain).append(duration_ns)
        if recorded and kind.seen >= kind.look_at and kind.is_known:
            kind.look_at = kind.seen + LOOK_AFTER
            known = (other for other in list(self._kinds.values()) if other.is_known)
            if kind is max(known, key=lambda other: other.total_ns):  # most of the time goes into its steps
                self._decide(kind)

    def _decide(self, kind: Kind) -> None:
        plain_ns = max(1, _median(sorted(kind.plain))[1])
        low, middle, high = (100 * cost_ns / plain_ns for cost_ns in kind.cost_ns())  # percent of a plain step
        every = min(MOST_EVERY, max(FIRST_EVERY, math.ceil(high / self._allowed_percent)))
        self.every = every
        self._announce(Sampling(every, middle / every, low / every, high / every, self._allowed_percent))


def _median(ordered: list[int]) -> tuple[int, int, int]:
    """The median between the ends of its interval."""
    count = len(ordered)
    reach = math.ceil(Z_95 * math.sqrt(count) / 2)
    middle = count // 2
    return ordered[max(0, middle - reach)], ordered[middle], ordered[min(count - 1, middle + reach)]


class GovernedProfiler(BrickProfiler):
    """A profiler that costs `allowed_percent` of its process's steps, as far as it can see."""

    def __init__(self, allowed_percent: float, *, recorder: Recorder) -> None:
        self.governor = Governor(allowed_percent, self.announce)
        super().__init__(sample_every=FIRST_EVERY, recorder=recorder)

    def step(self, name: str | None = None, tokens: int = 0, model: str = "") -> Step:
        return GovernedStep(self.governor, self._steps, name, tokens, model)

    def _is_sampled(self, key: object) -> bool:
        return self.governor.is_sampled(key)


class GovernedStep(Step):
    """A step that tells the governor how long it took, recorded or not."""

    __slots__ = ("_begun_ns", "_governor")

    def __init__(self, governor: Governor, steps: Steps, name: str | None, tokens: int, model: str) -> None:
        super().__init__(steps, name, tokens, model)
        self._governor = governor

    def __enter__(self) -> GovernedStep:
        self._begun_ns = time.perf_counter_ns()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        is_whole = kind is None and self._position is not None and self._outer is None
        key = self._name, self._model, self.tokens
        super().__exit__(kind, error, trace)
        if is_whole:
            took_ns = time.perf_counter_ns() - self._begun_ns
            try:
                self._governor.ended(key, took_ns, recorded=self._scope is not None)
            except Exception as trouble:  # noqa: BLE001 - trouble of ours is not the host's
                self._steps.give_up(trouble)
