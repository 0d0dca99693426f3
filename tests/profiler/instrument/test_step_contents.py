"""Tests of step contents: the operations of each brick are counted in the first steps of a kind.

All later steps of this kind run unchanged.
"""

from __future__ import annotations

import builtins
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import attach, step_contents
from cbtop.profiler.instrument.step_contents import COUNTED
from cbtop.profiler.instrument.torch_internals import dispatch_modes
from cbtop.profiler.instrument.warm_up import WarmUps
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.structure_messages import StepAllocations, StepOperations
from tests.profiler.instrument.dynamo_state import forget_backends, forget_compiled
from tests.profiler.instrument.tiny import Stack, torch
from tests.profiler.memory import Memory

INPUT = (1, 1, 3, 4)


@pytest.fixture(autouse=True)
def _first_steps_are_a_warm_up(profiler: BrickProfiler) -> Iterator[None]:
    if frames := sys.modules.get("torch._dynamo.eval_frame"):
        frames.cached_backends.clear()  # Forget the backends that other tests of this process have used.
    profiler.parts.steps.warm_ups = WarmUps()
    with torch.no_grad():
        yield


def operations(memory: Memory) -> list[StepOperations]:
    return [said for said in memory.said if isinstance(said, StepOperations)]


def by_place(memory: Memory) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return the counted operations of the last message, by brick or layer, then by name, then by type."""
    nodes = {said.id: said for said in memory.said if isinstance(said, Node)}
    found = operations(memory)[-1]
    return {
        (f"{nodes[one.node].parent}.{nodes[one.node].name}", one.name, one.dtype): (one.fewest, one.most)
        for one in found.operations
    }


def test_each_operation_is_counted_in_its_brick_with_its_type(profiler: BrickProfiler, memory: Memory) -> None:
    model = Stack()
    attach(model, profiler)
    for _ in range(COUNTED + 2):
        model(torch.ones(INPUT))
    said = operations(memory)
    # The first step of a kind is reported alone. Later reports are about all counted steps.
    assert [one.steps for one in said] == [1, 1, 2]
    assert {(one.phase, one.model) for one in said} == {("forward", "")}
    found = by_place(memory)
    assert set(found.values()) == {(1, 1)}
    names = [(place.partition(".")[2], name, dtype) for place, name, dtype in found]
    attention = next(name for _, name, _ in names if "attention" in name)
    assert names == [("UpProjection", "addmm", "float32"), ("Attention (fused)", attention, "float32")] * 2


def test_an_added_copy_is_counted_and_a_view_is_not(profiler: BrickProfiler, memory: Memory) -> None:
    model = Stack()
    attach(model, profiler)
    forward = torch.nn.Linear.forward
    model.layers[1].up_proj.forward = lambda x: forward(model.layers[1].up_proj, x.transpose(-1, -2).clone().mT)
    for _ in range(2):
        model(torch.ones(INPUT))
    names = [name for _, name, _ in by_place(memory)]
    assert names.count("clone") == 1
    assert "transpose" not in names


def test_steps_that_differ_leave_a_range(profiler: BrickProfiler, memory: Memory) -> None:
    class Varying(Stack):
        calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return super().forward(x) + 1 if self.calls == 2 else super().forward(x)

    model = Varying()
    attach(model, profiler)
    for _ in range(COUNTED):
        model(torch.ones(INPUT))
    ranges = {name: number for (_, name, _), number in by_place(memory).items()}
    assert (ranges["add"], ranges["addmm"]) == ((0, 1), (1, 1))


def test_a_counted_step_computes_and_records_what_every_other_step_does(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = Stack()
    expected = model(torch.ones(INPUT))
    attach(model, profiler)
    lengths = []
    for _ in range(COUNTED + 1):
        before = len(memory.records)
        assert torch.equal(model(torch.ones(INPUT)), expected)
        lengths.append(len(memory.records) - before)
        assert dispatch_modes() == 0
    assert len(set(lengths)) == 1


def test_an_error_of_the_model_ends_the_counting(profiler: BrickProfiler, memory: Memory) -> None:
    model = Stack()
    attach(model, profiler)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 1, 3, 5))
    assert dispatch_modes() == 0
    model(torch.ones(INPUT))


def test_nothing_is_counted_if_not_every_step_is_recorded(profiler: BrickProfiler, memory: Memory) -> None:
    model = Stack()
    attach(model, profiler)
    model_steps = next(iter(_steps_of(model)))
    model_steps.profiler_steps.governor = object()
    assert model_steps.contents.begin("forward (warm-up)", is_recorded=True) is None
    model_steps.profiler_steps.governor = None
    assert model_steps.contents.begin("forward (warm-up)", is_recorded=False) is None
    assert model_steps.contents.begin("forward", is_recorded=True) is None


def test_nothing_is_counted_once_the_process_compiles(profiler: BrickProfiler, memory: Memory) -> None:
    model = Stack()
    attach(model, profiler)
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    try:
        model(compiled(torch.ones(INPUT)))
        assert operations(memory) == []
    finally:
        forget_compiled()


def test_counting_imports_nothing(profiler: BrickProfiler, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    attach(model, profiler)
    imported: list[str] = []
    known = builtins.__import__

    def noted(name: str, *rest: Any) -> Any:
        imported.append(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", noted)
    model(torch.ones(INPUT))
    assert not [name for name in imported if "_dynamo" in name]
    assert operations(memory)


def test_an_operation_of_higher_order_runs_in_a_counted_step(profiler: BrickProfiler, memory: Memory) -> None:
    from torch._higher_order_ops import while_loop

    class Conditional(Stack):
        def forward(self, x: Any) -> Any:
            x = super().forward(x)
            return while_loop(lambda x: x.sum() < 0, lambda x: (x + 1,), (x,))[0]

    model = Conditional()
    expected = model(torch.ones(INPUT))
    forget_backends()
    attach(model, profiler)
    for _ in range(COUNTED):
        assert torch.equal(model(torch.ones(INPUT)), expected)
        # Forget the compiler that the test itself uses. cbtop counts no operations in a process that compiles.
        forget_backends()
    assert operations(memory) == []


def test_too_many_operations_are_not_announced_at_all(
    profiler: BrickProfiler, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_contents, "MAX_OPERATIONS", 3)
    model = Stack()
    attach(model, profiler)
    for _ in range(2):
        model(torch.ones(INPUT))
    assert operations(memory) == []


def test_on_a_gpu_the_allocations_of_a_step_are_counted(
    profiler: BrickProfiler, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack()
    attach(model, profiler)
    total = iter((100, 150, 200, 207, 300, 308, 400))
    monkeypatch.setattr(step_contents, "allocations_of", lambda device: next(total))
    contents = next(iter(_steps_of(model))).contents
    monkeypatch.setattr(contents, "_devices", lambda root: {torch.device("cuda", 0)})
    for _ in range(COUNTED):
        counted = contents.begin("decode (warm-up)", is_recorded=False)
        assert counted is not None
        counted.end_step()
    assert contents.begin("decode (warm-up)", is_recorded=False) is None
    said = [one for one in memory.said if isinstance(one, StepAllocations)]
    assert [(one.steps, one.fewest, one.most) for one in said] == [(1, 50, 50), (1, 7, 7), (2, 7, 8)]


def _steps_of(model: Any) -> Iterator[Any]:
    from cbtop.profiler.instrument.attachment import attachments

    yield from (attachment.steps for attachment in attachments() if attachment.root() is model)


def test_an_operation_that_fails_has_only_frames_of_the_host(profiler: BrickProfiler, memory: Memory) -> None:
    class Failing(Stack):
        def forward(self, x: Any) -> Any:
            try:
                torch.nn.functional.embedding(torch.tensor([9]), torch.ones(3, 4))
            except IndexError as error:
                lines.append([frame.name for frame in traceback.extract_tb(error.__traceback__)])
            return super().forward(x)

    lines: list[list[str]] = []
    bare, model = Failing(), Failing()
    attach(model, profiler)
    model(torch.ones(INPUT))
    bare(torch.ones(INPUT))
    assert len(operations(memory)) == 1
    assert lines[0] == lines[1] == ["forward", "embedding"]


def test_without_compiled_code_no_operation_is_counted(
    profiler: BrickProfiler, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_contents, "chosen", lambda: step_contents.HotPath)
    model = Stack()
    attach(model, profiler)
    model(torch.ones(INPUT))
    assert operations(memory) == []
