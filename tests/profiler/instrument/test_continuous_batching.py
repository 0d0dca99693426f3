"""Requests of transformers' continuous batching, compared with the engine's own accounting of real runs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")
pytest.importorskip("transformers", minversion="5.0", reason="its classes have other names before")

import torch
import transformers

from cbtop.profiler.instrument import continuous_batching, install, trouble, uninstall
from cbtop.profiler.instrument.continuous_batching import ATTRIBUTES, CONTRACT, FOLDER, INPUTS, SEEN_IN, follow
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.serving_messages import EngineLoad, EngineTimes, ServedRequest
from tests.profiler.instrument.engines import steps_of
from tests.profiler.memory import Memory

PROMPTS = [[1 + number] * length for number, length in enumerate((3, 5, 40))]
TOKENS = 4
LATER_NS = 500_000_000  # most that cbtop's moments are later than the engine's, also on a busy machine


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def _under_run(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a process under `cbtop run`."""
    monkeypatch.setattr(trouble, "_said", {})
    monkeypatch.setattr(continuous_batching, "_functions", functions := continuous_batching.TimedFunctions())
    install(BrickProfiler(recorder=memory))
    follow()
    yield
    functions.unwrap()
    uninstall()


def _settings(**more: Any) -> dict[str, Any]:
    batching = {"num_blocks": 16, "page_size": 16, "max_batch_tokens": 16} | more
    return {
        "generation_config": transformers.GenerationConfig(
            max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(**batching),
    }


def _ended(memory: Memory) -> list[ServedRequest]:
    return [said for said in memory.said if isinstance(said, ServedRequest) and said.ended_ns]


def test_each_request_has_the_tokens_and_moments_of_the_engine(model: Any, memory: Memory) -> None:
    own = model.generate_batch(PROMPTS, record_timestamps=True, **_settings())
    requests = {one.name: one for one in _ended(memory)}
    assert requests.keys() == own.keys()
    for name, result in own.items():
        request = requests[name]
        assert (request.prompt_tokens, request.output_tokens) == (len(result.prompt_ids), TOKENS)
        assert request.reason == "length"
        # Both clocks are perf_counter. The engine notes each moment before cbtop does.
        for ours_ns, theirs_s in (
            (request.arrived_ns, result.created_time),
            (request.scheduled_ns, result.lifespan[0]),
            (request.first_token_ns, result.timestamps[0]),
            (request.ended_ns, result.lifespan[1]),
        ):
            assert 0 <= ours_ns - round(1e9 * theirs_s) + 1_000 < LATER_NS, (name, ours_ns, theirs_s)


def test_steps_have_the_phase_and_tokens_of_their_requests(model: Any, memory: Memory) -> None:
    model.generate_batch(PROMPTS, **_settings())
    # A batch has 16 tokens at most. Prompts of 40, 5 and 3 tokens: 16, 16, 8 + 5 + 3, and then three decode steps.
    assert steps_of(memory) == [("prefill", 16), ("extend", 16), ("mixed", 16), *[("decode", 3)] * (TOKENS - 1)]


def test_the_loop_is_divided_into_scheduler_model_and_updates(model: Any, memory: Memory) -> None:
    model.generate_batch(PROMPTS, **_settings())
    continuous_batching._log[0][1].tell(is_last=True)
    (times,) = [said for said in memory.said if isinstance(said, EngineTimes)]
    assert times.engine == "transformers"
    assert {"scheduler", "model", "request updates"} <= {part.name for part in times.parts}
    assert {one.name: one.measured for one in times.latencies} == {
        "first token": len(PROMPTS),
        "between tokens": len(PROMPTS) * (TOKENS - 1),
    }
    loads = [said for said in memory.said if isinstance(said, EngineLoad)]
    assert (loads[-1].running, loads[-1].waiting) == (0, 0)


def test_requests_of_a_second_batch_are_counted_on(model: Any, memory: Memory) -> None:
    for _ in range(2):
        model.generate_batch(PROMPTS[:2], **_settings())
    assert Counter(one.number for one in _ended(memory)) == Counter(range(4))
    assert [one.output_tokens for one in _ended(memory)] == [TOKENS] * 4


def test_a_request_that_waits_again_for_memory_was_preempted(model: Any, memory: Memory) -> None:
    # Four requests of 24 tokens grow to 40 tokens, which are 3 pages each. There are 8 pages.
    prompts = [[number] * 24 for number in range(1, 5)]
    settings = _settings(num_blocks=8, max_batch_tokens=128, allow_block_sharing=False)
    settings["generation_config"].max_new_tokens = 16
    own = model.generate_batch(prompts, **settings)
    assert all(len(result.generated_tokens) == 16 for result in own.values())
    requests = _ended(memory)
    assert [one.output_tokens for one in requests] == [16] * 4
    assert sum(one.preemptions for one in requests) > 0


def test_a_cancelled_request_ends_without_its_tokens(model: Any, memory: Memory) -> None:
    settings = _settings()
    settings["generation_config"].max_new_tokens = 80
    with model.continuous_batching_context_manager(**settings) as manager:
        manager.add_request(PROMPTS[0], request_id="one", streaming=True)
        assert manager.get_result(timeout=10) is not None
        manager.cancel_request("one")
        deadline = time.monotonic() + 10
        while not _ended(memory) and time.monotonic() < deadline:
            time.sleep(0.005)
    (request,) = _ended(memory)
    assert request.reason == "abort"
    assert 1 <= request.output_tokens < 80


def test_the_installed_transformers_has_every_attribute_that_is_read(model: Any) -> None:
    with model.continuous_batching_context_manager(**_settings()) as manager:
        manager.add_request(PROMPTS[0])
        assert manager.get_result(timeout=10) is not None
        processor = manager.batch_processor
        state = sys.modules[f"{FOLDER}.requests"].RequestState(request_id="a", initial_tokens=[1])
        future = sys.modules[f"{FOLDER}.requests"].FutureRequestState(state, True, {}, 1)
        for thing in (processor, state, future):
            assert all(hasattr(thing, name) for name in ATTRIBUTES[type(thing).__name__])
        assert all(hasattr(processor.scheduler, name) for name in ATTRIBUTES["Scheduler"])


def test_an_unknown_version_is_named_in_one_line_and_keeps_its_steps(
    model: Any, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert transformers.__version__.split(".")[0] == SEEN_IN[-1].split(".")[0]
    continuous_batching._functions.unwrap()
    monkeypatch.setitem(CONTRACT, INPUTS, {"update_of_another_version": ("token_id",)})
    follow()
    model.generate_batch(PROMPTS, **_settings())
    assert not _ended(memory)
    assert sum(tokens for _, tokens in steps_of(memory)) == 48 + 3 * (TOKENS - 1)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "cbtop"]
    missing = "ContinuousBatchingIOs.update_of_another_version"
    assert line.startswith(f"cbtop: this transformers has no {missing} as in 5.23.0:")


def test_an_engine_with_other_attributes_runs_on_and_one_line_says_so(
    model: Any, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise AttributeError("no attribute of this name")

    bare = model.generate_batch(PROMPTS, **_settings())
    monkeypatch.setattr(continuous_batching, "described", fails)
    monkeypatch.setattr(continuous_batching.ServingLog, "outputs", fails)
    found = model.generate_batch(PROMPTS, **_settings())
    assert [one.generated_tokens for one in found.values()] == [one.generated_tokens for one in bare.values()]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "cbtop"]
    assert line == f"cbtop: {continuous_batching.LOST}: AttributeError: no attribute of this name"
