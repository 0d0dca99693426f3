"""Simulates a training process with the real profiler, source, store and feed. All of its times are known."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low

from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.feeds.feed import StoreViews
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol import codec
from cbtop.protocol.memory_messages import BrickMemories, PartMemory, TrainingMemory
from cbtop.protocol.messages import (
    Activity,
    Heartbeat,
    Message,
    StatsUpdate,
    WireMessage,
)
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingWriter, encode_frame
from cbtop.protocol.training_messages import (
    CommunicationTimes,
    GradientFault,
    GradientMessage,
    GradientNorm,
    LossScale,
    PartTime,
    TrainingTimes,
)
from cbtop.protocol.vocabulary import BACKWARD, RECOMPUTE, TRAIN, WARM_UP, BrickCategory, BrickId, TrainingPart
from cbtop.viewmodels.communication import with_ranks
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdicts import judged
from tests.cbtop.made_machines import HELLO
from tests.cbtop.recorded import Clock, apply, source_of

LAYERS = 3
LATEST = 64  # number of latest steps whose times are in a report of the process
UPDATE_NS = 500_000_000
# The process reports these parts of a step only if they take time.
_ABSENT = TrainingPart.COMMUNICATION, TrainingPart.EVALUATION, TrainingPart.NO_KERNEL
FORWARD_US = {BrickId.RMS_NORM: 200.0, BrickId.QKV_PROJECTION: 1_000.0, BrickId.DOWN_PROJECTION: 1_800.0}
BACKWARD_FACTOR = 2.0


NORM = GradientNorm(TRAIN, "", 298, 0.75, 0.5, 1.5, 64, clipping="before")
NAN = GradientFault(TRAIN, "", "layers.2.down.bias", "NaN", 118, 117, 300, 300, 26, 39)
STEADY_SCALE = LossScale(TRAIN, "", 65_536.0, 300, 3, 131_072.0, 20, 1, 0)
FALLING_SCALE = LossScale(TRAIN, "", 16.0, 300, 14, 65_536.0, 40, 12, 0)


def memory(
    forward_gb: float, backward_gb: float, reserved_gb: float, *, retries: int = 0, node: int = 0
) -> TrainingMemory:
    """Return the memory of training steps on a GPU of 80 GB. This process may use 79 GB of it."""
    parts = tuple(
        PartMemory(name, round(gb * 1e9), round(reserved_gb * 1e9))
        for name, gb in (("forward", forward_gb), ("backward", backward_gb))
    )
    unused_bytes = round((reserved_gb - max(forward_gb, backward_gb)) * 1e9)
    torch_peak_bytes = round(max(forward_gb, backward_gb) * 1e9)
    return TrainingMemory(TRAIN, "", 12, parts, node, unused_bytes, torch_peak_bytes, 79_000_000_000, retries, 240)


ROOMY = memory(30, 42, 48)


def usual(_step: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Training:
    """Settings of a simulated training process.

    With the defaults a step takes 34.6 ms: forward 9 ms, backward 18 ms.
    """

    steps: int = 300
    phase: str = TRAIN
    data_us: float = 600.0
    loss_us: float = 400.0
    exposed_us: float = 0.0  # time in each step in which the process waits for gradients of other ranks
    overlapped_us: float | None = 0.0
    own_us: float = 0.0  # cbtop's own work in each step, in no part
    clip_us: float = 300.0
    optimizer_us: float = 4_000.0
    zero_us: float = 100.0
    other_us: float = 200.0
    between_us: float = 0.0
    recomputes: bool = False
    is_stacked: bool = True  # whether each backward pass is recorded in separate layers, as for torch models
    sequences: int = 8
    tokens: int = 0
    warm_up: int = 0  # number of first steps that are warm-up
    reports: bool = True  # whether the process reports the parts of its steps
    gradients: tuple[GradientMessage | TrainingMemory | BrickMemories, ...] = ()  # announced together with the parts
    noise: float = 0.0  # relative noise of the time of each brick
    # factor on the time of a brick, by the name of the brick
    factor: Mapping[str, float] = field(default_factory=dict)


def of_ranks(directory: Path, *plans: Training) -> list[SourceView]:
    """Return the views of the ranks of one job. Each rank is compared with the other ranks."""
    every = []
    for rank, plan in enumerate(plans):
        (directory / str(rank)).mkdir()
        seen = trained(directory / str(rank), plan)
        (record,) = seen.store.sources.values()
        assert record.hello is not None
        record.hello = replace(record.hello, rank=rank, world_size=len(plans))
        every.append((seen, record))
    found = []
    for seen, record in every:
        view = seen.one()
        training = view.training
        assert training is not None
        if training.communication is not None:
            compared = with_ranks(training.communication, record, [other for _, other in every], view.phase or "")
            view = judged(with_parts(view, training=replace(training, communication=compared)))
        found.append(view)
    return found


class Seen(StoreViews):
    """The views that a viewer shows after it has received all messages about the process."""

    def __init__(self, window_s: float = 10.0) -> None:
        super().__init__(())
        self._store = Store(window_s)
        self._store.apply(HELLO)

    @property
    def store(self) -> Store:
        return self._store

    def one(self, phase: str | None = None, *, window: bool = False) -> SourceView:
        found = self.view(next(iter(self.seen())), phase, window=window)
        assert found is not None
        return found


def trained(directory: Path, plan: Training | None = None) -> Seen:
    """Return a viewer that has received all messages of the process."""
    seen = Seen()
    for messages in messages_of(directory, plan or Training()):
        apply(seen.store, messages)
    return seen


def messages_of(directory: Path, plan: Training) -> Iterator[list[Message]]:
    """Yield the messages of a daemon about the process. The daemon sends them about twice a second."""
    for source, now_ns, is_whole in _polled(directory, plan):
        yield [*_dated(source.snapshot() if is_whole else source.delta(), now_ns), _heartbeat(source, now_ns)]


def record(directory: Path, path: Path, plan: Training) -> None:
    """Write a recording of the whole process."""
    origin = RecordingOrigin("here", 1_000_000_000, HELLO.realtime_ns)
    writer = RecordingWriter(path, origin, 1 << 30)
    for source, now_ns, is_whole in _polled(directory, plan):
        if is_whole:
            writer.append(_frame(FrameKind.KEYFRAME, now_ns, HELLO, *_dated(source.snapshot(), now_ns)))
        writer.append(_frame(FrameKind.RECORDS, now_ns, *source.records()))
        if not is_whole:
            writer.append(_frame(FrameKind.LIVE, now_ns, *_dated(source.delta(), now_ns), _heartbeat(source, now_ns)))
    writer.close()


def _polled(directory: Path, plan: Training) -> Iterator[tuple[Source, int, bool]]:
    """Run the process, and yield about twice a second of its time.

    Each item has the source of the process, the time in ns, and whether this is the first item.
    """
    clock = Clock(1_000_000_000)
    profiler = BrickProfiler(clock_ns=clock, recorder=RingRecorder(directory, 1 << 20))
    profiler.announce(Activity(""))
    steps = _Steps(profiler, clock, plan)
    source, said_ns = source_of(directory), clock()
    source.poll()
    yield source, said_ns, True
    for number in range(plan.steps):
        steps.run(number)
        if clock() - said_ns >= UPDATE_NS or number == plan.steps - 1:
            if plan.reports and steps.taken_ns:
                profiler.announce(steps.times())
            for message in plan.gradients:
                profiler.announce(message)
            said_ns = clock()
            source.poll()
            yield source, said_ns, False


def _heartbeat(source: Source, now_ns: int) -> Heartbeat:
    return Heartbeat(now_ns, (source.state_message(),))


def _dated(messages: Iterable[WireMessage], now_ns: int) -> list[WireMessage]:
    return [replace(said, monotonic_ns=now_ns) if isinstance(said, StatsUpdate) else said for said in messages]


def _frame(kind: FrameKind, now_ns: int, *messages: WireMessage) -> bytes:
    return encode_frame(kind, now_ns, [codec.encode(message) for message in messages])


class _Steps:
    """Runs steps and stores how long the parts of the latest steps took."""

    def __init__(self, profiler: BrickProfiler, clock: Clock, plan: Training) -> None:
        self.taken_ns: list[dict[str, int]] = []  # duration of each part in ns; one entry for each step
        self._profiler, self._clock, self._plan = profiler, clock, plan
        self._random = random.Random(0)
        self._definitions: dict[str, BrickDefinition] = {}
        for brick in FORWARD_US:
            for suffix in ("", BACKWARD, RECOMPUTE):
                name = brick.display_name + suffix
                self._definitions[name] = BrickDefinition(name, brick.category, None if suffix else brick)
        self._definitions["GradientSync"] = BrickDefinition("GradientSync", BrickCategory.COMMUNICATION)

    def times(self) -> TrainingTimes:
        latest = self.taken_ns[-LATEST:]
        parts = []
        for part in TrainingPart:
            ns = [step.get(part, 0) for step in latest]
            if any(ns) or part not in _ABSENT:
                parts.append(PartTime(part.value, sum(ns), median_low(ns)))
        wall_ns = sum(part.sum_ns for part in parts)
        communication = self._communication(latest)
        own_ns = round(self._plan.own_us * 1e3) * len(latest)
        return TrainingTimes(self._plan.phase, "", len(latest), wall_ns, tuple(parts), communication, own_ns=own_ns)

    def _communication(self, latest: list[dict[str, int]]) -> CommunicationTimes | None:
        ns = [step.get(TrainingPart.COMMUNICATION, 0) for step in latest]
        if not any(ns):
            return None
        exposed = (PartTime("GradientSync, backward", sum(ns), median_low(ns)),)
        if self._plan.overlapped_us is None:
            return CommunicationTimes(exposed, None, "nobody knows")
        return CommunicationTimes(exposed, round(self._plan.overlapped_us * 1e3) * len(latest))

    def run(self, number: int) -> None:
        plan, is_warm = self._plan, number < self._plan.warm_up
        taken: dict[str, int] = {}
        with self._profiler.step(plan.phase + (WARM_UP if is_warm else ""), plan.tokens) as step:
            step.sequences = plan.sequences
            self._part(taken, TrainingPart.DATA_WAIT, [("DataWait", plan.data_us)])
            begin_ns = self._clock()
            self._layers(range(LAYERS), ("",))
            taken[TrainingPart.FORWARD] = self._clock() - begin_ns
            self._part(taken, TrainingPart.LOSS, [("Loss", plan.loss_us)])
            begin_ns = self._clock()
            self._brick("Loss backward", plan.loss_us)
            self._layers(reversed(range(LAYERS)), (RECOMPUTE, BACKWARD) if plan.recomputes else (BACKWARD,))
            taken[TrainingPart.BACKWARD] = self._clock() - begin_ns
            self._part(taken, TrainingPart.COMMUNICATION, [("GradientSync", plan.exposed_us)])
            self._part(taken, TrainingPart.CLIP, [("ClipGradients", plan.clip_us)])
            self._part(taken, TrainingPart.OPTIMIZER, [("Optimizer", plan.optimizer_us)])
            self._part(taken, TrainingPart.ZERO_GRAD, [("ZeroGrad", plan.zero_us)])
            taken[TrainingPart.OTHER] = round(plan.other_us * 1e3)
            self._clock.sleep_us(plan.other_us)
        if not is_warm:
            self.taken_ns.append(taken)
        self._clock.sleep_us(plan.between_us)

    def _part(self, taken: dict[str, int], part: TrainingPart, bricks: list[tuple[str, float]]) -> None:
        begin_ns = self._clock()
        for name, us in bricks:
            self._brick(name, us)
        taken[part] = self._clock() - begin_ns

    def _layers(self, layers: Iterator[int] | range, passes: tuple[str, ...]) -> None:
        for index in layers:
            is_own = self._plan.is_stacked and passes != ("",)
            with self._profiler.layer(index, "backward" if is_own else ""):
                for suffix in passes:
                    for brick, us in FORWARD_US.items():
                        self._brick(brick.display_name + suffix, us * (BACKWARD_FACTOR if suffix == BACKWARD else 1))

    def _brick(self, name: str, us: float) -> None:
        if us:
            with self._profiler.brick(self._definitions.get(name, name), 64):
                noise = self._random.lognormvariate(0, self._plan.noise)
                self._clock.sleep_us(us * self._plan.factor.get(name, 1.0) * noise)
