"""A profiler that keeps what it records, and leaves nothing attached. No torch here until a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cbtop.profiler.instrument import uninstall
from cbtop.profiler.profiler import BrickProfiler
from tests.profiler.memory import Memory


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def profiler(memory: Memory) -> Iterator[BrickProfiler]:
    yield BrickProfiler(recorder=memory)
    uninstall()


@pytest.fixture
def without_gradients() -> Iterator[None]:
    import torch

    with torch.no_grad():
        yield
