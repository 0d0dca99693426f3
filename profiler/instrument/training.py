"""Times the training steps of a model. A training step lasts from the end of one optimizer step to the end of the
next.

Rules
- A model trains if an optimizer changes one of its parameters. From then on, a call of the model in training mode
  with gradients enabled is a forward of a training step. Other calls are steps of inference, as usual.
- The first optimizer step after a backward ends the training step. Further optimizers after the same backward end no
  other step. Micro-batches with gradients that are added up are in one step.
- If the process has made no optimizer, and backwards give a model in training mode gradients, the program changes the
  weights by hand. Then a step ends when the next call of a model begins after a backward. So each backward is in a
  step of its own, and changing the weights is in the part `other`.
- The time of the thread is divided into the parts of the step, so the parts add up to the step. Only cbtop's own work
  in the hooks of optimizers is in no part: the program would not spend that time by itself.
- If the data loader ends, or the model is called in evaluation mode, the time since the last step belongs to no step.
- Every training step is counted with its time. Some are also recorded in detail: the calls of their modules
  (training_calls.py), or on a GPU their kernels (training_kernels.py).
- If code of cbtop fails, the model is detached, and the host continues.
"""

from __future__ import annotations

import statistics
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize, ref

import torch

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.brick_memory import RecordedBricks
from cbtop.profiler.instrument.capturing import captures
from cbtop.profiler.instrument.communication_times import StepCommunication, together
from cbtop.profiler.instrument.dynamo import without_dynamo
from cbtop.profiler.instrument.governor import FLOOR, LEAST_USED, SAMPLES, USED, interval_of
from cbtop.profiler.instrument.host_steps import noting_cost
from cbtop.profiler.instrument.kernel_bursts import node_at
from cbtop.profiler.instrument.open_step import Noting
from cbtop.profiler.instrument.phases import Call
from cbtop.profiler.instrument.step_clock import MOST_RANGES, Parts, StepClock
from cbtop.profiler.instrument.step_memory import NO_GPU
from cbtop.profiler.instrument.torch_internals import has_made_optimizer
from cbtop.profiler.instrument.training_calls import GRADIENT_SYNC, Part, StepCalls
from cbtop.profiler.positions import finder
from cbtop.profiler.recorder import RingRecorder
from cbtop.profiler.steps import STEP
from cbtop.protocol import clock
from cbtop.protocol.memory_messages import TrainingMemory
from cbtop.protocol.messages import Sampling
from cbtop.protocol.training_messages import MAX_TIMED_STEPS, PartTime, TrainingTimes
from cbtop.protocol.vocabulary import TRAIN, WARM_UP, BrickCategory, TrainingPart

if TYPE_CHECKING:
    from cbtop.profiler.instrument.timed_model import TimedModel
    from cbtop.profiler.profiler import BrickProfiler

#: The bricks of a training step outside of the model.
BRICKS = {
    part: BrickDefinition(name, BrickCategory.OTHER, backend="torch")
    for part, name in (
        (TrainingPart.DATA_WAIT, "DataWait"),
        (TrainingPart.LOSS, "Loss"),
        (TrainingPart.CLIP, "ClipGradients"),
        (TrainingPart.OPTIMIZER, "Optimizer"),
        (TrainingPart.ZERO_GRAD, "ZeroGrad"),
    )
}
ANNOUNCE_NS = 1_000_000_000  # least time in ns between two announcements of the parts of a model's steps
EARLY = 4, 16  # announce the parts of steps at once after these numbers of steps
NEVER_NS = 1 << 62
# Most forward passes of a step before its first backward, and in the whole step. With more, each forward pass is
# shown as a step of its own, as in inference.
MOST_WITHOUT_BACKWARD, MOST_FORWARDS = 32, 4096


class StepTimes(NamedTuple):
    """The times of a training step's parts."""

    wall_ns: int  # sum of the parts: the step without cbtop's own work
    parts: Parts
    communication: StepCommunication
    own_ns: int = 0  # cbtop's own work in ns that is in no part, so far as it was timed


@dataclass(slots=True)
class OptimizerCall:
    """A running call of an optimizer's `step`."""

    depth: int  # number of parts around the call
    # The arguments of torch's hook after the step. None until torch has called this hook.
    ended: tuple[Any, Any, Any] | None = None


class ThreadTraining:
    """The open training step of one thread, task or greenlet."""

    __slots__ = (
        "__weakref__",
        "calls",
        "clock",
        "communication",
        "forwards",
        "notings",
        "own_ns",
        "phase_after_backward",
        "sequences",
        "stepping",
        "steps",
        "tokens",
    )

    def __init__(self) -> None:
        self.clock = StepClock()
        self.stepping: list[OptimizerCall] = []  # the running calls of optimizers' `step`, the innermost last
        self.forget()

    def forget(self) -> None:
        """Drop the step, and begin a new one without data."""
        self.steps: TimedModel | None = None  # the first model that was called in this step
        self.tokens = self.sequences = 0
        self.own_ns = 0  # ns that cbtop spent to begin the forward passes of this step
        # Records the calls of this step. None if the step is not recorded.
        self.calls: StepCalls | None = None
        self.notings: dict[int, Noting] = {}  # id of a model -> makes `calls` record the calls of its modules
        self.communication = StepCommunication()
        self.forwards = 0
        # If not empty: the step ends together with the running backward, and gets this phase.
        self.phase_after_backward = ""

    def give_up(self) -> None:
        """Drop the step. It does not count, and its times are discarded."""
        self.record_no_more()
        self.forget()
        self.clock.restart(None)

    def end_evaluation(self) -> None:
        """End the step of inference that has run between micro-batches of this training step."""
        if self.clock.is_in is TrainingPart.EVALUATION:
            self.clock.end(clock.perf_counter_ns())

    def record_no_more(self) -> None:
        """Stop recording the step, which still counts as a plain step."""
        self.stop_noting()
        if self.calls is not None:
            self.calls.drop()
        self.calls, self.clock.changed = None, None

    def stop_noting(self) -> None:
        """Stop recording the calls of modules in this step."""
        if self.notings:
            captures.pop(get_ident(), None)
        while self.notings:
            _, noting = self.notings.popitem()
            noting.end()

    def note(self, model: TimedModel, call: Call, calls: StepCalls) -> None:
        """Record a call of `model` that begins now in `calls`.

        A step may call several models, such as those of a GAN.
        """
        if id(model) in self.notings:
            calls.model_own = model.own
            calls.begin(None, None)
        else:
            self.notings[id(model)] = noting = Noting(model, calls)
            noting.begin(call)


training_here: Callable[[], ThreadTraining] = finder(ThreadTraining)


class Forward:
    """One call of a model in a training step."""

    __slots__ = ("_here", "_steps")

    def __init__(self, here: ThreadTraining, steps: TimedModel) -> None:
        self._here, self._steps = here, steps

    def ended(self) -> None:
        """End the call of the model, which has returned."""
        try:
            here = self._here
            if here.calls is not None:
                here.calls.end_model()
            here.clock.end(clock.perf_counter_ns())
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._steps.failed(error)
        if self._steps.guard is not None:
            try:
                self._steps.guard.end(self)
            finally:
                if self._here.calls is not None:
                    self._here.calls.guard_ns += self._steps.guard.take_own_ns()

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Drop the training step, because the call of the model has raised an exception."""
        try:
            if self._steps.guard is not None:
                self._steps.guard.drop(self)
            self._here.give_up()
        except Exception as trouble:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._steps.failed(trouble)


class EndedStep(NamedTuple):
    """A training step that has ended. Times are in ns on the host's clock."""

    phase: str
    tokens: int
    sequences: int
    begun_ns: int
    ended_ns: int
    times: StepTimes
    ranges: list[tuple[TrainingPart, int, int]]  # (part, begin, end), in ns

    @property
    def wall_ns(self) -> int:
        return self.ended_ns - self.begun_ns


class TrainingSteps:
    """The training steps of one model. Chooses the steps to record, and records them."""

    is_measured = False  # whether torch's allocator counts the memory of bricks
    steady = 1.0  # the fraction of the allowed overhead to use once FLOOR steps are recorded

    def __init__(self, steps: TimedModel) -> None:
        self._steps = ref(steps)
        self._profiler, self._model = ref(steps.profiler), steps.model
        # The finalizer runs when the model is freed or the process ends.
        at_end = finalize(steps, self._tell_rest)
        setattr(at_end, "atexit", False)  # noqa: B010 - typeshed does not declare this attribute
        recorder = steps.profiler.parts.recorder
        if isinstance(recorder, RingRecorder):
            recorder.before_goodbye(at_end)
        self._due_ns = 0
        self._recorded = self._seen = 0
        self._first_ns = self._paid_ns = 0
        # Cost in ns of recording, for each of the newest recorded steps.
        self._costs_ns: deque[float] = deque(maxlen=SAMPLES)
        # Time in ns of cbtop's own work, for each of the newest steps that were not recorded.
        self._plain_ns: deque[float] = deque(maxlen=SAMPLES)
        self._latest: dict[str, deque[StepTimes]] = {}  # phase -> times in ns of its newest steps
        self._told_ns: dict[str, int] = {}
        self._next_ns = 0  # when the next step should begin, in ns, if it follows without a gap
        self._untold = 0  # number of steps since the last announcement
        self._bricks = RecordedBricks(is_measured=self.is_measured)
        self._no_memory: set[str] = set()  # phases for which unknown memory was announced
        # The model's training mode when an optimizer last changed its weights; None if unknown.
        self.mode: bool | None = None
        self.is_by_hand = False  # whether the program changes the weights by itself, without an optimizer

    def forward(self, model: TimedModel, call: Call) -> Forward | None:
        """Begin a call of the model in a training step.

        Returns None inside a forward or backward pass, because the call then belongs to this pass.
        """
        here = training_here()
        if here.clock.is_in in (TrainingPart.FORWARD, TrainingPart.BACKWARD):
            return None
        now_ns = clock.perf_counter_ns()
        here.forwards += 1
        if here.forwards > (MOST_FORWARDS if here.clock.has_backward else MOST_WITHOUT_BACKWARD):
            here.give_up()
            # This model's steps end in another thread, or in a way that cbtop does not see. Show its forward passes
            # as inference.
            model.training, model.in_python = False, model.takes_turns or model.guard is not None
            return None
        here.clock.begin(TrainingPart.FORWARD, now_ns)
        if here.steps is None:
            here.steps = model
            self._publish(model, here, call, now_ns)
            here.calls = self._calls(model, here, now_ns)
            if here.calls is not None:
                captures[get_ident()] = here.calls
        if here.calls is not None:
            here.note(model, call, here.calls)
        if here.steps is model:  # the other models in a step see the same data, such as the second of two encoders
            here.tokens += call.tokens
            here.sequences += call.sequences
        here.own_ns += clock.perf_counter_ns() - now_ns
        forward = Forward(here, model)
        if model.guard is not None:
            model.guard.begin(forward, TRAIN, is_counted=here.forwards == 1, is_watched=here.calls is not None)
        return forward

    def begin_evaluation(self) -> Callable[[], None] | None:
        """Begin a step of inference, which interrupts the training step of this thread.

        Returns the function that ends the interruption, or None if there is no training step.
        """
        here = training_here()
        if here.steps is None or here.clock.is_in is TrainingPart.EVALUATION:
            return None
        here.clock.begin(TrainingPart.EVALUATION, clock.perf_counter_ns())
        return here.end_evaluation

    def _calls(self, model: TimedModel, here: ThreadTraining, now_ns: int) -> StepCalls | None:
        """Return the object that records the calls of this step, or None if the step is not recorded.

        The first forward pass of the step begins now.
        """
        return StepCalls(model.labelled) if self._is_due(model, now_ns) else None

    def _is_due(self, model: TimedModel, now_ns: int) -> bool:
        warm_ups = model.profiler_steps.warm_ups
        is_settled = warm_ups is None or (TRAIN, model.model) in warm_ups.settled or self._seen > FLOOR
        return is_settled and now_ns >= self._due_ns and not captures

    def _publish(self, model: TimedModel, here: ThreadTraining, call: Call, now_ns: int) -> None:
        """Write into the ring that a training step is running, for viewers."""
        position = model.path.position
        root = position.scope
        while root.parent is not None:
            root = root.parent
        there = root.children.get((STEP, TRAIN, model.model) if model.model else (STEP, TRAIN))
        if there is not None:
            model.path.publish(position, there, now_ns, call.tokens, call.sequences or None)

    def ended(self, here: ThreadTraining, phase: str, now_ns: int) -> None:
        """Count the training step that ends now in the thread `here`. Record it if it was chosen."""
        model = self._steps()
        hooks_ns = here.clock.own_ns
        begun_ns, parts, ranges = here.clock.finish(now_ns)
        if model is None:
            return
        here.stop_noting()
        calls, own_ns = here.calls, here.own_ns
        times = StepTimes(sum(parts.values()), parts, here.communication, hooks_ns)
        step = EndedStep(phase, here.tokens, here.sequences, begun_ns, now_ns, times, ranges)
        here.forget()
        model.path.publish(model.path.position, model.path.position.scope, 0, None, None)
        self._seen += 1
        self._first_ns = self._first_ns or begun_ns
        warm_ups = model.profiler_steps.warm_ups
        name = phase if warm_ups is None else warm_ups.named(phase, model.model)
        self._record(model, name, step, calls)
        if calls is not None:
            self._pay(model, calls, now_ns)
        ended_ns = clock.perf_counter_ns()
        if calls is None:
            self._plain_ns.append(own_ns + ended_ns - now_ns)
            self._paid_ns += own_ns + ended_ns - now_ns
        self._prepare(model, here, ended_ns)
        self._next_ns = clock.perf_counter_ns()
        here.clock.restart(self._next_ns)  # the time of cbtop's own work at the end of this step belongs to no step
        here.clock.own_ns = self._next_ns - now_ns

    def _prepare(self, model: TimedModel, here: ThreadTraining, now_ns: int) -> None:
        """Prepare to record the step that begins now. Some recordings must start before the first forward pass."""

    def _record(self, model: TimedModel, name: str, step: EndedStep, calls: StepCalls | None) -> None:
        """Record an ended step under `name`, with its `calls` if there are any. Announce the parts of the newest
        steps.
        """
        inside = None
        if calls is not None and not calls.has_failed and not calls.is_full and len(step.ranges) < MOST_RANGES:
            inside = calls.parts()
            inside += [((brick,), begin_ns, end_ns, 0) for brick, begin_ns, end_ns in _bricks_in(step.ranges)]
            if not name.endswith(WARM_UP):
                self._bricks.add(step.phase, calls.outputs())
        self._write(model, name, step, inside)
        if not name.endswith(WARM_UP):
            self._announce(model, step, 0 if calls is None else calls.own_ns)

    def _write(self, model: TimedModel, name: str, step: EndedStep, inside: list[Part] | None) -> None:
        record, sequences = model.profiler_steps.record, step.sequences or None
        record(name, step.tokens, step.begun_ns, step.ended_ns, inside, model=model.model, sequences=sequences)
        warm_ups = model.profiler_steps.warm_ups
        if name.endswith(WARM_UP) and warm_ups is not None:
            warm_ups.took(step.phase, model.model, step.wall_ns, step.tokens or step.sequences)

    def _announce(self, model: TimedModel, step: EndedStep, own_ns: int) -> None:
        """Announce the times of the parts of the newest steps.

        `own_ns` is cbtop's own time in the backward passes of this step. It is subtracted first.
        """
        phase, times = step.phase, step.times
        latest = self._latest.setdefault(phase, deque(maxlen=MAX_TIMED_STEPS))
        backward_ns = times.parts.get(TrainingPart.BACKWARD, 0)
        own_ns = min(own_ns, backward_ns)
        parts = times.parts | {TrainingPart.BACKWARD: backward_ns - own_ns}
        latest.append(StepTimes(times.wall_ns - own_ns, parts, times.communication, times.own_ns + own_ns))
        if self._is_time_to_tell(phase, len(latest)):
            self._tell(phase, latest)

    def _is_time_to_tell(self, phase: str, steps: int) -> bool:
        """Count a step with known parts. There are now `steps` of them. Returns whether to announce the parts."""
        now_ns = clock.perf_counter_ns()
        self._untold += 1
        is_early = now_ns - self._told_ns.get(phase, 0) < ANNOUNCE_NS
        if is_early and steps not in EARLY and self._untold < MAX_TIMED_STEPS:
            return False
        self._untold = 0
        self._told_ns[phase] = now_ns
        return True

    def _tell_rest(self) -> None:
        """Announce the parts of the steps since the last announcement, because the steps have ended."""
        if self._untold:
            self._untold = 0
            for phase, latest in self._known().items():
                self._tell(phase, latest)

    def _known(self) -> dict[str, Collection[StepTimes]]:
        """Return the times of the newest steps with known parts, by phase."""
        return dict(self._latest)

    def _tell(self, phase: str, latest: Collection[StepTimes]) -> None:
        """Announce the times of the training steps in `latest`."""
        profiler = self._profiler()
        if profiler is None:
            return
        found = []
        for part in TrainingPart:
            each = [one.parts.get(part, 0) for one in latest]
            if any(each):
                found.append(PartTime(part, sum(each), round(statistics.median(each))))
        wall_ns = sum(one.wall_ns for one in latest)
        communication = together([one.communication for one in latest])
        by_kernels, own_ns = self._steps_by_kernels(phase), sum(one.own_ns for one in latest)
        profiler.announce(
            TrainingTimes(phase, self._model, len(latest), wall_ns, tuple(found), communication, by_kernels, own_ns)
        )
        memory = self._memory(profiler, phase)
        if memory is not None:
            profiler.announce(memory)
        key = (STEP, phase, self._model) if self._model else (STEP, phase)
        bricks = self._bricks.message(phase, self._model, lambda place: node_at(profiler, (key, *place)))
        if bricks is not None:
            profiler.announce(bricks)

    def _memory(self, profiler: BrickProfiler, phase: str) -> TrainingMemory | None:
        """Return the memory of the steps, or None if it was already announced."""
        if phase in self._no_memory:
            return None
        self._no_memory.add(phase)
        return TrainingMemory(phase, self._model, 0, why_unknown=NO_GPU)

    def _steps_by_kernels(self, phase: str) -> int:
        """Return how many recorded steps have times of the parts from their kernels. 0 if the host's clock has timed
        them.
        """
        return 0

    def _pay(self, model: TimedModel, calls: StepCalls, now_ns: int) -> None:
        """Measure the cost of recording the step that ended at `now_ns`."""
        cost = noting_cost()
        paid_ns = clock.perf_counter_ns() - now_ns + calls.own_ns + calls.guard_ns
        paid_ns += round(calls.count * (cost.inside_ns + cost.outside_ns))
        self._count_paid(model, paid_ns, now_ns)

    def _pause_ns(self, pause_ns: int) -> int:
        """Return the time until the next step is recorded, if its cost alone would make it `pause_ns`."""
        return pause_ns

    def _count_paid(self, model: TimedModel, paid_ns: int, now_ns: int, steps: int = 1) -> None:
        """Count recorded steps. Their total cost `paid_ns` decides when the next step is recorded.

        The time until then has to pay for these steps, so it is a part of the time that the cost is a share of.
        """
        self._recorded += steps
        self._paid_ns += paid_ns
        self._costs_ns.append(paid_ns)
        governor = model.profiler_steps.governor
        if governor is None:
            return
        lived_ns = max(1, now_ns - self._first_ns)
        plain = statistics.median(self._plain_ns) * self._seen / lived_ns if self._plain_ns else 0.0
        share = governor.share_of(model.model, self._recorded, now_ns, self.steady)
        used = max(LEAST_USED * share, USED * share - plain - governor.sampled_share)
        pause_ns = self._pause_ns(round(paid_ns / used)) if used else NEVER_NS
        self._due_ns = now_ns + pause_ns
        percent = 100 * (self._paid_ns / (lived_ns + (pause_ns if used else 0)) + governor.sampled_share)
        every = max(1, round(self._seen / max(1, self._recorded)))
        model.profiler.announce(
            Sampling(every, percent, *interval_of(percent, self._costs_ns), governor.allowed_percent)
        )


def _bricks_in(ranges: list[tuple[TrainingPart, int, int]]) -> Iterator[tuple[BrickDefinition, int, int]]:
    """Yield the bricks of a step that are outside of the model, with their begin and end in ns.

    Communication inside the model's forward or backward is left out, because training_calls.py records it. If several
    ranges before a backward count for the loss, the longest is the call of the loss. In the others, the loop may
    clear gradients.
    """
    around, loss = TrainingPart.OTHER, (0, 0)
    for part, begin_ns, end_ns in [*ranges, (TrainingPart.BACKWARD, 0, 0)]:
        if part is TrainingPart.LOSS:
            loss = max(loss, (begin_ns, end_ns), key=lambda one: one[1] - one[0])
        elif part in (TrainingPart.FORWARD, TrainingPart.BACKWARD) and loss[1]:
            yield BRICKS[TrainingPart.LOSS], *loss
            loss = 0, 0
        if part in BRICKS and part is not TrainingPart.LOSS:
            yield BRICKS[part], begin_ns, end_ns
        elif part is TrainingPart.COMMUNICATION and around not in (TrainingPart.FORWARD, TrainingPart.BACKWARD):
            yield GRADIENT_SYNC, begin_ns, end_ns
        around = part


def end_step(here: ThreadTraining, phase: str, now_ns: int) -> None:
    """End the training step of the thread `here`, which gets this `phase`."""
    steps, training = here.steps, None if here.steps is None else here.steps.training
    if steps is None or not training or not steps.profiler.enabled:
        here.give_up()
        here.clock.restart(now_ns)
    else:
        if not training.is_by_hand:  # a step that ends with an evaluation was in training mode
            training.mode = steps.training_mode()
        without_dynamo(training.ended, here, phase, now_ns)


def is_in_training(model: TimedModel) -> bool:
    """Return whether a call of `model` now belongs to a training step. Otherwise it is a step of inference.

    It does if a part of a training step is running. While gradients are enabled, it also does in two cases: a
    training step has begun, or the model is in the same mode (training or evaluation) as when an optimizer last
    changed it.
    """
    if not model.profiler.enabled:
        return False
    here = training_here()
    if here.clock.is_in is TrainingPart.EVALUATION:
        return False
    if here.clock.is_in is not None:
        return True
    if here.clock.has_backward and model.training.is_by_hand:
        if has_made_optimizer():
            model.training.is_by_hand = False  # the optimizer that ends this step and the following ones
        else:
            end_step(here, TRAIN, clock.perf_counter_ns())
    is_trained = torch.is_grad_enabled() and (here.steps is not None or model.training_mode() == model.training.mode)
    if not is_trained and here.steps is None:
        here.give_up()  # an evaluation between two training steps
    elif not is_trained and here.calls is not None:
        # An evaluation between two micro-batches has its own steps.
        here.record_no_more()
    return is_trained
