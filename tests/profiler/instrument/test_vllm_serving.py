"""vLLM's requests and scheduler, tested with a stand-in. tests/engines compares its names with an installed vLLM."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import install, trouble, uninstall, vllm_serving
from cbtop.profiler.instrument.vllm_plugin import register
from cbtop.profiler.instrument.vllm_serving import log_of
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.serving_messages import (
    EngineLoad,
    EngineQueue,
    EngineSchedules,
    EngineTimes,
    EngineWorker,
    ServedRequest,
)
from tests.profiler.instrument.engines import importable, write_engine
from tests.profiler.memory import Memory

SCHEDULER = "v1/core/sched/scheduler.py"


@pytest.fixture(autouse=True)
def _under_run(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a process under `cbtop run` that has loaded its plugins."""
    monkeypatch.setenv("CBTOP_RUN", "100")
    monkeypatch.setattr(trouble, "_said", {})
    write_engine("vllm", tmp_path)
    with importable("vllm", tmp_path):
        install(BrickProfiler(recorder=memory))
        register()
        register()  # vLLM may load its plugins several times
        yield
        uninstall()


def _core(**how: Any) -> Any:
    return import_module("vllm.v1.engine.core").EngineCore(**how)


def _request(name: str, tokens: int = 2, ago_s: float = 0.0) -> Any:
    return SimpleNamespace(
        request_id=name,
        arrival_time=time.time() - ago_s,
        num_prompt_tokens=32,
        left=tokens,
        is_finished=lambda: False,
    )


def _requests(memory: Memory) -> list[ServedRequest]:
    return [said for said in memory.said if isinstance(said, ServedRequest)]


def test_each_vllm_request_is_announced_with_its_tokens_and_moments(memory: Memory) -> None:
    core = _core(preempts=["a"])
    core.scheduler.add_request(_request("a", ago_s=0.5))
    core.scheduler.add_request(_request("b", tokens=1))
    for _ in range(3):
        core.step_fn()
    second, first = _requests(memory)
    assert [(one.name, one.number, one.output_tokens, one.preemptions) for one in (first, second)] == [
        ("a", 0, 2, 2),
        ("b", 1, 1, 0),
    ]
    assert (first.prompt_tokens, first.cached_tokens, first.reason) == (32, 16, "length")
    assert first.scheduled_ns - first.arrived_ns >= 500_000_000
    assert first.arrived_ns < first.scheduled_ns <= first.first_token_ns < first.ended_ns


def test_the_load_of_vllm_is_of_its_scheduler_and_cache(memory: Memory) -> None:
    core = _core()
    core.scheduler.add_request(_request("a", tokens=1))
    core.step_fn()
    loads = [said for said in memory.said if isinstance(said, EngineLoad)]
    assert [(load.running, load.waiting, load.cache_percent) for load in loads] == [(0, 0, 25.0)]


def test_the_schedules_of_vllm_say_how_many_wait_and_why(memory: Memory) -> None:
    core = _core(max_running=2)
    for name in "abc":
        core.scheduler.add_request(_request(name))
    for _ in range(4):
        core.step_fn()
    log = log_of(core.scheduler)
    assert log is not None
    log.tell(is_last=True)
    (schedules,) = [said for said in memory.said if isinstance(said, EngineSchedules)]
    queue = EngineQueue("limit of running requests", 2, 4, 2, 25.0)
    assert schedules == EngineSchedules(4, 6, 0, 2, (queue,))


def test_the_steps_of_vllm_are_divided_between_scheduler_and_model(memory: Memory) -> None:
    core = _core()
    core.scheduler.add_request(_request("a"))
    core.step_fn()
    log = log_of(core.scheduler)
    assert log is not None
    log.tell(is_last=True)
    (times,) = [said for said in memory.said if isinstance(said, EngineTimes)]
    assert times.engine == "vLLM"
    assert {"scheduler", "model", "request updates"} <= {part.name for part in times.parts}


def test_aborted_vllm_requests_end(memory: Memory) -> None:
    core = _core()
    core.scheduler.add_request(_request("a"))
    core.scheduler.add_request(_request("b"))
    core.scheduler.finish_requests(["a"], "aborted")
    assert [(one.name, one.reason) for one in _requests(memory)] == [("a", "abort")]


def test_engines_in_turn_in_one_process_have_requests_with_numbers_of_their_own(memory: Memory) -> None:
    for limit in (2, 4):
        core = _core(max_running=limit)
        core.scheduler.add_request(_request("0", tokens=1))  # each engine counts its requests from 0
        core.step_fn()
    assert [(one.number, one.output_tokens, one.reason) for one in _requests(memory)] == [
        (0, 1, "length"),
        (1, 1, "length"),
    ]
    log = log_of(core.scheduler)
    assert log is not None
    log.tell(is_last=True)
    assert [said.max_running for said in memory.said if isinstance(said, EngineSchedules)] == [4]


def test_a_second_engine_beside_a_running_one_is_left_out_and_a_line_says_so(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = _core(), _core()
    first.scheduler.add_request(_request("0"))
    second.scheduler.add_request(_request("0", tokens=9))
    for _ in range(2):
        first.step_fn()
        second.step_fn()
    assert [(one.number, one.output_tokens) for one in _requests(memory)] == [(0, 2)]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "cbtop"]
    assert line == "cbtop: vLLM: a second engine runs in this process, and its requests are not shown"


def test_requests_of_an_engine_that_was_dropped_have_ended(memory: Memory) -> None:
    core = _core()
    core.scheduler.add_request(_request("a"))
    core.step_fn()
    del core
    gc.collect()
    _core().scheduler.add_request(_request("b"))
    assert [(one.name, one.output_tokens, one.reason) for one in _requests(memory)] == [("a", 1, "engine ended")]


def test_detokenising_is_a_brick_with_the_number_of_tokens(memory: Memory) -> None:
    processor = import_module("vllm.v1.engine.output_processor").OutputProcessor()
    outputs = [SimpleNamespace(request_id=name, new_token_ids=[1, 2]) for name in "ab"]
    assert processor.process_outputs(outputs) == ["a", "b"]
    assert [name for *_, name in memory.nodes] == ["Detokenize"]
    assert [elements for *_, elements in memory.records] == [4]


def test_another_scheduler_is_left_alone_and_named_in_one_line(
    tmp_path: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "vllm" / SCHEDULER
    file.write_text(file.read_text().replace("def add_request(self, request)", "def enqueue(self, request)"))
    core = _core()
    core.scheduler.enqueue(_request("a"))
    core.step_fn()
    assert not _requests(memory)
    assert [record.getMessage() for record in caplog.records] == [
        "cbtop: vLLM 0.32.0 has no Scheduler.add_request as in 0.22.0 and 0.32.0. Shown: steps, bricks, sampling, "
        "input preparation, bricks in graphs, names of compiled code, detokenising. "
        "Not shown: requests, latencies and load, parts of an engine step."
    ]


def test_a_request_without_the_expected_attributes_does_not_stop_vllm(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    core = _core()
    request = _request("a", tokens=1)
    del request.num_prompt_tokens
    core.scheduler.add_request(request)
    assert core.step_fn()[1]
    assert not _requests(memory)
    assert len(caplog.records) == 1
    assert "num_prompt_tokens" in caplog.text


def test_a_worker_process_names_the_process_of_its_engine(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_serving, "_engine", [])
    runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    runner()
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace(pid=7))
    runner()
    assert [said for said in memory.said if isinstance(said, EngineWorker)] == [EngineWorker(7)]
