"""Tests of the facts about the module behind a brick: its class, the place of its `forward`, and its weight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument.module_facts import ModuleFacts, source_of
from cbtop.profiler.instrument.planning import plan_of
from cbtop.protocol.attributes import ModuleAttributes
from tests.profiler.instrument.tiny import torch

from torch import nn  # isort: skip


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.zeros(4, 8, dtype=torch.int8))

    def forward(self, x: Any) -> Any:
        return x


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*values: Any) -> Any:
        return function(*values)

    return wrapper


class Decorated(Quantized):
    @logged
    def forward(self, x: Any) -> Any:
        return x


def line_of(text: str) -> int:
    """Return the number of the first line of this file with `text`."""
    lines = Path(__file__).read_text().splitlines()
    return next(at for at, line in enumerate(lines, 1) if text in line)


def test_a_class_of_torch_has_the_name_that_users_import() -> None:
    found = ModuleFacts().of(nn.Linear(8, 4, dtype=torch.bfloat16))
    assert found.module_class == "torch.nn.Linear"
    assert found.module_source.startswith("torch/nn/modules/linear.py:")
    assert (found.weight_shape, found.weight_dtype) == ("4x8", "bfloat16")


def test_a_class_of_the_user_has_its_file_and_line_and_stored_weight() -> None:
    found = ModuleFacts().of(Quantized())
    assert found.module_class.endswith("Quantized")
    assert found.module_source.endswith(f"test_module_facts.py:{line_of('def forward')}")
    assert (found.weight_shape, found.weight_dtype) == ("4x8", "int8")


def test_the_source_of_a_decorated_forward_is_the_decorated_function() -> None:
    assert source_of(Decorated).endswith(f":{line_of('    @logged')}")


def test_a_source_begins_at_the_folder_of_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    code = compile("class Inside:\n    def forward(self): ...\n", str(tmp_path / "package" / "slow.py"), "exec")

    def made() -> type:
        space: dict[str, Any] = {"__name__": "package.slow"}
        exec(code, space)
        return cast("type", space["Inside"])

    assert source_of(made()) == "slow.py:2"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert source_of(made()) == "package/slow.py:2"


def test_what_is_not_known_is_empty() -> None:
    assert ModuleFacts().of(nn.LazyLinear(4)).weight_shape == ""
    identity = ModuleFacts().of(nn.Identity())
    assert identity == ModuleAttributes(module_class="torch.nn.Identity", module_source=identity.module_source)
    assert source_of(int) == ""


def test_no_code_of_the_host_runs() -> None:
    class Sly(Quantized):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"code of the host ran for {name}")

    module = Quantized()
    module.__class__ = Sly
    assert ModuleFacts().of(module).module_class.endswith("Sly")


def test_a_plan_has_the_facts_of_each_brick_and_layers_alike_share_them() -> None:
    layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)])
    layers[1][0] = nn.Linear(8, 8, dtype=torch.float64)
    model = nn.Sequential(nn.Embedding(9, 8), layers)
    keys = [part.key for part in plan_of(model, is_timed_there=False).parts]
    modules = [key.module for key in keys if hasattr(key, "module")]
    of_linear = [one.weight_dtype for one in modules if one.module_class == "torch.nn.Linear"]
    assert of_linear == ["float32", "float64", "float32"]
    assert {one.module_class for one in modules} >= {"torch.nn.Linear", "torch.nn.LayerNorm", "torch.nn.Embedding"}
