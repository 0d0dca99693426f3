"""Tests of the decoder's traces, which record what a model computes.

The traces are right, and their cost is visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.contracts import contract
from cbtop.compute.decoder import FAMILIES, tracing
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import interleaved
from cbtop.compute.decoder.probes import KvCacheProbe
from cbtop.compute.decoder.tracing import TRACE_BRICK, DecodeTracing
from cbtop.compute.guard import JidokaGuard, Reaction
from cbtop.compute.kernels import attention, linear, rms_norm, sampling
from cbtop.compute.kernels.base import Arguments, Kernel
from cbtop.compute.kernels.linear import CHECKED_ROWS
from cbtop.compute.quantization.floats import F16
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.quantization.q8_0 import Q8_0
from cbtop.profiler.analysis.divergence import Fingerprints
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.traces import TRACED_EVERY_STEPS, TRACES
from cbtop.profiler.traces.base import TracerConfig
from cbtop.profiler.traces.quantization import ErrorSource, QuantizationVerdict, quantization_error
from cbtop.protocol.messages import Node, TraceSummary
from cbtop.protocol.vocabulary import BrickCategory

from .conftest import ListRecorder, Norms, of_each_kind, of_one_family

PROMPT = [3, 141, 59, 26, 5, 358, 97]
MakeDecoder = Callable[[Model, int], Decoder]


class Traced:
    """A decoder that has run some steps with traces."""

    def __init__(
        self, decoder: Decoder, profiler: BrickProfiler, steps: int, config: TracerConfig, clock: list[float]
    ) -> None:
        self.tracing = DecodeTracing(decoder, profiler, config, clock_s=lambda: clock[0])
        token = decoder.prefill(PROMPT)
        for _ in range(steps):
            token = decoder.decode(token, self.tracing.observer())
            clock[0] += 0.5
        self.chosen = token
        self.forward = self.tracing.tracer.kept[-1]


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def run(profiler: BrickProfiler, decoder_for: MakeDecoder, clock: list[float]) -> Callable[..., Traced]:
    """Return a function that runs some steps of a model with traces."""

    def run(model: Model, steps: int = 1, config: TracerConfig | None = None) -> Traced:
        return Traced(decoder_for(model, 1), profiler, steps, config or TracerConfig.full(), clock)

    return run


def said(recorder: ListRecorder) -> list[TraceSummary]:
    return [message for message in recorder.messages if isinstance(message, TraceSummary)]


@of_each_kind
def test_every_layer_is_measured_where_its_tensors_are(model: Model, run: Callable[..., Traced]) -> None:
    layers = run(model).forward.activations
    assert [trace.layer for trace in layers] == [0, 1]
    assert layers[1].input == layers[0].output
    assert all(stats.count == model.hidden for trace in layers for _, stats in trace.parts)
    # The output of a layer is its input plus the outputs of attention and of the feed-forward network.
    for trace in layers:
        whole = sum(stats.mean or 0.0 for stats in (trace.input, trace.post_attn, trace.post_ffn))
        assert trace.output.mean == pytest.approx(whole, abs=1e-6)
        assert trace.residual_ratio is not None
        assert 0 < trace.residual_ratio < 1


@of_each_kind
def test_the_last_layer_through_the_lens_is_the_models_own_logits(
    model: Model, run: Callable[..., Traced], decoder_for: MakeDecoder
) -> None:
    traced = run(model)
    decoder = decoder_for(model, 1)
    token = decoder.decode(decoder.prefill(PROMPT))
    assert token == traced.chosen
    evolution = traced.forward.logits
    assert evolution is not None
    winner = evolution.tokens[0]
    assert winner.token == token
    assert winner.per_layer_rank[-1] == 1
    assert len(winner.per_layer_logit) == len(model.layers)
    for place, tracked in enumerate(evolution.tokens):
        assert tracked.per_layer_logit[-1] == pytest.approx(float(decoder.logits[tracked.token]), rel=1e-6)
        assert tracked.per_layer_rank[-1] == place + 1


@of_each_kind
def test_attention_is_that_of_the_last_query_over_all_positions(model: Model, run: Callable[..., Traced]) -> None:
    traces = run(model).forward.attention
    assert [(trace.layer, trace.query_pos, len(trace.heads)) for trace in traces] == [
        (layer, len(PROMPT), model.heads) for layer in range(len(model.layers))
    ]
    assert all(np.abs(trace.total - 1).max() < 1e-6 for trace in traces)


@of_each_kind
def test_the_error_of_a_kernel_is_rounding_and_int8_activations_have_more(
    model: Model, run: Callable[..., Traced]
) -> None:
    errors = run(model).forward.quant_errors
    gate = {"GateUpActivation (fused)"} if model.activation == "silu" else {"GateProjection", "UpProjection"}
    dense = {*gate, "DownProjection"}
    feed_forward = dense if model.experts is None else {"MoeExperts"}
    assert {error.brick for error in errors} == {"QkvProjection", "OutputProjection", *feed_forward, "LmHead"}
    assert {error.quant_type for error in errors} == {"Q4_K", "Q6_K"}
    by_source = {error.source.value: error.snr_db for error in errors}
    assert set(by_source) == {"kernel as it ran", "if activations were Q8_0"}
    for error in errors:
        assert error.snr_db is not None
        assert (error.snr_db > 100) == (error.source.value == "kernel as it ran")


@pytest.mark.slow
def test_the_error_of_an_int8_kernel_is_its_activations_and_reported_once(
    model: Model, run: Callable[..., Traced]
) -> None:
    errors = run(interleaved(model)).forward.quant_errors
    assert {error.source.value for error in errors} == {"kernel as it ran"}
    assert all(error.snr_db is not None and 30 < error.snr_db < 60 for error in errors)


def violations(model: Model, traced: Traced) -> set[str]:
    """Return the names of traces whose figures violate the contract of a kernel."""
    forward, found = traced.forward, set()
    for trace, weights in zip(forward.activations, model.layers, strict=True):
        # The contract of rms_norm has: abs(out) <= sqrt(columns(x)) * abs(weight). That of layer_norm has the same
        # for abs(out - bias).
        norm, tolerance = weights.attention_norm, Norms.of(model).kernel.contract.tolerance
        bound = np.sqrt(model.hidden) * np.abs(norm.weight).max() * (1 + tolerance)
        bound += 0 if norm.bias is None else np.abs(norm.bias).max()
        assert trace.post_norm.max is not None
        assert trace.post_norm.min is not None
        if max(trace.post_norm.max, -trace.post_norm.min) > bound:
            found.add("MLT-01")
    for attended in forward.attention:
        # The contract of attention says that the weights of a softmax add up to 1.
        if (np.abs(attended.total - 1) > contract("attention").tolerance).any() or (attended.top_weights < 0).any():
            found.add("MLT-02")
    assert forward.logits is not None
    # The contract of the kernel `greedy` says: logits <= at(logits, out).
    first = forward.logits.tokens[0]
    if first.token != traced.chosen or any(
        one.per_layer_logit[-1] > first.per_layer_logit[-1] for one in forward.logits.tokens
    ):
        found.add("MLT-03")
    for error in forward.quant_errors:
        # The contract of linear limits max|difference| / max|reference|. This ratio is computed for at most
        # CHECKED_ROWS outputs.
        if error.source is ErrorSource.KERNEL:
            assert error.snr_db is not None
            largest = np.sqrt(CHECKED_ROWS * error.mse * 10 ** (error.snr_db / 10))
            if error.max_abs_error > contract("linear").tolerance * largest:
                found.add("MLT-04")
    state = forward.kv_state
    assert state is not None
    # The contract of the kernel `kv_write` says: start + rows(k) <= extent(v_cache, 1).
    if state.valid_positions > state.max_positions:
        found.add("MLT-05")
    return found


def test_every_trace_of_a_pass_keeps_the_contracts_of_its_kernels(model: Model, run: Callable[..., Traced]) -> None:
    assert violations(model, run(model)) == set()


def wrong(kernel: Kernel, place: int, change: Callable[[Any], None]) -> Kernel:
    def implementation(*arguments: Any) -> None:
        kernel.implementation(*arguments)
        change(arguments[place])

    return replace(kernel, implementation=implementation)


def scaled(values: Any) -> None:
    values[:] = 2 * values


def too_large(values: Any) -> None:
    values[0, 0] = 1e3


def another_token(choice: Any) -> None:
    choice += 1


def test_a_fault_in_what_a_trace_looks_at_breaks_the_contract_there(
    model_files: dict[str, Path], run: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_model(model_files["qwen2"], FAMILIES)
    head, weights, made = model.lm_head.format.code, attention.attention_weights, KvCacheProbe.__init__

    def in_a_context_of_the_prompt(probe: Any, bricks: Any, tracer: Any, context: int) -> None:
        made(probe, bricks, tracer, len(PROMPT))

    faults: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
        "MLT-01": lambda patch: patch.setattr(rms_norm, "RMS_NORM", wrong(rms_norm.RMS_NORM, 3, too_large)),
        "MLT-02": lambda patch: patch.setattr(attention, "attention_weights", lambda *call: 1.001 * weights(*call)),
        "MLT-03": lambda patch: patch.setattr(sampling, "GREEDY", wrong(sampling.GREEDY, 1, another_token)),
        "MLT-04": lambda patch: patch.setitem(linear.LINEAR, head, wrong(linear.LINEAR[head], 4, scaled)),
        "MLT-05": lambda patch: patch.setattr(KvCacheProbe, "__init__", in_a_context_of_the_prompt),
    }
    for trace, plant in faults.items():
        with monkeypatch.context() as patch:
            plant(patch)
            assert violations(model, run(model)) == {trace}


def test_where_the_float_weights_are_at_hand_more_bits_mean_less_error() -> None:
    weights = np.random.default_rng(3).standard_normal((8, 512)).astype(np.float32)
    errors = [
        quantization_error(
            "LmHead", None, ErrorSource.WEIGHTS, kind.name, 8 * kind.block_bytes / kind.block_elements,
            weights, kind.dequantize(kind.quantize(weights)),
        )
        for kind in (Q4_K, Q6_K, Q8_0, F16)
    ]  # fmt: skip
    assert [error.bits_per_weight for error in errors] == [4.5, 6.5625, 8.5, 16]
    decibels = [error.snr_db or 0 for error in errors]
    assert decibels == sorted(decibels)
    assert 15 < decibels[0] < 30
    assert all(error.verdict is QuantizationVerdict.OK for error in errors)


@of_each_kind
def test_each_traced_pass_measures_the_products_of_another_layer(model: Model, run: Callable[..., Traced]) -> None:
    kept = run(model, TRACED_EVERY_STEPS + 1).tracing.tracer.kept
    assert [{error.layer for error in forward.quant_errors} for forward in kept] == [{0, None}, {1, None}]


@of_each_kind
def test_the_cache_is_described_as_it_is(model: Model, run: Callable[..., Traced]) -> None:
    state = run(model).forward.kv_state
    assert state is not None
    assert (state.step, state.valid_positions, state.max_positions) == (1, len(PROMPT) + 1, model.context_length)
    assert state.size_bytes == 2 * 2 * len(model.layers) * model.kv_heads * model.head_dim * model.context_length
    assert (state.evictions, state.hit_rate, state.fragmentation) == (0, None, 0.0)


def test_of_a_window_the_cache_and_the_weights_are_what_is_seen(model: Model, run: Callable[..., Traced]) -> None:
    layers = tuple(replace(layer, slides=True) for layer in model.layers)
    forward = run(replace(model, window=3, layers=layers)).forward
    assert forward.kv_state is not None
    assert (forward.kv_state.valid_positions, forward.kv_state.accessed_positions) == (len(PROMPT) + 1, 3)
    for trace in forward.attention:
        seen = trace.top_positions[trace.top_weights > 0]
        assert seen.size
        assert set(seen.tolist()) <= {len(PROMPT) - 2, len(PROMPT) - 1, len(PROMPT)}


@of_one_family
def test_a_restart_is_an_eviction_of_all_positions(
    model: Model, decoder_for: MakeDecoder, profiler: BrickProfiler
) -> None:
    decoder = decoder_for(model, 1)
    watched = DecodeTracing(decoder, profiler, TracerConfig.of(["kv"]))
    for _ in range(TRACED_EVERY_STEPS + 1):  # Each round is a sequence with one prompt and one decode step.
        decoder.restart()
        decoder.decode(decoder.prefill(PROMPT), watched.observer())
    state = watched.tracer.kept[-1].kv_state
    assert state is not None
    assert (state.step, state.evictions) == (TRACED_EVERY_STEPS + 1, TRACED_EVERY_STEPS)
    assert state.evicted_positions == TRACED_EVERY_STEPS * (len(PROMPT) + 1)
    (summary,) = watched.tracer.trace_summaries()
    assert any("16 evictions in 17 steps" in anomaly.text for anomaly in summary.anomalies)
    assert any("thrashing" in anomaly.text for anomaly in summary.anomalies)


@of_each_kind
def test_a_weight_that_is_no_number_is_an_anomaly_of_its_layer(
    model: Model, decoder_for: MakeDecoder, profiler: BrickProfiler, clock: list[float]
) -> None:
    decoder = decoder_for(with_norm(model, layer=1, value=np.nan), 1)
    decoder.guard = JidokaGuard(Reaction.LOG, profiler, decoder.bricks.places())
    run_of = Traced(decoder, profiler, 1, TracerConfig.full(), clock)
    texts = [anomaly.text for summary in run_of.tracing.tracer.trace_summaries() for anomaly in summary.anomalies]
    assert any(text.startswith("layer 1 post_norm: 1 NaN") for text in texts)
    assert not any(text.startswith("layer 0") for text in texts)


@of_one_family
def test_what_is_no_number_is_an_anomaly_and_no_warning(
    model: Model, decoder_for: MakeDecoder, profiler: BrickProfiler, clock: list[float]
) -> None:
    """The NaN must be reported without a warning of NumPy, which would be an error in tests."""
    too_large = replace(model.final_norm, weight=np.full_like(model.final_norm.weight, 3e38))
    decoder = decoder_for(replace(model, final_norm=too_large), 1)
    decoder.guard = JidokaGuard(Reaction.LOG, profiler, decoder.bricks.places())
    run_of = Traced(decoder, profiler, 1, TracerConfig.full(), clock)
    run_of.tracing.finish()
    texts = [anomaly.text for summary in run_of.tracing.tracer.trace_summaries() for anomaly in summary.anomalies]
    assert any(text.endswith(" logits are NaN or infinite") for text in texts)
    assert any(text.endswith("cosine nan is critical") for text in texts)


@of_one_family
def test_tracing_is_sampled_and_a_brick_of_its_own(
    model: Model, run: Callable[..., Traced], recorder: ListRecorder
) -> None:
    run(model, 2 * TRACED_EVERY_STEPS)
    nodes = {message.id: message for message in recorder.messages if isinstance(message, Node)}
    steps = [nodes[tag] for tag, _ in recorder.records if nodes[tag].name == "decode"]
    traced = [nodes[tag] for tag, _ in recorder.records if nodes[tag].name == TRACE_BRICK]
    assert len(steps) == 2 * TRACED_EVERY_STEPS
    # The number of records is even, because both traced passes have the same number of records.
    assert len(traced) == 2 * (len(traced) // 2)
    assert {node.category for node in traced} == {BrickCategory.OTHER}
    assert {nodes[node.parent or 0].name for node in traced} == {"0", "1", "decode"}


@of_one_family
def test_without_a_trace_nothing_is_recorded_of_it(
    model: Model, decoder_for: MakeDecoder, recorder: ListRecorder
) -> None:
    decoder_for(model, 1).decode(3)
    names = {message.name for message in recorder.messages if isinstance(message, Node)}
    assert TRACE_BRICK not in names
    assert said(recorder) == []


@of_each_kind
def test_summaries_come_at_most_once_a_second_and_once_at_the_end(
    model: Model, run: Callable[..., Traced], recorder: ListRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "TRACED_EVERY_STEPS", 1)
    traced = run(model, 6, TracerConfig.of(["kv"]))  # On the fake clock, each step takes half a second.
    assert [summary.forwards for summary in said(recorder)] == [1, 3, 5]
    traced.tracing.finish()
    traced.tracing.finish()
    assert [summary.forwards for summary in said(recorder)] == [1, 3, 5, 6]


@of_each_kind
def test_a_long_run_says_less_and_less_often(
    model: Model, run: Callable[..., Traced], recorder: ListRecorder, clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The summaries of a day must be few, because a daemon stores at most 10,000 announcements of a process."""
    monkeypatch.setattr(tracing, "TRACED_EVERY_STEPS", 1)
    traced = run(model, 1)
    for _ in range(3000):
        clock[0] += 30.0  # 3,000 times 30 s are about a day.
        traced.tracing._end(())
    assert len(said(recorder)) < 5 * 250
    assert {summary.trace for summary in said(recorder)} == set(TRACES.values())


# --- divergence ---------------------------------------------------------------------------------------------


def with_norm(model: Model, layer: int, value: float) -> Model:
    """Return the model after one value in the attention norm of one layer was replaced."""
    norm = model.layers[layer].attention_norm
    weight = norm.weight.copy()
    weight[17] = value
    layers = list(model.layers)
    layers[layer] = replace(layers[layer], attention_norm=replace(norm, weight=weight))
    return replace(model, layers=tuple(layers))


def with_down(model: Model, layer: int) -> Model:
    """Return the model after one byte was changed in some down weights of one layer.

    The byte is the scale of 256 weights.
    """
    down = model.layers[layer].down
    data = down.weight.data.copy()
    data[100 :: model.hidden, 5] ^= 0x3F
    # Arrays of a model are read-only. Numba would compile kernels again for a writable array.
    data.flags.writeable = False
    layers = list(model.layers)
    layers[layer] = replace(layers[layer], down=replace(down, weight=replace(down.weight, data=data)))
    return replace(model, layers=tuple(layers))


def fingerprints_of(decoder: Decoder) -> Fingerprints:
    """Return the fingerprints of all brick outputs in a prefill and one decode step."""
    found = Fingerprints()
    layer_of = {
        getattr(part, field.name): layer
        for layer, bricks in enumerate(decoder.bricks.layers)
        for part in (bricks, bricks.experts)
        if part is not None
        for field in fields(part)
    }
    # Position at which the current pass starts. The decoder advances its own position before the last bricks run.
    position = 0

    def observe(brick: ComputeBrick, calls: Sequence[Arguments]) -> None:
        nonlocal position
        if brick is decoder.bricks.embedding:
            position = decoder.position
        for kernel, arguments in zip(brick.kernels, calls, strict=True):
            for place in kernel.outputs:
                found.record(brick.spec.name, layer_of.get(brick), position, arguments[place])

    decoder.decode(decoder.prefill(PROMPT, observe), observe)
    return found


def test_one_wrong_norm_weight_is_found_in_its_layer(model: Model, decoder_for: MakeDecoder) -> None:
    reference = fingerprints_of(decoder_for(model, 1))
    wrong = fingerprints_of(decoder_for(with_norm(model, layer=1, value=3.0), 1))
    found = wrong.find_divergence(reference)
    assert found is not None
    assert (found.brick, found.layer, found.position) == (Norms.of(model).behind_sum, 1, 0)
    assert found.expected != found.actual


def test_one_wrong_byte_of_a_quantised_matrix_is_found_in_its_brick(model: Model, decoder_for: MakeDecoder) -> None:
    reference = fingerprints_of(decoder_for(model, 1))
    found = fingerprints_of(decoder_for(with_down(model, layer=1), 1)).find_divergence(reference)
    assert found is not None
    assert (found.brick, found.layer, found.position) == (
        "DownProjection" if model.experts is None else "MoeExperts",
        1,
        0,
    )


@of_each_kind
def test_other_threads_and_equivalent_kernels_are_not_a_divergence(
    model: Model, decoder_for: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = fingerprints_of(decoder_for(model, 1))
    assert fingerprints_of(decoder_for(model, 2)).find_divergence(reference) is None

    norms = Norms.of(model)

    def other_order(*arguments: Any) -> None:
        norms.kernel.reference(*arguments)

    norms.plant(monkeypatch, other_order)
    assert fingerprints_of(decoder_for(model, 1)).find_divergence(reference) is None
