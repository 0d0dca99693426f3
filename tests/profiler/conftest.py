"""Fixtures that run a test twice: with the hot path of the profiler in Python and in C."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import pytest

from cbtop.profiler import hot_path, profiler
from cbtop.profiler.device import compiled, pairs, stamp_clock


@pytest.fixture(params=["python", "compiled"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of the hot path that the test runs with. Processes that the test starts also use it."""
    name: str = request.param
    monkeypatch.setenv("CBTOP_PURE_PYTHON", "1" if name == "python" else "")
    if hot_path.chosen().implementation != name:
        pytest.skip("the compiled hot path was not built")
    return name


# Run a test with both hot paths. The hot path in Python runs only in slow tests. Use this fixture for tests that
# start a process or take seconds.
of_either = pytest.mark.parametrize(
    "implementation", [pytest.param("python", marks=pytest.mark.slow), "compiled"], indirect=True
)


# Tests of stamps run with Python by default only if the compiled stamps were not built.
_IN_PYTHON = () if compiled.chosen(pairs.PairStamps) is pairs.PairStamps else pytest.mark.slow


@pytest.fixture(params=[pytest.param("python", marks=_IN_PYTHON), "compiled"])
def stamping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test twice: with time stamps that Python adds to launches, and with those that C adds."""
    name: str = request.param
    if name == "python":
        for module in (pairs, stamp_clock):
            monkeypatch.setattr(module, "chosen", lambda python: python)
    elif compiled.chosen(pairs.PairStamps) is pairs.PairStamps:
        pytest.skip("the compiled stamps were not built")
    return name


@pytest.fixture
def profiler_module(implementation: str) -> ModuleType:
    """Return the module cbtop.profiler.profiler, imported with the hot path of this test."""
    return _loaded(implementation)


@cache
def _loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cbtop_profiler_{name}", profiler.__file__)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
