"""One CUDA graph that the host has captured, and its clones. A clone also has stamps: kernels that store the device's
time.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from cbtop.profiler.definitions import BrickDefinition, OwningKey, OwnOperations
from cbtop.profiler.device.graph_surgery import StampedGraph, StampSites
from cbtop.profiler.device.pairs import NOT_HERE
from cbtop.profiler.device.stamp_cost import StampCosts
from cbtop.profiler.held_steps import Part
from cbtop.profiler.instrument.capturing import Capture, CapturedCall, capture_here, captures
from cbtop.profiler.instrument.device_graphs import DeviceGraphs, settle
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.instrument.kernel_bursts import GraphNodePlaces, KernelRecording
from cbtop.profiler.instrument.placed_calls import PlacedCalls
from cbtop.profiler.instrument.stamp_plans import StampPlan, times_without_stamps
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.trouble import in_words, log_once, log_own_error
from cbtop.profiler.instrument.work import work_of
from cbtop.profiler.steps import ActiveStep
from cbtop.protocol import clock
from cbtop.protocol.vocabulary import SAMPLE, NodeKind

# For a graph with fewer stamps than this, the clone `_ends` is timed for comparison instead of the host's graph. The
# launch of a graph takes 10 us, which would add 0.05 us or more to the cost of each stamp.
FEW_STAMPS = 200
COPIES = 4  # number of clones that take turns if every step is recorded
PLAIN_EVERY = 64  # after this many replays with stamps, run one without stamps to compare
FIRST_PLAIN = 8  # used instead of PLAIN_EVERY until the cost of stamps is known
# with more replays than this waiting for the cost of stamps, record the oldest with an estimated cost
MOST_HELD = 256
MOST_WAITING = 1024  # number of replays of one graph that may wait to be recorded
ENOUGH_PLAIN = 128  # check the cost of timing plain (not recorded) replays after this many of them
MAX_STAMPED = 32  # maximum number of graphs with stamps; each takes some megabytes on the device


class PendingReplay:
    """A replay that is not recorded yet.

    `stamped` is the clone that ran, or None for the host's own graph. `plan` says where its stamps are, or is None if
    only its ends have stamps.
    """

    __slots__ = ("around", "is_due", "is_of_all", "own_ns", "pair", "plan", "stamped", "step", "times")

    def __init__(
        self,
        pair: int,
        step: ActiveStep | None,
        ready: tuple[StampedGraph, StampPlan | None] | None,
        *,
        is_due: bool,
        is_of_all: bool,
    ) -> None:
        self.pair = pair
        self.is_due = is_due  # whether to record this replay; it may have run without stamps
        self.is_of_all = is_of_all  # whether to time replays that are not recorded (plain replays)
        self.own_ns = 0  # time in ns that cbtop spent on this replay; stamps inside the graph are not included
        self.step = step  # the step that contains this replay; None if the replay is a step itself
        self.stamped: StampedGraph | None
        self.plan: StampPlan | None
        self.stamped, self.plan = ready or (None, None)
        # The device's times before and after the replay; None until they were read.
        self.around: tuple[int, int] | None = None
        self.times: list[int] | None = None  # the device's times at the stamps inside the graph


# The data of a replay that is being launched:
# - the number of its pair of stamps
# - its stream
# - whether to record the replay
# - whether the device was idle, and so waits for cbtop
# - the clone that runs and the plan of its stamps, or None for the host's graph
Begun = tuple[int, int, bool, bool, tuple[StampedGraph, StampPlan | None] | None]


class CapturedGraph:
    """One CUDA graph of the host: its clones with stamps, its launches, and the cost of its stamps."""

    def __init__(self, graph: Any, clone: int, capture: Capture, device: DeviceGraphs, steps: ModelSteps) -> None:
        self._graph = weakref.ref(graph, self._is_dropped_with)
        self.clone = clone
        self._spans = capture.spans
        self.on = device
        self.steps = steps
        for span in capture.spans:
            _put_on_device(span, steps.on_device)
        self.profiler = steps.profiler
        # All paths of the profiler have the same positions, so use any of them.
        self._path = steps.profiler.parts.paths.host
        calls = capture.calls
        self._tokens, self._sequences = sum(call.tokens for call in calls), calls[0].sequences
        self.phase = calls[0].phase
        self._key = (NodeKind.STEP, self.phase, steps.model) if steps.model else (NodeKind.STEP, self.phase)
        self._is_checked = False  # True after the first replay, which tells whether the graph draws random numbers
        # Clones with stamps inside, and the plans of their stamps. The clones take turns. Empty before the first
        # replay with stamps.
        self.variants: list[tuple[StampedGraph, StampPlan]] = []
        # A clone with stamps only at its ends. If the graph has few stamps, it is timed for comparison (see
        # FEW_STAMPS).
        self._ends: StampedGraph | None = None
        self._turn = 0
        self._stamped_since = 0  # number of replays with stamps since the last replay without stamps
        # Number of steps since the last recorded step that were lost. Too many steps were waiting, or their times
        # were invalid.
        self._lost = 0
        # Whether to record the next replay, because no clone was free for an earlier one.
        self._is_due = False
        self._is_every = not isinstance(self.profiler, GovernedProfiler) and self.profiler.sample_every == 1
        self._is_plain_timed = True
        # Times in ns of plain (not recorded) replays since the last check of their cost (see ENOUGH_PLAIN).
        self._plain_ns: list[int] = []
        self._own_ns: list[int] = []
        self.launches: deque[PendingReplay] = deque()
        self.costs = StampCosts()
        self._kernel_places: GraphNodePlaces | None = None
        self.is_left_alone = bool(capture.why_not)
        if capture.why_not:
            self.leave_alone(capture.why_not)

    def _is_dropped_with(self, _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Drop the clones when the host drops its graph. NCCL cannot end while a clone contains its kernels.

        `sys.is_finalizing` is a default argument, because this module's globals may already be deleted when the
        interpreter ends.
        """
        self.on.drop(self)
        if not is_finalizing() and not captures:
            settle(False)

    def leave_alone(self, why: str) -> None:
        """From now on, run only the host's own graph, and log the reason `why`."""
        log_once(f"a captured graph is not looked into: {why}")
        self.is_left_alone = True
        self.on.drop(self)

    def replay(self, original: Callable[[Any], None], graph: Any) -> None:
        """Replay the graph for the host, with a stamp before and after it. Some replays also have stamps inside."""
        if self.is_left_alone or self.on.device.is_of_parent:
            original(graph)
            return
        if not self._is_checked:
            before = _random_numbers_drawn(self.on.index)
            original(graph)
            self._is_checked = True
            if (
                before is None or _random_numbers_drawn(self.on.index) != before
            ):  # torch counts how many random numbers each replay draws
                self.leave_alone("it draws random numbers")
            return
        begun_ns = clock.perf_counter_ns()
        is_on = self.profiler.enabled
        if is_on and _is_burst_asked(self.steps) and self._replay_in_burst(original, graph):
            return
        begun: Begun | None = None
        step: Any = None
        try:
            step = self._path.position.step
            begun = self._begun(step) if is_on else None
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a captured graph is not looked into")
            self.leave_alone(in_words(error))
        launched_ns = clock.perf_counter_ns()
        if begun is None or begun[-1] is None:
            original(graph)
        if begun is None:
            return
        try:  # from here on the device has work, so cbtop no longer delays it
            after_ns = clock.perf_counter_ns()
            on, (pair, stream, is_recorded, was_idle, ready) = self.on, begun
            on.pairs.end(pair, stream)
            is_stamped = ready is not None and ready[1] is not None
            self._turn += is_stamped
            self._stamped_since = self._stamped_since + 1 if is_stamped else 0
            if step is not None and is_recorded:
                step.wait()
            launch = PendingReplay(pair, step, ready, is_due=is_recorded, is_of_all=self._is_plain_timed)
            launch.own_ns = on.stamp_ns + (launched_ns - begun_ns if was_idle else 0)
            self.launches.append(launch)
            on.launched(self)
            on.settle()
            if on.pairs.is_through():  # the device had nothing to do while cbtop worked
                launch.own_ns += clock.perf_counter_ns() - after_ns
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "some steps of captured graphs are not recorded")

    def _watch(self, duration_ns: int, own_ns: int, allowed_share: float) -> None:
        """Store the time of a plain (not recorded) replay and the cost of timing it.

        Stop timing plain replays if this cost is too high.
        """
        self._plain_ns.append(duration_ns)
        self._own_ns.append(own_ns)
        if len(self._own_ns) < ENOUGH_PLAIN:
            return
        each_ns, own_each_ns = median(self._plain_ns), median(self._own_ns)
        self._plain_ns.clear()
        self._own_ns.clear()
        if own_each_ns <= allowed_share * each_ns:
            return
        how = f"a replay takes {each_ns / 1000:.0f} us, of which timing it would take more than is allowed"
        if not self._is_plain_timed:
            self.leave_alone(how)
        self._is_plain_timed = False
        log_once(f"of a captured graph no replays are counted but those that are recorded: {how}")

    def _begun(self, step: ActiveStep | None) -> Begun | None:
        """Enqueue the stamp before a replay. Launch a clone if one should run instead of the host's graph.

        Returns None without a stamp.
        """
        is_recorded = self._is_recorded(step)
        if not is_recorded and not self._is_looked_at(step):
            return None
        on, pairs = self.on, self.on.pairs
        if len(self.launches) >= MOST_WAITING:
            self._lost += step is None or is_recorded
            return None
        stream = on.current_stream()
        ready = self._ready(stream) if is_recorded and not self._is_compared() else None
        ready = ready or self._compared()
        was_idle = pairs.is_through()
        pair = pairs.begin(stream)
        # A new thread may have no current CUDA context. `on.stream()` calls torch, which makes one current.
        if pair == NOT_HERE and on.stream() is not None:
            pair = pairs.begin(stream)
        if pair == NOT_HERE:
            return None
        if pair is None:  # all pairs of stamps are in use, because the device is late
            self._lost += step is None or is_recorded
            return None
        try:
            if ready is not None and not ready[0].launch(stream):
                ready = None  # another thread has just launched this clone
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a captured graph is not looked into")
            self.leave_alone(in_words(error))
            ready = None
        return pair, stream, is_recorded, was_idle, ready

    def _is_looked_at(self, step: ActiveStep | None) -> bool:
        """Return whether to time a replay that is not recorded.

        The reason is to count it as a plain step, or to compare it with replays that have stamps.
        """
        if step is None and self._is_plain_timed:
            return bool(self._path.recording)
        return bool(self._stamped_since)

    def replay_recorded(self, original: Callable[[Any], None], graph: Any, recording: KernelRecording) -> None:
        """Replay the graph for the host while CUPTI records its kernels."""
        is_launched = False
        try:
            stream = self.on.stream()
            if not self.is_left_alone and self._is_checked and stream is not None:
                if self._kernel_places is None:
                    self._kernel_places = GraphNodePlaces(self.on.device.driver, self.clone, self._spans)
                recording.launch(self.clone, self._kernel_places, stream)
                is_launched = True
                placed = capture_here()
                if isinstance(placed, PlacedCalls):
                    placed.replayed(self._spans)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            recording.bursts.refuse(error)
        if not is_launched:
            with recording.paused():
                original(graph)

    def _replay_in_burst(self, original: Callable[[Any], None], graph: Any) -> bool:
        """Replay the graph as a step. CUPTI records its kernels. Returns False if the graph was not replayed."""
        recording = self.steps.bursts.begin(self._key, self.steps, has_calls=False)
        if recording is None:
            return False
        try:
            self.replay_recorded(original, graph, recording)
        finally:
            recording.end_step()
        return True

    def _is_recorded(self, step: Any) -> bool:
        """Return whether to record a replay. `step` is the step that contains it, or None if the replay is a step
        itself.
        """
        if step is None:
            is_sampled = self.profiler._is_replay_sampled(self._key) or self._is_due
            self._is_due = False
        else:
            # Inside a step of a different model, the replay is not recorded.
            is_sampled = bool(step.model == self.steps.model)
        return is_sampled and self._path.recording

    def _is_compared(self) -> bool:
        """Return whether the next recorded replay runs without stamps, to compare it with replays that have
        stamps.
        """
        first = 1 if self._is_every else FIRST_PLAIN
        return self._stamped_since >= (first if self.costs.known is None else PLAIN_EVERY)

    def _compared(self) -> tuple[StampedGraph, None] | None:
        """Return the clone that has stamps only at its ends, if it should run next for comparison. Returns None for
        the host's own graph.
        """
        ends = self._ends
        return (ends, None) if ends is not None and self._stamped_since and not ends.is_running else None

    def _ready(self, stream: int) -> tuple[StampedGraph, StampPlan | None] | None:
        """Return the clone to launch instead of the host's graph, or None if the host's graph should run."""
        on = self.on
        if not self.variants and (on.stream() is None or not self._build(stream)):
            return None
        stamped, plan = self.variants[self._turn % len(self.variants)]
        if stamped.is_running and on.stream() is not None:
            on.settle()
        if stamped.is_running:  # the device has not finished the previous replay of this clone
            self._is_due = True
            return None
        return stamped, plan

    def _build(self, stream: int) -> bool:
        on = self.on
        if on.stamped_graphs >= MAX_STAMPED:
            self.leave_alone(f"{MAX_STAMPED} others are")
            return False
        shape = StampSites.of(on.device.driver, self.clone)
        plan = StampPlan(shape, self._spans)
        if not any([isinstance(interval.keys[-1], BrickDefinition) for interval in plan.intervals]):
            self.leave_alone("no call of a brick was seen between its nodes")
            return False
        if plan.left_out:
            log_once(f"{plan.left_out} calls in a captured graph are not timed: its kernels run side by side there")
        for _ in range(COPIES if self._is_every else 1):
            self.variants.append((StampedGraph(on.device, self.clone, plan.places, stream), plan))
        if len(plan.places) < FEW_STAMPS:
            self._ends = StampedGraph(on.device, self.clone, [plan.places[0], plan.places[-1]], stream)
        return True

    def settle(self, *, is_last: bool = False) -> None:
        """Record all replays that the device has finished, in order.

        If `is_last`, record them even without a measured cost of stamps. The cost is then an estimate.
        """
        before = self.costs.known
        for launch in list(self.launches):
            if launch.around is None and not self._is_told(launch):
                break
        known = self.costs.known
        # Announce the cost when it becomes known, and at 4, 8, 16 … comparisons.
        if known is not None and (before is None or self.costs.seen.bit_count() == 1):
            self.on.say_how_measured(self, known)
        for launch in list(self.launches):
            if launch.around is None:
                break
            if self._may_record(launch, is_last=is_last):
                self.launches.remove(launch)
                self._record(launch)
        if is_last:
            self._count_lost()

    def _is_told(self, launch: PendingReplay) -> bool:
        """Read the stamps of a replay. Returns False if the device has not finished the replay."""
        stamped = launch.stamped
        if stamped is not None and launch.times is None:
            launch.times = stamped.read()
            if launch.times is None:
                return False
        launch.around = self.on.pairs.read(launch.pair)
        if launch.around is None:
            return False
        around_ns = launch.around[1] - launch.around[0]
        self._compare(launch.times, around_ns, launch.plan)
        if launch.step is None and isinstance(self.profiler, GovernedProfiler):
            governor, is_recorded = self.profiler.governor, launch.plan is not None
            governor.replayed(self.phase, self.steps.model, around_ns, launch.own_ns, is_recorded=is_recorded)
            if not is_recorded:
                self._watch(around_ns, launch.own_ns, governor.allowed_share)
        return True

    def _compare(self, times: list[int] | None, around_ns: int, plan: StampPlan | None) -> None:
        """Use a replay to measure the cost of stamps.

        `times` are the stamps inside the graph. `around_ns` is the time from the stamp before the graph to the stamp
        after it.
        """
        inside_ns = 0 if times is None else times[-1] - times[0]
        ends = 0 if self._ends is None else 2
        if times is not None and plan is not None:
            self.costs.stamped(inside_ns if ends else around_ns, len(times) - ends, around_ns - inside_ns)
        elif not ends:
            self.costs.plain(around_ns)
        elif times is not None:
            self.costs.plain(inside_ns)

    def _may_record(self, launch: PendingReplay, *, is_last: bool) -> bool:
        if launch.step is not None and launch.step.is_running:
            return False
        if launch.plan is None:
            return True
        return self.costs.known is not None or is_last or len(self.launches) > MOST_HELD

    def _record(self, launch: PendingReplay) -> None:
        times, step, known = launch.times, launch.step, self.on.device.time
        assert launch.around is not None
        if times is None or launch.plan is None:
            if step is None and known.last is not None and launch.is_of_all:
                end_ns = known.host_ns(launch.around[1])
                inside_ns = self.costs.inside_ns(launch.around[1] - launch.around[0])
                cost = self.costs.guess()
                if times is not None and cost is not None:
                    inside_ns = max(0, times[-1] - times[0] - round(cost.cost_ns))
                self._record_step(self.phase, end_ns - inside_ns, end_ns, None)
            elif step is not None and launch.is_due:
                step.told(None)
            return
        cost = self.costs.guess()
        if cost is None or known.last is None or any([after < before for before, after in pairwise(times)]):
            if step is None:
                self._lost += 1
            else:
                step.told(None)
            return
        begun_ns = known.host_ns(times[0])
        at = [begun_ns + offset for offset in times_without_stamps(times, cost.cost_ns)]
        parts: list[Part] = [
            (interval.keys, at[interval.begin], at[interval.end], interval.elements)
            for interval in launch.plan.intervals
        ]
        if step is not None:
            step.told(parts)
        else:
            name = self.phase if launch.is_of_all else f"{self.phase}{SAMPLE}"
            self._record_step(name, begun_ns, at[-1], parts)

    def _record_step(self, name: str, begun_ns: int, ended_ns: int, parts: list[Part] | None) -> None:
        lost, self._lost = self._lost, 0
        self.profiler.parts.steps.record(
            name,
            self._tokens,
            begun_ns,
            ended_ns,
            parts,
            lost=lost,
            model=self.steps.model,
            sequences=self._sequences or None,
        )

    def _count_lost(self) -> None:
        lost, self._lost = self._lost, 0
        self.profiler.parts.steps.lose(lost)

    def give_up(self) -> None:
        """Stop waiting for the device and for steps to end. Count all waiting replays as lost."""
        while self.launches:
            launch = self.launches.popleft()
            if launch.step is None:
                self._lost += 1
            elif launch.is_due:
                self._lost += launch.step.is_running
                launch.step.told(None)
        self._count_lost()

    def close(self) -> bool:
        """Free the memory of the clones on the device. Returns False, and frees nothing, if a replay is running."""
        self.settle(is_last=True)
        if self.launches:
            return False
        while self.variants:
            self.variants.pop()[0].close()
        ends, self._ends = self._ends, None
        if ends is not None:
            ends.close()
        clone, self.clone = self.clone, 0
        if clone and not self.on.device.is_of_parent:
            self.on.device.driver.destroy_graph(clone)
        return True

    @property
    def is_stamped(self) -> bool:
        return bool(self.variants)

    @property
    def is_gone(self) -> bool:
        return self._graph() is None


def _random_numbers_drawn(index: int) -> int | None:
    """Return how many random numbers the generator of the device `index` has drawn, or None if that is unknown."""
    try:
        return int(torch.cuda.default_generators[index].get_offset())
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, "a captured graph is not looked into")
        return None


def _put_on_device(span: CapturedCall, on_device: dict[Hashable, Hashable]) -> None:
    """Give the call `span` the keys of the bricks that the device times. Do the same for the calls inside it.

    Also drop their references to modules.
    """
    module, key = span.module, span.key
    span.module = None
    span.own = _own_on_device(span.own, on_device)
    if isinstance(key, OwningKey):
        span.key = OwningKey.of(key, _own_on_device(key.own, on_device))
    elif isinstance(key, OwnOperations):
        span.key = _own_on_device(key, on_device)
    elif isinstance(key, BrickDefinition):
        if key not in on_device:
            work = key.work
            if module is not None:
                work = work_of(module, key.name if key.brick is None else key.brick, is_timed_there=True)
            on_device[key] = replace(key, backend="torch on cuda", work=work)
        span.key = on_device[key]
    for inner in span.inside:
        _put_on_device(inner, on_device)


def _own_on_device(own: OwnOperations | None, on_device: dict[Hashable, Hashable]) -> OwnOperations | None:
    """Return the brick `own` (a module's own operations) as a brick that the device times."""
    if own is None:
        return None
    there = on_device.setdefault(own, replace(own, backend="torch on cuda", on_device=True))
    return there if isinstance(there, OwnOperations) else None


def _is_burst_asked(steps: ModelSteps) -> bool:
    """Return whether a command has asked for the kernels of a few steps."""
    try:
        return bool(steps.bursts.is_asked)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, "a request for kernels is not answered")
        return False
