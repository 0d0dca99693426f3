"""Brick times inside captured CUDA graphs: for some replays, a clone of the graph with stamps runs instead.

Rules
- While a model on CUDA is attached, the methods of `torch.cuda.CUDAGraph` are replaced. They work as before, and also
  take notes. When the last model is detached, the class gets its own methods back. The stamps are in a clone of the
  graph, made just before its capture ends.
- During a capture, the calls of a model and its parts note their first and last nodes (capturing.py), and so do lines
  of code that inductor generated (compiled_code.py). The first call of the model tells what a replay is: with one new
  token per sequence it is a decode.
- A replay in an open step gives that step its layers and bricks. A replay outside any step is itself a step, from the
  first stamp to the last. The profiler decides which are recorded, as for any step.
- Each replay has a stamp before it and one after it. A replay outside steps that is not recorded is a plain step. Its
  time is the time between the two stamps, less the time around the graph that recorded replays show. If that is too
  expensive, only recorded replays are steps. These have their own name, because their count and rate are not those of
  all replays.
- If the device is idle, work before a replay costs the host time. So only this comes before it: the decision whether
  to record, the caller's stream, and a stamp, in C. The rest comes after it. The device counts as idle if it has
  reached the stamp after the last replay. If the host has enqueued other work since, this overstates our cost.
- The host does not wait for the device. Stamps are read at the next replay, or when the books are closed. The step is
  recorded then, in the host's time.
- The cost of the stamps inside is how much longer such replays take than others (stamp_cost.py). It is subtracted,
  stretch by stretch, and nothing is recorded until it is known. In a graph with few stamps, the time from the stamp
  before the graph to its begin would distort it. So there the compared replay also runs a clone, with stamps only at
  its ends.
- The time between bricks is named "Other kernels", so the books close. If every step is recorded, COPIES of the clone
  take turns, because the host may be ahead of its device.
- There can be no stamp while kernels run side by side, so calls that begin or end there are left out. A graph is left
  alone if it draws random numbers, if two models are called in it, or if cbtop's code fails. One line says so, and
  the host's own replay runs.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.driver import CudaDriver, Driver
from cbtop.profiler.device.graph_surgery import START, StampedGraph, StampSites
from cbtop.profiler.device.in_line_cost import InLineCost
from cbtop.profiler.device.pairs import NOT_HERE, Pairs
from cbtop.profiler.device.stamp_cost import StampCost, StampCosts
from cbtop.profiler.held_steps import Part
from cbtop.profiler.instrument import compiled_code
from cbtop.profiler.instrument.capturing import OTHER, Capture, CapturedCall, Last, captures
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.instrument.kernel_bursts import GraphNodePlaces, Recording, recording_here
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.trouble import in_words, log_once, log_own_error
from cbtop.profiler.instrument.work import device_of, work_of
from cbtop.profiler.steps import ActiveStep
from cbtop.protocol import clock
from cbtop.protocol.vocabulary import SAMPLE, NodeKind

FEW_STAMPS = 200  # inside: with fewer, the time of a launch (10 us) would add 0.05 us or more to each
COPIES = 4  # of a clone with stamps, if every step is recorded
PLAIN_EVERY = 64  # replays with stamps in a row: the next has none, for comparison
FIRST_PLAIN = 8  # the same until the cost is known; 1 if every step is recorded
MOST_HELD = 256  # replays, until the cost of stamps is known
MOST_WAITING = 1024  # replays of a graph that wait for the device, or for the end of the step around them
ENOUGH_PLAIN = 128  # replays, to know whether timing them is too expensive
MAX_STAMPED = 32  # graphs: each takes some megabytes on the device
WAIT_S = 1.0  # for the device, when the books are closed
NAP_S = 1e-3


# --- the plan of a capture --------------------------------------------------------------------------------------


class StampedInterval:
    """A layer or brick between two stamps of a plan. `keys` lead to it from the step down."""

    __slots__ = ("begin", "elements", "end", "keys")

    def __init__(self, keys: tuple[Hashable, ...], begin: int, end: int, elements: int) -> None:
        self.keys = keys
        self.begin = begin
        self.end = end
        self.elements = elements


class StampPlan:
    """The places of a graph that are stamped, and the stretches between them."""

    def __init__(self, shape: StampSites, spans: list[CapturedCall]) -> None:
        self._shape = shape
        self._found: list[tuple[tuple[Hashable, ...], int, int, int]] = []  # by number of place
        self.left_out = 0  # calls that cannot be stamped
        first, last = shape.places[START], shape.places[shape.end]
        self._walk(spans, (), first, last, names_gaps=True)
        numbers = sorted({first, last}.union(*({begin, end} for _, begin, end, _ in self._found)))
        place_of = {number: place for place, number in shape.places.items()}
        self.places = [place_of[number] for number in numbers]
        at = {number: index for index, number in enumerate(numbers)}
        self.intervals = [
            StampedInterval(keys, at[begin], at[end], elements) for keys, begin, end, elements in self._found
        ]

    def _number(self, last: Last) -> int | None:
        place = self._shape.place_of(last)
        return None if place is None else self._shape.places[place]

    def _walk(
        self, spans: list[CapturedCall], keys: tuple[Hashable, ...], begin: int, end: int, *, names_gaps: bool
    ) -> None:
        """Store `spans` between two places, each after the spans inside it; with `names_gaps`, also the gaps."""
        at, some = begin, False
        for span in spans:
            first, last = self._number(span.begin), self._number(span.end)
            if first is None or last is None or not at <= first <= last <= end:
                self.left_out += 1
                before = len(self._found)
                self._walk(span.inside, keys if span.key is None else (*keys, span.key), at, end, names_gaps=False)
                at = max([at, *(found[2] for found in self._found[before:])])
                continue
            if first == last:  # it runs nothing on the device
                continue
            if span.key is None:  # the model itself
                if names_gaps and first > at:
                    self._found.append(((*keys, OTHER), at, first, 0))
                self._walk(span.inside, keys, first, last, names_gaps=True)
                at, some = last, True
                continue
            if names_gaps and first > at:
                self._found.append(((*keys, OTHER), at, first, 0))
            key = span.key
            is_layer = isinstance(key, tuple)
            self._walk(span.inside, (*keys, key), first, last, names_gaps=is_layer)
            self._found.append(((*keys, key), first, last, span.elements))
            at, some = last, True
        if names_gaps and some and at < end:
            self._found.append(((*keys, OTHER), at, end, 0))


def times_without_stamps(times: list[int], cost_ns: float) -> list[int]:
    """Return the times of the places, in ns after the first, without the cost of the stamps between them."""
    at, found = 0.0, [0]
    for before, after in pairwise(times):
        at += max(0.0, after - before - cost_ns)
        found.append(round(at))
    return found


# --- one graph --------------------------------------------------------------------------------------------------


class PendingReplay:
    """A replay that is not recorded yet. `stamped` is its clone with stamps, at the places of `plan` if any."""

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
        self.is_due = is_due  # it should be recorded, with stamps or not
        self.is_of_all = is_of_all  # all replays are timed, also plain ones
        self.own_ns = 0  # its cost, without that of stamps inside
        self.step = step  # the step around it; None if it is a step itself
        self.stamped: StampedGraph | None
        self.plan: StampPlan | None
        self.stamped, self.plan = ready or (None, None)
        self.around: tuple[int, int] | None = None  # times of the stamps around it, once the device has finished
        self.times: list[int] | None = None  # of the stamps inside


# A replay that is launched: its pair of stamps and its stream; whether it should be recorded; whether the device was
# idle, so that it waited for our work; and the clone that runs instead, with stamps inside or only at its ends.
Begun = tuple[int, int, bool, bool, tuple[StampedGraph, StampPlan | None] | None]


class CapturedGraph:
    """One graph of the host: its clones, its launches and the cost of its stamps."""

    def __init__(self, graph: Any, clone: int, capture: Capture, device: DeviceGraphs, steps: ModelSteps) -> None:
        self._graph = weakref.ref(graph, self._is_dropped_with)
        self.clone = clone
        self._spans = capture.spans
        self._on = device
        self.steps = steps
        for span in capture.spans:
            self._put_on_device(span)
        self.profiler = steps.profiler
        self._hot_path = steps.profiler.parts.paths.host._hot_path  # its position is that of all paths
        calls = capture.calls
        self._tokens, self._sequences = sum(call.tokens for call in calls), calls[0].sequences
        self.phase = calls[0].phase
        self._key = (NodeKind.STEP, self.phase, steps.model) if steps.model else (NodeKind.STEP, self.phase)
        self._is_checked = False  # whether it draws random numbers
        self._variants: list[tuple[StampedGraph, StampPlan]] = []
        self._ends: StampedGraph | None = None  # with stamps only at its ends: if the graph has few
        self._turn = 0
        self._stamped_since = 0  # replays with stamps, since the last one without
        self._lost = 0  # steps lost since the last recorded one: too many waited, or the device's times were invalid
        self._is_due = False  # record the next replay instead of one whose clone was still in use
        self._is_every = not isinstance(self.profiler, GovernedProfiler) and self.profiler.sample_every == 1
        self._is_plain_timed = True
        self._plain_ns: list[int] = []  # since the last check whether timing them is too expensive
        self._own_ns: list[int] = []
        self.launches: deque[PendingReplay] = deque()
        self.costs = StampCosts()
        self._kernel_places: GraphNodePlaces | None = None
        self.is_left_alone = bool(capture.why_not)
        if capture.why_not:
            self.leave_alone(capture.why_not)

    def _is_dropped_with(self, _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Drop the clone with the host's graph, because NCCL ends only when no graph has its kernels.

        When the interpreter ends, the names of this module may be gone already.
        """
        self._on.drop(self)
        if not is_finalizing() and not captures:
            settle(False)

    def leave_alone(self, why: str) -> None:
        """Only run the host's own replay from now on."""
        log_once(f"a captured graph is not looked into: {why}")
        self.is_left_alone = True
        self._on.drop(self)

    def replay(self, original: Callable[[Any], None], graph: Any) -> None:
        """Replay the graph for the host, with stamps around it and perhaps inside."""
        if self.is_left_alone or self._on.device.is_of_parent:
            original(graph)
            return
        if not self._is_checked:
            before = self._drawn()
            original(graph)
            self._is_checked = True
            if before is None or self._drawn() != before:  # torch counts the numbers that a replay draws
                self.leave_alone("it draws random numbers")
            return
        begun_ns = clock.perf_counter_ns()
        is_on = self.profiler.enabled
        if is_on and self._is_asked() and self._replay_in_burst(original, graph):
            return
        begun: Begun | None = None
        step: Any = None
        try:
            step = self._hot_path.position.step
            begun = self._begun(step) if is_on else None
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a captured graph is not looked into")
            self.leave_alone(in_words(error))
        launched_ns = clock.perf_counter_ns()
        if begun is None or begun[-1] is None:
            original(graph)
        if begun is None:
            return
        try:  # now that the device is busy
            after_ns = clock.perf_counter_ns()
            on, (pair, stream, is_recorded, was_idle, ready) = self._on, begun
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
            if on.pairs.is_through():  # otherwise nothing waited for the work after the launch
                launch.own_ns += clock.perf_counter_ns() - after_ns
        except Exception as error:  # noqa: BLE001 - as above
            log_own_error(error, "some steps of captured graphs are not recorded")

    def _watch(self, duration_ns: int, own_ns: int, allowed_share: float) -> None:
        """Note the time and the cost of a plain replay. If the cost is too high, time fewer replays."""
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
        """Stamp the begin of a replay, and launch a clone instead if one is ready. Return None without a stamp."""
        is_recorded = self._is_recorded(step)
        if not is_recorded and not self._is_looked_at(step):
            return None
        on, pairs = self._on, self._on.pairs
        if len(self.launches) >= MOST_WAITING:
            self._lost += step is None or is_recorded
            return None
        stream = on.current_stream()
        ready = self._ready(stream) if is_recorded and not self._is_compared() else None
        ready = ready or self._compared()
        was_idle = pairs.is_through()
        pair = pairs.begin(stream)
        if pair == NOT_HERE and on.stream() is not None:  # torch makes its context current in a thread's first call
            pair = pairs.begin(stream)
        if pair == NOT_HERE:
            return None
        if pair is None:  # the device is far behind
            self._lost += step is None or is_recorded
            return None
        try:
            if ready is not None and not ready[0].launch(stream):
                ready = None  # another thread was faster
        except Exception as error:  # noqa: BLE001 - as above: the host's own replay runs between both stamps
            log_own_error(error, "a captured graph is not looked into")
            self.leave_alone(in_words(error))
            ready = None
        return pair, stream, is_recorded, was_idle, ready

    def _is_looked_at(self, step: ActiveStep | None) -> bool:
        """Return whether to time a replay that is not recorded: as a step, or to learn the cost of stamps."""
        if step is None and self._is_plain_timed:
            return self._hot_path.recording
        return bool(self._stamped_since)

    def replay_recorded(self, original: Callable[[Any], None], graph: Any, recording: Recording) -> None:
        """Replay the graph for the host in a step of a burst."""
        is_launched = False
        try:
            stream = self._on.stream()
            if not self.is_left_alone and self._is_checked and stream is not None:
                if self._kernel_places is None:
                    self._kernel_places = GraphNodePlaces(self._on.device.driver, self.clone, self._spans)
                recording.launch(self.clone, self._kernel_places, stream)
                is_launched = True
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            recording.bursts.refuse(error)
        if not is_launched:
            with recording.paused():
                original(graph)

    def _is_asked(self) -> bool:
        """Return whether a burst of kernels is requested, so that this replay may be in it."""
        try:
            return self.steps.bursts.is_asked
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a request for kernels is not answered")
            return False

    def _replay_in_burst(self, original: Callable[[Any], None], graph: Any) -> bool:
        """Replay the graph as a step of the requested burst. Returns whether it was replayed."""
        recording = self.steps.bursts.begin(self._key, self.steps, has_calls=False)
        if recording is None:
            return False
        try:
            self.replay_recorded(original, graph, recording)
        finally:
            recording.end()
        return True

    def _is_recorded(self, step: Any) -> bool:
        """Return whether this replay is recorded. It is in `step`, or is a step itself."""
        if step is None:
            is_sampled = self.profiler._is_replay_sampled(self._key) or self._is_due
            self._is_due = False
        else:
            is_sampled = bool(step.model == self.steps.model)  # otherwise the step is another model's
        return is_sampled and self._hot_path.recording

    def _is_compared(self) -> bool:
        """Return whether the next replay to record runs without stamps, to show their cost in earlier replays."""
        first = 1 if self._is_every else FIRST_PLAIN
        return self._stamped_since >= (first if self.costs.known is None else PLAIN_EVERY)

    def _compared(self) -> tuple[StampedGraph, None] | None:
        """Return the clone for a comparison after replays with stamps, or None for the host's own replay."""
        ends = self._ends
        return (ends, None) if ends is not None and self._stamped_since and not ends.is_running else None

    def _drawn(self) -> int | None:
        """Return how many random numbers the device's generator has drawn, or None if unknown."""
        try:
            return int(torch.cuda.default_generators[self._on.index].get_offset())
        except Exception as error:  # noqa: BLE001 - as above
            log_own_error(error, "a captured graph is not looked into")
            return None

    def _ready(self, stream: int) -> tuple[StampedGraph, StampPlan | None] | None:
        """Return what to launch instead of the host's own replay, or None if that should run."""
        on = self._on
        if not self._variants and (on.stream() is None or not self._build(stream)):
            return None
        stamped, plan = self._variants[self._turn % len(self._variants)]
        if stamped.is_running and on.stream() is not None:
            on.settle()
        if stamped.is_running:  # the host is ahead of its device
            self._is_due = True
            return None
        return stamped, plan

    def _build(self, stream: int) -> bool:
        on = self._on
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
            self._variants.append((StampedGraph(on.device, self.clone, plan.places, stream), plan))
        if len(plan.places) < FEW_STAMPS:
            self._ends = StampedGraph(on.device, self.clone, [plan.places[0], plan.places[-1]], stream)
        return True

    def _put_on_device(self, span: CapturedCall) -> None:
        """Replace the keys of `span` by keys for the device, and drop its references to modules."""
        module, key = span.module, span.key
        span.module = None
        if isinstance(key, BrickDefinition):
            known = self.steps.on_device
            if key not in known:
                work = key.work
                if module is not None:
                    work = work_of(module, key.name if key.brick is None else key.brick, is_timed_there=True)
                known[key] = replace(key, backend="torch on cuda", work=work)
            span.key = known[key]
        for inner in span.inside:
            self._put_on_device(inner)

    def settle(self, *, is_last: bool = False) -> None:
        """Record finished replays, in order. With `is_last`, also if the cost of stamps is only a guess."""
        before = self.costs.known
        for launch in list(self.launches):
            if launch.around is None and not self._is_told(launch):
                break
        known = self.costs.known
        if known is not None and (before is None or self.costs.seen.bit_count() == 1):  # 4, 8, 16 …
            self._on.say_how_measured(self, known)
        for launch in list(self.launches):
            if launch.around is None:
                break
            if self._may_record(launch, is_last=is_last):
                self.launches.remove(launch)
                self._record(launch)
        if is_last:
            self._count_lost()

    def _is_told(self, launch: PendingReplay) -> bool:
        """Return whether the device has finished the replay, and read its stamps once."""
        stamped = launch.stamped
        if stamped is not None and launch.times is None:
            launch.times = stamped.read()
            if launch.times is None:
                return False
        launch.around = self._on.pairs.read(launch.pair)
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
        """Add a replay to the costs: its `times` inside, and the time between the stamps around it."""
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
        times, step, known = launch.times, launch.step, self._on.device.time
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
        """Stop waiting for the device and for ends of steps. Replays that wait are lost, and counted as lost."""
        while self.launches:
            launch = self.launches.popleft()
            if launch.step is None:
                self._lost += 1
            elif launch.is_due:
                self._lost += launch.step.is_running
                launch.step.told(None)
        self._count_lost()

    def close(self) -> bool:
        """Free its memory on the device. Returns False if a replay still runs, which must end first."""
        self.settle(is_last=True)
        if self.launches:
            return False
        while self._variants:
            self._variants.pop()[0].close()
        ends, self._ends = self._ends, None
        if ends is not None:
            ends.close()
        clone, self.clone = self.clone, 0
        if clone and not self._on.device.is_of_parent:
            self._on.device.driver.destroy_graph(clone)
        return True

    @property
    def is_stamped(self) -> bool:
        return bool(self._variants)

    @property
    def is_gone(self) -> bool:
        return self._graph() is None


# --- one device -------------------------------------------------------------------------------------------------


class DeviceGraphs:
    """The graphs of one device, its clock and the stamps around replays."""

    def __init__(self, driver: Driver, index: int) -> None:
        self.device = CudaDevice(driver)
        self.index = index
        #: Returns the caller's stream on this device, captured or not.
        self.current_stream: Callable[[], int] = functools.partial(torch._C._cuda_getCurrentRawStream, index)
        self._waiting: dict[CapturedGraph, None] = {}  # graphs with launches to read
        self._dropped: dict[CapturedGraph, None] = {}  # graphs to close
        self._live: dict[CapturedGraph, None] = {}
        self.pairs = Pairs(self.device)
        self._in_line = InLineCost(self.device)
        self._settling = threading.Lock()

    def stream(self) -> int | None:
        """Return the caller's stream, or None if it is another device's or is captured."""
        if torch._C._cuda_getDevice() != self.index or torch._C._cuda_isCurrentStreamCapturing():
            return None
        return int(torch._C._cuda_getCurrentRawStream(self.index))

    def captured_last(self) -> Last:
        """Return the nodes of the caller's capture that the next node would follow."""
        return self.device.driver.captured_last(torch._C._cuda_getCurrentRawStream(self.index))

    def cloned(self, capture: Capture) -> int:
        """Copy the caller's captured graph, and put the nodes of the copy into `capture`. Returns 0 without a graph.

        Raises DriverError if it cannot be copied.
        """
        driver = self.device.driver
        graph = driver.captured_graph(torch._C._cuda_getCurrentRawStream(self.index))
        if graph is None:
            return 0
        with driver.relaxed():
            clone = driver.clone(graph)
            try:
                capture.now_in(lambda node: driver.in_clone(node, clone))
            except BaseException:
                driver.destroy_graph(clone)
                raise
        return clone

    @property
    def stamped_graphs(self) -> int:
        return sum([graph.is_stamped for graph in list(self._live)])

    def add(self, graph: CapturedGraph) -> None:
        self._live[graph] = None
        for other in list(self._live):
            if other.is_gone:
                self.drop(other)

    def launched(self, graph: CapturedGraph) -> None:
        self._waiting[graph] = None

    def drop(self, graph: CapturedGraph) -> None:
        """Close `graph`, which is not replayed any longer, as soon as it does not run."""
        self._dropped[graph] = None

    @property
    def stamp_ns(self) -> int:
        """The cost on the device of the two stamps around a replay, or 0 if unknown."""
        return 2 * (self._in_line.stamp_ns or 0)

    def settle(self, *, may_wait: bool = False) -> None:
        """Record finished replays, and close dropped graphs."""
        if self.device.is_of_parent or not (self._waiting or self._dropped):
            return
        if not self._settling.acquire(blocking=False):  # another thread settles, or a signal interrupted this one
            return
        try:
            deadline = clock.monotonic() + WAIT_S
            with self.device.driver.within(self.device.context):
                while True:
                    self._settle(is_last=may_wait)
                    if not may_wait or not (self._waiting or self._dropped) or clock.monotonic() > deadline:
                        return
                    time.sleep(NAP_S)
        finally:
            self._settling.release()

    def _settle(self, *, is_last: bool) -> None:
        self.device.look_at_clocks()
        for graph in list(self._waiting):
            if graph.profiler.recording:  # otherwise the caller is in a step that is not recorded
                graph.settle(is_last=is_last)
            if not graph.launches:
                self._waiting.pop(graph, None)
        for graph in list(self._live):
            if graph.is_gone:
                self.drop(graph)
        for graph in list(self._dropped):
            if graph.close():
                for kept in (self._dropped, self._waiting, self._live):
                    kept.pop(graph, None)

    def say_how_measured(self, graph: CapturedGraph, cost: StampCost) -> None:
        """Report how `graph` is measured, with the new cost of a stamp."""
        last = self.device.time.last
        clock = "" if last is None else f", its clock to {self.device.time.error_ns(last.device_ns) / 1000:.1f} us"
        stamps = f"less {cost.cost_ns / 1000:.2f} +- {cost.error_ns / 1000:.2f} us a stamp"
        graph.steps.measured(f"captured graphs on the device, {stamps}{clock}")

    def close(self) -> None:
        """Free everything on the device unless something still runs. Replays that are not read by then are lost."""
        if self.device.is_of_parent:
            return
        for graph in list(self._live):
            self.drop(graph)
        self.settle(may_wait=True)
        for graph in list(self._live):
            graph.give_up()
        if self.pairs.waiting:  # something still runs
            return
        self.settle()
        if not (self._waiting or self._dropped) and self._in_line.close():
            self.pairs.close()
            self.device.close()


# --- the class of torch -----------------------------------------------------------------------------------------

_lock = threading.RLock()
_devices: dict[int, DeviceGraphs] = {}
_graphs: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()
_random: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs with the host's own generators
_replaced: dict[str, Any] = {}  # the original methods of the class; None: it inherits them
_users: weakref.WeakSet[ModelSteps] = weakref.WeakSet()


def look_into(steps: ModelSteps, *modules: Any) -> None:
    """Time the captured graphs of a model from now on if it is on CUDA. Called when it is attached."""
    if device_of(*modules) != "cuda":
        return
    with _lock:
        _users.add(steps)
        if settle not in steps.profiler.parts.paths.settlers:
            steps.profiler.parts.paths.settlers.insert(0, settle)  # before steps that wait for it
        if _replaced:
            return
        if not hasattr(torch.cuda, "CUDAGraph"):
            return
        kind = torch.cuda.CUDAGraph
        for name, ours_ in _METHODS.items():
            _replaced[name] = vars(kind).get(name)
            setattr(kind, name, ours_(getattr(kind, name)))
        compiled_code.follow()
        atexit.register(_at_exit)


def look_no_more(steps: ModelSteps) -> None:
    """Stop timing the graphs of a detached model. After the last one, restore the class and free the devices."""
    with _lock:
        if steps not in _users:
            return
        _users.discard(steps)
        for graph, captured in list(_graphs.items()):
            if captured.steps is steps:
                _graphs.pop(graph, None)
                captured._on.drop(captured)
        settle(True)
        if not len(_users):
            _put_back()


def _put_back() -> None:
    for name, was in _replaced.items():
        if was is None:
            delattr(torch.cuda.CUDAGraph, name)
        else:
            setattr(torch.cuda.CUDAGraph, name, was)
    _replaced.clear()
    atexit.unregister(_at_exit)
    compiled_code.follow_no_more()
    for device in _devices.values():
        try:
            device.close()
        except Exception as error:  # noqa: BLE001 - the device may be lost: nothing can be freed on it
            log_own_error(error, "what timed captured graphs is left on their device")
    _devices.clear()
    _graphs.clear()


def end() -> None:
    """Detach all models, also those that were dropped."""
    for steps in list(_users):
        look_no_more(steps)
    with _lock:
        _put_back()


def _at_exit() -> None:
    """Only run the host's own replays, and free all clones.

    When the interpreter ends, a process group that was not destroyed waits until no graph has collectives. By then
    cbtop would not learn that the host's graphs are gone.
    """
    with _lock:
        for captured in list(_graphs.values()):
            captured.is_left_alone = True
            captured._on.drop(captured)
        settle(True)


def settle(may_wait: bool) -> None:
    """Record the finished replays of all devices."""
    for device in list(_devices.values()):
        try:
            device.settle(may_wait=may_wait)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "some steps of captured graphs are not recorded")


def _device_here() -> DeviceGraphs:
    index = torch.cuda.current_device()
    with _lock:
        found = _devices.get(index)
        if found is None:
            found = _devices[index] = DeviceGraphs(CudaDriver(), index)
        return found


def _capture_begin(original: Callable[..., None]) -> Callable[..., None]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        _forget(self)
        device = None
        try:
            device = _device_here()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a captured graph is not looked into")
        original(self, *args, **kwargs)
        if device is not None:
            capture = captures[get_ident()] = Capture(device.captured_last)
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
                device = _device_here()
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
            if capture is not None and device is not None and clone:
                if self in _random:
                    capture.why_not = "it has generators of random numbers of its own"
                captured = CapturedGraph(self, clone, capture, device, capture.steps)
                device.add(captured)
                _graphs[self] = captured
        except Exception as error:  # noqa: BLE001 - as above
            log_own_error(error, "a captured graph is not looked into")

    return capture_end


def _ended(capture: Capture) -> bool:
    """End `capture`. Returns whether nothing was captured, as in the first graph that inductor makes."""
    capture.ended()
    return capture.last() == []


def _replay(original: Callable[..., None]) -> Callable[..., None]:
    def replay(self: Any) -> None:
        captured = _graphs.get(self)
        if getattr(self, "_tracker", None) is not None:
            captured = None
        if captured is not None and captured._on.index != torch._C._cuda_getDevice():
            with torch.cuda.device(captured._on.index):  # as torch's own replay does
                replay(self)
            return
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


def _reset(original: Callable[..., None]) -> Callable[..., None]:
    def reset(self: Any) -> None:
        _forget(self)
        original(self)

    return reset


def _instantiate(original: Callable[..., None]) -> Callable[..., None]:
    def instantiate(self: Any) -> None:
        captured = _graphs.get(self)
        if captured is not None and captured.is_stamped:
            captured.leave_alone("its host has made it anew")  # and may have changed it
        original(self)

    return instantiate


def _register(original: Callable[..., None]) -> Callable[..., None]:
    def register_generator_state(self: Any, *args: Any, **kwargs: Any) -> None:
        _random.add(self)
        original(self, *args, **kwargs)

    return register_generator_state


def _forget(graph: Any) -> None:
    captured = _graphs.pop(graph, None)
    if captured is not None:
        captured._on.drop(captured)
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
    """Make a new lock in a child process and forget its captures: other threads are gone."""
    global _lock
    _lock = threading.RLock()
    captures.clear()


os.register_at_fork(after_in_child=_after_fork)
