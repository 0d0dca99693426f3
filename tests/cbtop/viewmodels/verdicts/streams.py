"""Simulated decoding processes with known problems. They use the real profiler, source, store and feed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from pathlib import Path

from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.feeds.feed import StoreViews
from cbtop.profiler.analysis.budget import TokenBudget
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.held_steps import launch_bound
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.attributes import Work
from cbtop.protocol.guard_messages import GuardedSteps
from cbtop.protocol.messages import (
    Activity,
    Ceiling,
    CheckResult,
    Compilation,
    HostHello,
    Manifest,
    Message,
    SourceCatalog,
    StatsUpdate,
)
from cbtop.protocol.vocabulary import BrickId, Provenance
from cbtop.viewmodels.source import SourceView
from tests.cbtop.made_machines import HELLO
from tests.cbtop.recorded import Clock, apply, source_of

LAYERS = 8
UPDATE_NS = 500_000_000  # interval of the daemon's messages on the fake clock
# µs per call: bricks that run in each layer, and the LM head, which runs once per step. A step takes 24.2 ms.
IN_LAYERS = {"RmsNorm": 100.0, "QkvProjection": 800.0, "AttentionScore": 500.0, "DownProjection": 1_200.0}
LM_HEAD_US = 3_000.0
GAP_US = 25.0  # time in each layer that is outside its bricks
# Bytes and FLOP per call of DownProjection. At its usual time this is 30 GB/s and 60 GFLOP/s.
DOWN_WORK = Work(flops_per_call=72e6, bytes_per_call=36e6)


def usual(_step: int) -> float:
    return 1.0


@dataclass
class Decoding:
    """Settings of a simulated decoding process. With the defaults, it has no problem."""

    seconds: float = 12.0
    noise: float = 0.03  # relative noise of the time of each brick
    # a function from the number of a step to the factor on all times in this step
    step_factor: Callable[[int], float] = usual
    layer_factor: dict[int, float] = field(default_factory=dict)
    down_factor: float = 1.0  # factor on the time of DownProjection
    # by brick: a function from the number of a step to the factor on the brick's time
    brick_factor: dict[str, Callable[[int], float]] = field(default_factory=dict)
    # by layer and brick: the factor on the brick's time in this layer
    cell_factor: dict[tuple[int, str], float] = field(default_factory=dict)
    # by layer and brick: a number n. In one of n steps, this brick takes 4 ms more in this layer.
    cell_pauses: dict[tuple[int, str], int] = field(default_factory=dict)
    reduce_us: float = 0.0  # time in each layer in which the process waits for other ranks
    gap_us: float = GAP_US
    rest_us: float = 0.0  # time in each step outside its layers and bricks
    between_us: float = 200.0  # pause between steps
    measured: str = ""  # how the process measures times, in its own words
    cached: Callable[[int], int] | None = None  # reported cached positions before step n
    sequences: Callable[[int], int] | None = None  # reported sequences in step n
    tokens: Callable[[int], int] = lambda _step: 1
    prefills: int = 0  # number of decode steps after each prefill; 0: there are no prefills
    sample_every: int = 1
    # a number n; 0: never. In one of n steps, bricks wait for the host. Such steps are labelled launch-bound.
    waits_every: int = 0
    attach_s: float = 0.0  # time from the start of the process until a viewer connects
    work: Work | None = None
    ceilings: Sequence[Ceiling] = ()
    checks: Sequence[CheckResult] = ()
    guarded: Sequence[GuardedSteps] = ()
    compiles_at: Sequence[int] = ()  # numbers of the steps that wait 0.5 s for a compiler
    compiles_again: bool = True
    budget_us: float | None = None  # budget of DownProjection per token
    ring_bytes: int = 1 << 20
    seed: int = 0


class Made(StoreViews):
    """The views of a viewer that has received all messages about these processes."""

    def __init__(self, window_s: float = 10.0) -> None:
        super().__init__(())
        self._store = Store(window_s)
        self._store.apply(HELLO)

    @property
    def store(self) -> Store:
        return self._store

    def hear(self, *messages: Message) -> None:
        apply(self._store, messages)

    def one(self, *, window: bool = False) -> SourceView:
        """Return the view of one process, the first in the order of keys."""
        found = self.view(next(iter(self.seen())), "decode", window=window)
        assert found is not None
        return found


def run(directory: Path, *ranks: Decoding) -> Made:
    """Run these processes at the same time. Several processes are ranks of one job."""
    made = Made()
    running = [_updates(directory / str(rank), rank, plan) for rank, plan in enumerate(ranks)]
    for updates in zip(*running, strict=False):
        for rank, messages in enumerate(updates):
            made.hear(*(_of_rank(message, rank, len(ranks)) for message in messages))
    return made


def _updates(directory: Path, rank: int, plan: Decoding) -> Iterator[list[Message]]:
    directory.mkdir()
    clock, noise = Clock(1_000_000_000), random.Random(1_000 * rank + plan.seed)
    recorder = RingRecorder(directory, plan.ring_bytes)
    profiler = BrickProfiler(clock_ns=clock, recorder=recorder, sample_every=plan.sample_every)
    for announced in (Activity(""), *plan.ceilings, *plan.checks, *plan.guarded):
        profiler.announce(announced)
    if plan.measured:
        profiler.announce(Manifest("made", "made", plan.measured, "F32", 1, LAYERS, 64, 256, 1_000, 4_000))
    bricks = {name: _brick(name, plan) for name in (*IN_LAYERS, "LmHead")}
    waiting = {name: launch_bound(definition) for name, definition in bricks.items()}

    def brick(name: str, us: float) -> None:
        waits = plan.waits_every and step % plan.waits_every == 0
        with profiler.brick(waiting[name] if waits else bricks[name], 64):
            clock.sleep_us(us * exp(noise.normalvariate(0, plan.noise)))

    cells = [
        [
            (
                each, us, plan.down_factor if each == "DownProjection" else 1.0, plan.brick_factor.get(each, usual),
                plan.layer_factor.get(index, 1.0) * plan.cell_factor.get((index, each), 1.0),
                plan.cell_pauses.get((index, each), 0),
            )
            for each, us in IN_LAYERS.items()
        ]
        for index in range(LAYERS)
    ]  # fmt: skip
    source = None if plan.attach_s else _attached(directory)
    begin_ns = said_ns = clock()
    if source:
        yield _at(said_ns, source.snapshot())
    step = 0
    while clock() - begin_ns < plan.seconds * 1e9:
        is_prefill = bool(plan.prefills) and step % plan.prefills == 0
        factor = plan.step_factor(step) * (4 if is_prefill else 1)
        name, tokens = ("prefill", noise.randrange(100, 500)) if is_prefill else ("decode", plan.tokens(step))
        with profiler.step(name, tokens) as running:
            if plan.cached is not None:
                running.sequences, running.cached = 1, plan.cached(step)
            if plan.sequences is not None:
                running.sequences = plan.sequences(step)
            for index, in_layer in enumerate(cells):
                with profiler.layer(index):
                    for each, us, down, of_step, own, every in in_layer:
                        took_us = us * factor * (down * of_step(step)) * own
                        brick(each, took_us + (4_000 if every and step % every == 0 else 0))
                    if plan.reduce_us:
                        with profiler.brick("AllReduce", 64):
                            clock.sleep_us(plan.reduce_us)
                    clock.sleep_us(plan.gap_us * factor)
            brick("LmHead", LM_HEAD_US * factor)
            clock.sleep_us(plan.rest_us)
            if step in plan.compiles_at:
                compile_ns = clock()
                clock.sleep_us(500_000)
                said = Compilation(plan.compiles_at.index(step), compile_ns, clock(), plan.compiles_again)
                profiler.announce(said)
        clock.sleep_us(plan.between_us * noise.lognormvariate(0, 0.2))
        step += 1
        is_over = clock() - begin_ns >= plan.seconds * 1e9
        if clock() - begin_ns >= plan.attach_s * 1e9 and (is_over or clock() - said_ns >= UPDATE_NS):
            said_ns = clock()
            if source is None:
                source = _attached(directory)
                yield _at(said_ns, source.snapshot())
            source.poll()
            yield _at(said_ns, source.delta())


def _attached(directory: Path) -> Source:
    source = source_of(directory)
    source.poll()
    return source


def _at(now_ns: int, messages: Iterable[Message]) -> list[Message]:
    return [replace(said, monotonic_ns=now_ns) if isinstance(said, StatsUpdate) else said for said in messages]


def _brick(name: str, plan: Decoding) -> BrickDefinition:
    return BrickDefinition.of(
        BrickId.from_name(name),
        backend="made",
        work=plan.work if name == "DownProjection" else None,
        budget=TokenBudget(plan.budget_us) if name == "DownProjection" and plan.budget_us else None,
    )


def _of_rank(message: Message, rank: int, ranks: int) -> Message:
    """Return the message as if rank `rank` of `ranks` had sent the message.

    With one rank, it is returned unchanged.
    """
    if ranks == 1 or not hasattr(message, "source"):
        return message
    if isinstance(message, SourceCatalog):
        said = tuple(
            replace(one, rank=rank, world_size=ranks, pid=one.pid + rank) if isinstance(one, HostHello) else one
            for one in message.messages
        )
        message = replace(message, messages=said)
    return replace(message, source=f"made:{rank}:1:0")


def ceiling(kind: str, value: float, median: float | None = None) -> Ceiling:
    unit = "GB/s" if kind == "bandwidth" else "GFLOP/s"
    return Ceiling(f"made {kind}", kind, value, unit, Provenance.MEASURED, median=median)
