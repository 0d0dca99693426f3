"""Keeps the cost of instrumentation within a share of the program's time. To do so, it records one step in k.

Which steps
- The first step of each kind (name and model) is recorded, then one step in k. A step is recorded if the fraction of
  its number times the golden ratio is below 1/k (Knuth, The Art of Computer Programming, volume 3, section 6.4). So
  periodic steps are recorded as often as others, and no gap is much longer than k.
- Processes that count the same steps choose the same steps, and a larger k chooses a subset. So ranks that wait for
  each other pay for recording at the same time.
- k is 1 if recording every step is cheap enough. Even then, once in PLAIN_PAIRS steps, two steps in a row are not
  recorded, to measure the cost. The first of them removes the timed calls. The second is plain.

The cost
- Recording makes three sorts of steps longer: recorded steps, the next step, which removes the timed calls, and steps
  that run in other threads during a recorded step, or while a window of kernels is open.
- Each such step is compared with the mean of the plain steps of its kind before and after it, so that a steady growth
  cancels out. A lonely plain step is compared with the recorded steps around it.
- The cost is the median of these differences, with a 95 % interval from order statistics. The measured time of cbtop
  in plain steps is added, with a share of the time for decisions.
- One cost is not measured: methods that stay wrapped check in plain steps, too, whether to record.

Choosing k
- The upper end of the interval, divided by k, must be within four fifths of the share. The last fifth is for costs
  that the process cannot measure. (On an H200, plain replays of a captured graph of 4.9 ms took 5 us more than
  measured.)
- The processor time of the thread that samples functions (cpu_sampling.py) counts as if the program had waited for
  it.
- If plain steps alone use up the share, recording may still take a fifth of the share. Without recording, cbtop would
  show nothing and still cost almost as much.
- Until FLOOR steps of a kind are recorded, one step in FIRST_EVERY is recorded at any cost, because fewer steps give
  no reliable figure. The first WARM_UP_RECORDED steps of a warm-up (warm_up.py) are recorded, and do not count for
  the cost.
- While the cost is unknown, one step in FIRST_EVERY is recorded, later fewer and fewer. If recording has cost more
  than the share, half as many steps are recorded until the excess is paid back.
"""

from __future__ import annotations

import math
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Collection, Hashable
from enum import IntEnum
from typing import NamedTuple
from weakref import ref

from cbtop.profiler.cpu_sampling import CpuSampling
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import Recorder
from cbtop.protocol.messages import Sampling
from cbtop.protocol.vocabulary import WARM_UP

FIRST_EVERY = 4  # Record one step in this number until the cost is known and FLOOR steps were recorded.
FLOOR = 20  # number of recorded steps of a kind that are needed for reliable figures
WARM_UP_RECORDED = 2  # number of warm-up steps of a kind that are recorded
MOST_EVERY = 10_000
PASSED_OVER = 8  # the first steps of a kind may fill caches, so this many are not used to measure the cost
SAMPLES = 121  # number of newest differences that are stored
ENOUGH = 11
MAX_WAITING = 16  # compare two plain steps only if at most this many steps are between them
LOOKS = 9  # number of newest decisions; the median of their durations counts as overhead
LOOK_STEPS, LOOK_NS = 64, 250_000_000  # least number of steps, and least time in ns, between two decisions
LOOK_TIMES = 2_000  # pause after a decision, as a multiple of the decision's duration
LEARNING_STEPS = 256  # record fewer steps if the cost is still unknown after this many
MAX_KINDS = 64
# Added to the key of a step that replays a captured graph, to count replays separately.
REPLAYED = "replayed"
Z_95 = 1.96
LEAST_OF_INTERVAL = 6  # the range of six values contains their median with 97 %, that of five values with 94 %
USED = 0.8  # the part of the allowed share that cbtop tries to use
# Share of the time that windows of kernels, and recorded training steps, may cost until FLOOR steps are recorded.
FLOOR_SHARE = 5 / 105
SHARING_NS = 20_000_000_000  # models that have recorded a step in the last so many ns divide the allowed cost
LEAST_USED = 0.2  # the fraction of the allowed share that recording may always use
ONE = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15  # fraction of the golden ratio, multiplied by ONE
# With k below FIRST_EVERY, steps with a fraction in one of two ranges are not recorded. The ranges begin at
# PLAIN_FROM and PLAIN_AFTER. A step in the first range is followed by a step in the second, so unrecorded steps come
# in pairs.
PLAIN_PAIRS = 64
PLAIN_FROM = ONE * 3 // 10
PLAIN_AFTER = (PLAIN_FROM + GOLDEN) % ONE
PLAIN_WIDTH = ONE // PLAIN_PAIRS
WINDOW = "window"  # this key stands for an open window of kernels among the running recorded steps
MOST_APART = 4  # compare a recorded step only with a plain step that is at most this many steps earlier


class Sort(IntEnum):  # an IntEnum, because hashing members of other enums runs Python code
    """The sorts of steps, by the time that recording adds.

    PLAIN: nothing. RECORDED: the step is recorded. AFTER: the step removes the timed calls. BESIDE: a step in another
    thread is recorded at the same time, or a window of kernels is open.
    """

    PLAIN = 0
    RECORDED = 1
    AFTER = 2
    BESIDE = 3


PLAIN, RECORDED, AFTER, BESIDE = Sort


class Estimate(NamedTuple):
    """An estimate of a time in ns, with its confidence interval."""

    low: float
    middle: float
    high: float

    def times(self, factor: float) -> Estimate:
        return Estimate(*(factor * end for end in self))

    def plus(self, other: Estimate) -> Estimate:
        return Estimate(*(end + of_other for end, of_other in zip(self, other, strict=True)))


NOTHING = Estimate(0, 0, 0)


class Alone(NamedTuple):
    """A plain step that has no other plain step nearby. It will be compared with the next recorded step.

    `number` is its number among the steps of its kind. The last recorded step was `distance` steps earlier and took
    `before_ns`. `after_ns` is the time of the step between them that removed the timed calls, if there was one.
    """

    number: int
    plain_ns: int
    before_ns: int
    distance: int
    after_ns: int | None


class StepKind:
    """The measurements of the steps of one kind (name and model)."""

    __slots__ = ("alone", "counts", "excess", "plain_ns", "recent", "seen", "waiting")

    def __init__(self) -> None:
        self.seen = 0
        self.recent = 0.0  # number of recent steps; halved at each decision
        self.counts = [0 for _ in Sort]
        self.excess: list[deque[float]] = [deque(maxlen=SAMPLES) for _ in Sort]
        self.plain_ns: int | None = None  # time in ns of the last plain step
        # Steps that wait for the next plain step, to be compared with it.
        self.waiting: list[tuple[Sort, int]] = []
        self.alone: Alone | None = None

    def estimate(self, sort: Sort) -> Estimate | None:
        """Return the overhead in ns of a step of this sort, or None if it is unknown."""
        found = list(self.excess[sort])
        return median_of(sorted(found)) if len(found) >= ENOUGH else None

    def compare(self, waiting: list[tuple[Sort, int]], before_ns: int | None, after_ns: int) -> None:
        """Compare each step in `waiting` with the mean of the plain steps before and after it.

        If too many steps wait (MAX_WAITING), the later plain step is too far away. It becomes `alone`, and is
        compared with a later recorded step.
        """
        if len(waiting) > MAX_WAITING:
            sorts = [sort for sort, _ in waiting[-2:]]
            if sorts == [RECORDED, AFTER]:
                self.alone = Alone(self.seen, after_ns, waiting[-2][1], 2, waiting[-1][1])
            elif sorts[1] is RECORDED:
                self.alone = Alone(self.seen, after_ns, waiting[-1][1], 1, None)
        elif before_ns is not None:
            for waited, took_ns in waiting:
                self.excess[waited].append(took_ns - (before_ns + after_ns) / 2)

    def compare_alone(self, recorded_ns: int) -> None:
        """Compare the plain step `alone` with the recorded steps before and after it.

        The recorded step after it took `recorded_ns`.
        """
        alone, self.alone = self.alone, None
        apart = self.seen - alone.number if alone else 0
        if alone and 0 < apart <= MOST_APART:
            # how much longer each step is than the last, on average
            growth_ns = (recorded_ns - alone.before_ns) / (alone.distance + apart)
            self.excess[RECORDED].append(recorded_ns - growth_ns * apart - alone.plain_ns)
            if alone.after_ns is not None:
                self.excess[AFTER].append(alone.after_ns + growth_ns - alone.plain_ns)


class GovernedModel:
    """The recorded steps of one model that are running now. All models after the first MAX_KINDS share one object."""

    __slots__ = ("calls_are_in", "is_many", "recorded", "running")

    def __init__(self, *, is_many: bool) -> None:
        self.is_many = is_many
        self.calls_are_in = False
        self.recorded = 0
        # The recorded steps that are running. An open window of kernels is the key WINDOW.
        self.running: dict[Hashable, None] = {}


class StepStart(NamedTuple):
    """What is stored about a step when it begins."""

    sort: Sort
    recorded_before: int
    model: GovernedModel


class Governor:
    """Decides which steps are recorded: one step in `every`.

    `seen` counts the measured steps, and `recorded` those that were recorded. `kinds` has the measurements by name
    and model, and `models` the running recorded steps. `own_ns` has the overhead of the last plain steps. The next
    decision follows after step number `look_at_step`.
    """

    __slots__ = (
        "_announce",
        "_early",
        "_has_announced",
        "_lived_ns",
        "_look_at_ns",
        "_looked_at_step",
        "_looks",
        "_recent_ns",
        "_recorded_alone_ns",
        "allowed_percent",
        "allowed_share",
        "begun",
        "beside_ns",
        "every",
        "floor",
        "has_looked",
        "kinds",
        "look_at_step",
        "look_ns",
        "models",
        "models_by_kernels",
        "own_ns",
        "recorded",
        "sampling",
        "seen",
        "told_ns",
        "window_thread",
    )

    def __init__(self, allowed_percent: float, announce: Callable[[Sampling], None]) -> None:
        self.allowed_percent = allowed_percent
        # The allowed share of the program's whole time. The whole includes the recording.
        self.allowed_share = allowed_percent / (100 + allowed_percent)
        self._announce = announce
        self.models_by_kernels: set[str] = set()  # names of models with steps that only kernel_steps.py records
        self.sampling: CpuSampling | None = None
        self.floor = FLOOR  # set to 0 by a benchmark that chooses the recorded steps itself
        self.forget()

    def forget(self) -> None:
        """Reset all measurements, for example in a forked child."""
        self.every = FIRST_EVERY
        # kind of step -> number of its next step; C code begins only steps of these kinds
        self.begun: dict[object, int] = {}
        # Kind of step with fewer than FLOOR recorded steps -> number of its next step, and how many were recorded.
        self._early: dict[object, list[int]] = {}
        self._has_announced = False
        self.kinds: dict[object, StepKind] = {}
        self.models: dict[object, GovernedModel] = {}
        self.own_ns: deque[float] = deque(maxlen=SAMPLES)  # overhead of beginning and ending a plain step, in ns
        self.told_ns = 0  # duration of the last call of `ended`; it counts for the next step
        self.look_ns = 0  # duration of the last decision; it counts for all steps until the next one
        self._looks: deque[int] = deque(maxlen=LOOKS)  # durations in ns of the latest decisions
        # Whether the last call of `ended` made a decision, which took `look_ns`.
        self.has_looked = False
        # Models that choose their recorded steps themselves. The value is the time in ns when the model last recorded
        # a step.
        self._recorded_alone_ns: dict[str, int] = {}
        self.seen = self.recorded = self._lived_ns = 0
        self.window_thread: int | None = None  # the thread with the open window of kernels
        self.beside_ns = 0  # the time that this window has added to steps of other models in its thread
        self.look_at_step, self._look_at_ns, self._looked_at_step = 0, 0, 0
        self._recent_ns = 0.0

    def is_sampled(self, key: object) -> bool:
        """Return whether to record the step of kind `key` that begins now."""
        if self.models_by_kernels and _model_in(key) in self.models_by_kernels:
            self.begun[key] = self.begun.get(key, 0) + 1
            return False
        return self._is_next_sampled(key)

    def is_replay_sampled(self, key: tuple[object, ...]) -> bool:
        """Return whether to record the replay of kind `key` that begins now.

        May be True even for models in `models_by_kernels`.
        """
        return self._is_next_sampled((*key, REPLAYED))

    def _is_next_sampled(self, key: object) -> bool:
        number = self.begun.get(key)
        if number is None:
            early = self._early.get(key)
            if early is None and len(self.begun) + len(self._early) < MAX_KINDS:
                # Each kind of step begins at a different number. Otherwise, kinds that take turns would be recorded
                # in adjacent steps.
                early = self._early[key] = [(len(self.begun) + len(self._early)) << 32, 0]
            if early is not None:
                return self._is_sampled_early(key, early)
            # After too many kinds, all further kinds count as one. Otherwise, the first step of each would be
            # recorded.
            key = None
            number = self.begun.get(key, 0)
        self.begun[key] = number + 1
        return self._is_next(number, self.every)

    def _is_sampled_early(self, key: object, early: list[int]) -> bool:
        number, recorded = early
        early[0] += 1
        if isinstance(key, tuple) and len(key) > 1 and isinstance(key[1], str) and key[1].endswith(WARM_UP):
            found = recorded < WARM_UP_RECORDED
        else:
            found = not recorded or self._is_next(number, min(self.every, FIRST_EVERY) if self.floor else self.every)
            if recorded + found >= self.floor:
                self.begun[key] = number + 1
                self._early.pop(key, None)
        early[1] += found
        return found

    def _is_next(self, number: int, every: int) -> bool:
        fraction = number * GOLDEN % ONE
        if fraction * every >= ONE:
            return False
        return every >= FIRST_EVERY or not (
            0 <= fraction - PLAIN_FROM < PLAIN_WIDTH or 0 <= fraction - PLAIN_AFTER < PLAIN_WIDTH
        )

    def began(self, step: object, model: str, *, recorded: bool) -> StepStart:
        """Count `step` of `model` as begun. Returns the `mark` for `left` and `ended`."""
        state = self.models.get(model) or self._model(model)
        if recorded:
            state.recorded += 1
            state.calls_are_in = True
            state.running[ref(step, state.running.pop)] = None
            sort = RECORDED
        elif state.running:
            sort = BESIDE
        else:
            was_in, state.calls_are_in = state.calls_are_in, False
            sort = AFTER if was_in else PLAIN
        return tuple.__new__(
            StepStart, (sort, state.recorded, state)
        )  # makes a `StepStart` without a Python frame for `__new__`

    def left(self, step: object, mark: StepStart) -> None:
        """Count `step` as ended, with or without an exception."""
        mark.model.running.pop(ref(step), None)

    def ended(self, name: str, model: str, duration_ns: int, mark: StepStart, own_ns: int = 0) -> None:
        """Measure a step that has completed. `own_ns` is the time that cbtop took to begin and end the step."""
        if not self._has_announced and not self.models_by_kernels:
            self._has_announced = True
            self._announce(Sampling(self.every, None, None, None, self.allowed_percent))
        self.has_looked = False
        if name.endswith(WARM_UP):
            return
        sort = mark.sort
        if sort is PLAIN and mark.model.recorded != mark.recorded_before:
            sort = BESIDE
        if sort is PLAIN:
            self.own_ns.append(own_ns)
        self.seen += 1
        self.recorded += sort is RECORDED
        self._lived_ns += duration_ns
        self._recent_ns += duration_ns
        kind = self.kinds.get((name, model))
        if kind is None:
            key = (name, model) if len(self.kinds) < MAX_KINDS else None
            kind = self.kinds.setdefault(key, StepKind())
        kind.seen += 1
        kind.recent += 1
        kind.counts[sort] += 1
        if sort is BESIDE and kind.plain_ns is not None and self.window_thread == get_ident():
            self.beside_ns += max(0, duration_ns - kind.plain_ns)
        if kind.seen > PASSED_OVER:
            if sort is PLAIN:
                before, kind.plain_ns = kind.plain_ns, duration_ns
                if kind.waiting:
                    waiting, kind.waiting = kind.waiting, []
                    kind.compare(waiting, before, duration_ns)
            # With many models, it is unknown which of them had timed calls in this step.
            elif not (sort is AFTER and mark.model.is_many):
                if kind.alone is not None and sort is RECORDED:
                    kind.compare_alone(duration_ns)
                kind.waiting.append((sort, duration_ns))
                if len(kind.waiting) > MAX_WAITING + 1:
                    del kind.waiting[0]
        if self.seen >= self.look_at_step and self._lived_ns >= self._look_at_ns:
            self._look()
            if self.sampling is not None:
                self.sampling.tell_if_due()

    def window_opened(self) -> None:
        """Note that the calling thread has opened a window of kernels. Launches of all threads take longer now.

        A process has at most one open window.
        """
        self.window_thread, self.beside_ns = get_ident(), 0
        for model in list(self.models.values()):
            model.running[WINDOW] = None
            model.recorded += 1  # steps that are running are not plain

    def window_closed(self) -> None:
        """Note that the window is closed. Does nothing if none was open."""
        if self.window_thread is not None:
            self.window_thread = None
            for model in list(self.models.values()):
                model.running.pop(WINDOW, None)
                model.recorded += 1

    def share_of(self, model: str, recorded: int, now_ns: int, steady: float = 1.0) -> float:
        """Return the share of the time that `model` may spend on recording, if it chooses its recorded steps itself.

        The model has recorded `recorded` steps. The last of them ended at `now_ns`. All models with recent recorded
        steps divide the allowed share. Until `recorded` is FLOOR, the allowed share is at least FLOOR_SHARE. After
        that, only the fraction `steady` of it is used.
        """
        last_ns = self._recorded_alone_ns | {model: now_ns}
        self._recorded_alone_ns = {name: at for name, at in last_ns.items() if now_ns - at < SHARING_NS}
        share = steady * self.allowed_share if recorded >= FLOOR else max(self.allowed_share, FLOOR_SHARE)
        return share / len(self._recorded_alone_ns)

    @property
    def lived_ns(self) -> int:
        """The total time in ns of all measured steps."""
        return self._lived_ns

    @property
    def sampled_share(self) -> float:
        """The share of a core that sampling functions takes (cpu_sampling.py)."""
        return 0.0 if self.sampling is None else self.sampling.share

    def last_plain_ns(self, name: str, model: str) -> int | None:
        """Return the time in ns of the last plain step of a kind, or None if there was none."""
        kind = self.kinds.get((name, model))
        return None if kind is None else kind.plain_ns

    def replayed(self, name: str, model: str, duration_ns: int, own_ns: int, *, is_recorded: bool) -> None:
        """Measure a step that was timed on a device. These steps never overlap."""
        sort = RECORDED if is_recorded else PLAIN
        state = self._model(model)
        self.ended(name, model, duration_ns, StepStart(sort, state.recorded, state), own_ns)

    def _model(self, model: str) -> GovernedModel:
        found = self.models.get(model)
        if found is None:
            is_many = len(self.models) >= MAX_KINDS
            found = self.models.setdefault(None if is_many else model, GovernedModel(is_many=is_many))
            if self.window_thread is not None:
                found.running[WINDOW] = None
        return found

    def _look(self) -> None:
        kinds = list(self.kinds.values())
        cost = _cost_of_recording(kinds)
        if cost is None and self.seen < LEARNING_STEPS:
            return
        steps, self._looked_at_step = self.seen - self._looked_at_step, self.seen
        if steps <= 0:  # another thread has just made the decision
            return
        self.has_looked = True
        # Other programs may interrupt a decision, so use the median duration.
        self._looks.append(self.look_ns)
        looks = sorted(self._looks)
        pause_ns = max(LOOK_NS, LOOK_TIMES * looks[(len(looks) - 1) // 2])
        self.look_at_step, self._look_at_ns = self.seen + LOOK_STEPS, self._lived_ns + pause_ns
        step_ns = max(1.0, self._recent_ns / max(1.0, sum(kind.recent for kind in kinds)))
        self._recent_ns /= 2
        for kind in kinds:
            kind.recent /= 2
        if cost is None and self.models_by_kernels and not self.recorded:
            return  # kernel_steps.py announces the cost of these models
        if cost is None:
            self.every = min(MOST_EVERY, 2 * self.every)
            self._announce(Sampling(self.every, None, None, None, self.allowed_percent))
            return
        own = median_of(sorted(self.own_ns)) if len(self.own_ns) >= ENOUGH else NOTHING
        sampled_ns = self.sampled_share * step_ns
        own = own.plus(Estimate(*[looks[len(looks) // 2] / steps + sampled_ns] * 3))
        share_ns = self.allowed_share * step_ns
        # Time in ns that recording may cost per step.
        allowed_ns = max(USED * share_ns - own.high, LEAST_USED * share_ns)
        every = math.ceil(cost.high / allowed_ns)
        lived_share_ns = self.allowed_share * self._lived_ns
        if self.recorded * cost.middle > max(lived_share_ns - self.seen * own.middle, LEAST_USED * lived_share_ns):
            every *= 2
        self.every = every = min(MOST_EVERY, max(1, every))
        # Because of noise, recorded steps may seem faster than plain ones. A cost is never below zero.
        low, middle, high = [max(0.0, end) for end in cost.times(1 / every).plus(own).times(100 / step_ns)]
        self._announce(Sampling(every, middle, low, high, self.allowed_percent))


def _model_in(key: object) -> str:
    """Return the model in the key of a kind of step, or "" (see `ActiveStep`)."""
    return str(key[2]) if isinstance(key, tuple) and len(key) > 2 else ""


def _cost_of_recording(kinds: list[StepKind]) -> Estimate | None:
    """Return the mean cost of recording a recent step, including the time that it adds to other steps.

    A sort of step with unknown cost counts with the largest known cost. Returns None if the cost of recorded steps is
    known for less than half of the recent steps.
    """
    total = sum(kind.recent for kind in kinds) or 1.0
    estimates = {(kind, sort): kind.estimate(sort) for kind in kinds for sort in Sort if kind.counts[sort]}
    known = [estimate for (_, sort), estimate in estimates.items() if estimate and sort is not PLAIN]
    if 2 * sum(kind.recent for kind in kinds if estimates.get((kind, RECORDED))) < total:
        return None
    dearest = max(known, key=lambda estimate: estimate.high)
    recorded = sum(kind.counts[RECORDED] for kind in kinds)
    cost = NOTHING
    for (kind, sort), estimate in estimates.items():
        if sort is not PLAIN:
            times = kind.recent / total if sort is RECORDED else kind.counts[sort] / recorded
            cost = cost.plus((estimate or dearest).times(times))
    return cost


def median_of(ordered: list[float]) -> Estimate:
    """Return the median of `ordered`, and the limits of its 95 % interval."""
    count = len(ordered)
    reach = math.ceil(Z_95 * math.sqrt(count) / 2)
    middle = count // 2
    return Estimate(ordered[max(0, middle - reach)], ordered[middle], ordered[min(count - 1, middle + reach)])


def interval_of(percent: float, costs: Collection[float]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of an overhead of `percent`, from the costs of recorded steps.

    The limits are None if there are too few costs to know how they scatter.
    """
    if len(costs) < LEAST_OF_INTERVAL:
        return None, None
    low, middle, high = median_of(sorted(costs))
    return percent * low / max(1.0, middle), max(percent, percent * high / max(1.0, middle))


class GovernedProfiler(BrickProfiler):
    """A profiler that keeps its measurable cost within `allowed_percent` of the time of the process's steps."""

    def __init__(self, allowed_percent: float, *, recorder: Recorder) -> None:
        self.governor = Governor(allowed_percent, self.announce)
        super().__init__(sample_every=FIRST_EVERY, recorder=recorder)
        self._steps.governor, self._steps.is_sampled = self.governor, self.governor.is_sampled

    def _is_sampled(self, key: object) -> bool:
        return self.governor.is_sampled(key)

    def _is_replay_sampled(self, key: tuple[object, ...]) -> bool:
        return self.governor.is_replay_sampled(key)

    def _after_fork(self) -> None:
        self.governor.forget()
        super()._after_fork()
