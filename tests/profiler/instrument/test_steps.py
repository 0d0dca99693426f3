"""Tests of steps of running models: phases, tokens, sampling, sums of times, threads and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from benchmarks.beside_bare import record_when_told
from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument import attach, install, uninstall
from cbtop.profiler.instrument.governor import PLAIN, GovernedProfiler
from cbtop.profiler.instrument.work import stored_bytes
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import Manifest, Node, Training
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_CANCELLED, FLAG_FAILED
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.instrument.tiny import WORDS, model_of, torch, transformers, words
from tests.profiler.memory import Memory
from tests.representatives import first_by_default

pytestmark = pytest.mark.usefixtures("without_gradients")

NODE = (1 << 24) - 1
HOSTS = ("_call_impl", "forward", "get_seq_length")  # Functions of torch and transformers that cbtop's code calls.
WRAPPER = "timed.<locals>.call"


def _nodes(memory: Memory) -> dict[int, Node]:
    return {node.id: node for node in memory.said if isinstance(node, Node)}


def _steps(memory: Memory) -> list[tuple[str, int]]:
    """Return (phase, tokens) of each step in the order of their ends."""
    nodes = _nodes(memory)
    return [
        (nodes[tag & NODE].name, elements)
        for tag, _, _, elements in memory.records
        if nodes[tag & NODE].kind is NodeKind.STEP and not tag & (FLAG_CANCELLED | FLAG_AMOUNTS)
    ]


def _calls(memory: Memory, phase: str) -> Counter[str]:
    """Return how often each brick ran in the steps of a phase."""
    nodes = _nodes(memory)
    kept = (nodes[tag & NODE] for tag, *_ in memory.records)
    return Counter(node.name for node in kept if node.kind is NodeKind.BRICK and _step_of(nodes, node).name == phase)


def _step_of(nodes: dict[int, Node], node: Node) -> Node:
    return node if node.parent is None else _step_of(nodes, nodes[node.parent])


def test_generating_is_a_prefill_and_a_decode_for_each_further_token(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)
    model.generate(words(2, 7), max_new_tokens=4, min_new_tokens=4)
    assert _steps(memory) == [("prefill", 14), ("decode", 2), ("decode", 2), ("decode", 2)]


def _functions_of_ours(profiler: BrickProfiler) -> Counter[str]:
    """Count the functions of cbtop that run in Python during a step, with the functions that they call.

    The functions in HOSTS and replaced functions are not counted, because their number depends on Dynamo's
    compilations.
    """
    # Remove models of other tests. While several models are timed, functions also check which model a step belongs
    # to.
    gc.collect()
    model, cache = model_of("llama"), transformers.DynamicCache()
    ran: Counter[str] = Counter()

    def is_ours(frame: Any) -> bool:
        return str(frame.f_globals.get("__name__", "")).startswith("cbtop.") and frame.f_code.co_qualname != WRAPPER

    def trace(frame: Any, event: str, argument: object) -> None:
        if event == "call" and (is_ours(frame) or (is_ours(frame.f_back) and frame.f_code.co_name not in HOSTS)):
            ran[frame.f_code.co_qualname] += 1

    with contextlib.closing(profiler):
        attach(model, profiler)
        for _ in range(3):
            model(words(1, 1), past_key_values=cache)
        sys.setprofile(trace)
        try:
            model(words(1, 1), past_key_values=cache)
        finally:
            sys.setprofile(None)
    return ran


# Why the number is limited: each function costs about 1 µs, because its code is no longer in the processor's cache.
@pytest.mark.skipif(chosen() is HotPath, reason="the compiled hot path was not built, or not chosen")
def test_a_recorded_step_runs_few_functions_of_ours_in_python(runtime: Path) -> None:
    ran = _functions_of_ours(BrickProfiler())
    assert ran["TimedModel.follow"] == 1
    assert "timed.<locals>.call_timed" not in ran  # In every version of Python, this function runs in C.
    assert sum(ran.values()) <= 8, ran


@pytest.mark.skipif(chosen() is HotPath, reason="the compiled hot path was not built, or not chosen")
def test_a_plain_step_runs_no_function_of_ours_in_python(runtime: Path) -> None:
    profiler = GovernedProfiler(1, recorder=RingRecorder(runtime))
    record_when_told(profiler.governor)(False)
    ran = _functions_of_ours(profiler)
    assert profiler.governor.kinds["decode", ""].counts[PLAIN] == 1  # the traced step
    assert not ran


def test_a_benchmark_that_tells_which_steps_are_recorded_is_obeyed(runtime: Path) -> None:
    profiler = GovernedProfiler(1, recorder=RingRecorder(runtime))
    tell = record_when_told(profiler.governor)
    model = model_of("llama")
    with contextlib.closing(profiler):
        attach(model, profiler)
        recorded = []
        for is_told in (True, False, True, False, False, True):  # the first step of a kind is always recorded
            tell(is_told)
            before = profiler.governor.recorded
            model(words(1, 1))
            recorded.append(profiler.governor.recorded > before)
    assert recorded == [True, False, True, False, False, True]


@pytest.mark.skipif(chosen() is HotPath, reason="the compiled hot path was not built, or not chosen")
def test_where_python_is_to_begin_a_plain_step_it_runs_few_functions_of_ours(runtime: Path) -> None:
    profiler = GovernedProfiler(1, recorder=RingRecorder(runtime))
    turns = iter([True])
    profiler.parts.steps.is_sampled = lambda key: next(turns, False)
    profiler.governor.floor = 0
    profiler.governor.look_at_step = 1000  # The governor makes no decision before this step number.
    ran = _functions_of_ours(profiler)
    assert ran["Governor.ended"] == 1
    assert sum(ran.values()) <= 23, ran  # Two of these functions check whether this thread is compiling.


@pytest.mark.skipif(chosen() is HotPath, reason="the compiled hot path was not built, or not chosen")
def test_a_plain_step_of_generate_runs_no_function_of_ours_in_python(runtime: Path) -> None:
    profiler, model, ran = GovernedProfiler(1, recorder=RingRecorder(runtime)), model_of("llama"), Counter[str]()
    record_when_told(profiler.governor)(False)

    def trace(frame: Any, event: str, argument: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__", "")).startswith("cbtop."):
            ran[frame.f_code.co_qualname] += 1

    def generate(tokens: int) -> Counter[str]:
        ran.clear()
        sys.setprofile(trace)
        try:
            model.generate(words(1, 3), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        finally:
            sys.setprofile(None)
        return ran.copy()

    with contextlib.closing(profiler):
        attach(model, profiler)
        generate(4)
        few, many = generate(3), generate(9)
    assert few
    assert {name for name in many if many[name] != few[name]} <= {WRAPPER}


@pytest.mark.skipif(chosen() is HotPath, reason="the compiled hot path was not built, or not chosen")
def test_where_nothing_is_recorded_a_model_runs_no_function_of_ours(runtime: Path) -> None:
    assert not _functions_of_ours(BrickProfiler(enabled=False, recorder=RingRecorder(runtime)))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral"])
def test_every_step_has_all_its_bricks_and_its_sampling(kind: str, profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of(kind)
    attach(model, profiler)
    model.generate(words(1, 5), max_new_tokens=3, min_new_tokens=3, do_sample=True)
    for phase, steps in (("prefill", 1), ("decode", 2)):
        calls = _calls(memory, phase)
        attention = calls["Attention (fused)"] + calls["Attention (eager)"]
        assert (attention, calls["KvWrite"], calls["Sampling"], calls["LmHead"]) == (
            3 * steps,
            3 * steps,
            steps,
            steps,
        )
        assert calls["AttentionMask"] == (2 if kind == "gemma2" else 1) * steps
        # Inputs are prepared once per token, and updated once for the next token.
        assert calls["GenerateInputs"] == 2 * steps
        if kind != "gpt2":
            assert calls["RopeEmbedding"] == 3 * steps


def test_sampling_lies_in_the_step_and_the_next_step_begins_after_it(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)
    model.generate(words(1, 5), max_new_tokens=3, min_new_tokens=3)
    nodes = _nodes(memory)
    steps = [
        (start, end)
        for tag, start, end, _ in memory.records
        if nodes[tag & NODE].kind is NodeKind.STEP and not tag & FLAG_AMOUNTS
    ]
    chosen = [(start, end) for tag, start, end, _ in memory.records if nodes[tag & NODE].name == "Sampling"]
    assert all(a <= c and d <= b for (a, b), (c, d) in zip(steps, chosen, strict=True))
    assert all(before[1] <= after[0] for before, after in pairwise(steps))


def test_what_a_streamer_does_with_a_token_is_in_no_step(profiler: BrickProfiler, memory: Memory) -> None:
    puts: list[tuple[int, int]] = []

    class Streamer:
        def put(self, value: Any) -> None:
            start = time.perf_counter_ns()
            torch.ones(64) @ torch.ones(64)
            puts.append((start, time.perf_counter_ns()))

        def end(self) -> None:
            pass

    model = model_of("llama")
    attach(model, profiler)
    model.generate(words(1, 5), max_new_tokens=3, min_new_tokens=3, streamer=Streamer())
    nodes = _nodes(memory)
    steps = [
        (start, end)
        for tag, start, end, _ in memory.records
        if nodes[tag & NODE].kind is NodeKind.STEP and not tag & FLAG_AMOUNTS
    ]
    # The streamer is also called for the prompt, so it is called once more than there are steps.
    assert (len(steps), len(puts)) == (3, 4)
    assert not [one for one in puts for start, end in steps if start < one[1] and one[0] < end]


def test_the_books_of_every_phase_close(profiler: BrickProfiler, memory: Memory) -> None:
    """Each brick is inside its step, and no two bricks of the same level overlap."""
    model = model_of("llama")
    attach(model, profiler)
    model.generate(words(1, 5), max_new_tokens=3, min_new_tokens=3)
    model(words(1, 4))
    nodes = _nodes(memory)
    records = [record for record in memory.records if not record[0] & FLAG_AMOUNTS]
    open_until: dict[int | None, int] = {}
    for tag, start, end, _ in sorted(records, key=lambda record: record[1]):
        parent = nodes[tag & NODE].parent
        assert start >= open_until.get(parent, 0)
        open_until[parent] = end
    inside = [(nodes[tag & NODE].parent, end - start) for tag, start, end, _ in records]
    for node in nodes.values():
        if node.kind is NodeKind.STEP:
            whole = sum(end - start for tag, start, end, _ in records if tag & NODE == node.id)
            assert sum(duration for parent, duration in inside if parent == node.id) <= whole
    assert not [node for node in nodes.values() if node.parent is None and node.kind is not NodeKind.STEP]


def test_generating_without_a_cache_counts_the_tokens_that_come_of_it(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = model_of("llama")
    attach(model, profiler)
    for _ in range(2):
        model.generate(words(2, 7), max_new_tokens=3, min_new_tokens=3, use_cache=False)
    assert _steps(memory) == [("prefill", 14), ("decode, no cache", 2), ("decode, no cache", 2)] * 2


def test_a_beam_search_counts_the_tokens_of_the_beams_that_it_returns(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = model_of("llama")
    attach(model, profiler)
    length = {"max_new_tokens": 3, "min_new_tokens": 3}
    model.generate(words(2, 7), num_beams=3, **length)
    assert _steps(memory) == [("prefill", 42), ("decode, 3 beams", 2), ("decode, 3 beams", 2)]
    model.generate(words(2, 7), num_beams=3, num_return_sequences=2, **length)
    assert _steps(memory)[3:] == [("prefill", 42), ("decode, 3 beams", 4), ("decode, 3 beams", 4)]
    model.generate(words(2, 7), num_beams=3, use_cache=False, **length)
    assert _steps(memory)[6:] == [("prefill", 42), *[("decode, no cache, 3 beams", 2)] * 2]
    model.generate(words(2, 7), **length)
    assert _steps(memory)[9:] == [("prefill", 14), ("decode", 2), ("decode", 2)]


def test_a_loop_of_the_hosts_own_has_a_step_for_each_call(profiler: BrickProfiler, memory: Memory) -> None:
    model, ids = model_of("qwen2"), words(2, 6)
    attach(model, profiler)
    cache = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    model(ids[:, :1], past_key_values=cache)
    model(ids[:, :3], past_key_values=cache)
    model(ids, use_cache=False)
    model(ids, use_cache=True)
    assert _steps(memory) == [("prefill", 12), ("decode", 2), ("extend", 6), ("forward", 12), ("prefill", 12)]


def test_a_static_cache_is_followed_too(profiler: BrickProfiler, memory: Memory) -> None:
    model, ids = model_of("llama"), words(1, 6)
    attach(model, profiler)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(ids, past_key_values=cache)
    model(ids[:, :1], past_key_values=cache)
    assert _steps(memory) == [("prefill", 6), ("decode", 1)]


def test_weights_that_the_host_computes_are_not_asked_for_gradients(profiler: BrickProfiler, memory: Memory) -> None:
    model, ids = model_of("llama"), words(1, 6)
    attach(model, profiler)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if the attribute `grad` of a tensor that is not a leaf is read.
        computed = {name: weight * 1 for name, weight in model.named_parameters()}
        for _ in range(2):
            torch.func.functional_call(model, computed, (ids,))
    assert _steps(memory) == [("prefill", 6), ("prefill", 6)]
    assert Training() not in memory.said


def test_a_part_called_alone_is_a_step_and_inside_a_step_it_is_not(profiler: BrickProfiler, memory: Memory) -> None:
    model, ids = model_of("llama"), words(1, 6)
    attach(model, profiler)
    model.model(ids)
    model(ids)
    assert _steps(memory) == [("prefill", 6), ("prefill", 6)]
    assert _calls(memory, "prefill")["LmHead"] == 1


@pytest.mark.parametrize("how", ["attached", "installed"])
def test_the_called_part_is_the_step_if_forward_is_called_by_name(
    how: str, profiler: BrickProfiler, memory: Memory
) -> None:
    model, ids = model_of("llama"), words(2, 6)
    if how == "installed":
        install(profiler)
    else:
        attach(model, profiler)
    cache = transformers.DynamicCache(config=model.config)
    bare = model.forward(ids).logits
    assert torch.equal(model.forward(ids, past_key_values=cache).logits, bare)
    model.forward(ids[:, :1], past_key_values=cache)
    assert _steps(memory) == [("prefill", 12), ("prefill", 12), ("decode", 2)]
    calls = _calls(memory, "decode")
    # The LM head runs outside the steps here, because the inner model is the step.
    assert (calls["DownProjection"], calls["RmsNorm"], calls["LmHead"]) == (3, 7, 0)
    assert [said.model for said in memory.said if isinstance(said, Manifest)] == [
        "LlamaModel" if how == "installed" else "LlamaForCausalLM"
    ]


def test_models_that_are_called_to_choose_a_token_end_no_step_but_their_own(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model, expert = model_of("llama"), model_of("llama", num_hidden_layers=2)

    class Guided(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            model(input_ids[:, :2])  # Classifier-free guidance also calls the model a second time.
            return scores + expert(input_ids[:, :3]).logits[:, -1]

    attach(model, profiler)
    attach(expert, profiler)
    model.generate(words(1, 5), max_new_tokens=3, min_new_tokens=3, logits_processor=[Guided()])
    nodes = _nodes(memory)
    outermost = [
        (nodes[tag & NODE].name, nodes[tag & NODE].label, tokens)
        for tag, _, _, tokens in memory.records
        if nodes[tag & NODE].kind is NodeKind.STEP and nodes[tag & NODE].parent is None and not tag & FLAG_AMOUNTS
    ]
    guided = ("prefill", "LlamaForCausalLM", 3)
    assert outermost == [guided, ("prefill", "", 5), guided, ("decode", "", 1), guided, ("decode", "", 1)]
    assert _calls(memory, "decode")["Sampling"] == 2


@pytest.mark.slow
def test_steps_of_a_draft_and_its_target_follow_one_another(profiler: BrickProfiler, memory: Memory) -> None:
    target, draft = model_of("llama"), model_of("llama", num_hidden_layers=2)
    install(profiler)
    target.generate(words(1, 5), assistant_model=draft, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    nodes = _nodes(memory)
    steps = sorted(
        (start, end)
        for tag, start, end, _ in memory.records
        if nodes[tag & NODE].kind is NodeKind.STEP and not tag & FLAG_AMOUNTS
    )
    assert all(before[1] <= after[0] for before, after in pairwise(steps))


def test_a_model_whose_call_generates_has_a_step_per_token_inside_its_own(
    profiler: BrickProfiler, memory: Memory
) -> None:
    class Answers(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.language_model = model_of("llama")

        def forward(self, ids: Any) -> Any:
            return self.language_model.generate(ids, max_new_tokens=3, min_new_tokens=3)

    model = Answers()
    attach(model, profiler)
    model(words(1, 5))
    nodes = _nodes(memory)
    outermost = [
        (nodes[tag & NODE].name, tokens)
        for tag, _, _, tokens in memory.records
        if nodes[tag & NODE].kind is NodeKind.STEP and nodes[tag & NODE].parent is None and not tag & FLAG_AMOUNTS
    ]
    assert outermost == [("prefill", 5), ("decode", 1), ("decode", 1), (outermost[-1][0], 5)]
    assert _calls(memory, "decode")["LmHead"] == 2


class Head(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, ids: Any) -> Any:
        return self.trunk(ids).last_hidden_state


@pytest.mark.slow
def test_the_first_caller_of_a_shared_trunk_takes_over_its_earlier_name(
    profiler: BrickProfiler, memory: Memory
) -> None:
    trunk = model_of("llama").model
    one, other = Head(trunk), Head(trunk)
    install(profiler)
    for model in (trunk, one, other, one, other):
        model(words(1, 4))
    assert [model for model, _ in _named_steps(memory)] == ["", "", "Head", "", "Head"]


@pytest.mark.parametrize("how", ["attached", "installed"])
def test_models_that_share_a_trunk_keep_their_names_and_a_step_per_call(
    how: str, profiler: BrickProfiler, memory: Memory
) -> None:
    trunk = model_of("llama").model
    one, other = Head(trunk), Head(trunk)
    if how == "installed":
        install(profiler)
    else:
        attach(one, profiler)
        attach(other, profiler)
    for model in (one, other, one, other, trunk):
        model(words(1, 4))
    nodes = _nodes(memory)
    ran = [nodes[tag & NODE] for tag, *_ in memory.records if not tag & FLAG_AMOUNTS]
    steps = [node for node in ran if node.kind is NodeKind.STEP]
    assert [node.label for node in steps] == ["", "Head", "", "Head", ""]
    assert not [node for node in steps if node.parent is not None]
    assert _calls(memory, steps[0].name)["QkvProjection"] == 5 * 3 * 3


def test_a_draft_proposes_and_the_target_verifies(profiler: BrickProfiler, memory: Memory) -> None:
    target, draft = model_of("llama"), model_of("llama", num_hidden_layers=2)
    install(profiler)
    ids = words(1, 5)
    found = target.generate(ids, assistant_model=draft, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    nodes = _nodes(memory)
    steps = Counter((node.name, node.label) for node in nodes.values() if node.kind is NodeKind.STEP)
    assert {name for name, _ in steps} == {"prefill", "decode", "verify"} or {name for name, _ in steps} >= {"verify"}
    assert len({label for _, label in steps}) == 2
    accepted = [tokens for name, tokens in _steps(memory) if name == "verify"]
    assert 0 < sum(accepted) <= found.shape[1] - ids.shape[1]
    uninstall()
    bare = target.generate(ids, assistant_model=draft, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert torch.equal(found, bare)


def _pair() -> Any:
    torch.manual_seed(7)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0,
            eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip


def _manifests(memory: Memory) -> list[Manifest]:
    return [said for said in memory.said if isinstance(said, Manifest)]


def _named_steps(memory: Memory) -> list[tuple[str, str]]:
    """Return (model, phase) of each step in the order of their ends."""
    nodes = _nodes(memory)
    ran = [nodes[tag & NODE] for tag, *_ in memory.records if not tag & (FLAG_CANCELLED | FLAG_AMOUNTS)]
    return [(node.label, node.name) for node in ran if node.kind is NodeKind.STEP]


def test_a_model_has_name_and_all_steps_if_generate_calls_its_encoder_first(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = _pair()
    install(profiler)
    for _ in range(2):
        model.generate(words(1, 5), max_new_tokens=3, min_new_tokens=3)
    assert _named_steps(memory) == 2 * [("", "encode"), ("", "prefill"), ("", "decode"), ("", "decode")]
    layers = {(node.name, node.label) for node in _nodes(memory).values() if node.kind is NodeKind.LAYER}
    assert layers == {(layer, stack) for layer in "01" for stack in ("encoder", "decoder")}
    assert [(said.model, said.weights_bytes) for said in _manifests(memory)] == [
        ("T5ForConditionalGeneration", stored_bytes(model))
    ]


def test_a_model_takes_over_name_and_steps_of_a_part_called_earlier(profiler: BrickProfiler, memory: Memory) -> None:
    model, ids = _pair(), words(1, 5)
    install(profiler)
    for _ in range(2):
        seen = model.encoder(ids)
        model(encoder_outputs=seen, decoder_input_ids=ids[:, :1])
    assert _named_steps(memory) == 2 * [("", "encode"), ("", "prefill")]
    assert [said.model for said in _manifests(memory)] == ["T5Stack", "T5ForConditionalGeneration"]
    assert _manifests(memory)[-1].weights_bytes == stored_bytes(model)


@pytest.mark.slow
def test_the_largest_model_that_decodes_is_named_like_its_steps(profiler: BrickProfiler, memory: Memory) -> None:
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=5000, num_hidden_layers=3)).eval()
    models = [encoder, model_of("llama"), model_of("llama", num_hidden_layers=5), model_of("llama"), encoder]
    install(profiler)
    for model in (*models, *models):
        model(words(1, 4))
    assert [(said.steps_of, said.weights_bytes) for said in _manifests(memory)] == [
        ("", stored_bytes(encoder)),
        ("LlamaForCausalLM", stored_bytes(models[1])),
        ("LlamaForCausalLM 2", stored_bytes(models[2])),
    ]


def test_a_target_is_named_and_its_draft_is_not_even_if_it_is_called_first(
    profiler: BrickProfiler, memory: Memory
) -> None:
    target, draft = model_of("llama"), model_of("llama", num_hidden_layers=2)
    install(profiler)
    target.generate(words(1, 5), assistant_model=draft, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert {model for model, phase in _named_steps(memory) if phase == "verify"} == {""}
    assert [said.weights_bytes for said in _manifests(memory)] == [stored_bytes(target)]


def test_each_thread_has_its_own_steps(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)
    results: list[Any] = []

    def run(batch: int) -> None:
        with torch.no_grad():
            results.append(model.generate(words(batch, 5), max_new_tokens=3, min_new_tokens=3))

    threads = [threading.Thread(target=run, args=(batch,)) for batch in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(_steps(memory)) == sorted(
        [("prefill", 5 * batch) for batch in (1, 2, 3, 4)] + 2 * [("decode", batch) for batch in (1, 2, 3, 4)]
    )
    assert _calls(memory, "decode")["LmHead"] == 8
    assert not [node for node in _nodes(memory).values() if node.parent is None and node.kind is not NodeKind.STEP]


async def test_each_task_has_its_own_steps(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)

    async def serve(batch: int) -> None:
        cache = transformers.DynamicCache(config=model.config)
        model(words(batch, 4), past_key_values=cache)
        for _ in range(2):
            await asyncio.sleep(0)
            model(words(batch, 1), past_key_values=cache)

    await asyncio.gather(*(serve(batch) for batch in (1, 2)))
    assert Counter(_steps(memory)) == Counter(
        {("prefill", 4): 1, ("prefill", 8): 1, ("decode", 1): 2, ("decode", 2): 2}
    )


def test_a_generate_that_fails_closes_its_step(profiler: BrickProfiler, memory: Memory) -> None:
    class Stop(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    model = model_of("llama")
    attach(model, profiler)
    with pytest.raises(KeyboardInterrupt):
        model.generate(words(1, 5), max_new_tokens=3, stopping_criteria=[Stop()])
    model.generate(words(1, 5), max_new_tokens=2, min_new_tokens=2)
    assert _steps(memory) == [("prefill", 5), ("prefill", 5), ("decode", 1)]


def test_a_call_that_fails_is_a_step_that_failed(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)
    with pytest.raises(IndexError):
        model(words(1, 5) + 1000)
    nodes = _nodes(memory)
    failed = [nodes[tag & NODE].name for tag, *_ in memory.records if tag & FLAG_FAILED]
    assert failed == ["Embedding", "prefill"]


def test_of_many_steps_one_in_so_many_is_recorded_and_has_all_its_bricks(memory: Memory) -> None:
    profiler = BrickProfiler(recorder=memory, sample_every=3)
    model = model_of("llama")
    attachment = attach(model, profiler)
    model.generate(words(1, 5), max_new_tokens=8, min_new_tokens=8)
    attachment.detach()
    assert _steps(memory) == [("prefill", 5), ("decode", 1), ("decode", 1), ("decode", 1)]
    assert _calls(memory, "decode")["QkvProjection"] == 3 * 3 * 3


def test_attention_counts_the_pairs_it_attends(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)
    cache = transformers.DynamicCache(config=model.config)
    model(words(2, 6), past_key_values=cache)
    model(words(2, 1), past_key_values=cache)
    nodes = _nodes(memory)
    found = {
        (_step_of(nodes, nodes[tag & NODE]).name, elements, nodes[tag & NODE].work.flops_per_element)
        for tag, _, _, elements in memory.records
        if nodes[tag & NODE].name == "Attention (fused)"
    }
    assert found == {("prefill", 2 * 4 * 6 * 7 // 2, 4 * 8), ("decode", 2 * 4 * 7, 4 * 8)}


def test_attention_of_other_shapes_types_and_masks_is_looked_at_anew(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)

    def decoded(batch: int, held: int, **mask: Any) -> set[tuple[int, float | None]]:
        """Return (elements, bytes per element) of attention in all layers of one decoding step."""
        cache = transformers.DynamicCache(config=model.config)
        model(words(batch, held), past_key_values=cache)
        before = len(memory.records)
        model(words(batch, 1), past_key_values=cache, **mask)
        nodes = _nodes(memory)
        found = [(nodes[tag & NODE], elements) for tag, _, _, elements in memory.records[before:]]
        return {
            (elements, None if node.work is None else node.work.bytes_per_element)
            for node, elements in found
            if node.name == "Attention (fused)"
        }

    ((_, in_floats),) = decoded(1, 6)
    assert in_floats
    assert decoded(1, 6) == {(4 * 7, in_floats)}
    assert decoded(1, 8) == {(4 * 9, in_floats)}
    assert decoded(1, 6, attention_mask=torch.tensor([[0, *[1] * 6]])) == {(4 * 7, None)}
    assert decoded(2, 6) == {(2 * 4 * 7, in_floats)}
    model.bfloat16()
    assert decoded(2, 6) == {(2 * 4 * 7, in_floats / 2)}
    assert decoded(1, 6) == {(4 * 7, in_floats / 2)}


def test_each_step_keeps_its_sequences_and_what_their_caches_held(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)
    for batch in (1, 3):
        model.generate(words(batch, 5), max_new_tokens=3, min_new_tokens=3)
    nodes = _nodes(memory)
    found = [
        (nodes[tag & NODE].name, sequences, cached)
        for tag, sequences, cached, _ in memory.records
        if tag & (FLAG_AMOUNTS | FLAG_CANCELLED) == FLAG_AMOUNTS
    ]
    assert found == [
        (name, batch, kept) for batch in (1, 3) for name, kept in [("prefill", 0), ("decode", 5), ("decode", 6)]
    ]


def test_attention_that_is_a_method_of_its_module_is_a_brick(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("gptj", n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    kind = type(model.transformer.h[0].attn)
    bare, before = model(words(1, 6)).logits, kind._attn
    attachment = attach(model, profiler)
    assert torch.equal(model(words(1, 6)).logits, bare)
    assert _calls(memory, "prefill")["Attention (eager)"] == len(model.transformer.h)
    attachment.detach()
    assert kind._attn is before


MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
}


@first_by_default(
    ("kind", "sizes", "bricks"),
    [
        ("gptj", {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}, "RotaryTables SplitHeads×3 MergeHeads"),
        ("bloom", {"n_layer": 3, "n_head": 4}, "SplitHeads MergeHeads ResidualAdd×2"),
        ("deepseek_v3", MLA, "KvExpansion"),
    ],
)
def test_methods_and_functions_of_older_models_are_bricks(
    kind: str, sizes: dict[str, int], bricks: str, profiler: BrickProfiler, memory: Memory
) -> None:
    model, ids = model_of(kind, **sizes), words(1, 6)
    bare = model(ids).logits
    attachment = attach(model, profiler)
    assert torch.equal(model(ids).logits, bare)
    calls = _calls(memory, "prefill")
    for brick in bricks.split():
        name, _, times = brick.partition("×")
        assert calls[name] == 3 * int(times or 1), calls
    attachment.detach()
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    assert not [(kind, name) for kind in kinds for name, it in vars(kind).items() if hasattr(it, "_is_of_cbtop")]


def test_written_out_attention_is_called_so(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama", attn_implementation="eager")
    attach(model, profiler)
    model(words(1, 6))
    calls = _calls(memory, "prefill")
    assert (calls["Attention (eager)"], calls["Attention (fused)"]) == (3, 0)


@first_by_default("what", ["describe", "close", "told"])
def test_what_a_plain_step_pays_is_told_as_its_cost(
    what: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cbtop.profiler.instrument import governor, model_call, open_step

    owner: Any
    owner, name = {
        "describe": (model_call, "describe"),
        "close": (open_step.OpenStep, "close"),
        "told": (governor.Governor, "ended"),
    }[what]
    original = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    profiler, model = GovernedProfiler(1, recorder=memory), model_of("llama")
    monkeypatch.setattr(profiler.parts.steps, "is_sampled", lambda key: False)
    attachment = attach(model, profiler)
    for _ in range(6):
        model(words(1, 3))
    attachment.detach()
    assert len(profiler.governor.own_ns) == 6
    # The time of the announcement is a cost of the next step.
    assert min(list(profiler.governor.own_ns)[what == "told" :]) >= 10_000_000
