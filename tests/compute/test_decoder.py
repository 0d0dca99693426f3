"""Tests of the decoder: it equals a plain forward pass in float64, and its records are right."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from cbtop.compute.decoder import decoder as of_decoder
from cbtop.compute.decoder.base import Model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.machine import Host
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.errors import ComputeError, NoTokenError
from cbtop.compute.kernels import gated, linear, qkv
from cbtop.compute.kernels.kv_caches import CACHE_TYPES
from cbtop.compute.settings import GREEDY, DecoderSettings, TokenSampling
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.representatives import each_value_once, first_by_default

from .conftest import ListRecorder, Norms, in_every_family, of_each_kind, of_one_family

PROMPT = [3, 141, 59, 26, 5, 358, 97]
MakeDecoder = Callable[[Model, int], Decoder]


@in_every_family("threads", {"1 thread": 1, "2 threads": 2})
def test_logits_agree_with_the_float64_reference(model: Model, decoder_for: MakeDecoder, threads: int) -> None:
    decoder = decoder_for(model, threads)
    sequence = list(PROMPT)
    sequence.append(decoder.prefill(PROMPT))
    passes = [decoder.logits.copy()]
    for _ in range(5):
        sequence.append(decoder.decode(sequence[-1]))
        passes.append(decoder.logits.copy())
    expected = forward_reference(model, sequence[:-1])[len(PROMPT) - 1 :]
    error = np.abs(np.array(passes) - expected).max() / np.abs(expected).max()
    assert error < 1e-3
    assert sequence[len(PROMPT) :] == list(expected.argmax(axis=1))


@in_every_family("cache_type", {name: name for name in CACHE_TYPES})
def test_a_prompt_that_takes_several_passes_ends_as_in_one(
    model: Model, profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    whole = Decoder(model, "numba", 1, profiler, model.context_length, DecoderSettings(cache_type))
    monkeypatch.setattr(Host, "most_together", 3)
    parts = Decoder(model, "numba", 1, profiler, model.context_length, DecoderSettings(cache_type))
    assert parts.prefill(PROMPT) == whole.prefill(PROMPT)
    np.testing.assert_allclose(parts.logits, whole.logits, atol=1e-5 * np.abs(whole.logits).max())
    assert parts.decode(1) == whole.decode(1)
    assert parts.position == len(PROMPT) + 1


class CountingHost(Host):
    """A CPU that records the size in bytes of each buffer and each cache that it allocates."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.buffers: list[int] = []
        self.cache_bytes = 0

    def zeros(self, shape: Any, dtype: Any) -> Any:
        array = super().zeros(shape, dtype)
        self.buffers.append(array.nbytes)
        return array

    def caches(self, *sizes: Any) -> list[tuple[Any, Any]]:
        made = super().caches(*sizes)
        self.cache_bytes += sum(keys.nbytes + values.nbytes for keys, values in made)
        return made

    def attention_scratch(self, model: Model, context: int) -> Any:
        array = super().attention_scratch(model, context)
        self.buffers.append(array.nbytes)
        return array

    def scratch(self, columns: int) -> Any:
        array = super().scratch(columns)
        self.buffers.append(array.nbytes)
        return array

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        made = super().int8_scratch(model, tokens, columns)
        self.buffers += [made.codes.nbytes, made.factors.nbytes]
        return made


@of_each_kind
def test_no_buffer_of_a_pass_grows_with_the_context(model: Model, profiler: BrickProfiler) -> None:
    sizes = []
    for context in (Host.most_together, 20 * Host.most_together):
        host = CountingHost(1)
        Decoder(model, "numba", 1, profiler, context, machine=host)
        sizes.append(host.buffers)
    assert sizes[0]
    assert sizes[0] == sizes[1]


@of_each_kind
def test_a_float16_cache_is_half_a_float32_one_and_is_off_by_its_rounding(
    model: Model, profiler: BrickProfiler
) -> None:
    size_bytes, errors = {}, {}
    for cache_type in CACHE_TYPES:
        host, settings = CountingHost(1), DecoderSettings(cache_type)
        decoder = Decoder(model, "numba", 1, profiler, model.context_length, settings, machine=host)
        decoder.prefill(PROMPT)
        expected = forward_reference(model, PROMPT)[-1]
        size_bytes[cache_type] = host.cache_bytes
        errors[cache_type] = np.abs(decoder.logits - expected).max() / np.abs(expected).max()
    assert size_bytes["f32"] == 2 * size_bytes["f16"]
    assert errors["f32"] < 1e-5 < errors["f16"] < 2e-3


@in_every_family("cache_type", {name: name for name in CACHE_TYPES})
def test_a_context_whose_cache_is_larger_than_the_memory_is_refused(
    model: Model, profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    host = CountingHost(1)
    Decoder(model, "numba", 1, profiler, 64, DecoderSettings(cache_type), machine=host)
    tables = {id(rope): rope.table(64).nbytes for rope in (model.rope, model.sliding_rope)}
    size_bytes = host.cache_bytes + sum(tables.values())
    monkeypatch.setattr(of_decoder, "available_bytes", lambda: size_bytes)
    Decoder(model, "numba", 1, profiler, 64, DecoderSettings(cache_type))
    with pytest.raises(
        ComputeError, match=r"KV cache of 65 tokens and their angles take 0\.\d GB .* shorter context"
    ):
        Decoder(model, "numba", 1, profiler, 65, DecoderSettings(cache_type))
    monkeypatch.setattr(of_decoder, "available_bytes", lambda: None)
    Decoder(model, "numba", 1, profiler, 65, DecoderSettings(cache_type))


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_while_a_thread_uses_a_decoder_no_other_one_can(model: Model, decoder_for: MakeDecoder) -> None:
    decoder = decoder_for(model, 1)
    expected = decoder.prefill(PROMPT)
    decoder.restart()
    met: list[str] = []

    def use() -> None:
        for call in (lambda: decoder.decode(1), lambda: decoder.prefill([1]), decoder.restart, decoder.verify):
            with pytest.raises(ComputeError) as refused:
                call()
            met.append(str(refused.value))

    def meanwhile(brick: Any, calls: Any) -> None:
        if not met:
            other = threading.Thread(target=use)
            other.start()
            other.join()

    assert decoder.prefill(PROMPT, meanwhile) == expected
    assert met == ["this decoder is in use: it has one sequence; make one for each thread"] * 4
    decoder.decode(expected)


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_what_runs_inside_a_pass_cannot_use_its_decoder(model: Model, decoder_for: MakeDecoder) -> None:
    """A signal handler or an observer could call the decoder during a pass. Such calls raise an error.

    Before, a token decoded inside a prompt moved the rest of the prompt beyond the cache, and the result was wrong.
    """
    decoder = decoder_for(model, 1)
    expected = decoder.prefill(PROMPT)
    decoder.restart()
    met: list[str] = []

    def meanwhile(brick: Any, calls: Any) -> None:
        for call in () if met else (lambda: decoder.decode(1), lambda: decoder.prefill([1]), decoder.restart):
            with pytest.raises(ComputeError, match="in use") as refused:
                call()
            met.append(str(refused.value))

    assert (decoder.prefill(PROMPT, meanwhile), decoder.position, len(met)) == (expected, len(PROMPT), 3)


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_a_fork_made_while_a_thread_uses_a_decoder_can_use_it(model: Model, decoder_for: MakeDecoder) -> None:
    decoder = decoder_for(model, 1)
    is_inside, may_go_on = threading.Event(), threading.Event()

    def hold(brick: Any, calls: Any) -> None:
        is_inside.set()
        may_go_on.wait()

    other = threading.Thread(target=decoder.prefill, args=(PROMPT, hold))
    other.start()
    is_inside.wait()
    try:
        if (process := os.fork()) == 0:
            try:
                decoder.restart()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(process, 0)[1] == 0
    finally:
        may_go_on.set()
        other.join()


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_other_threads_can_use_the_decoder_after_an_interrupt_at_any_place(
    model: Model, decoder_for: MakeDecoder
) -> None:
    """Python can raise KeyboardInterrupt when a function begins and when a call returns.

    The test raises it at both moments while the decoder is locked.
    """
    decoder = decoder_for(model, 1)

    def interrupted_at(place: int) -> bool:
        met = 0

        def look(frame: FrameType, event: str, _: object) -> None:
            nonlocal met
            if event in ("call", "c_return") and frame.f_code.co_filename == of_decoder.__file__:
                met += 1
                if met == place:
                    raise KeyboardInterrupt

        sys.setprofile(look)
        try:
            decoder.restart()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    place = 1
    while interrupted_at(place):
        with ThreadPoolExecutor(1) as other:
            other.submit(decoder.restart).result()
        place += 1
    assert place > 4


@of_each_kind
def test_a_second_sequence_is_not_touched_by_the_first(model: Model, decoder_for: MakeDecoder) -> None:
    decoder = decoder_for(model, 1)
    first = decoder.prefill(PROMPT)
    logits = decoder.logits.copy()
    decoder.decode(first)
    decoder.restart()
    assert decoder.prefill(PROMPT) == first
    np.testing.assert_array_equal(decoder.logits, logits)


def test_every_brick_of_a_step_is_recorded(model: Model, decoder_for: MakeDecoder, recorder: ListRecorder) -> None:
    decoder_for(model, 1).prefill(PROMPT)
    nodes = {m.id: m for m in recorder.messages if isinstance(m, Node)}
    ran = [nodes[tag] for tag, _ in recorder.records]
    step = next(node for node in ran if node.kind is NodeKind.STEP)
    assert step.name == "prefill"
    layers = [node for node in ran if node.kind is NodeKind.LAYER]
    assert [layer.parent for layer in layers] == [step.id] * len(model.layers)
    qk_norm = ["RmsNorm"] if model.layers[0].q_norm is not None else []
    norms = Norms.of(model)
    between = ["ResidualAdd", norms.brick] if norms.behind_sum == norms.brick else [norms.behind_sum]
    post_norm = ["RmsNorm"] if model.layers[0].ffn_post_norm is not None else []
    is_fused = model.activation == "silu"
    gate = ["GateUpActivation (fused)"] if is_fused else ["GateProjection", "UpProjection", "Activation"]
    feed_forward = [*gate, "DownProjection"]
    in_layers = [node.name for node in ran if node.parent in [layer.id for layer in layers]]
    # A step has one record of the expert brick for each chosen expert. Count these records as one.
    if model.experts is not None:
        in_layers = [name for at, name in enumerate(in_layers) if in_layers[at - 1 : at + 1] != ["MoeExperts"] * 2]
        feed_forward = ["MoeRouter", "MoeExperts", "MoeCombine"]
    in_layer = [
        "QkvProjection", *qk_norm, "RopeEmbedding", "KvWrite", "Attention (fused)", "OutputProjection",
        *post_norm, *between, *feed_forward, *post_norm,
    ]  # fmt: skip
    assert in_layers == [norms.brick, *in_layer, *[*between, *in_layer] * (len(layers) - 1), "ResidualAdd"]
    directly = [node.name for node in ran if node.parent == step.id and node.kind is NodeKind.BRICK]
    assert directly == ["Embedding", norms.brick, "LmHead", *["SoftCap"] * (model.logit_cap > 0), "Sampling"]


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_a_step_reports_its_number_of_sequences_and_of_cached_positions(
    model: Model, decoder_for: MakeDecoder, recorder: ListRecorder
) -> None:
    decoder = decoder_for(model, 1)
    for _ in range(2):
        decoder.decode(decoder.decode(decoder.prefill(PROMPT)))
        decoder.restart()
    assert recorder.amounts == [(1, 0), (1, len(PROMPT)), (1, len(PROMPT) + 1)] * 2


@of_each_kind
def test_a_projections_work_is_its_shapes(model: Model, decoder_for: MakeDecoder, recorder: ListRecorder) -> None:
    decoder_for(model, 1).prefill(PROMPT)
    node = next(m for m in recorder.messages if isinstance(m, Node) and m.name == "QkvProjection")
    layer = model.layers[0]
    projections = (layer.q, layer.k, layer.v)
    elements = len(PROMPT) * sum(p.weight.rows for p in projections)
    assert (node.id, elements) in recorder.records
    assert node.work.flops_per_element is not None
    products = 2.0 * model.hidden * elements
    biases = len(PROMPT) * sum(p.bias.size for p in projections)
    assert node.work.flops_per_element * elements == pytest.approx(products + biases)
    assert node.work.bytes_per_call == sum(p.weight.size_bytes + p.bias.nbytes for p in projections)


def test_all_bricks_hold_their_assertions(model: Model, decoder_for: MakeDecoder, recorder: ListRecorder) -> None:
    results = decoder_for(model, 1).verify(PROMPT)
    assert [result for result in results if not result.passed] == []
    assert {result.assertion for result in results} == {"finite", "equals reference"}
    assert recorder.records == []


@of_each_kind
def test_a_wrong_kernel_fails_its_check(
    model: Model, decoder_for: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = Norms.of(model)

    def wrong(*arguments: Any) -> None:
        norms.kernel.reference(*arguments)
        arguments[-1][-1, -1] *= 1.01

    norms.plant(monkeypatch, wrong)
    failed = [result for result in decoder_for(model, 1).verify(PROMPT) if not result.passed]
    assert [(result.brick, result.assertion) for result in failed] == [(norms.brick, "equals reference")]
    assert failed[0].max_error is not None
    assert failed[0].tolerance is not None
    assert failed[0].max_error > failed[0].tolerance


def scaled(out: Any) -> None:
    out *= 1.5


def swapped(out: Any) -> None:
    out[:, [0, 1]] = out[:, [1, 0]]


def not_a_number(out: Any) -> None:
    out[-1, 0] = np.nan


@first_by_default(("threads", "alone"), each_value_once([(1, True), (2, False), (2, True), (1, False)]), 8)
@in_every_family("fault", {fault.__name__: fault for fault in (scaled, swapped, not_a_number)})
def test_a_product_wrong_only_for_one_token_or_only_for_many_fails_its_check(
    model: Model,
    decoder_for: MakeDecoder,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Any], None],
    alone: bool,
    threads: int,
) -> None:
    def wrong(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: Any) -> None:
        linear.linear(code, weights, bias, x, out, scratch)
        # Plant no fault in the output matrix, because this matrix multiplies only one token in every pass, also for a
        # prompt.
        if (x.shape[0] == 1) == alone and weights is not model.lm_head.data:
            fault(out)

    for code, kernel in linear.LINEAR.items():
        monkeypatch.setitem(linear.LINEAR, code, replace(kernel, implementation=wrong))

    def in_parts(module: Any, name: str) -> None:
        right = getattr(module, name)

        def wrong_parts(*arguments: Any) -> None:
            right(*arguments)
            for kernel, call in module.parts(arguments):
                kernel.implementation(*call)

        monkeypatch.setattr(module, name, wrong_parts)

    in_parts(qkv, "qkv")
    in_parts(gated, "gated")
    failed = {result.brick for result in decoder_for(model, threads).verify(PROMPT) if not result.passed}
    gate = {"GateUpActivation (fused)"} if model.activation == "silu" else {"GateProjection", "UpProjection"}
    feed_forward = {*gate, "DownProjection"}
    if model.experts is not None:
        feed_forward = {"MoeRouter", "MoeExperts"}
    assert failed >= {"QkvProjection", "OutputProjection", *feed_forward}


@of_each_kind
def test_if_weights_make_a_nan_their_brick_fails_and_later_ones_are_skipped(
    model: Model, decoder_for: MakeDecoder
) -> None:
    weight = model.layers[1].ffn_norm.weight
    kept = weight.copy()
    weight[0] = np.nan
    try:
        results = decoder_for(model, 1).verify(PROMPT)
    finally:
        weight[:] = kept
    norm = Norms.of(model).behind_sum
    assert {result.brick for result in results if not result.passed} == {norm}
    skipped = {result.brick: result.skipped for result in results if result.skipped}
    assert set(skipped.values()) == {f"what {norm} computed before it is not finite"}
    assert {"DownProjection", "LmHead"} <= skipped.keys() or {"MoeExperts", "LmHead"} <= skipped.keys()
    assert "QkvProjection" not in skipped


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_a_nan_that_no_cache_keeps_hides_nothing_of_the_next_pass(model: Model, decoder_for: MakeDecoder) -> None:
    """A NaN after the last layer enters no cache, so the NaN does not affect the next pass.

    A product that is wrong only for single tokens must still be found in the next pass.
    """
    decoder = decoder_for(model, 1)
    down = decoder.bricks.layers[0].down
    assert down is not None
    right, weight = down.implementations[0], model.final_norm.weight

    def wrong_of_one_token(*arguments: Any) -> None:
        right(*arguments)
        out = arguments[down.kernels[0].outputs[0]]
        out *= 1 + (len(out) == 1)

    down.implementations = (wrong_of_one_token,)
    kept = weight.copy()
    weight[0] = np.nan
    try:
        results = decoder.verify(PROMPT)
    finally:
        weight[:] = kept
    assert {result.brick for result in results if not result.passed} == {"RmsNorm", "DownProjection"}


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_if_a_kernel_makes_a_nan_its_brick_fails_and_later_ones_are_checked(
    model: Model, decoder_for: MakeDecoder
) -> None:
    decoder = decoder_for(model, 1)
    brick = decoder.bricks.layers[0].output_projection
    right = brick.implementations[0]

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        not_a_number(arguments[4])

    brick.implementations = (wrong,)
    results = decoder.verify(PROMPT)
    assert {result.brick for result in results if not result.passed} == {"OutputProjection"}
    assert not any(result.skipped for result in results)


@of_each_kind
def test_a_prompt_that_was_interrupted_leaves_nothing_behind(
    model: Model, decoder_for: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "most_together", 3)
    decoder = decoder_for(model, 1)
    expected = decoder.prefill(PROMPT)
    decoder.restart()
    bricks = []

    def interrupt(brick: Any, calls: Any) -> None:
        bricks.append(brick)
        if bricks.count(decoder.bricks.embedding) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.prefill(PROMPT, interrupt)
    assert decoder.position == 0
    assert decoder.prefill(PROMPT) == expected
    assert decoder.position == len(PROMPT)


@of_one_family
def test_a_full_context_is_refused(model: Model, decoder_for: MakeDecoder) -> None:
    decoder = decoder_for(model, 1)
    with pytest.raises(ComputeError, match="do not fit a context of 64"):
        decoder.prefill([1] * 65)


@of_one_family
@pytest.mark.parametrize("token", [512, -1, 1.0, 2.5, float("nan"), np.float32(3), "7", None, [1], True])
def test_a_token_outside_the_vocabulary_is_refused_before_a_step_begins(
    model: Model, decoder_for: MakeDecoder, recorder: ListRecorder, token: Any
) -> None:
    decoder = decoder_for(model, 1)
    for refuse in (decoder.prefill, decoder.verify):
        with pytest.raises(ComputeError, match="whole numbers from 0 to 511 are wanted, which is the vocabulary"):
            refuse([1, 2, token])
    with pytest.raises(ComputeError, match="whole numbers from 0 to 511 are wanted, which is the vocabulary"):
        decoder.decode(token)
    assert (decoder.position, recorder.records) == (0, [])


@pytest.mark.parametrize("model", ["qwen2", "gemma2"], indirect=True)
@pytest.mark.parametrize("sampling", [GREEDY, TokenSampling(temperature=1.0)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_token_is_chosen_among_logits_of_which_one_is_no_number(
    model: Model, profiler: BrickProfiler, sampling: TokenSampling, value: float
) -> None:
    decoder = Decoder(model, "numba", 1, profiler, 64, DecoderSettings(sampling=sampling))
    last = decoder.bricks.soft_cap or decoder.bricks.lm_head
    right = last.implementations[0]

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[-1 if last is decoder.bricks.soft_cap else 4][0, 7] = value

    last.implementations = (wrong,)
    for append in (lambda: decoder.prefill(PROMPT), lambda: decoder.decode(1)):
        with pytest.raises(NoTokenError, match="no token can be chosen: a logit is NaN or infinite; "):
            append()
        assert decoder.position == 0
    last.implementations = (right,)
    assert decoder.prefill(PROMPT) in range(512)


@pytest.mark.parametrize("model", ["gemma2"], indirect=True)
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_no_token_is_chosen_where_a_soft_cap_hides_an_infinity(
    model: Model, decoder_for: MakeDecoder, value: float
) -> None:
    decoder = decoder_for(model, 1)
    right = decoder.bricks.lm_head.implementations[0]

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[4][0, 7] = value

    decoder.bricks.lm_head.implementations = (wrong,)
    with pytest.raises(NoTokenError):
        decoder.prefill(PROMPT)
    assert np.isfinite(decoder.logits).all()


@of_one_family
def test_tokens_of_numpy_are_tokens(model: Model, decoder_for: MakeDecoder) -> None:
    decoder = decoder_for(model, 1)
    assert decoder.decode(np.int32(5)) == decoder_for(model, 1).prefill([5])
    assert decoder.decode(decoder.prefill(np.array(PROMPT))) in range(512)


@of_one_family
def test_an_empty_prompt_is_refused_by_that_name(model: Model, decoder_for: MakeDecoder) -> None:
    decoder = decoder_for(model, 1)
    for refuse in (decoder.prefill, decoder.verify):
        with pytest.raises(ComputeError, match="no token to begin with: give a prompt of one or more"):
            refuse([])


@of_one_family
@pytest.mark.parametrize(
    ("threads", "context"), [(-1, 64), (0, 64), (1, 0), (1, -5), (1.5, 64), (1, 64.0), (True, 64), (1, True)]
)
def test_a_decoder_of_nothing_is_refused(model: Model, profiler: BrickProfiler, threads: int, context: int) -> None:
    wanted = f"^{threads} threads and a context of {context}; whole numbers from 1 are wanted"
    with pytest.raises(ComputeError, match=wanted):
        Decoder(model, "numba", threads, profiler, context)


@of_one_family
def test_a_kv_cache_of_a_type_that_is_not_known_is_refused(model: Model, profiler: BrickProfiler) -> None:
    with pytest.raises(ComputeError, match=r"^a KV cache of 'f64'; supported are f16 and f32$"):
        Decoder(model, "test", 1, profiler, 16, DecoderSettings("f64"))
