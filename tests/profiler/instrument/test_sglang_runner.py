"""Tests of SGLang's runner with a stand-in that has SGLang's names and signatures, because SGLang needs a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cbtop.profiler.instrument import install, trouble, uninstall
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Manifest
from tests.profiler.instrument.engines import importable, places_of, places_of_a_step, steps_of, write_engine
from tests.profiler.instrument.tiny import torch
from tests.profiler.memory import Memory


@pytest.fixture(autouse=True)
def _under_run(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a process under `cbtop run` that imports SGLang."""
    from cbtop.profiler.instrument import sglang_runner

    monkeypatch.setattr(trouble, "_said", {})
    write_engine("sglang", tmp_path)
    with importable("sglang", tmp_path):
        install(BrickProfiler(recorder=memory))
        sglang_runner.await_import()
        yield
        uninstall()


def _worker(**args: Any) -> Any:
    return import_module("sglang.srt.managers.tp_worker").TpModelWorker(**args)


def _batch(mode: str, tokens: int, sequences: int = 1, cached: int = 0, **more: Any) -> Any:
    info = import_module("sglang.srt.model_executor.forward_batch_info")
    ids = torch.arange(tokens) % 31
    return info.ForwardBatch(info.ForwardMode[mode], sequences, ids, cached + tokens, **more)


def test_each_sglang_forward_is_one_step_with_all_model_and_sampling_bricks(memory: Memory) -> None:
    worker = _worker()
    worker.forward_batch_generation(_batch("EXTEND", 5, extend_num_tokens=5, extend_prefix_lens_cpu=[0]))
    worker.forward_batch_generation(_batch("DECODE", 1, cached=5))
    assert steps_of(memory) == [("prefill", 5), ("decode", 1)]
    assert places_of(memory) == places_of_a_step("prefill") | places_of_a_step("decode")
    assert [(said.architecture, said.backend, said.layers) for said in memory.said if isinstance(said, Manifest)] == [
        ("LlamaForCausalLM", "SGLang", 2)
    ]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (("EXTEND", 8, 2, 0, 8, [0, 0]), ("prefill", 8)),
        (("EXTEND", 8, 2, 20, 8, [16, 4]), ("extend", 8)),
        (("EXTEND", 8, 2, 16, 8, [16, 0]), ("mixed", 8)),
        (("MIXED", 8, 4, 16, 8, [0, 7, 5, 4]), ("mixed", 8)),
        (("DECODE", 4, 4, 40, None, None), ("decode", 4)),
        (("TARGET_VERIFY", 6, 2, 40, None, None), ("verify", 6)),
        (("EXTEND", 3, 1, 9, None, None), ("extend", 3)),  # a draft model
    ],
)
def test_the_forward_mode_is_the_phase(batch: Any, expected: tuple[str, int], memory: Memory) -> None:
    mode, tokens, sequences, cached, new, prefixes = batch
    batch = _batch(mode, tokens, sequences, cached, extend_num_tokens=new, extend_prefix_lens_cpu=prefixes)
    _worker().model_runner.forward(batch)
    assert steps_of(memory) == [expected]


def test_a_step_that_samples_nothing_ends_with_its_batch(memory: Memory) -> None:
    worker = _worker()
    worker.forward_batch_generation(_batch("TARGET_VERIFY", 3, cached=9), is_verify=True)
    assert steps_of(memory) == [("verify", 3)]
    assert "verify / Sampling" not in places_of(memory)


def test_idle_runs_and_what_captures_graphs_are_no_steps(memory: Memory) -> None:
    worker = _worker()
    worker.model_runner.forward(_batch("IDLE", 1, 0))
    assert memory.records == []


def test_a_draft_has_steps_of_its_own(memory: Memory) -> None:
    worker, draft = _worker(), _worker(is_draft_worker=True)
    worker.forward_batch_generation(_batch("TARGET_VERIFY", 3, cached=9), is_verify=True)
    draft.model_runner.forward(_batch("DECODE", 1, cached=9))
    assert steps_of(memory) == [("verify", 3), ("decode", 1)]


@pytest.mark.parametrize(
    ("args", "decodes_with_bricks", "extends_with_bricks", "said"),
    [
        ({"disable_cuda_graph": False}, False, True, "replays captured graphs"),
        ({"enable_torch_compile": True}, False, False, "compiles its model"),
        ({"disable_piecewise_cuda_graph": False}, False, False, "compiles its model"),
    ],
)
def test_replayed_or_compiled_steps_have_no_bricks_and_a_warning_says_so(
    args: Any,
    decodes_with_bricks: bool,
    extends_with_bricks: bool,
    said: str,
    memory: Memory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = _worker(**args)
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(2):
            worker.forward_batch_generation(_batch("EXTEND", 5, extend_num_tokens=5, extend_prefix_lens_cpu=[0]))
            worker.forward_batch_generation(_batch("DECODE", 1, cached=5))
    assert steps_of(memory) == [("prefill", 5), ("decode", 1)] * 2
    places = places_of(memory)
    assert ("decode / 0" in places, "prefill / 0" in places) == (decodes_with_bricks, extends_with_bricks)
    assert len(caplog.records) == 1
    assert f"SGLang {said}" in caplog.text


def test_what_the_model_computes_is_what_it_computes_without_us(memory: Memory) -> None:
    worker = _worker()
    batch = _batch("EXTEND", 5, extend_num_tokens=5, extend_prefix_lens_cpu=[0])
    with torch.no_grad():
        bare = worker.model_runner.model.forward(batch.input_ids, torch.arange(5), batch)
    assert memory.records == []
    assert torch.equal(worker.model_runner.forward(batch).logits_output, bare)
    assert steps_of(memory) == [("prefill", 5)]


def test_an_sglang_with_other_names_is_said_in_one_line_and_goes_on(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    worker, batch = _worker(), _batch("DECODE", 1, cached=5)
    del batch.seq_lens_sum
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(2):
            assert worker.forward_batch_generation(batch).shape == (1,)
    assert memory.records == []
    assert [record.getMessage() for record in caplog.records] == [
        "cbtop: SGLang is other than expected, and is not shown: "
        "AttributeError: 'ForwardBatch' object has no attribute 'seq_lens_sum'"
    ]
