"""Tests of compilations by Dynamo: their time is reported, and whether they are repeated.

The program is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cbtop.profiler.instrument import attach
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Activity, Compilation, Node
from cbtop.protocol.structure_messages import CompiledCode
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.instrument.dynamo_state import callbacks, forget_compiled
from tests.profiler.instrument.tiny import model_of, torch, words
from tests.profiler.memory import Memory


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    forget_compiled()
    yield
    forget_compiled()


def told(memory: Memory) -> list[Compilation]:
    return [said for said in memory.said if isinstance(said, Compilation)]


def compiled_step(model: Any) -> Any:
    return torch.compile(model, backend="eager", dynamic=False)


def test_each_compilation_is_told_with_whether_the_code_was_compiled_before(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = model_of("llama")
    attach(model, profiler)
    step = compiled_step(model)
    begun_ns = profiler.parts.now_ns()
    step(words(1, 4))
    first = told(memory)
    assert first
    assert not any(one.is_again for one in first)
    step(words(1, 4))
    assert told(memory) == first  # The second call with equal shapes compiles nothing.
    step(words(1, 5))
    again = told(memory)[len(first) :]
    assert any(one.is_again for one in again)
    every = told(memory)
    assert [one.number - every[0].number for one in every] == list(range(len(every)))
    times = [time_ns for one in every for time_ns in (one.begun_ns, one.ended_ns)]
    assert times == sorted(times)  # The intervals of the compilations do not overlap.
    assert begun_ns <= times[0] < times[-1] <= profiler.parts.now_ns()
    # While it compiles, the process reports this activity, so that a viewer shows no stall.
    during = [one for one in memory.said if isinstance(one, Activity)]
    assert during == [Activity("compiling"), Activity("")] * len(every)


@pytest.mark.slow
def test_once_no_model_is_attached_dynamo_has_none_of_ours_left_to_tell(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = model_of("llama")
    handle = attach(model, profiler)
    lists = callbacks()
    assert all(lists)
    handle.detach()
    assert lists == ([], [])
    compiled_step(model)(words(1, 4))
    assert not told(memory)


@pytest.mark.slow  # The default run skips this test, because test_trouble.py tests other failures of cbtop.
def test_what_fails_of_ours_as_it_is_told_does_not_reach_the_host(
    profiler: BrickProfiler, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    attach(model, profiler)

    def fails(message: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(profiler, "announce", fails)
    expected = model(words(1, 4)).logits
    assert torch.equal(compiled_step(model)(words(1, 4)).logits, expected)


@pytest.mark.slow  # The default run skips this test, because a test above also gets a message after a reset.
def test_after_a_reset_it_is_told_again_once_the_model_was_looked_at(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    handle = attach(model, profiler)
    torch.compiler.reset()
    handle.look_again()
    compiled_step(model)(words(1, 4))
    assert told(memory)


def test_a_graph_break_is_counted_with_its_reason_at_its_place(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)
    (watched,) = totals(memory)
    # The reported counts must be equal to those in `watched`, because nothing has been compiled yet.
    assert watched == CompiledCode(watched.compilations, watched.recompilations)

    class Breaking(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            torch._dynamo.graph_break()
            return x + 1

    model.model.layers[1].mlp.act_fn = Breaking()
    model.model.layers[1].mlp.act_fn.compile(backend="eager")
    with torch.no_grad():
        model(words(1, 4))
    found = totals(memory)[-1]
    assert found.compilations > watched.compilations
    (one,) = found.breaks
    assert (one.count, found.graph_breaks) == (1, 1)
    assert one.reason.startswith("Call to `torch._dynamo.graph_break()`: User-inserted graph break")
    nodes = {said.id: said for said in memory.said if isinstance(said, Node)}
    assert (nodes[one.node].kind, nodes[one.node].name) == (NodeKind.LAYER, "1")


@pytest.mark.slow
def test_recompilations_are_counted_among_the_compilations(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)
    step = compiled_step(model)
    step(words(1, 4))
    before = totals(memory)[-1]
    step(words(1, 5))
    after = totals(memory)[-1]
    assert after.recompilations > before.recompilations
    assert after.compilations - before.compilations >= after.recompilations - before.recompilations


def totals(memory: Memory) -> list[CompiledCode]:
    return [said for said in memory.said if isinstance(said, CompiledCode)]
