"""Tests of compiled models on a CUDA device: kernels are named, and times agree with CUPTI.

Results do not change.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import pytest

from tests.profiler.instrument.dynamo_state import forget_compiled, graphs_and_breaks
from tests.profiler.instrument.tiny import torch

from cbtop.profiler.instrument import attach, captured_graphs, uninstall  # isort: skip - it loads torch
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.device.graph_surgery import StampedGraph
from cbtop.profiler.instrument.capturing import OTHER
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.instrument.test_cuda_graphs import begin_anew, steps_in
from tests.profiler.memory import Memory

if torch.cuda.is_available():
    from benchmarks.gpu.lean import lean

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # warnings of torch
]


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def profiler(memory: Memory) -> Iterator[BrickProfiler]:
    yield BrickProfiler(recorder=memory, sample_every=2)
    uninstall()


def hand_written() -> tuple[Any, Callable[[Any], Any]]:
    model = lean(batch=4, hidden=1024, inner=2048, heads=8, layers=3, context=64, vocabulary=1000)
    words = torch.ones((4, 1), dtype=torch.long, device="cuda")
    at = torch.zeros(1, dtype=torch.long, device="cuda")
    return model, lambda called: called(words, at)


def llama() -> tuple[Any, Callable[[Any], Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    words = torch.arange(8, device="cuda")[None]
    return model, lambda called: called(words, use_cache=False).logits


def static_llama() -> tuple[Any, Callable[[Any], Any]]:
    transformers = pytest.importorskip("transformers")
    model, _ = llama()
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    word = torch.ones((1, 1), dtype=torch.long, device="cuda")
    with torch.no_grad():
        model(word, past_key_values=cache, use_cache=True)  # creates the cache

    def call(called: Any) -> Any:
        cache.reset()
        return called(word, past_key_values=cache, use_cache=True).logits

    return model, call


MODELS = [hand_written, llama, static_llama]


def counted() -> tuple[int, int]:
    """Return how many graphs and graph breaks Dynamo has counted since the last call of this function."""
    found = graphs_and_breaks()
    forget_compiled()
    return found


@torch.no_grad()
def run(model: Any, call: Callable[[Any], Any], times: int = 6) -> list[Any]:
    compiled = torch.compile(model, mode="reduce-overhead")
    found = []
    for _ in range(times):
        torch.compiler.cudagraph_mark_step_begin()
        found.append(call(compiled).clone())
        torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_kernels_are_named_and_results_graphs_and_breaks_are_unchanged(
    kind: Callable[[], Any], profiler: BrickProfiler, memory: Memory
) -> None:
    counted()
    model, call = kind()
    bare, graphs, before_bytes = run(model, call), counted(), torch.cuda.memory_reserved()
    attach(model, profiler)
    ours = run(model, call, times=10)
    profiler.finalize()
    sys.stdout.write(f"reserved {before_bytes} bytes, and with us {torch.cuda.memory_reserved()}\n")
    assert all(torch.equal(bare[-1], one) for one in ours[2:])
    assert sys.gettrace() is None
    (captured,) = [one for one in captured_graphs.graphs.values() if one.is_stamped]
    ((_, plan),) = captured.variants
    shape = plan.shape
    places = [shape.places[place] for place in plan.places]
    named: set[int] = set()
    for interval in plan.intervals:
        key = interval.keys[-1]
        begin, end = places[interval.begin], places[interval.end]
        if isinstance(key, BrickDefinition):
            inside = "  " * (len(interval.keys) - 1)
            sys.stdout.write(f"{begin:4} {end:4} {inside}{key.name} | {key.label} | {key.category.display_name}\n")
            if key is not OTHER:
                named.update(range(begin, end))
        else:
            sys.stdout.write(f"{begin:4} {end:4} {key}\n")
    sys.stdout.write(f"{len(named)} of {shape.nodes} nodes named\n")
    assert counted() == graphs  # Reading the counts also drops the compiled graphs.
    assert len(named) >= 0.95 * shape.nodes
    found = [step for step in steps_in(memory) if any(key for key in step["in"] if len(key) > 2)]
    assert len(found) > 2
    for step in found:
        bricks = [times for all_ in step["in"].values() for times in all_ if times[2] is NodeKind.BRICK]
        layers = [times for all_ in step["in"].values() for times in all_ if times[2] is NodeKind.LAYER]
        assert len(layers) == 3
        first, last = min(start for start, *_ in bricks), max(end for _, end, *_ in bricks)
        assert sum(end - start for start, end, *_ in bricks) == pytest.approx(last - first, rel=0.01)
    names = {name for step in found for all_ in step["in"].values() for *_, name in all_}
    assert {"OutputProjection", "DownProjection", "LmHead"} <= names
    assert any("ResidualAdd, RmsNorm" in name for name in names)


def between_us(captured: Any, step: Callable[[], object], stamped: StampedGraph) -> float:
    """Return the time of `step` in µs, measured by two time stamps and without CUPTI.

    The graph with time stamps, `stamped`, runs instead of the original. The time includes the work of torch around a
    replay, which copies inputs.
    """
    cost, stream, found = captured.costs.known, torch.cuda.current_stream().cuda_stream, []
    captured.replay = lambda original, graph: stamped.launch(stream)
    for _ in range(30):
        step()
        torch.cuda.synchronize()
        times = stamped.read()
        assert times is not None
        found.append((times[-1] - times[0] - cost.cost_ns) / 1e3)
    del captured.replay
    return median(found)


def alone_us(captured: Any, step: Callable[[], object], begin: int, end: int) -> float:
    """Return the time between two places of a graph in µs.

    The copy that runs has time stamps only at these two places.
    """
    stream = torch.cuda.current_stream().cuda_stream
    stamped = StampedGraph(captured.on.device, captured.clone, [begin, end], stream)
    found = between_us(captured, step, stamped)
    stamped.close()
    return found


# Known difference on an H200: in one of three layers, attention after a memset took 1.4 µs more without time stamps
# next to it. In the two other layers, the difference was within 0.2 µs.
APART = pytest.mark.xfail(reason="of three layers one has attention behind a memset apart by over 0.5 us a node")


@pytest.mark.parametrize("kind", [hand_written, pytest.param(llama, marks=APART), static_llama])
def test_brick_times_are_those_of_cupti(kind: Callable[[], Any], profiler: BrickProfiler, memory: Memory) -> None:
    forget_compiled()
    model, call = kind()
    attachment = attach(model, profiler)
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(30):
            call(compiled)
            torch.cuda.synchronize()
        begin_anew(memory, profiler)
        for _ in range(80):
            call(compiled)
            torch.cuda.synchronize()
        profiler.finalize()
        records = list(memory.records)
        (captured,) = [one for one in captured_graphs.graphs.values() if one.is_stamped]
        ((_, plan),) = captured.variants
        shape = plan.shape
        profiler.disable()
        step = partial(call, compiled)
        whole_us = between_us(captured, step, captured._ends)
        alone = {  # Measure these times before CUPTI is active, because CUPTI slows down the process from then on.
            interval.keys: alone_us(captured, step, plan.places[interval.begin], plan.places[interval.end])
            for interval in plan.intervals
        }
        from torch.profiler import ProfilerActivity, profile

        runs = 20
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as kineto:
            for _ in range(runs):
                call(compiled)
                torch.cuda.synchronize()
    profiler.enable()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in kineto.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    assert len(kernels) % runs == 0
    each = len(kernels) // runs
    assert each >= shape.nodes  # Before the graph, torch copies its inputs, so there are more kernels than nodes.
    nodes = {said.id: said for said in memory.said if isinstance(said, Node)}
    measured: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    expected: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    kernels_of: dict[str, int] = {}
    reference: dict[str, str] = defaultdict(lambda: "CUPTI")
    for tag, start, end, _ in records:
        node = nodes.get(tag & 0xFFFFFF)
        if node is not None and node.kind in (NodeKind.BRICK, NodeKind.LAYER):
            name = f"{node.name} {node.label}" if node.kind is NodeKind.BRICK else "layer"
            measured[name][node.id].append((end - start) / 1e3)
    places = [shape.places[place] for place in plan.places]
    replays = [kernels[at * each : (at + 1) * each][-shape.nodes :] for at in range(runs)]
    longer_us = (median(one[-1][1] - one[0][0] for one in replays) - whole_us) / shape.nodes
    sys.stdout.write(f"CUPTI makes each kernel {longer_us:.2f} us longer (taken off); {whole_us:.1f} us in all\n")
    for one in replays:
        for interval in plan.intervals:
            begin, end = places[interval.begin], places[interval.end]
            key = interval.keys[-1]
            name = "layer" if isinstance(key, tuple) else f"{key.name} {key.label}"
            times = expected[name][interval.keys]
            kernels_of[name] = 1 if name == "layer" else end - begin
            if any(kernel[2].startswith("Mem") for kernel in one[begin:end]) and name != "layer":
                # If a memset precedes a kernel, CUPTI makes this kernel 2 to 3 µs slower. The reference is therefore
                # `alone`, which was measured without CUPTI.
                times.append(alone[interval.keys])
                reference[name] = "alone"
            elif begin:  # CUPTI reports no begin of a replay, so this time is unknown for the first kernel.
                times.append(one[end - 1][1] - one[begin - 1][1] - longer_us * (end - begin))
    wrong = []
    # Compare layer by layer. The time of a brick may differ between layers, and a median over different layers means
    # nothing.
    for name, places_of in sorted(expected.items()):
        assert len(places_of) == len(measured[name]), name
        for (_, ours), theirs in zip(sorted(measured[name].items()), places_of.values(), strict=True):
            if not theirs:
                continue
            here, there = median(ours), median(theirs)
            figures = f"stamps {here:8.2f} us   {reference[name]} {there:8.2f} us   {here - there:+6.2f}"
            sys.stdout.write(f"{name[:90]:90} {kernels_of[name]:3} kernels   {figures}\n")
            # CUPTI makes each kernel longer by a varying time, so the allowed difference grows with the number of
            # kernels.
            if abs(here - there) > max(0.05 * there, 0.5 * kernels_of[name]):
                wrong.append((name, here, there))
    attachment.detach()
    assert not wrong
