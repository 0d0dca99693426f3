"""The classes, methods and parameters of llama-cpp-python that cbtop uses, compared with an installed package."""

from __future__ import annotations

import importlib
import inspect

import pytest

from cbtop.profiler.instrument.engine_methods import differences
from cbtop.profiler.instrument.llama_cpp_python import CONTRACT

pytestmark = pytest.mark.engines
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install llama-cpp-python")


@pytest.mark.parametrize("key", CONTRACT, ids=".".join)
def test_each_class_of_llama_cpp_python_has_the_methods_that_are_wrapped(key: tuple[str, str]) -> None:
    module, kind = key
    assert differences(getattr(importlib.import_module(module), kind), CONTRACT[key]) == []


def test_a_batch_and_the_parameters_have_the_fields_that_are_read() -> None:
    structures = importlib.import_module("llama_cpp.llama_cpp")
    fields = {name for name, _ in structures.llama_batch._fields_}
    assert {"n_tokens", "pos", "seq_id"} <= fields
    parameters = {name for name, _ in structures.llama_context_params._fields_}
    assert {"cb_eval", "cb_eval_user_data", "embeddings"} <= parameters
    assert "self.batch" in inspect.getsource(importlib.import_module("llama_cpp._internals").LlamaBatch)
