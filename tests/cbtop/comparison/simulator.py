"""Simulated programs with a fake clock. Their runs are recorded and read as in `cbtop check`.

A simulated run uses the real profiler, its ring, its source and a recording. This shows how a comparison treats
batches, phases, sampling, and bricks that run only in some steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.runs import Run
from cbtop.feeds.run_reader import runs_in
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import Manifest
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingWriter
from cbtop.protocol.vocabulary import BrickCategory
from tests.cbtop.comparison.made_runs import Noise, wander
from tests.cbtop.made_recordings import BEGIN_NS, HELLO, frame
from tests.cbtop.recorded import Clock, source_of

BETWEEN_US, BETWEEN_STEPS_US, PAUSE_US = 0.5, 20.0, 20_000.0
STEPS_A_FRAME = 60
RING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SimulatedBrick:
    """A simulated brick that may run in every layer.

    In each step, the brick runs in a layer with probability `rate`. If it runs, it runs 1 to `most` times. A call
    takes `us` µs, and `us_a_token` µs more for each token after the first.
    """

    name: str
    us: float
    category: BrickCategory = BrickCategory.FFN
    rate: float = 1.0
    most: int = 1
    us_a_token: float = 0.0
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A simulated program: steps with layers, and layers with bricks.

    Each layer also has `of_experts` bricks, called `Expert 0`, `Expert 1`, …. Of these bricks, `experts` run in a
    layer, after the other bricks. The number of tokens of each step is drawn from `batches`. With probability
    `prefill`, a step is a prefill of `prefill_tokens` instead.
    """

    bricks: tuple[SimulatedBrick, ...]
    layers: int = 3
    steps: int = 240
    experts: int = 0
    of_experts: int = 0
    expert_us: float = 80.0
    batches: tuple[int, ...] = (1,)
    prefill: float = 0.0
    prefill_tokens: int = 4
    sample_every: int = 1

    @property
    def all_bricks(self) -> tuple[SimulatedBrick, ...]:
        experts = (SimulatedBrick(f"Expert {at}", self.expert_us) for at in range(self.of_experts))
        return *self.bricks, *experts


@dataclass(frozen=True, slots=True)
class Planted:
    """A deliberate change of one brick in one layer (None: in all layers). A comparison should find it.

    The change multiplies the duration or the rate of the brick's calls, or renames the brick.
    """

    brick: str
    layer: int | None = None
    call: float = 1.0
    rate: float = 1.0
    name: str = ""


NOTHING = Planted("")
USUAL = tuple(
    SimulatedBrick(name, us, category)
    for name, us, category in (
        ("RmsNorm", 20.0, BrickCategory.NORM),
        ("QkvProjection", 160.0, BrickCategory.ATTENTION),
        ("Attention", 100.0, BrickCategory.ATTENTION),
    )
)


def simulated(program: Program, seed: int, noise: Noise = Noise(), planted: Planted = NOTHING) -> Run:  # noqa: B008
    """Return a run of `program`, read from its recording."""
    with TemporaryDirectory(prefix="cbtop-simulated-") as folder:
        path = recorded(program, seed, Path(folder), noise, planted)
        (run,) = runs_in(path)
    return replace(run, name=f"run {seed}")


def recorded(
    program: Program,
    seed: int,
    folder: Path,
    noise: Noise = Noise(),  # noqa: B008
    planted: Planted = NOTHING,
) -> Path:
    """Write a recording of a run of `program` to `folder`, and return its path."""
    path, runtime = folder / f"{seed}.cbtop", folder / f"{seed}"
    runtime.mkdir()
    clock = Clock(now_ns=1_000_000 + 1_000 * seed)
    recorder = RingRecorder(runtime, RING_BYTES)
    profiler = BrickProfiler(clock_ns=clock, recorder=recorder, sample_every=program.sample_every)
    profiler.announce(Manifest("made", "llama", "made", "Q4_K", 1, program.layers, 64, 256, 1_000, 4_000))
    source = source_of(runtime)
    writer = RecordingWriter(path, RecordingOrigin("here", BEGIN_NS, HELLO.realtime_ns), 1 << 30)
    plan = _Plan(program, seed, noise, planted)
    for at, _ in enumerate(_steps(profiler, clock, plan), 1):
        if at % STEPS_A_FRAME == 0:
            source.poll()
            writer.append(frame(FrameKind.RECORDS, at / 10, *source.records()))
            source.delta()
    profiler.close("done")
    source.poll()
    writer.append(frame(FrameKind.RECORDS, at / 10 + 0.1, *source.records()))
    source.delta()
    writer.append(frame(FrameKind.KEYFRAME, at / 10 + 0.1, HELLO, *source.snapshot()))
    writer.close()
    return path


class _Plan:
    """The random content of a simulated run.

    For each step, it has the phase, the tokens, and the calls with their durations. Everything is drawn in advance.
    """

    def __init__(self, program: Program, seed: int, noise: Noise, planted: Planted) -> None:
        self.program = program
        rng = np.random.default_rng(seed)
        bricks, shape = program.all_bricks, (program.steps, program.layers, len(program.all_bricks))
        self.definitions = [
            BrickDefinition(
                planted.name if planted.name and brick.name == planted.brick else brick.name,
                brick.category,
                kernels=tuple(KernelDefinition(kernel, "made") for kernel in brick.kernels),
            )
            for brick in bricks
        ]
        is_planted = np.zeros(shape[1:], np.bool_)
        for at, brick in enumerate(bricks):
            layers = range(program.layers) if planted.layer is None else [planted.layer]
            is_planted[list(layers), at] = brick.name == planted.brick
        self.pace = _pace(rng, noise, shape) * np.where(is_planted, planted.call, 1.0)
        self.calls = _calls(rng, program, shape, np.where(is_planted, planted.rate, 1.0))
        self.is_prefill = rng.random(program.steps) < program.prefill
        self.tokens = rng.choice(program.batches, program.steps)
        self.tokens[self.is_prefill] = program.prefill_tokens
        self._rng, self._noise = rng, noise

    def of_step(self, at: int) -> NDArray[np.object_]:
        """Return how long a call of each brick takes in each layer, in µs. The shape is (layers, bricks)."""
        usual = np.array([b.us + b.us_a_token * (int(self.tokens[at]) - 1) for b in self.program.all_bricks])
        found = np.empty(self.calls.shape[1:], np.object_)
        for layer, brick in np.ndindex(found.shape):
            count = self.calls[at, layer, brick]
            moved = np.exp(self._noise.call * self._rng.standard_normal(count))
            pauses = PAUSE_US * (self._rng.random(count) < self._noise.pauses)
            found[layer, brick] = (usual[brick] * self.pace[at, layer, brick] * moved + pauses).tolist()
        return found


def _pace(rng: np.random.Generator, noise: Noise, shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """Return a factor for each brick in each step.

    The noise of the machine changes the brick's time by this factor.
    """
    steps, layers, bricks = shape
    moved = noise.machine * wander(rng, steps, 1, noise.memory)
    moved = moved + noise.brick * wander(rng, steps, layers * bricks, noise.memory)
    moved += noise.run * (rng.standard_normal() + rng.standard_normal(layers * bricks) / 3)
    moved += rng.choice([-1, 1]) * noise.drift * np.linspace(0, 1, steps)[:, None]
    found = np.exp(moved)
    for begin in np.flatnonzero(rng.random(steps) < 0.1 / 12).tolist() if noise.neighbour else []:
        found[begin : begin + 12] *= 1 + noise.neighbour
    return found.reshape(shape)


def _calls(
    rng: np.random.Generator, program: Program, shape: tuple[int, int, int], factor: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the number of calls of each brick in each step and layer. `factor` multiplies the rate of each brick."""
    rate = np.array([brick.rate for brick in program.all_bricks]) * factor
    most = np.array([brick.most for brick in program.all_bricks])
    calls = (rng.random(shape) < rate) * rng.integers(1, most + 1, shape)
    whole = np.floor(rate).astype(np.int64)  # A rate of 2 means two calls in every step.
    calls = np.where(rate > 1, whole + (rng.random(shape) < rate - whole), calls)
    if program.of_experts:
        first = len(program.bricks)
        # An expert with a larger factor is chosen more often, as if the router preferred it.
        chance = rng.exponential(size=(*shape[:2], program.of_experts)) / factor[None, :, first:]
        chosen = np.argsort(chance, axis=2)[:, :, : program.experts]
        calls[:, :, first:] = 0
        np.put_along_axis(calls[:, :, first:], chosen, 1, axis=2)
    found: NDArray[np.int64] = calls.astype(np.int64)
    return found


def _steps(profiler: BrickProfiler, clock: Clock, plan: _Plan) -> Iterator[None]:
    for at in range(plan.program.steps):
        phase, tokens = "prefill" if plan.is_prefill[at] else "decode", int(plan.tokens[at])
        with profiler.step(phase, tokens=tokens):
            for layer, bricks in enumerate(plan.of_step(at)):
                with profiler.layer(layer):
                    for definition, calls in zip(plan.definitions, bricks, strict=True):
                        for us in calls:
                            with profiler.brick(definition, tokens):
                                clock.sleep_us(us)
                            clock.sleep_us(BETWEEN_US)
        clock.sleep_us(BETWEEN_STEPS_US)
        yield
