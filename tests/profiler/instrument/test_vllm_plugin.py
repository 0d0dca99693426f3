"""Tests of vLLM's plugin with a stand-in that has vLLM's names and signatures, because vLLM needs a GPU."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import install, open_step, phases, runners, trouble, uninstall
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.vllm_plugin import register
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.attributes import UNKNOWN_WORK
from cbtop.protocol.messages import Manifest, Node
from cbtop.protocol.vocabulary import COMPILED_MODEL
from tests.profiler.instrument.engines import importable, places_of, places_of_a_step, steps_of, write_engine
from tests.profiler.instrument.tiny import torch
from tests.profiler.memory import Memory
from tests.representatives import first_by_default

RUNNER = "vllm.v1.worker.gpu_model_runner"


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


def _runner(**how: Any) -> Any:
    runner = import_module(RUNNER).GPUModelRunner(**how)
    runner.load_model()
    return runner


def _scheduled(
    new: dict[str, tuple[int, int]] | None = None,
    known: dict[str, tuple[int, int, int]] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    """Return what vLLM's scheduler decides for a step.

    New requests are (tokens, computed). Known requests are (tokens, computed, output).
    """
    output = import_module("vllm.v1.core.sched.output")
    new, known = new or {}, known or {}
    tokens = {name: request[0] for name, request in (new | known).items()}
    cached = output.CachedRequestData(list(known), [it[1] for it in known.values()], [it[2] for it in known.values()])
    requests = [output.NewRequestData(name, computed) for name, (_, computed) in new.items()]
    return output.SchedulerOutput(requests, cached, tokens, sum(tokens.values()), drafts or {})


def _step(runner: Any, scheduled: Any) -> Any:
    output = runner.execute_model(scheduled)
    return runner.sample_tokens(None) if output is None else output


def test_each_vllm_run_is_one_step_with_all_model_and_sampling_bricks(memory: Memory) -> None:
    runner = _runner()
    _step(runner, _scheduled(new={"a": (5, 0)}))
    _step(runner, _scheduled(known={"a": (1, 5, 1)}))
    assert steps_of(memory) == [("prefill", 5), ("decode", 1)]
    inputs = {"prefill / PrepareInputs": 1, "decode / PrepareInputs": 1}
    assert places_of(memory) == places_of_a_step("prefill") | places_of_a_step("decode") | inputs
    assert [(said.architecture, said.backend, said.layers) for said in memory.said if isinstance(said, Manifest)] == [
        ("LlamaForCausalLM", "vLLM", 2)
    ]


def test_a_model_that_only_warms_up_has_no_step_and_later_names_its_engine(memory: Memory) -> None:
    """vLLM's runner for CPUs has a `load_model` of its own, so cbtop meets the model at a call of the warm-up."""
    module = import_module(RUNNER)
    own = {"load_model": lambda runner: setattr(runner, "model", module.LlamaForCausalLM())}
    runner = type("CPUModelRunner", (module.GPUModelRunner,), own)(enforce_eager=False)
    runner.load_model()
    for _ in range(3):
        runner._dummy_run(8)
    assert not steps_of(memory)
    _step(runner, _scheduled(known={"a": (1, 5, 1)}))
    assert steps_of(memory) == [("decode", 1)]
    assert [said.backend for said in memory.said if isinstance(said, Manifest)][-1] == f"vLLM{COMPILED_MODEL}"


@first_by_default(
    ("scheduled", "expected"),
    [
        ({"new": {"a": (5, 0), "b": (3, 0)}}, ("prefill", 8)),
        ({"new": {"a": (5, 16)}}, ("extend", 5)),
        ({"known": {"a": (4, 16, 0)}}, ("extend", 4)),
        ({"known": {"a": (1, 16, 0)}}, ("extend", 1)),
        # This request was interrupted in favour of other requests, and its computation begins again.
        ({"known": {"a": (9, 0, 3)}}, ("prefill", 9)),
        ({"known": {"a": (1, 9, 1), "b": (1, 20, 7)}}, ("decode", 2)),
        ({"new": {"a": (5, 0)}, "known": {"b": (1, 9, 1)}}, ("mixed", 6)),
        ({"new": {"a": (5, 0), "b": (5, 16)}}, ("mixed", 10)),
        ({"known": {"a": (3, 9, 1), "b": (1, 9, 1)}, "drafts": {"a": [7, 8]}}, ("verify", 4)),
        ({"new": {"c": (5, 0)}, "known": {"a": (3, 9, 1)}, "drafts": {"a": [7, 8]}}, ("mixed", 8)),
    ],
    3,
)
def test_what_is_scheduled_is_the_phase(scheduled: Any, expected: tuple[str, int], memory: Memory) -> None:
    _step(_runner(), _scheduled(**scheduled))
    assert steps_of(memory) == [expected]


def test_a_verify_steps_tokens_are_those_accepted_if_the_host_has_them(memory: Memory) -> None:
    runner = _runner(spec_lengths=[2, 1])
    _step(runner, _scheduled(known={"a": (3, 9, 1), "b": (3, 9, 1)}, drafts={"a": [7, 8], "b": [7, 8]}))
    assert steps_of(memory) == [("verify", 3)]


def test_warming_up_and_runs_without_tokens_are_no_steps_and_record_nothing(memory: Memory) -> None:
    runner = _runner()
    runner._dummy_run(8)
    assert runner.execute_model(_scheduled()) == "nothing"
    _step(runner, _scheduled(new={"a": (5, 0)}))
    kept = len(memory.records)
    runner._dummy_run(8)
    assert (steps_of(memory), len(memory.records)) == ([("prefill", 5)], kept)


def test_what_the_model_computes_is_what_it_computes_without_us(memory: Memory) -> None:
    runner = _runner()
    with torch.inference_mode():
        bare = runner.get_model().compute_logits(runner._dummy_run(5).clone())
        ids = torch.arange(5)
        bare = runner.get_model().compute_logits(runner.get_model()(input_ids=ids, positions=ids))
    assert runner.execute_model(_scheduled(new={"a": (5, 0)})) is None
    assert torch.equal(runner.execute_model_state, bare)
    runner.sample_tokens(None)
    assert steps_of(memory) == [("prefill", 5)]


def test_a_captured_graph_is_a_step_without_bricks_and_that_is_said(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    runner = _runner(enforce_eager=False)
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(3):
            _step(runner, _scheduled(known={"a": (1, 9, 1)}))
    assert steps_of(memory) == [("decode", 1)] * 3
    assert set(places_of(memory)) == {"decode", "decode / PrepareInputs", "decode / Sampling"}
    assert [record.getMessage() for record in caplog.records] == [
        "cbtop: vLLM compiles its model: only decode steps have bricks, unless with enforce_eager"
    ]
    assert not [module for module in runner.get_model().modules() if module.__dict__.get("_compiled_call_impl")]


def test_the_work_of_a_part_is_its_ranks_own_and_of_a_fused_norm_unknown(memory: Memory) -> None:
    runner = _runner()
    product = runner.model.model.layers[0].mlp.down_proj
    # sizes of a matrix product that is split over two ranks
    product.input_size, product.input_size_per_partition = 32, 16
    _step(runner, _scheduled(new={"a": (5, 0)}))
    nodes = [node for node in memory.said if isinstance(node, Node)]
    down = next(node for node in nodes if node.name == "DownProjection")
    assert (down.work.flops_per_element, down.work.bytes_per_element) == (2 * 8, 4 * (1 + 8 / 16))
    assert {node.work for node in nodes if node.name == "RmsNorm"} == {UNKNOWN_WORK}


def test_an_exception_of_the_runner_ends_its_step_and_is_the_hosts(memory: Memory) -> None:
    runner = _runner()
    with pytest.raises(ValueError, match="out of memory"):
        runner.execute_model(_scheduled(new={"bad": (5, 0)}))
    _step(runner, _scheduled(new={"a": (5, 0)}))
    assert steps_of(memory) == [("prefill", 5), ("prefill", 5)]


@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        (lambda runner, scheduled: vars(scheduled).pop("scheduled_cached_reqs"), "scheduled_cached_reqs"),
        (lambda runner, scheduled: vars(runner).pop("vllm_config"), "vllm_config"),
        (lambda runner, scheduled: setattr(runner, "get_model", lambda: "a string"), "'str'"),
    ],
)
def test_a_vllm_with_other_names_is_said_in_one_line_and_goes_on(
    breaks: Any, why: str, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    runner, scheduled = _runner(), _scheduled(new={"a": (5, 0)})
    breaks(runner, scheduled)
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(2):
            assert _step(runner, scheduled).sampled_token_ids is not None
    assert memory.records == []
    assert len(caplog.records) == 1
    assert "vLLM is other than expected" in caplog.text
    assert why in caplog.text


def test_a_runner_of_another_name_is_said_and_its_import_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_engine("vllm", tmp_path, **{"v1/worker/gpu_model_runner.py": "class Runner: pass"})
    with caplog.at_level(logging.WARNING, "cbtop"):
        assert import_module(RUNNER).Runner
    (line,) = {record.getMessage() for record in caplog.records}
    assert line.startswith(
        "cbtop: vLLM 0.32.0 has no GPUModelRunner as in 0.22.0 and 0.32.0. Shown: names of compiled code, requests"
    )
    assert line.endswith("Not shown: steps, bricks, sampling, input preparation, bricks in graphs.")


def test_without_cbtop_run_the_plugin_does_nothing_and_loads_nothing() -> None:
    code = (
        "import os, sys; os.environ.pop('CBTOP_RUN', None)\n"
        "from cbtop.profiler.instrument.vllm_plugin import register\n"
        "finders = len(sys.meta_path); register(); assert len(sys.meta_path) == finders\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'vllm', 'cbtop.profiler.profiler')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("owner", "name"), [(runners, "unit"), (ModelSteps, "open_in"), (phases, "of_sequence")])
def test_what_fails_of_ours_in_a_run_is_said_and_the_runner_goes_on(
    owner: Any, name: str, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise LookupError("of ours")

    runner = _runner()
    _step(runner, _scheduled(new={"a": (5, 0)}))
    with caplog.at_level(logging.WARNING, "cbtop"), monkeypatch.context() as planted:
        planted.setattr(owner, name, fails)
        for _ in range(2):
            assert len(_step(runner, _scheduled(new={"a": (5, 0)})).sampled_token_ids) == 5
    assert 1 <= len([record for record in caplog.records if "of ours" in record.getMessage()]) <= 2
    assert not open_step.unit().open


class Odd(list[Any]):
    """A list of tokens that raises an error when its length is read."""

    def __len__(self) -> int:
        raise LookupError("of the host's")


def test_accepted_tokens_that_cannot_be_counted_are_said_and_their_step_ends(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    runner = _runner()
    runner._sample = lambda *args: [Odd()]
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(2):
            _step(runner, _scheduled(known={"a": (3, 9, 1)}, drafts={"a": [7, 8]}))
    assert steps_of(memory) == [("verify", 3)] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "cbtop: accepted tokens are not counted: LookupError: of the host's"
    ]


def test_a_runner_that_cannot_be_told_from_another_is_said_and_goes_on(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = _runner()
    monkeypatch.setattr(type(runner), "__hash__", None)
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(2):
            assert len(_step(runner, _scheduled(new={"a": (5, 0)})).sampled_token_ids) == 5
    assert not memory.records
    assert len(caplog.records) == 1
