"""Tests of captured graphs on a CUDA device: times of bricks agree with CUPTI, and outputs are equal.

Nothing is left after detaching.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.profiler.instrument.tiny import torch

from cbtop.profiler.instrument import attach, captured_graphs, device_graphs, uninstall  # isort: skip - it loads torch
from cbtop.feeds.replay import ReplayFeed
from cbtop.profiler.device.graph_surgery import StampSites
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS, LANE_SHIFT
from cbtop.protocol.vocabulary import NodeKind
from tests.integration.hosts import CBTOP, DEADLINE_S
from tests.profiler.memory import Memory

if torch.cuda.is_available():
    from benchmarks.gpu.lean import Engine, lean

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SMALL = {"hidden": 512, "inner": 1024, "heads": 8, "layers": 4, "context": 64, "vocabulary": 1000}


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def profiler(memory: Memory) -> Iterator[BrickProfiler]:
    yield BrickProfiler(recorder=memory, sample_every=2)
    uninstall()


def steps_in(memory: Memory) -> list[dict[str, Any]]:
    """Return a dict for each step: (start, end, elements) of its records by the path of their names."""
    nodes = {said.id: said for said in memory.said if isinstance(said, Node)}

    def path(node: Node) -> tuple[str, ...]:
        outer = nodes.get(node.parent) if node.parent else None
        name = f"{node.name} {node.label}".strip()
        return (*(path(outer) if outer is not None else ()), name)

    found: list[dict[str, Any]] = []
    lanes: dict[int, Any] = {}
    for tag, start, end, elements in memory.records:
        node = nodes.get(tag & 0xFFFFFF)
        if node is None or tag & FLAG_AMOUNTS == FLAG_AMOUNTS:
            continue
        lane = tag >> LANE_SHIFT
        inside = lanes.setdefault(lane, defaultdict(list))
        if node.kind is NodeKind.STEP:
            found.append({"name": node.name, "start": start, "end": end, "tokens": elements, "in": lanes.pop(lane)})
        else:
            inside[path(node)].append((start, end, node.kind, node.name))
    return found


def begin_anew(memory: Memory, profiler: BrickProfiler) -> None:
    """Wait for the device and discard all records so far, which include warm-up calls."""
    torch.cuda.synchronize()
    profiler.finalize()
    memory.records.clear()


def replay(engine: Any, times: int, memory: Memory, profiler: BrickProfiler) -> list[dict[str, Any]]:
    begin_anew(memory, profiler)
    for _ in range(times):
        engine.step()
        torch.cuda.synchronize()
    profiler.finalize()
    return steps_in(memory)


def test_replays_outside_steps_are_steps_whose_layers_and_bricks_add_up(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = lean(batch=4, **SMALL)
    attach(model, profiler)
    engine = Engine(model, 4).capture()
    found = replay(engine, 11, memory, profiler)
    assert len(found) == 5
    for step in found:
        assert (step["name"], step["tokens"]) == ("decode", 4)
        bricks = [times for path, all_ in step["in"].items() for times in all_ if times[2] is NodeKind.BRICK]
        assert all(step["start"] <= start <= end <= step["end"] for start, end, *_ in bricks)
        inclusive = sum(end - start for start, end, *_ in bricks)
        span = step["end"] - step["start"]
        assert inclusive == pytest.approx(span, rel=0.01)
        layers = [times for all_ in step["in"].values() for times in all_ if times[2] is NodeKind.LAYER]
        assert len(layers) == 4
    names = {name for step in found for all_ in step["in"].values() for *_, name in all_}
    assert {"RmsNorm", "QkvProjection", "OutputProjection", "DownProjection", "LmHead"} <= names
    nodes = [said for said in memory.said if isinstance(said, Node) and said.kind is NodeKind.BRICK]
    stamped = [node for node in nodes if node.backend == "torch on cuda"]
    assert any(node.work.bytes_per_call for node in stamped)


def test_stamped_replays_compute_the_same_to_the_bit(profiler: BrickProfiler, memory: Memory) -> None:
    model = lean(**SMALL)
    bare = Engine(model, 1).capture()
    expected = []
    for at in range(8):
        bare.at.fill_(at)
        bare.words.fill_(at + 3)
        bare.step()
        expected.append(bare.scores.clone())
    for layer in model.layers:
        layer.self_attn.keys.zero_()
        layer.self_attn.values.zero_()
    profiler.sample_every = 1
    attach(model, profiler)
    engine = Engine(model, 1).capture()
    for layer in model.layers:
        layer.self_attn.keys.zero_()
        layer.self_attn.values.zero_()
    for at in range(8):
        engine.at.fill_(at)
        engine.words.fill_(at + 3)
        engine.step()
        assert torch.equal(engine.scores, expected[at])
    profiler.finalize()
    assert steps_in(memory)


def test_brick_times_are_those_of_cupti(profiler: BrickProfiler, memory: Memory) -> None:
    model = lean(layers=4)
    attachment = attach(model, profiler)
    engine = Engine(model, 1).capture()
    for _ in range(20):
        engine.step()
    found = replay(engine, 60, memory, profiler)
    captured = captured_graphs.graphs[engine.graph]
    _, plan = captured.variants[0]
    places = plan.places
    shape = StampSites.of(captured.on.device.driver, captured.clone)
    del found
    profiler.disable()
    from torch.profiler import ProfilerActivity, profile

    runs = 20
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as kineto:
        for _ in range(runs):
            engine.step()
            torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in kineto.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    assert len(kernels) == runs * shape.nodes
    profiler.enable()
    ours: dict[str, list[float]] = defaultdict(list)
    theirs: dict[str, list[float]] = defaultdict(list)
    nodes = {said.id: said for said in memory.said if isinstance(said, Node)}
    for tag, start, end, _ in memory.records:
        node = nodes.get(tag & 0xFFFFFF)
        if (
            node is not None
            and node.kind in (NodeKind.BRICK, NodeKind.LAYER)
            and (node.kind is NodeKind.LAYER or node.backend == "torch on cuda")
        ):
            ours[f"{node.name} {node.label}" if node.kind is NodeKind.BRICK else "layer"].append((end - start) / 1e3)
    numbers = [shape.places[place] for place in places]
    for run in range(runs):
        one = kernels[run * shape.nodes : (run + 1) * shape.nodes]
        for interval in plan.intervals:
            begin, end = numbers[interval.begin], numbers[interval.end]
            if begin == 0:
                continue
            key = interval.keys[-1]
            name = "layer" if isinstance(key, tuple) else f"{key.name} {key.label}"
            theirs[name].append(one[end - 1][1] - one[begin - 1][1])
    wrong = []
    for name, times in sorted(theirs.items()):
        here, there = sorted(ours[name])[len(ours[name]) // 2], sorted(times)[len(times) // 2]
        sys.stdout.write(f"{name:40} stamps {here:8.2f} us   CUPTI {there:8.2f} us   {here - there:+6.2f}\n")
        if abs(here - there) > max(0.05 * there, 0.5):
            wrong.append((name, here, there))
    attachment.detach()
    assert not wrong


def test_a_replay_in_an_open_step_gives_it_its_layers(profiler: BrickProfiler, memory: Memory) -> None:
    model = lean(**SMALL)
    attach(model, profiler)
    engine = Engine(model, 1).capture()
    engine.step()
    begin_anew(memory, profiler)
    for _ in range(4):
        with profiler.step("mine", tokens=3):
            with profiler.brick("host work"):
                pass
            engine.step()
        torch.cuda.synchronize()
    profiler.finalize()
    found = steps_in(memory)
    assert [(step["name"], step["tokens"]) for step in found] == [("mine", 3)] * 2
    for step in found:
        names = {name for all_ in step["in"].values() for *_, name in all_}
        assert {"RmsNorm", "host work"} <= names
        assert all(end <= step["end"] for all_ in step["in"].values() for _, end, *_ in all_)


def test_graphs_that_draw_random_numbers_or_run_side_by_side_are_left_alone(
    profiler: BrickProfiler, memory: Memory
) -> None:
    profiler.sample_every = 1
    model = lean(**SMALL)
    attach(model, profiler)

    class Drawing(Engine):
        def capture(self) -> Engine:
            with torch.no_grad():
                self.model(self.words, self.at)
                with torch.cuda.graph(self.graph):
                    self.scores = torch.nn.functional.dropout(self.model(self.words, self.at), 0.5)
            return self

    drawing = Drawing(model, 1).capture()
    begin_anew(memory, profiler)
    first = None
    for _ in range(4):
        drawing.step()
        torch.cuda.synchronize()
        assert first is None or not torch.equal(first, drawing.scores)
        first = drawing.scores.clone()
    profiler.finalize()
    assert not steps_in(memory)

    side = torch.cuda.Stream()
    norm = model.layers[1].input_layernorm
    plain = type(norm).forward

    def forked(self: Any, rows: Any) -> Any:
        if self is not norm:
            return plain(self, rows)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = plain(self, rows)
        found = plain(self, rows)
        torch.cuda.current_stream().wait_stream(side)
        return (found + other) / 2

    type(norm).forward = forked
    try:
        engine = Engine(model, 1).capture()
        found = replay(engine, 9, memory, profiler)
    finally:
        type(norm).forward = plain
    assert found
    counts = [sum(len(all_) for path, all_ in step["in"].items() if "input_layernorm" in path[-1]) for step in found]
    assert max(counts) >= 1
    step = found[-1]
    assert all(
        step["start"] <= start <= end <= step["end"] for all_ in step["in"].values() for start, end, *_ in all_
    )


def test_captured_again_reset_and_dropped_graphs_leave_nothing_behind(
    profiler: BrickProfiler, memory: Memory
) -> None:
    profiler.sample_every = 1
    model = lean(**SMALL)
    attachment = attach(model, profiler)

    def round_of_graphs() -> int:
        for _ in range(5):
            engine = Engine(model, 1).capture()
            for _ in range(4):
                engine.step()
            torch.cuda.synchronize()
            engine.graph.reset()
            engine.capture()
            for _ in range(4):
                engine.step()
                torch.cuda.synchronize()
            del engine
            gc.collect()
            torch.cuda.empty_cache()
        profiler.finalize()
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    def lost_bytes() -> int:
        first = round_of_graphs()
        return first - [round_of_graphs() for _ in range(4)][-1]

    attachment.detach()
    lost_bytes()  # Run once without counting, because torch and the driver allocate some memory only once.
    without = lost_bytes()
    attachment = attach(model, profiler)
    with_us = lost_bytes()
    assert with_us <= without + (16 << 20), (with_us, without)
    assert len(device_graphs.devices[0]._live) <= 2
    kept = Engine(model, 1).capture()
    kept.step()
    begin_anew(memory, profiler)
    expected = kept.scores.clone()
    for _ in range(10_000):
        kept.step()
    torch.cuda.synchronize()
    profiler.finalize()
    assert torch.equal(kept.scores, expected)
    starts = [step["start"] for step in steps_in(memory)]
    assert starts == sorted(starts)
    assert len(device_graphs.devices[0].device._spare) < 20
    attachment.detach()
    assert not device_graphs.devices
    assert "__init__" not in vars(torch.cuda.CUDAGraph)
    assert "cbtop" not in torch.cuda.CUDAGraph.replay.__module__
    kept.scores.zero_()
    kept.step()
    torch.cuda.synchronize()
    assert torch.equal(kept.scores, expected)


def test_a_forked_child_does_nothing_on_the_device(profiler: BrickProfiler, memory: Memory) -> None:
    model = lean(**SMALL)
    attach(model, profiler)
    engine = Engine(model, 1).capture()
    for _ in range(4):
        engine.step()
    child = os.fork()
    if child == 0:
        profiler.finalize()
        uninstall()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.cuda.synchronize()
    assert replay(engine, 4, memory, profiler)


HOST = """
import torch
from benchmarks.gpu.lean import Engine, lean
model = lean(hidden=512, inner=1024, heads=8, layers=4, batch=4, context=64, vocabulary=1000)
engine = Engine(model, 4).capture()
for _ in range(200):
    engine.step()
    torch.cuda.synchronize()
print(engine.scores.float().sum().item())
"""


def test_cbtop_run_shows_graph_bricks_of_a_program_that_does_not_know_cbtop(tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(HOST)
    root = Path(__file__).parents[3]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    bare = subprocess.run(
        [sys.executable, "host.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=DEADLINE_S,
    )  # fmt: skip
    done = subprocess.run(
        [*CBTOP, "run", "--overhead", "20%", "--record", "run.cbtop", "--", sys.executable, "host.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, bare.stdout), done.stderr
    with ReplayFeed(tmp_path / "run.cbtop") as feed:
        feed.seek(feed.duration_s)
        views = [view for source in feed.sources() if (view := feed.view(source.key)) is not None]
    (view,) = views
    assert {"DownProjection", "RmsNorm", "Layer"} <= {row.name for row in view.bricks}, done.stderr
    assert view.steps is not None
    assert view.steps.count > 10
