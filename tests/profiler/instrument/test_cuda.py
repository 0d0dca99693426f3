"""Models on a CUDA device: what they compute stays the same, and no rate is made of what the host alone timed."""

from __future__ import annotations

from typing import Any

import pytest

from cbtop.profiler.instrument import attach
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.attributes import UNKNOWN_WORK
from cbtop.protocol.messages import Manifest, Node
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.instrument.tiny import model_of, torch, words
from tests.profiler.memory import Memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def _model(kind: str = "llama") -> tuple[Any, Any]:
    return model_of(kind).cuda(), words(2, 7).cuda()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_outputs_are_the_same_to_the_bit(kind: str, profiler: BrickProfiler, memory: Memory) -> None:
    model, inputs = _model(kind)
    logits, tokens = model(inputs).logits, model.generate(inputs, max_new_tokens=4, do_sample=False)
    attach(model, profiler)
    assert torch.equal(model(inputs).logits, logits)
    assert torch.equal(model.generate(inputs, max_new_tokens=4, do_sample=False), tokens)
    assert memory.records


def test_a_captured_graph_replays_the_same_whether_captured_before_or_after(profiler: BrickProfiler) -> None:
    model, inputs = _model()
    expected = model(inputs).logits

    def captured() -> tuple[Any, Any]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(inputs, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(inputs, use_cache=False).logits
        return graph, logits

    before = captured()
    attachment = attach(model, profiler)
    after = captured()
    attachment.detach()
    for graph, logits in (before, after):
        logits.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(logits, expected, atol=1e-5)


def test_compiled_with_cudagraphs_it_computes_and_breaks_as_the_bare_model(profiler: BrickProfiler) -> None:
    def outcome(attached: bool) -> tuple[Any, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, inputs = _model()
        compiled = torch.compile(model, mode="reduce-overhead")
        if attached:
            attach(model, profiler)
        for _ in range(4):
            logits = compiled(inputs, use_cache=False).logits.clone()
        return logits, sum(torch._dynamo.utils.counters["graph_break"].values())

    (bare, bare_breaks), (ours, breaks) = outcome(False), outcome(True)
    assert breaks == bare_breaks
    assert torch.equal(ours, bare)


def test_no_rate_is_made_of_launches(profiler: BrickProfiler, memory: Memory) -> None:
    model, inputs = _model()
    attach(model, profiler)
    model.generate(inputs, max_new_tokens=3, do_sample=False)
    bricks = [said for said in memory.said if isinstance(said, Node) and said.kind is NodeKind.BRICK]
    assert bricks
    assert all(node.work == UNKNOWN_WORK for node in bricks)
    manifest = next(said for said in memory.said if isinstance(said, Manifest))
    assert manifest.backend == "torch on cuda: launches"
