"""The profiler with either hot path: tests that take one of these run twice."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import pytest

from cbtop.profiler import hot_path, profiler
from cbtop.profiler.device import compiled, pairs, stamp_clock


@pytest.fixture(params=["python", "compiled"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The hot path's name; processes that the test starts use it too."""
    name: str = request.param
    monkeypatch.setenv("CBTOP_PURE_PYTHON", "1" if name == "python" else "")
    if hot_path.chosen().implementation != name:
        pytest.skip("the compiled hot path was not built")
    return name


# For what takes a process or seconds, and by default is seen of the compiled one.
of_either = pytest.mark.parametrize(
    "implementation", [pytest.param("python", marks=pytest.mark.slow), "compiled"], indirect=True
)


@pytest.fixture(params=["python", "compiled"])
def stamping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What launches stamps on devices."""
    name: str = request.param
    if name == "python":
        for module in (pairs, stamp_clock):
            monkeypatch.setattr(module, "chosen", lambda python: python)
    elif compiled.chosen(pairs.PairStamps) is pairs.PairStamps:
        pytest.skip("the compiled stamps were not built")
    return name


@pytest.fixture
def profiler_module(implementation: str) -> ModuleType:
    """cbtop.profiler.profiler as it is where that hot path was chosen at import."""
    return _loaded(implementation)


@cache
def _loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cbtop_profiler_{name}", profiler.__file__)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
