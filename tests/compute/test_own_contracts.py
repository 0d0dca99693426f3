"""A contract file is read strictly, and its checks find a wrong output and a broken condition."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop import BrickCategory, BrickDefinition, BrickId, BrickProfiler
from cbtop.compute.contracts.own import read_own
from cbtop.compute.errors import ContractError
from cbtop.compute.own_contracts import checks_of, resolved
from cbtop.protocol.messages import CheckResult
from tests.compute.made_bricks import CONTRACT, write
from tests.profiler.memory import Memory


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a module with bricks and a contract."""
    name = f"bricks_{tmp_path.name.replace('-', '_')}"
    write(tmp_path, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    resolved.cache_clear()
    yield import_module(name)
    del sys.modules[name]


def call() -> tuple[Any, Any, float]:
    return np.random.default_rng(1).standard_normal((3, 8), np.float32), np.ones(8, np.float32), 1e-6


def test_a_contract_makes_two_checks_that_pass_a_right_call(module: Any) -> None:
    equal, keeps = module.NORM.checks
    assert (equal.name, keeps.name) == ("equals plain_rms_norm", "contract rms")
    output = module.fast_rms_norm(*call())
    outcome = equal.evaluate(output, call(), {})
    assert outcome.passed
    assert outcome.tolerance == 1e-5
    assert keeps.evaluate(output, call()[:2], {"epsilon": 1e-6}).passed
    assert not equal.evaluate(1.1 * output, call(), {}).passed


def test_a_broken_condition_is_named(module: Any) -> None:
    _, keeps = module.NORM.checks
    x, weight, _ = call()
    outcome = keeps.evaluate(np.full((3, 8), np.inf), (x, weight, 0.0), {})
    assert outcome.note == "precondition epsilon > 0; postcondition finite(out)"
    assert keeps.evaluate(module.fast_rms_norm(*call()), (x, weight), {}).passed  # the default of the reference


def test_calls_without_all_arguments_or_outputs_are_errors(module: Any) -> None:
    _, keeps = module.NORM.checks
    x, weight, epsilon = call()
    output = module.fast_rms_norm(x, weight, epsilon)
    with pytest.raises(TypeError, match="missing a required argument"):
        keeps.evaluate(output, (x,), {})
    with pytest.raises(ValueError, match="2 outputs instead of 1"):
        keeps.evaluate((output, output), (x, weight, epsilon), {})


def test_a_contract_is_checked_in_recorded_calls(module: Any) -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    timed = profiler.timed(module.NORM)(module.inexact.__wrapped__)
    with profiler.step("decode", tokens=1):
        timed(*call())
    results = [message for message in memory.said if isinstance(message, CheckResult)]
    assert {result.assertion: result.passed for result in results} == {
        "equals plain_rms_norm": False, "contract rms": True
    }  # fmt: skip


def test_the_values_of_torch_are_checked_too(module: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    _, keeps = module.NORM.checks
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(3, 8, dtype=dtype), torch.ones(8, dtype=dtype)
        assert keeps.evaluate(x * 0.5, (x, weight, 1e-6), {}).passed
        assert keeps.evaluate(x / 0, (x, weight, 1e-6), {}).note == "postcondition finite(out)"


def test_arrays_with_gaps_and_half_precision_are_checked_too(module: Any) -> None:
    _, keeps = module.NORM.checks
    x, weight, epsilon = call()
    with_gaps = np.repeat(x, 2, axis=1)[:, ::2]
    for given in (with_gaps, np.asfortranarray(x), x.astype(np.float16), x.astype(np.float64)):
        right = module.fast_rms_norm(given, weight, epsilon)
        assert keeps.evaluate(right, (given, weight, epsilon), {}).passed
        broken = given.copy()
        broken[1, 2] = np.nan
        assert not keeps.evaluate(right, (broken, weight, epsilon), {}).passed


def test_other_checks_of_a_definition_stay(module: Any, tmp_path: Path) -> None:
    definition = BrickDefinition(
        "Mine", BrickCategory.NORM, checks=module.SOFTMAX.checks, contract=tmp_path / "rms.yaml"
    )
    assert [check.name for check in definition.checks][:2] == ["finite", "from 0 to 1"]
    assert len(definition.checks) == 4
    assert BrickDefinition.of(BrickId.RMS_NORM).checks == ()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("outputs: [out]\n", "", "the file: has no 'outputs'"),
        ("outputs: [out]", "outputs: [result]", "outputs: 'result' is not one of the arguments"),
        ("outputs: [out]", "outputs: []", "outputs: is empty"),
        ("my_norms:plain_rms_norm", "plain_rms_norm", "reference: is 'plain_rms_norm'; module:function is expected"),
        ("finite(x)", "finite(y)", "precondition finite(y): "),
        ("tolerance: 1.0e-5", "tolerance: 1e-5", "tolerance: is '1e-5'; a number from 0 is wanted"),
        ("weight: [8]", "weight: [0]", "case 1: weight: is [0]; a number, or a shape such as [3, 64] is expected"),
        ("weight: [8]", "weight: [100000, 100000]", "a shape such as [3, 64] is expected"),
        ("weight: [8], ", "", "cases: case 1: has no 'weight'"),
        ("low: 0.5", "dtype: float8", "case 2: weight: has the dtype 'float8'; dtypes are float16"),
        ("low: 0.5", "low: .inf", "case 2: weight: low: is inf; a number is expected"),
        ("cases:", "cases: []\nnothing:", "the file: 'nothing' is not a key; keys are "),
        ("cases:", "arrays: jax\ncases:", "arrays: is 'jax'; numpy, torch, torch:cuda, cupy are known"),
        ("low: 0.5", "dtype: bfloat16", "arrays: is numpy, which has no bfloat16; torch has it"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named_with_its_file(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    assert old in CONTRACT
    path.write_text(CONTRACT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ContractError) as raised:
        read_own(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert said in str(raised.value)


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"none\.yaml: No such file"):
        checks_of(tmp_path / "none.yaml")
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe{")
    with pytest.raises(ContractError, match="it is not UTF-8"):
        checks_of(tmp_path / "odd.yaml")
    (tmp_path / "odd.yaml").write_text("{a: ")
    with pytest.raises(ContractError, match="is not YAML"):
        checks_of(tmp_path / "odd.yaml")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", "module:object is expected"),
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("json:nothing", "there is no 'nothing' in json"),
    ],
)
def test_a_name_without_an_object_is_named(name: str, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        resolved(name)


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_bricks.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ContractError, match="importing failing_bricks raises ZeroDivisionError: division by zero"):
        resolved("failing_bricks:brick")


def test_without_the_extra_a_definition_with_a_contract_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cbtop.compute.own_contracts", None)
    with pytest.raises(ImportError, match=r"a contract needs pip install 'cbtop\[compute\]'"):
        BrickDefinition.of(BrickId.RMS_NORM, contract="mine.yaml")


def test_the_inputs_of_a_case_have_their_shapes_and_bounds(tmp_path: Path) -> None:
    text = CONTRACT.replace("{shape: [64], low: 0.5, high: 2}", "{shape: [64], dtype: int8, low: 3, high: 5}")
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    contract = read_own(path)
    first, second = contract.values_of(0), contract.values_of(1)
    assert (first["x"].shape, first["x"].dtype, first["epsilon"]) == ((1, 8), np.float32, 0.01)
    assert set(second["weight"].tolist()) == {3, 4, 5}
    assert second["weight"].dtype == np.int8
    assert np.array_equal(contract.values_of(1)["x"], second["x"])
