"""Fixtures: a profiler that stores its records in memory, and a check that no model stays attached.

Only tests that use torch import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cbtop.profiler.instrument import uninstall
from cbtop.profiler.profiler import BrickProfiler
from tests.profiler.memory import Memory


@pytest.fixture(autouse=True)
def _torch_computes_in_one_thread() -> None:
    """Limit torch to one thread.

    torch shares OpenMP with Numba. After a kernel of Numba on two threads, torch would also compute the tiny products
    of these tests on two threads.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _frozen_objects_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no attachment count the frozen objects, because the tests freeze millions and counting takes 0.1 s."""
    if garbage := sys.modules.get("cbtop.profiler.instrument.garbage"):
        monkeypatch.setattr(garbage, "MANY_OBJECTS", 10**9)


@pytest.fixture(autouse=True)
def _dynamo_is_told_once_of_each_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell Dynamo about cbtop's modules only once. This would take 20 ms for each attachment."""
    if attachment := sys.modules.get("cbtop.profiler.instrument.attachment"):
        tell: Callable[[], None] = attachment.keep_dynamo_out

        def tell_of_what_is_new() -> None:
            loaded = {module for name, module in sys.modules.items() if name.startswith("cbtop.")}
            if loaded - _told:
                tell()
                _told.update(loaded)

        monkeypatch.setattr(attachment, "keep_dynamo_out", tell_of_what_is_new)


_told = set[ModuleType]()


@pytest.fixture(autouse=True)
def _dynamo_has_compiled_nothing() -> None:
    """Reset what Dynamo has counted.

    If Dynamo has compiled anything in a process, cbtop does not time functions that Dynamo may inspect.
    """
    if utils := sys.modules.get("torch._dynamo.utils"):
        utils.counters.clear()


@pytest.fixture(autouse=True)
def _optimizers_of_other_tests_do_not_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that no optimizer was ever made in this process, except in test files about training."""
    timed_model = sys.modules.get("cbtop.profiler.instrument.timed_model")
    if timed_model and "optim" not in Path(request.path).read_text():
        monkeypatch.setattr(timed_model, "has_made_optimizer", lambda: False)


@pytest.fixture(autouse=True)
def _nothing_stays_attached() -> Iterator[None]:
    yield
    if "cbtop.profiler.instrument.attachment" in sys.modules:
        uninstall()


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def profiler(memory: Memory) -> BrickProfiler:
    return BrickProfiler(recorder=memory)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    import torch

    with torch.no_grad():
        yield
