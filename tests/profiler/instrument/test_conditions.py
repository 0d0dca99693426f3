"""Tests of announced conditions: a process with a torch model announces versions and instruction sets."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import attach
from cbtop.profiler.instrument.conditions import conditions_of
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.structure_messages import Conditions
from tests.profiler.instrument.tiny import Stack, torch
from tests.profiler.memory import Memory


def test_a_model_on_a_processor_has_its_instructions_and_no_cuda(profiler: BrickProfiler, memory: Memory) -> None:
    attach(Stack(), profiler)
    (said,) = [one for one in memory.said if isinstance(one, Conditions)]
    found = {one.name: one.value for one in said.conditions}
    assert (found["torch"], found["instructions"]) == (torch.__version__, torch.backends.cpu.get_cpu_capability())
    assert {"Python", "transformers"} <= set(found)
    assert not {"CUDA", "cuDNN"} & set(found)


def test_a_model_on_no_device_has_neither() -> None:
    found = {one.name for one in conditions_of(Stack().to("meta")).conditions}
    assert not {"CUDA", "instructions"} & found
