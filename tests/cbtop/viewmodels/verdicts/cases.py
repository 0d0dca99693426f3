"""Simulated processes for the tests of verdicts: one for each cause of a verdict, and healthy ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.device_messages import MEMORY_POINT_NS, DeviceProcess, packed_memory
from cbtop.protocol.guard_messages import GuardedSteps, GuardFault
from cbtop.protocol.messages import CheckResult, Quiet
from cbtop.protocol.serving_messages import EngineLoad, EngineQueue, EngineSchedules
from cbtop.protocol.vocabulary import QueueReason
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView
from tests.cbtop.made_machines import CPU, GPU, NVML
from tests.cbtop.made_training import FALLING_SCALE, NAN, NORM, STEADY_SCALE, Training, memory, of_ranks, trained
from tests.cbtop.viewmodels.verdicts.streams import DOWN_WORK, LAYERS, Decoding, ceiling, run

IMPERFECT = Path(__file__).parents[2] / "imperfect.cbtop"
H100 = Path(__file__).parents[2] / "h100.cbtop"
FAR = (ceiling("bandwidth", 1_000.0, 970.0), ceiling("compute", 1_000.0, 970.0))
FINITE = CheckResult("LmHead", "finite", True, None, None)
WEIGHT = GuardFault(
    "decode", 61, "NaN", "DownProjection", "layers.2.down", 2, "finite", 90, inside="", weight="weight"
)
EQUAL = CheckResult("QkvProjection", "equals the NumPy reference", False, 1.2e-3, 1e-5)


def _of(*ranks: Decoding) -> Callable[[Path], SourceView]:
    return lambda directory: run(directory, *ranks).one()


def training(plan: Training, *, window: bool = False) -> Callable[[Path], SourceView]:
    return lambda directory: trained(directory, plan).one(window=window)


def ranks(*plans: Training) -> Callable[[Path], SourceView]:
    """Return a function that runs these ranks and returns the view of the first one."""
    return lambda directory: of_ranks(directory, *plans)[0]


def _in_window(plan: Decoding) -> Callable[[Path], SourceView]:
    return lambda directory: run(directory, plan).one(window=True)


def _beside(base: Decoding, now: Decoding) -> Callable[[Path], SourceView]:
    """Return a function that returns the view of the process `now`.

    The view is compared with a baseline from the process `base`.
    """

    def view(directory: Path) -> SourceView:
        for name in ("base", "now"):
            (directory / name).mkdir()
        made = run(directory / "now", now)
        made.baselines = run(directory / "base", base).snapshots()
        return made.one()

    return view


def _with_gpu(held_down: bool, clock_mhz: float = 1_200.0) -> Callable[[Path], SourceView]:
    gpu = replace(GPU, slowed_by="power cap" if held_down else "", clock_mhz=clock_mhz)

    def view(directory: Path) -> SourceView:
        made = run(directory, Decoding())
        made.hear(replace(NVML, devices=(gpu,)))
        return made.one()

    return view


def beside_a_gpu(plan: Decoding, busy_percent: float) -> Callable[[Path], SourceView]:
    """Return a function that returns the view of a process. Its GPU has the given utilisation."""

    def view(directory: Path) -> SourceView:
        made = run(directory, plan)
        (source,) = made.seen().values()
        hello = source.record.hello
        assert hello is not None
        process = DeviceProcess(hello.pid, hello.process_start, "decode.py")
        gpu = replace(GPU, utilization_percent=busy_percent, processes=(process,), slowed_by="")
        made.hear(replace(NVML, devices=(gpu,)))
        return made.one()

    return view


def _beside_others(
    plan: Decoding, had_percent: float, busy_percent: float = 100.0, waiting_percent: float | None = None
) -> Callable[[Path], SourceView]:
    """Return a function that returns the view of a process with these shares of processor time.

    The process ran for `had_percent` of the time and, as the kernel counts it, waited for a processor for
    `waiting_percent`. The processors of the machine were busy for `busy_percent`.
    """

    def view(directory: Path) -> SourceView:
        made = run(directory, plan)
        (source,) = made.seen().values()
        hello = source.record.hello
        assert hello is not None
        process = DeviceProcess(hello.pid, hello.process_start, "decode.py", None, had_percent, waiting_percent)
        cpu = replace(CPU.devices[0], utilization_percent=busy_percent, processes=(process,))
        for second in range(4):
            made.hear(replace(CPU, devices=(cpu,), monotonic_ns=CPU.monotonic_ns + second * 10**9))
        return made.one()

    return view


def with_memory(
    *points_mib: float, plan: Decoding | None = None, free_gib: float = 12
) -> Callable[[Path], SourceView]:
    """Return a function that returns the view of a process. `points_mib` is its memory, each 20 s, in MiB."""

    def view(directory: Path) -> SourceView:
        made = run(directory, plan or Decoding())
        (source,) = made.seen().values()
        hello = source.record.hello
        assert hello is not None
        source.record.hello = replace(hello, monotonic_ns=0)  # the process has the clock of the samples
        history = packed_memory([round(point * 2**20) for point in points_mib])
        process = DeviceProcess(hello.pid, hello.process_start, "decode.py", memory_history=history)
        cpu = replace(
            CPU.devices[0], memory_used_bytes=4 * 2.0**30, memory_total_bytes=(4 + free_gib) * 2**30,
            processes=(process,), utilization_percent=10.0,
        )  # fmt: skip
        ended_ns = (CPU.monotonic_ns // MEMORY_POINT_NS + len(points_mib)) * MEMORY_POINT_NS
        made.hear(replace(CPU, devices=(cpu,), monotonic_ns=ended_ns))
        return made.one()

    return view


def _engine(
    waits_percent: int,
    reason: QueueReason = QueueReason.LIMIT,
    *,
    running: int = 4,
    cache_percent: float = 10.0,
    preemptions: int = 0,
    schedules: int = 200,
    is_over: bool = False,
) -> Callable[[Path], SourceView]:
    """Return a function that returns the view of an engine.

    Nine requests wait after `waits_percent` of its schedules. If `is_over`, there are no requests any longer.
    """
    waits = schedules * waits_percent // 100
    queue = EngineQueue(reason, max(1, waits), waits * running, max(1, waits * 9), cache_percent)
    said = EngineSchedules(schedules, schedules * running, preemptions, 4, (queue,) if waits else ())

    def view(directory: Path) -> SourceView:
        made = run(directory, Decoding())
        (source,) = made.seen().values()
        load = (0, 0) if is_over else (running, 9)
        source.record.serving.take(EngineLoad(0, 10**9, *load, cache_percent))
        source.record.serving.take(said)
        return made.one(window=is_over)

    return view


def _read_every(resolution_ns: int) -> Callable[[Path], SourceView]:
    """Return a function that returns the view of a process. Its clock has the resolution `resolution_ns`."""

    def view(directory: Path) -> SourceView:
        made = run(directory, Decoding())
        (source,) = made.seen().values()
        assert source.record.hello is not None
        source.record.hello = replace(source.record.hello, clock_resolution_ns=resolution_ns)
        return made.one()

    return view


def _quiet_for(seconds: float, *place: str) -> Callable[[Path], SourceView]:
    """Return a function that returns the view of a process that has made no progress for `seconds`.

    `place` is the path of the node that runs: phase, layer and brick. Without `place`, no node runs.
    """

    def view(directory: Path) -> SourceView:
        made = run(directory, Decoding())
        (source,) = made.seen().values()
        record, inside = source.record, None
        for name in place:
            inside = next(node.id for node in record.nodes.children[inside] if node.name == name)
        assert record.state is not None
        quiet_ns = round(seconds * 1e9)
        quiet = Quiet(quiet_ns, inside or 0, quiet_ns if place else None, threads=len(place[:1]), is_watched=True)
        record.state = replace(record.state, quiet=quiet)
        return made.one()

    return view


def _merged(directory: Path) -> SourceView:
    found = run(directory, *(Decoding(seed=rank) for rank in range(3))).merged(MergeMode.SUM)
    assert found is not None
    return found


def _recorded(directory: Path) -> SourceView:
    """Return the view of a recording from an H100.

    One of its 272 decode steps took 0.7 s because the driver loaded kernels.
    """
    with ReplayFeed(H100) as feed:
        feed.is_playing = False
        feed.seek(20.0)
        found = feed.view(None, "decode")
    assert found is not None
    return found


SCORES = [(layer, "AttentionScore") for layer in range(LAYERS)]

# The memory (MiB) of a process that keeps 12 MiB more in 20 s, with some noise.
LEAK = tuple(1_000 + 12 * point + (0, 2, 1, 4)[point % 4] for point in range(16))

# Simulated processes by the id of a verdict. Each process must get exactly this verdict.
CAUSES: dict[str, Callable[[Path], SourceView]] = {
    "stuck": _quiet_for(32.0, "decode", "5", "DownProjection"),
    "data-incomplete": _of(Decoding(ring_bytes=1 << 14)),
    "failed-checks": _of(Decoding(checks=(FINITE, EQUAL))),
    "not-finite": _of(Decoding(guarded=(GuardedSteps("", 90, 30, WEIGHT),))),
    "gradient-not-finite": training(Training(gradients=(NORM, NAN))),
    "starved": _beside_others(Decoding(), had_percent=55),
    "straggler": _of(Decoding(reduce_us=605), Decoding(down_factor=1.5, reduce_us=5), Decoding(reduce_us=605)),
    "waits-for-rank": ranks(Training(exposed_us=9_000), Training(other_us=9_000, exposed_us=200)),
    "clock-throttled": _with_gpu(held_down=True),
    "slower-than-baseline": _beside(
        Decoding(seed=1, noise=0.1), Decoding(noise=0.1, cell_factor={(5, "DownProjection"): 1.1})
    ),
    "recompilation": _in_window(Decoding(compiles_at=(100, 200, 300))),
    "loss-scale-falling": training(Training(gradients=(NORM, FALLING_SCALE))),
    "allocator-retries": training(Training(gradients=(memory(30, 42, 60, retries=6),))),
    "memory-grows": with_memory(*LEAK),
    "cache-too-small": _engine(40, QueueReason.CACHE, preemptions=9, cache_percent=98.0),
    "batch-of-one": _engine(90, running=1),
    "queue-at-limit": _engine(90),
    "idle-between-steps": _of(Decoding(between_us=20_000)),
    "input-bound": training(Training(data_us=12_000)),
    "communication-exposed": ranks(Training(exposed_us=9_000), Training(exposed_us=8_000, other_us=1_200)),
    "optimizer-bound": training(Training(optimizer_us=15_000)),
    "launch-bound": _of(Decoding(waits_every=1)),
    "host-bound": beside_a_gpu(Decoding(gap_us=1_500), busy_percent=10),
    "odd-layer": _of(Decoding(layer_factor={5: 1.5})),
    "bimodal-latency": _of(Decoding(step_factor=lambda step: 1.5 if step * 7_919 % 100 < 30 else 1.0)),
    "outlier-mean": _of(Decoding(step_factor=lambda step: 20.0 if step % 100 == 50 else 1.0)),
    "over-budget": _of(Decoding(budget_us=1_100)),
    "warm-up": _of(Decoding(step_factor=lambda step: 30.0 if step < 6 else 1.0)),
    "grows-with-cache": _of(
        Decoding(
            cached=lambda step: 100 + step, brick_factor={"AttentionScore": lambda step: 1 + step / 150}, seconds=15
        )
    ),
    "slows-down": _of(Decoding(step_factor=lambda step: 1 + step / 1_000, seconds=15)),
    "recompute": training(Training(recomputes=True)),
    "memory-near-limit": training(Training(gradients=(memory(60, 76, 78, node=4),))),
    "below-resolution": _read_every(40_000),
    "roof-unsure": _of(Decoding(work=DOWN_WORK, ceilings=(ceiling("bandwidth", 40, 33), ceiling("compute", 1_000)))),
    "memory-bound": _of(Decoding(work=DOWN_WORK, ceilings=(ceiling("bandwidth", 40, 39), ceiling("compute", 1_000)))),
    "compute-bound": _of(
        Decoding(work=DOWN_WORK, ceilings=(ceiling("bandwidth", 1_000), ceiling("compute", 80, 78)))
    ),
}

# Simulated processes with the problems of CAUSES. The problems are too small for a verdict here.
ALMOST: dict[str, Callable[[Path], SourceView]] = {
    "stuck": _quiet_for(1.9, "decode", "5", "DownProjection"),
    "not-finite": _of(Decoding(guarded=(GuardedSteps("", 90),))),
    "starved": _beside_others(Decoding(), had_percent=90),
    "straggler": _of(Decoding(reduce_us=245), Decoding(down_factor=1.2, reduce_us=5), Decoding(reduce_us=245)),
    "waits-for-rank": ranks(Training(exposed_us=3_200), Training(other_us=3_200, exposed_us=200)),
    "clock-throttled": _with_gpu(held_down=True, clock_mhz=1_920.0),
    "slower-than-baseline": _beside(
        Decoding(seed=1, noise=0.1), Decoding(noise=0.1, cell_factor={(5, "DownProjection"): 1.02})
    ),
    "recompilation": _in_window(Decoding(compiles_at=(300,), seconds=14)),
    "loss-scale-falling": training(Training(gradients=(replace(FALLING_SCALE, latest_falls=6, latest_rises=3),))),
    "allocator-retries": training(Training(gradients=(memory(30, 42, 60, retries=2),))),
    "memory-grows": with_memory(*LEAK, free_gib=120_000),
    "cache-too-small": _engine(0, preemptions=1),
    "batch-of-one": _engine(45, running=1),
    "queue-at-limit": _engine(90, cache_percent=55.0),
    "idle-between-steps": _of(Decoding(between_us=5_000)),
    "input-bound": training(Training(data_us=2_500)),
    "communication-exposed": ranks(Training(exposed_us=3_400), Training(exposed_us=3_200, other_us=400)),
    "optimizer-bound": training(Training(optimizer_us=8_500)),
    "launch-bound": _of(Decoding(waits_every=6)),
    "host-bound": beside_a_gpu(Decoding(gap_us=800), busy_percent=10),
    "odd-layer": _of(Decoding(layer_factor={5: 1.17})),
    "bimodal-latency": _of(Decoding(step_factor=lambda step: 1.5 if step % 13 == 0 else 1.0)),
    "outlier-mean": _of(Decoding(step_factor=lambda step: 5.0 if step % 50 == 25 else 1.0)),
    "over-budget": _of(Decoding(budget_us=1_230)),
    "warm-up": _of(Decoding(step_factor=lambda step: 8.0 if step < 7 else 1.0, seconds=15)),
    "grows-with-cache": _of(
        Decoding(
            cached=lambda step: 100 + step, brick_factor={"AttentionScore": lambda step: 1 + step / 1_000}, seconds=15
        )
    ),
    "slows-down": _of(Decoding(step_factor=lambda step: 1 + step / 4_000, seconds=15)),
    "recompute": training(
        Training(recomputes=True, factor={"DownProjection recompute": 0.1, "QkvProjection recompute": 0.7})
    ),
    "memory-near-limit": training(Training(gradients=(memory(60, 74, 78),))),
    "below-resolution": _read_every(19_000),
    "roof-unsure": _of(Decoding(ceilings=(ceiling("bandwidth", 40, 36.5), ceiling("compute", 1_000)))),
    "memory-bound": _of(Decoding(work=DOWN_WORK, ceilings=(ceiling("bandwidth", 52), ceiling("compute", 1_000)))),
    "compute-bound": _of(Decoding(work=DOWN_WORK, ceilings=(ceiling("bandwidth", 1_000), ceiling("compute", 104)))),
}

OUTLIERS = Decoding(step_factor=lambda step: 20.0 if step % 100 == 50 else 1.0)

HEALTHY: dict[str, Callable[[Path], SourceView]] = {
    "never without a processor, says the kernel": _beside_others(Decoding(), had_percent=55, waiting_percent=5),
    "as usual": _of(Decoding()),
    "an engine without a queue": _engine(0),
    "an engine with one request at a time, and no queue": _engine(0, running=1),
    "an engine with a burst of requests": _engine(90, schedules=63),
    "an engine whose queue is over": _engine(90, is_over=True),
    "an engine whose steps are full of a long prompt": _engine(90, QueueReason.TOKENS, running=1),
    "an engine whose cache is full, without preemptions": _engine(90, QueueReason.CACHE, cache_percent=97.0),
    "noisy": _of(Decoding(noise=0.2, seed=1)),
    "noisy, in a window": _in_window(Decoding(noise=0.2, seed=2)),
    "two phases": _of(Decoding(prefills=20)),
    "two phases, one as long as the other": _of(Decoding(prefills=5)),
    "layers of two kinds": _of(Decoding(layer_factor={1: 1.5, 4: 1.5, 6: 1.5})),
    "layers of all kinds": _of(Decoding(layer_factor={0: 0.7, 1: 0.8, 2: 0.9, 5: 1.05, 6: 1.1, 7: 1.3})),
    "a short, noisy life": _of(Decoding(seconds=0.15, noise=0.4)),
    "steps of all lengths": _of(Decoding(step_factor=lambda step: 0.5 + step * 7_919 % 1_000 / 1_000)),
    "steps of two lengths, little apart": _of(
        Decoding(step_factor=lambda step: 1.15 if step * 7_919 % 100 < 30 else 1.0, noise=0.01, seconds=30)
    ),
    "a cache that fills, and much else that moves": _of(
        Decoding(
            cached=lambda step: 100 + step,
            step_factor=lambda step: 1 + step / 1_200 + 0.3 * (step // 40 * 7_919 % 10 / 10),
            seconds=15,
        )
    ),
    "steps of many sizes": _of(
        Decoding(tokens=lambda step: 1 + step % 7, step_factor=lambda step: 1 + step % 7, seconds=20)
    ),
    "steps of two sizes in turn": _of(
        Decoding(tokens=lambda step: 1 + 2 * (step % 2), step_factor=lambda step: 1 + 2 * (step % 2), seconds=20)
    ),
    "a batch that shrinks": _of(
        Decoding(tokens=lambda step: 32 if step < 40 else 4, step_factor=lambda step: 4 if step < 40 else 1)
    ),
    "compiled once, late": _in_window(Decoding(compiles_at=(300,), compiles_again=False)),
    "a short life": _of(Decoding(seconds=0.4)),
    "sampled": _of(Decoding(sample_every=8)),
    "a cache that fills": _of(Decoding(cached=lambda step: 100 + step)),
    "pauses now and then": _of(Decoding(step_factor=lambda step: 3.0 if step % 100 == 50 else 1.0)),
    "roofs far above": _of(Decoding(work=DOWN_WORK, ceilings=FAR, budget_us=1_300, checks=(FINITE,))),
    "found late": _of(Decoding(attach_s=20, seconds=32, ring_bytes=1 << 16)),
    "a server that waits": _quiet_for(32.0),
    "half of a step in code that cbtop does not see inside": _of(Decoding(gap_us=4_000)),
    "the same, and the GPU is busy": beside_a_gpu(Decoding(gap_us=4_000), busy_percent=95),
    "a GPU that idles": _with_gpu(held_down=False),
    "as the baseline, noisy": _beside(Decoding(seed=3, noise=0.2), Decoding(seed=4, noise=0.2)),
    "paused in one place since the baseline": _beside(Decoding(), Decoding(cell_pauses={(2, "RmsNorm"): 5})),
    "faster than the baseline": _beside(Decoding(down_factor=1.1), Decoding(seed=1)),
    "a longer cache than the baseline's": _beside(
        Decoding(cached=lambda step: 100 + step // 100),
        Decoding(cached=lambda step: 400 + step // 100, cell_factor=dict.fromkeys(SCORES, 1.5)),
    ),
    "another batch than the baseline's": _beside(
        Decoding(), Decoding(tokens=lambda _step: 2, step_factor=lambda _step: 1.5)
    ),
    "another mix of phases than the baseline's": _beside(
        Decoding(prefills=20), Decoding(prefills=5, step_factor=lambda _step: 1.3)
    ),
    "training": training(Training()),
    "training with a gradient scaler": training(Training(gradients=(NORM, STEADY_SCALE))),
    "training whose allocator keeps much for later, with room left": training(
        Training(gradients=(memory(30, 36, 70),))
    ),
    "training that fills a GPU's memory with its cache": training(Training(gradients=(memory(30, 62, 78),))),
    "training, in a window": training(Training(tokens=4_096), window=True),
    "training that pauses between steps": training(Training(between_us=20_000)),
    "training that only begins": training(Training(steps=19, data_us=12_000, optimizer_us=15_000, exposed_us=9_000)),
    "a warm-up that waits for data": training(Training(steps=200, warm_up=200, data_us=12_000)),
    "three ranks": _of(Decoding(), Decoding(seed=1), Decoding(seed=2)),
    "three replicas, one of them slow": _of(Decoding(), Decoding(down_factor=1.5), Decoding()),
    "three ranks merged": _merged,
    "a cache of results that fills and stops": with_memory(*[1_000 + 40 * min(point, 6) for point in range(16)]),
    "a cache of results that fills more and more slowly": with_memory(
        *[1_000 + 400 * (1 - 0.8**point) for point in range(16)]
    ),
    "an allocator that takes a block at once": with_memory(*[1_000 + 512 * (point > 8) for point in range(16)]),
    "memory that is freed again and again": with_memory(*[1_000 + 30 * (point % 8) for point in range(20)]),
    "memory that goes up and down": with_memory(*[1_000 + 20 * (point * 7_919 % 10) for point in range(30)]),
    "memory that grows for two minutes": with_memory(*LEAK[:7]),
    "memory that grows with a request's cache": with_memory(
        *LEAK, plan=Decoding(cached=lambda step: 100 + step, seconds=30)
    ),
}


def _imperfect(directory: Path) -> SourceView:
    """Return the view of a recording.

    Its process pauses, its sampling waits, and one layer copies its weights.
    """
    with ReplayFeed(IMPERFECT) as feed:
        feed.is_playing = False
        feed.seek(7.0)
        found = feed.view(None, "decode", window=True)
    assert found is not None
    return found


# Recordings, and the verdicts that their known problems must get. In WAITS, the kernel counts waits for a processor
# although the machine is not fully used, so its latency gets no verdict.
WAITS = _beside_others(OUTLIERS, had_percent=55, busy_percent=50, waiting_percent=40)

RECORDED: dict[str, tuple[Callable[[Path], SourceView], list[str]]] = {
    "an H100's first seconds": (_recorded, ["outlier-mean"]),
    "imperfect": (_imperfect, ["idle-between-steps", "odd-layer", "outlier-mean"]),
}
