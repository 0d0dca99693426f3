"""The classes, methods and attributes of SGLang that cbtop uses, compared with the sources of an installed SGLang.

The sources are read and not imported, because SGLang imports only on a machine with its devices.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument.sglang_runner import RUNNER, WORKER

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
# (module, class) -> {method that is wrapped: its first parameters}.
WRAPPED = {
    (RUNNER, "ModelRunner"): {
        "forward": ["self", "forward_batch"],
        "load_model": ["self"],
        "sample": ["self", "logits_output", "forward_batch"],
    },
    (WORKER, "TpModelWorker"): {"forward_batch_generation": ["self"]},
    ("sglang.srt.model_executor.forward_batch_info", "ForwardMode"): {
        name: ["self"] for name in ("is_idle", "is_decode", "is_mixed", "is_target_verify")
    },
}
BATCH = "sglang.srt.model_executor.forward_batch_info", "ForwardBatch"
FIELDS = {
    "forward_mode",
    "batch_size",
    "input_ids",
    "extend_num_tokens",
    "extend_prefix_lens_cpu",
    "seq_lens_sum",
}


def _source(module: str) -> str:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parents[1] / module.replace(".", "/")
    return (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py").read_text()


def _class(module: str, name: str) -> ast.ClassDef:
    found = [node for node in ast.parse(_source(module)).body if isinstance(node, ast.ClassDef) and node.name == name]
    assert found, f"{module} has no class {name}"
    return found[0]


@pytest.mark.parametrize("key", WRAPPED, ids=".".join)
def test_each_class_of_sglang_has_the_methods_that_are_wrapped(key: tuple[str, str]) -> None:
    found = {
        node.name: [one.arg for one in node.args.args]
        for node in _class(*key).body
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: found[name][: len(first)] for name, first in WRAPPED[key].items()} == WRAPPED[key]


def test_a_batch_of_sglang_has_the_fields_that_describe_a_step() -> None:
    found = {node.target.id for node in _class(*BATCH).body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert FIELDS - found == set()


def test_the_runner_of_sglang_sets_its_model_and_arguments() -> None:
    source = _source(RUNNER)
    assert re.search(r"self\.model = ", source)
    assert re.search(r"self\.server_args = ", source)


def test_the_arguments_of_sglang_say_whether_graphs_and_compilation_are_used() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "srt"
    # In 0.5.23 the fields are in a folder of their own.
    files = [folder / "server_args.py", *sorted((folder / "arg_groups" / "fields").glob("*.py"))]
    source = "".join(file.read_text() for file in files)
    assert re.search(r"\benable_torch_compile\b", source)
    assert re.search(r"\bcuda_graph_config\b|\bdisable_cuda_graph\b", source)
