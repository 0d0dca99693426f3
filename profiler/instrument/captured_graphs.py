"""Brick times inside captured CUDA graphs: of some replays, a clone of the graph with stamps runs in its place.

Rules
- The methods of `torch.cuda.CUDAGraph` are ours as long as a model on CUDA is attached: they do what they did, and
  note. At the last one's detachment the class has what it had. What is stamped is a clone of the graph, made just
  before its capture ends.
- While a graph is captured, calls of a model and its parts note between which nodes they lie (capturing.py), and so
  do lines of code that inductor has generated (compiled_code.py). The first call of the model says what a replay is:
  with one new token a sequence it is a decode.
- A replay in an open step gives that step its layers and bricks; one outside of any is a step, from the first stamp
  to the last. Which are recorded, the profiler decides as for any step.
- Each replay has a stamp before it and one behind it. One outside of steps that is not recorded is a plain step: it
  took what lies between these, less what recorded ones show to lie around the graph. Where that is too dear only
  recorded ones are steps, with a name of their own: their count and rate are not those of all replays.
- What comes before a replay costs a host whose device is idle its time, so it is little: whether it is recorded, the
  caller's stream, and a stamp, in C. The rest comes behind it. The device counts as idle where it has reached the
  stamp behind the last replay: where the host has enqueued other work since, this says too much of our cost.
- Nobody waits for the device: stamps are read at the next replay, or when the books are asked for. The step is
  recorded then, in the host's time.
- What the stamps inside cost is how much longer such replays take than the others (stamp_cost.py), and is taken off,
  stretch by stretch. Until that is known nothing is recorded. In a graph of few stamps the time from the stamp before
  it to its begin would tell: there the replay that is compared runs a clone, too, with stamps at its ends alone.
- What lies between bricks is named "Other kernels": the books close. If every step is recorded, COPIES of the clone
  take turns, because the host may be ahead of its device.
- Where kernels run side by side no stamp may stand: what begins or ends there is left out. A graph that draws random
  numbers, or two models are called in, is left alone, and so is one where anything of ours fails: that is said in one
  line, and the host's own replay runs.
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
from cbtop.profiler.device.device import Device
from cbtop.profiler.device.driver import CudaDriver, Driver
from cbtop.profiler.device.graph_surgery import START, Shape, StampedGraph
from cbtop.profiler.device.in_line_cost import InLineCost
from cbtop.profiler.device.pairs import NOT_HERE, Pairs
from cbtop.profiler.device.stamp_cost import StampCost, StampCosts
from cbtop.profiler.held_steps import Part
from cbtop.profiler.instrument import compiled_code
from cbtop.profiler.instrument.capturing import OTHER, Capture, Last, Span, captures
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.instrument.kernel_bursts import Places, Recording, recording_here
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.trouble import in_words, ours, say
from cbtop.profiler.instrument.work import device_of, work_of
from cbtop.profiler.steps import Step
from cbtop.protocol import clock
from cbtop.protocol.vocabulary import SAMPLE, NodeKind

FEW_STAMPS = 200  # inside: of less, what a launch takes (10 us) would be 0.05 us and more each
COPIES = 4  # of a clone with stamps, if every step is recorded
PLAIN_EVERY = 64  # replays with stamps and none without: the next has none, and beside it what they cost is seen
FIRST_PLAIN = 8  # as long as that is not known; where every step is recorded, the next
MOST_HELD = 256  # replays, until what stamps cost is known
MOST_WAITING = 1024  # replays of a graph, until the device is through and the step that they lie in has ended
ENOUGH_PLAIN = 128  # replays, to know whether timing them is too dear
MAX_STAMPED = 32  # graphs: each takes some megabytes on the device
WAIT_S = 1.0  # for the device, where the books are closed
NAP_S = 1e-3


# --- what a capture has told ------------------------------------------------------------------------------------


class Stretch:
    """A layer or brick between two of the stamps of a plan: where (keys from the step down), and its elements."""

    __slots__ = ("begin", "elements", "end", "keys")

    def __init__(self, keys: tuple[Hashable, ...], begin: int, end: int, elements: int) -> None:
        self.keys = keys
        self.begin = begin
        self.end = end
        self.elements = elements


class Plan:
    """Which places of a graph are stamped, and what lies between them."""

    def __init__(self, shape: Shape, spans: list[Span]) -> None:
        self._shape = shape
        self._found: list[tuple[tuple[Hashable, ...], int, int, int]] = []  # by number of place
        self.left_out = 0  # calls of which a stamp may not tell
        first, last = shape.places[START], shape.places[shape.end]
        self._walk(spans, (), first, last, names_gaps=True)
        numbers = sorted({first, last}.union(*({begin, end} for _, begin, end, _ in self._found)))
        place_of = {number: place for place, number in shape.places.items()}
        self.places = [place_of[number] for number in numbers]
        at = {number: index for index, number in enumerate(numbers)}
        self.stretches = [Stretch(keys, at[begin], at[end], elements) for keys, begin, end, elements in self._found]

    def _number(self, last: Last) -> int | None:
        place = self._shape.place_of(last)
        return None if place is None else self._shape.places[place]

    def _walk(self, spans: list[Span], keys: tuple[Hashable, ...], begin: int, end: int, *, names_gaps: bool) -> None:
        """Note `spans`, which lie between two places, each behind what is in it, and what is between where named."""
        at, some = begin, False
        for span in spans:
            first, last = self._number(span.begin), self._number(span.end)
            if first is None or last is None or not at <= first <= last <= end:
                self.left_out += 1
                before = len(self._found)
                self._walk(span.inside, keys if span.key is None else (*keys, span.key), at, end, names_gaps=False)
                at = max([at, *(found[2] for found in self._found[before:])])
                continue
            if first == last:  # nothing of it runs on the device
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
    """When each place would have been reached, after the first, without the stamps between: in ns."""
    at, found = 0.0, [0]
    for before, after in pairwise(times):
        at += max(0.0, after - before - cost_ns)
        found.append(round(at))
    return found


# --- one graph --------------------------------------------------------------------------------------------------


class Launch:
    """A replay that was not recorded yet; `stamped`: with stamps inside, where `plan` has them."""

    __slots__ = ("around", "is_due", "is_of_all", "own_ns", "pair", "plan", "stamped", "step", "times")

    def __init__(
        self,
        pair: int,
        step: Step | None,
        ready: tuple[StampedGraph, Plan | None] | None,
        *,
        is_due: bool,
        is_of_all: bool,
    ) -> None:
        self.pair = pair
        self.is_due = is_due  # it was to be recorded, with stamps or not
        self.is_of_all = is_of_all  # all replays are timed, also those that are not recorded
        self.own_ns = 0  # what it paid for us, beside stamps inside
        self.step = step  # that it lies in; None where it is one
        self.stamped: StampedGraph | None
        self.plan: Plan | None
        self.stamped, self.plan = ready or (None, None)
        self.around: tuple[int, int] | None = None  # once the device got through
        self.times: list[int] | None = None  # inside


# A replay that is launched: its pair of stamps, on which stream; whether it was to be recorded; whether the device
# was idle, so that it waited for what came before; and what runs in its place, with stamps inside or at its ends.
Begun = tuple[int, int, bool, bool, tuple[StampedGraph, Plan | None] | None]


class CapturedGraph:
    """What is known of one graph of the host's."""

    def __init__(self, graph: Any, clone: int, capture: Capture, device: OneDevice, steps: ModelSteps) -> None:
        self._graph = weakref.ref(graph, self._is_dropped_with)
        self.clone = clone
        self._spans = capture.spans
        self._on = device
        self.steps = steps
        for span in capture.spans:
            self._put_on_device(span)
        self.profiler = steps.profiler
        self._hot_path = steps.profiler._host_path._hot_path  # whose position is that of all paths
        calls = capture.calls
        self._tokens, self._sequences = sum(call.tokens for call in calls), calls[0].sequences
        self.phase = calls[0].phase
        self._key = (NodeKind.STEP, self.phase, steps.model) if steps.model else (NodeKind.STEP, self.phase)
        self._is_checked = False  # for random numbers
        self._variants: list[tuple[StampedGraph, Plan]] = []
        self._ends: StampedGraph | None = None  # with no stamps but at its ends: of a graph of few
        self._turn = 0
        self._stamped_since = 0  # replays with stamps, since the last one without
        self._lost = 0  # steps since the last one that was recorded: too many waited, or the device told nonsense
        self._is_due = False  # the next is to be recorded: the one that was to be found its stamps in use
        self._is_every = not isinstance(self.profiler, GovernedProfiler) and self.profiler.sample_every == 1
        self._is_plain_timed = True
        self._plain_ns: list[int] = []  # since it was last asked whether to time them is too dear
        self._own_ns: list[int] = []
        self.launches: deque[Launch] = deque()
        self.costs = StampCosts()
        self._kernel_places: Places | None = None
        self.is_left_alone = bool(capture.why_not)
        if capture.why_not:
            self.leave_alone(capture.why_not)

    def _is_dropped_with(self, _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """The host's graph is no more, nor is the clone: NCCL ends only when no graph holds its kernels.

        As the interpreter ends, the names of this module may be gone already.
        """
        self._on.drop(self)
        if not is_finalizing() and not captures:
            settle(False)

    def leave_alone(self, why: str) -> None:
        """Let the host's own replay run from now on."""
        say(f"a captured graph is not looked into: {why}")
        self.is_left_alone = True
        self._on.drop(self)

    def replay(self, original: Callable[[Any], None], graph: Any) -> None:
        """The host replays the graph."""
        if self.is_left_alone or self._on.device.is_of_parent:
            original(graph)
            return
        if not self._is_checked:
            before = self._drawn()
            original(graph)
            self._is_checked = True
            if before is None or self._drawn() != before:  # torch counts what a replay draws
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
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            ours(error, "a captured graph is not looked into")
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
            launch = Launch(pair, step, ready, is_due=is_recorded, is_of_all=self._is_plain_timed)
            launch.own_ns = on.stamp_ns + (launched_ns - begun_ns if was_idle else 0)
            self.launches.append(launch)
            on.launched(self)
            on.settle()
            if on.pairs.is_through():  # else nobody has waited for what came after
                launch.own_ns += clock.perf_counter_ns() - after_ns
        except Exception as error:  # noqa: BLE001 - as above
            ours(error, "some steps of captured graphs are not recorded")

    def _watch(self, duration_ns: int, own_ns: int, allowed_share: float) -> None:
        """A plain replay took the device so long, and paid us so much: where that is too dear, less is done."""
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
        say(f"of a captured graph no replays are counted but those that are recorded: {how}")

    def _begun(self, step: Step | None) -> Begun | None:
        """What was launched in place of the host's own replay, or is stamped before that; None: that is all."""
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
        if pair == NOT_HERE and on.stream() is not None:  # of a thread's first call torch makes its context current
            pair = pairs.begin(stream)
        if pair == NOT_HERE:
            return None
        if pair is None:  # the device is far behind
            self._lost += step is None or is_recorded
            return None
        try:
            if ready is not None and not ready[0].launch(stream):
                ready = None  # another thread was faster
        except Exception as error:  # noqa: BLE001 - as above: the host's own runs, between both stamps
            ours(error, "a captured graph is not looked into")
            self.leave_alone(in_words(error))
            ready = None
        return pair, stream, is_recorded, was_idle, ready

    def _is_looked_at(self, step: Step | None) -> bool:
        """Whether a replay that is not recorded is timed as a whole: as a step, or to know what stamps cost."""
        if step is None and self._is_plain_timed:
            return self._hot_path.recording
        return bool(self._stamped_since)

    def replay_recorded(self, original: Callable[[Any], None], graph: Any, recording: Recording) -> None:
        """The host replays the graph in a step of a burst."""
        is_launched = False
        try:
            stream = self._on.stream()
            if not self.is_left_alone and self._is_checked and stream is not None:
                if self._kernel_places is None:
                    self._kernel_places = Places(self._on.device.driver, self.clone, self._spans)
                recording.launch(self.clone, self._kernel_places, stream)
                is_launched = True
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            recording.bursts.refuse(error)
        if not is_launched:
            with recording.paused():
                original(graph)

    def _is_asked(self) -> bool:
        """Whether this replay may be one of a burst of kernels."""
        try:
            return self.steps.bursts.is_asked
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            ours(error, "a request for kernels is not answered")
            return False

    def _replay_in_burst(self, original: Callable[[Any], None], graph: Any) -> bool:
        """The host replays the graph, and a burst is asked for; gives whether this was a step of it."""
        recording = self.steps.bursts.begin(self._key, self.steps, has_calls=False)
        if recording is None:
            return False
        try:
            self.replay_recorded(original, graph, recording)
        finally:
            recording.end()
        return True

    def _is_recorded(self, step: Any) -> bool:
        """Whether this replay is; it lies in `step`, or is one."""
        if step is None:
            is_sampled = self.profiler._is_replay_sampled(self._key) or self._is_due
            self._is_due = False
        else:
            is_sampled = bool(step.model == self.steps.model)  # else it is another model's
        return is_sampled and self._hot_path.recording

    def _is_compared(self) -> bool:
        """Whether a replay that is to be recorded has no stamps, as many before it had: it shows what these cost."""
        first = 1 if self._is_every else FIRST_PLAIN
        return self._stamped_since >= (first if self.costs.known is None else PLAIN_EVERY)

    def _compared(self) -> tuple[StampedGraph, None] | None:
        """What runs behind a replay with stamps, to know what these cost; None: the host's own, which tells."""
        ends = self._ends
        return (ends, None) if ends is not None and self._stamped_since and not ends.is_running else None

    def _drawn(self) -> int | None:
        """How many random numbers the device's generator has given."""
        try:
            return int(torch.cuda.default_generators[self._on.index].get_offset())
        except Exception as error:  # noqa: BLE001 - as above
            ours(error, "a captured graph is not looked into")
            return None

    def _ready(self, stream: int) -> tuple[StampedGraph, Plan | None] | None:
        """What to launch in place of the host's own replay; None where that runs."""
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
        shape = Shape.of(on.device.driver, self.clone)
        plan = Plan(shape, self._spans)
        if not any([isinstance(stretch.keys[-1], BrickDefinition) for stretch in plan.stretches]):
            self.leave_alone("no call of a brick was seen between its nodes")
            return False
        if plan.left_out:
            say(f"{plan.left_out} calls in a captured graph are not timed: its kernels run side by side there")
        for _ in range(COPIES if self._is_every else 1):
            self._variants.append((StampedGraph(on.device, self.clone, plan.places, stream), plan))
        if len(plan.places) < FEW_STAMPS:
            self._ends = StampedGraph(on.device, self.clone, [plan.places[0], plan.places[-1]], stream)
        return True

    def _put_on_device(self, span: Span) -> None:
        """Let the keys say what is measured on the device, and hold no module."""
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
        """Record what the device has told meanwhile, in order; `is_last`: also where what stamps cost is a guess."""
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

    def _is_told(self, launch: Launch) -> bool:
        """Whether the device has got through, which is read once."""
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

    def _compare(self, times: list[int] | None, around_ns: int, plan: Plan | None) -> None:
        """A replay has told its `times` inside, and how long it took between the stamps around it."""
        inside_ns = 0 if times is None else times[-1] - times[0]
        ends = 0 if self._ends is None else 2
        if times is not None and plan is not None:
            self.costs.stamped(inside_ns if ends else around_ns, len(times) - ends, around_ns - inside_ns)
        elif not ends:
            self.costs.plain(around_ns)
        elif times is not None:
            self.costs.plain(inside_ns)

    def _may_record(self, launch: Launch, *, is_last: bool) -> bool:
        if launch.step is not None and launch.step.is_running:
            return False
        if launch.plan is None:
            return True
        return self.costs.known is not None or is_last or len(self.launches) > MOST_HELD

    def _record(self, launch: Launch) -> None:
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
            (stretch.keys, at[stretch.begin], at[stretch.end], stretch.elements) for stretch in launch.plan.stretches
        ]
        if step is not None:
            step.told(parts)
        else:
            name = self.phase if launch.is_of_all else f"{self.phase}{SAMPLE}"
            self._record_step(name, begun_ns, at[-1], parts)

    def _record_step(self, name: str, begun_ns: int, ended_ns: int, parts: list[Part] | None) -> None:
        lost, self._lost = self._lost, 0
        self.profiler._steps.record(
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
        self.profiler._steps.lose(lost)

    def give_up(self) -> None:
        """Wait no more for the device, nor for the end of a step: what was to be recorded is lost, and counted."""
        while self.launches:
            launch = self.launches.popleft()
            if launch.step is None:
                self._lost += 1
            elif launch.is_due:
                self._lost += launch.step.is_running
                launch.step.told(None)
        self._count_lost()

    def close(self) -> bool:
        """Give back what it took on the device; gives whether it could: what runs is left until it has."""
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


class OneDevice:
    """The graphs of one device, and what they share: its clock, and stamps around replays."""

    def __init__(self, driver: Driver, index: int) -> None:
        self.device = Device(driver)
        self.index = index
        #: The caller's on this device, captured or not.
        self.current_stream: Callable[[], int] = functools.partial(torch._C._cuda_getCurrentRawStream, index)
        self._waiting: dict[CapturedGraph, None] = {}  # that have launches to be read
        self._dropped: dict[CapturedGraph, None] = {}  # that are to be closed
        self._live: dict[CapturedGraph, None] = {}
        self.pairs = Pairs(self.device)
        self._in_line = InLineCost(self.device)
        self._settling = threading.Lock()

    def stream(self) -> int | None:
        """The caller's stream; None where it is another device's, or captured."""
        if torch._C._cuda_getDevice() != self.index or torch._C._cuda_isCurrentStreamCapturing():
            return None
        return int(torch._C._cuda_getCurrentRawStream(self.index))

    def captured_last(self) -> Last:
        """The nodes of the caller's capture that the next one would follow."""
        return self.device.driver.captured_last(torch._C._cuda_getCurrentRawStream(self.index))

    def cloned(self, capture: Capture) -> int:
        """A copy of what the caller has captured, whose nodes stand in `capture` from now on; 0 where there is none.

        Raises DriverError for what cannot be copied.
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
        """Nobody replays it any more: it is closed as soon as it does not run."""
        self._dropped[graph] = None

    @property
    def stamp_ns(self) -> int:
        """What the stamps around a replay cost the device, as far as that is known."""
        return 2 * (self._in_line.stamp_ns or 0)

    def settle(self, *, may_wait: bool = False) -> None:
        """Record what the device has told meanwhile, and close what nobody wants any more."""
        if self.device.is_of_parent or not (self._waiting or self._dropped):
            return
        if not self._settling.acquire(blocking=False):  # another thread does, or a signal came in between
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
            if graph.profiler.recording:  # else the caller is in a step that is not recorded
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
        """What a stamp costs is known better now."""
        last = self.device.time.last
        clock = "" if last is None else f", its clock to {self.device.time.error_ns(last.device_ns) / 1000:.1f} us"
        stamps = f"less {cost.cost_ns / 1000:.2f} +- {cost.error_ns / 1000:.2f} us a stamp"
        graph.steps.measured(f"captured graphs on the device, {stamps}{clock}")

    def close(self) -> None:
        """Leave nothing behind, once nothing runs any more; what the device has not told by then is lost."""
        if self.device.is_of_parent:
            return
        for graph in list(self._live):
            self.drop(graph)
        self.settle(may_wait=True)
        for graph in list(self._live):
            graph.give_up()
        if self.pairs.waiting:  # something runs still
            return
        self.settle()
        if not (self._waiting or self._dropped) and self._in_line.close():
            self.pairs.close()
            self.device.close()


# --- the class of torch -----------------------------------------------------------------------------------------

_lock = threading.RLock()
_devices: dict[int, OneDevice] = {}
_graphs: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()
_random: weakref.WeakSet[Any] = weakref.WeakSet()  # that have generators of the host's
_replaced: dict[str, Any] = {}  # methods of the class, as they were; None: it inherits them
_users: weakref.WeakSet[ModelSteps] = weakref.WeakSet()


def look_into(steps: ModelSteps, *modules: Any) -> None:
    """A model is attached: where it lies on CUDA, its captured graphs are looked into from now on."""
    if device_of(*modules) != "cuda":
        return
    with _lock:
        _users.add(steps)
        if settle not in steps.profiler._settlers:
            steps.profiler._settlers.insert(0, settle)  # before steps that wait for it
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
    """A model is detached: of the last one on, the class is as it was, and nothing of ours is left on a device."""
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
        except Exception as error:  # noqa: BLE001 - a device that is lost: nothing can be given back to it
            ours(error, "what timed captured graphs is left on their device")
    _devices.clear()
    _graphs.clear()


def end() -> None:
    """No model is attached any more: also those that were dropped."""
    for steps in list(_users):
        look_no_more(steps)
    with _lock:
        _put_back()


def _at_exit() -> None:
    """Let the host's own replays run, and keep nothing of graphs.

    A process group that nobody has ended waits, as the interpreter ends, for all graphs with collectives; by then
    nobody tells us that the host's are no more.
    """
    with _lock:
        for captured in list(_graphs.values()):
            captured.is_left_alone = True
            captured._on.drop(captured)
        settle(True)


def settle(may_wait: bool) -> None:
    """Record what devices have told meanwhile."""
    for device in list(_devices.values()):
        try:
            device.settle(may_wait=may_wait)
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            ours(error, "some steps of captured graphs are not recorded")


def _device_here() -> OneDevice:
    index = torch.cuda.current_device()
    with _lock:
        found = _devices.get(index)
        if found is None:
            found = _devices[index] = OneDevice(CudaDriver(), index)
        return found


def _capture_begin(original: Callable[..., None]) -> Callable[..., None]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        _forget(self)
        device = None
        try:
            device = _device_here()
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            ours(error, "a captured graph is not looked into")
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
                say(
                    "a captured graph in which no call of a model was seen, as when it was compiled before that was "
                    "attached, is not looked into"
                )
            elif capture.steps in _users:
                device = _device_here()
                clone = device.cloned(capture)
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            ours(error, "a captured graph is not looked into")
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
            ours(error, "a captured graph is not looked into")

    return capture_end


def _ended(capture: Capture) -> bool:
    """It ends; gives whether nothing was captured, as in the first graph that inductor makes."""
    capture.ended()
    return capture.last() == []


def _replay(original: Callable[..., None]) -> Callable[..., None]:
    def replay(self: Any) -> None:
        captured = _graphs.get(self)
        if getattr(self, "_tracker", None) is not None:
            captured = None
        if captured is not None and captured._on.index != torch._C._cuda_getDevice():
            with torch.cuda.device(captured._on.index):  # as torch's own does for itself
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
    """In a child no device is asked, and nobody holds the lock."""
    global _lock
    _lock = threading.RLock()
    captures.clear()


os.register_at_fork(after_in_child=_after_fork)
