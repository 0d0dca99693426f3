"""A vLLM with other methods than those that cbtop knows: one line names what is shown and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from cbtop.profiler.instrument import trouble
from cbtop.profiler.instrument.vllm_contract import compare_unknown_version, say_differences
from tests.profiler.instrument.engines import PACKAGES, importable, write_engine

SECOND_RUNNER = "v1/worker/gpu/model_runner.py"
UNKNOWN = {"__init__.py": '__version__ = "99.0"'}


@pytest.fixture(autouse=True)
def _vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trouble, "_said", {})
    with importable("vllm", tmp_path):
        yield


def _write(directory: Path, file: str, old: str, new: str, **more: str) -> None:
    write_engine("vllm", directory, **{file: PACKAGES["vllm"][file].replace(old, new)}, **more)
    import_module("vllm")


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_an_unknown_version_with_the_same_methods_is_not_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_engine("vllm", tmp_path, **UNKNOWN)
    import_module("vllm")
    compare_unknown_version()
    assert _lines(caplog) == []


def test_what_needs_a_method_that_is_missing_is_not_shown_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, "v1/worker/gpu_model_runner.py", "def execute_model", "def run_model", **UNKNOWN)
    compare_unknown_version()
    assert _lines(caplog) == [
        "cbtop: vLLM 99.0 has no GPUModelRunner.execute_model as in 0.22.0 and 0.32.0. Shown: names of compiled "
        "code, requests, latencies and load, parts of an engine step, detokenising. "
        "Not shown: steps, bricks, sampling, input preparation, bricks in graphs."
    ]


def test_a_runner_that_differs_is_named_if_the_other_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = "v1/worker/gpu_model_runner.py"
    second = PACKAGES["vllm"][file].replace("_prepare_inputs", "prepare").replace("_sample(", "sample(")
    _write(tmp_path, file, "", "", **UNKNOWN, **{SECOND_RUNNER: second})
    compare_unknown_version()
    (line,) = _lines(caplog)
    assert "has no GPUModelRunner.prepare_inputs as in" in line
    assert line.endswith("Not shown: input preparation with vllm.v1.worker.gpu.model_runner.")


def test_other_parameters_are_a_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path, "v1/engine/output_processor.py", "self, engine_core_outputs", "self, outputs", **UNKNOWN)
    compare_unknown_version()
    (line,) = _lines(caplog)
    assert line.endswith("Not shown: detokenising.")


def test_a_process_that_vllm_started_leaves_the_line_to_the_first_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "v1/engine/core.py", "def step(", "def iterate(", **UNKNOWN)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace(pid=7))
    say_differences()
    assert _lines(caplog) == []


def test_sources_that_cannot_be_read_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path, "v1/engine/core.py", "def step(", "def step(:", **UNKNOWN)
    compare_unknown_version()
    (line,) = _lines(caplog)
    assert line.startswith("cbtop: vLLM 99.0 was not compared with 0.22.0 and 0.32.0: SyntaxError")
