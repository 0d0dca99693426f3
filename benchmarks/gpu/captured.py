"""Measure the cost of timing bricks inside a captured CUDA graph: `python -m benchmarks.gpu.captured [transformers]
[batch ...]`.

A decode step of a 7B-shaped model in bf16 is one captured graph. It is replayed and waited for, as in an engine that
reads its tokens. These variants take turns in rounds:
- the graph replayed by torch without cbtop (twice; the ratio of both is the noise)
- the same graph under `--overhead 1%`, and with stamps only between its layers in every step
- another graph of the same model, without cbtop and with every step recorded
- a graph with a CUDA event recorded before and after every leaf module

torch.profiler is measured last, first with the device alone (Kineto), then with CPU and device. It is last because
CUPTI continues to take time after it was loaded. It is compared with the earlier rounds without cbtop. Ratios are
medians over the rounds. Ratios of means are shown, too, because the default adds its cost to few steps, which a
median does not show.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.lean import Engine, lean, transformers_llama
from cbtop.profiler.device.graph_surgery import StampedGraph, StampSites
from cbtop.profiler.instrument import attach, captured_graphs, device_graphs
from cbtop.profiler.instrument.governor import GovernedProfiler, Sort
from cbtop.profiler.instrument.stamp_plans import StampPlan
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

ROUNDS, STEPS, WARM_UP = 20, 30, 20  # number of rounds, of steps per round, and of warm-up rounds
PEER_ROUNDS = 5
PERCENT = 1.0


def timed_ns(engine: Engine, step: Callable[[], None], steps: int) -> float:
    engine.restart()
    torch.cuda.synchronize()
    begun = time.perf_counter_ns()
    for _ in range(steps):
        step()
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - begun) / steps


def build_bytes(engine: Engine) -> tuple[int, float]:
    """Return what the clones of an engine's graph that record stamps cost: memory on the device (bytes) and time to
    make them (s).

    The time is the longest of the first replays.
    """
    free = torch.cuda.mem_get_info()[0]
    slowest = 0.0
    for _ in range(8):
        slowest = max(slowest, timed_ns(engine, engine.step, 1) / 1e9)
    return free - torch.cuda.mem_get_info()[0], slowest


def with_events(model: Any, batch: int) -> Engine:
    """Return an engine with a graph that records an event before and after every leaf module."""
    events: list[Any] = []

    def record(*_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            events.append(torch.cuda.Event(enable_timing=True, external=True))
            events[-1].record()

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [
        hook for one in leaves for hook in (one.register_forward_pre_hook(record), one.register_forward_hook(record))
    ]
    engine = Engine(model, batch).capture()
    for hook in hooks:
        hook.remove()
    engine.events = events
    return engine


def with_layer_stamps(engine: Engine) -> Callable[[], None]:
    """Return a function that runs a step of a clone of the engine's graph. The clone records time stamps only between
    layers.
    """
    captured = captured_graphs.graphs[engine.graph]
    device = captured.on.device
    plan = StampPlan(StampSites.of(device.driver, captured.clone), captured._spans)
    ends = {0, len(plan.places) - 1}
    for interval in plan.intervals:
        if isinstance(interval.keys[-1], tuple):  # This interval between two stamps belongs to a layer.
            ends |= {interval.begin, interval.end}
    stream = torch.cuda.current_stream().cuda_stream
    stamped = StampedGraph(device, captured.clone, [plan.places[end] for end in sorted(ends)], stream)

    def step() -> None:
        stamped.read()
        stamped.launch(stream)

    return step


def of_batch(batch: int, make: Callable[[int], Any]) -> None:
    model, another = make(batch), make(batch)
    eventful = with_events(model, batch)
    governed = GovernedProfiler(PERCENT, recorder=RingRecorder())
    every = BrickProfiler()
    attach(model, governed)
    attach(another, every)
    default, everywhere = Engine(model, batch).capture(), Engine(another, batch).capture()
    nodes = len(device_graphs.devices[0].device.driver.nodes(captured_graphs.graphs[default.graph].clone))
    took = {"default": build_bytes(default), "every step": build_bytes(everywhere)}
    plain = torch._C._CUDAGraph.replay
    kinds: dict[str, tuple[Engine, Callable[[], None]]] = {
        "bare": (default, lambda: plain(default.graph)),
        "bare again": (default, lambda: plain(default.graph)),
        "bare, another": (everywhere, lambda: plain(everywhere.graph)),
        "default": (default, default.step),
        "every step": (everywhere, everywhere.step),
        "layers alone": (default, with_layer_stamps(default)),
        "event nodes": (eventful, lambda: plain(eventful.graph)),
    }
    for name, (engine, step) in kinds.items():
        for _ in range(WARM_UP if name == "default" else 2):
            timed_ns(engine, step, STEPS)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for at in range(ROUNDS):
        names = list(kinds)
        for name in names[at % len(names) :] + names[: at % len(names)]:
            found[name].append(timed_ns(*kinds[name], STEPS))
    bare_us = statistics.median(found["bare"]) / 1000
    print(f"{make.__name__}, batch {batch}: {nodes} nodes, bare {bare_us:.0f} us a step")
    for name in list(kinds)[1:]:
        peer = found["bare, another" if name == "every step" else "bare"]
        ratios = sorted(mine / other for mine, other in zip(found[name], peer, strict=True))
        middle, low, high = statistics.median(ratios), ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        mean = sum(found[name]) / sum(peer)
        print(
            f"  {name:14} {middle:.4f} x (half of the rounds between {low:.4f} and {high:.4f}; of means {mean:.4f})"
        )
    for name, (size, seconds) in took.items():
        print(f"  {name:12} {size / (1 << 20):.0f} MiB on the device, longest of 8 steps {1000 * seconds:.0f} ms")
    cost, last = captured_graphs.graphs[default.graph].costs.known, device_graphs.devices[0].device.time.last
    print(f"  one step in {governed.governor.every}; a stamp costs {cost}; {last}")
    for (name, _), kind in governed.governor.kinds.items():
        costs = {sort.name.lower(): kind.estimate(sort) for sort in Sort if kind.counts[sort]}
        print(f"  {name}: {kind.seen} steps, paid in ns: {costs}")
    own = sorted(governed.governor.own_ns)
    print(f"  a plain step pays {own[len(own) // 2] / 1000:.1f} us (median of the last {len(own)})")
    peers(default, lambda: plain(default.graph), statistics.median(found["bare"]))
    governed.finalize()
    every.finalize()
    for profiler in (governed, every):
        print(profiler.report())


def peers(engine: Engine, step: Callable[[], None], bare_ns: float) -> None:
    """Measure the cost of torch.profiler on the same replays of the graph."""
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for name, activities in (("Kineto", both[1:]), ("torch.profiler", both)):
        times = []
        for _ in range(PEER_ROUNDS):
            with torch.profiler.profile(activities=activities):
                times.append(timed_ns(engine, step, STEPS))
        print(f"  {name:14} {statistics.median(times) / bare_ns:.4f} x")
    after = [timed_ns(engine, step, STEPS) for _ in range(PEER_ROUNDS)]
    print(f"  {'bare, then':14} {statistics.median(after) / bare_ns:.4f} x")


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    driver = torch.cuda.get_device_properties(0)
    print(f"{time.strftime('%Y-%m-%d')} {driver.name}, torch {torch.__version__}: {' '.join(sys.argv)}")
    make = transformers_llama if "transformers" in sys.argv else lean
    for batch in [int(word) for word in sys.argv[1:] if word.isdigit()] or [1, 16]:
        of_batch(batch, make)


if __name__ == "__main__":
    main()
