"""Tests of each trace (what a model computes). A trace measures the right values and reports the right anomalies."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cbtop.profiler.traces import activations, attention, kv_cache, logits, quantization
from cbtop.profiler.traces.activations import LayerActivationTrace
from cbtop.profiler.traces.attention import NO_POSITION, attention_weights
from cbtop.profiler.traces.base import AttentionConfig, spread
from cbtop.profiler.traces.kv_cache import KvCacheStateTrace, has_high_eviction, has_thrashing
from cbtop.profiler.traces.logits import TokenLogitEvolution, logit_evolution
from cbtop.profiler.traces.moments import TensorStats, tensor_stats
from cbtop.profiler.traces.quantization import ErrorSource, QuantizationVerdict, quantization_error

HEALTHY = tensor_stats(np.array([-1.0, 0.5, 2.0]))
LAYER = LayerActivationTrace(3, HEALTHY, HEALTHY, HEALTHY, HEALTHY, HEALTHY)


def stats_of(*values: float) -> TensorStats:
    return tensor_stats(np.array(values))


def test_a_healthy_layer_has_no_anomaly() -> None:
    assert list(activations.anomalies(LAYER)) == []
    assert LAYER.residual_ratio == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ((1.0, math.nan), "layer 3 output: 1 NaN"),
        ((1.0, -math.inf, 2.0), "layer 3 output: 1 infinite"),
        ((1.0, -2e6, 1e6), "explosion"),
        ((3e4, -3e4), "std 3e+04 exceeds 10000"),
        ((5.0, 5.0 + 1e-7), "vanishing"),
    ],
)
def test_a_sick_output_is_an_anomaly(values: tuple[float, ...], complaint: str) -> None:
    found = list(activations.anomalies(replace(LAYER, output=stats_of(*values))))
    assert any(complaint in text for text in found), found


def test_a_layer_that_adds_nothing_is_an_anomaly() -> None:
    trace = replace(LAYER, post_attn=stats_of(1e-3, -1e-3), post_ffn=stats_of(1e-3, -1e-3))
    (found,) = activations.anomalies(trace)
    assert found.startswith("layer 3: residual ratio 0.99")


def test_attention_is_measured_by_its_definitions() -> None:
    weights = np.array([[0.7, 0.1, 0.195, 0.005], [0.25, 0.25, 0.25, 0.25]], np.float32)
    trace = attention_weights(1, weights, AttentionConfig(top_k=3))
    assert trace.top_positions.tolist() == [[0, 2, 1], [0, 1, 2]]
    assert trace.tail_mass == pytest.approx([0.005, 0.25], abs=1e-7)
    assert trace.entropy == pytest.approx([-(weights[0] * np.log(weights[0])).sum(), math.log(4)], rel=1e-6)
    assert trace.is_attention_sink.tolist() == [True, False]
    assert trace.is_uniform.tolist() == [False, True]
    assert list(attention.anomalies(trace)) == []


def test_a_weight_below_the_threshold_is_never_among_the_top() -> None:
    trace = attention_weights(0, np.array([[0.995, 0.005]]), AttentionConfig())
    assert trace.top_positions.tolist() == [[0, NO_POSITION]]
    assert trace.tail_mass == pytest.approx([0.005])


def test_a_head_that_looks_only_at_the_latest_positions_has_a_recency_bias() -> None:
    weights = np.full((2, 12), 0.02)
    weights[0, -2:] = 0.4
    weights[1, :2] = 0.4
    assert attention_weights(0, weights, AttentionConfig()).has_recency_bias.tolist() == [True, False]


@pytest.mark.parametrize("wrong", [0.9, 1.001, math.nan])
def test_weights_that_do_not_sum_to_one_are_an_anomaly(wrong: float) -> None:
    weights = np.array([[0.5, 0.5], [0.5, wrong - 0.5]])
    found = list(attention.anomalies(attention_weights(2, weights, AttentionConfig(heads=(1,)))))
    assert len(found) == 1
    assert found[0].startswith("layer 2 head 1: weights of position 1 sum to ")


def test_logits_and_ranks_of_every_layer_are_recorded() -> None:
    layers = [np.array([3.0, 1.0, 2.0]), np.array([1.0, 5.0, 2.0]), np.array([0.0, 9.0, 8.0])]
    trace = logit_evolution(7, layers[-1], iter(layers))
    assert [token.token for token in trace.tokens] == [1, 2, 0]
    assert trace.tokens[0] == TokenLogitEvolution(1, (1.0, 5.0, 9.0), (3, 1, 1))
    assert [token.decisive_layer for token in trace.tokens] == [1, None, None]


@pytest.mark.parametrize(
    ("ranks", "decisive"),
    [((1, 1, 1), 0), ((1, 4, 1), 2), ((9, 1, 1), 1), ((1, 1, 2), None), ((), None)],
)
def test_the_decisive_layer_is_the_first_after_which_nothing_overtakes(
    ranks: tuple[int, ...], decisive: int | None
) -> None:
    assert TokenLogitEvolution(0, tuple(map(float, ranks)), ranks).decisive_layer == decisive


def test_the_tokens_to_track_can_be_chosen() -> None:
    layer = np.array([3.0, 1.0, 2.0])
    assert [token.token for token in logit_evolution(0, layer, [layer], tracked=(2,)).tokens] == [2]


def test_logits_that_are_not_finite_are_an_anomaly() -> None:
    final = np.array([1.0, math.nan, math.inf])
    assert list(logits.anomalies(logit_evolution(4, final, [final]))) == ["position 4: 2 logits are NaN or infinite"]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_logit_beyond_the_bound_is_an_anomaly(sign: int) -> None:
    final = np.array([1.0, sign * 1e30, math.nan], np.float32)
    assert list(logits.anomalies(logit_evolution(4, final, [final]))) == [
        "position 4: 1 logits are NaN or infinite",
        "position 4: a logit of magnitude 1e+30 exceeds 1e+06 (explosion)",
    ]
    assert list(logits.anomalies(logit_evolution(4, sign * np.array([1e6, 2.0]), []))) == []


def error_between(expected: list[float], actual: list[float]) -> quantization.QuantizationErrorTrace:
    return quantization_error("LmHead", 1, ErrorSource.KERNEL, "Q4_K", 4.5, np.array(expected), np.array(actual))


def test_a_quantisation_error_is_measured_by_its_definitions() -> None:
    trace = error_between([3.0, 4.0], [3.0, 4.5])
    assert (trace.mse, trace.max_abs_error) == (0.125, 0.5)
    assert trace.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))
    assert trace.snr_db == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("expected", "actual", "decibels"), [(1.0, 1.0, None), (1.0, math.inf, -math.inf), (math.inf, 1.0, math.nan)]
)
def test_an_undefined_signal_to_noise_ratio_is_none_infinite_or_nan(
    expected: float, actual: float, decibels: float | None
) -> None:
    assert error_between([expected], [actual]).snr_db == pytest.approx(decibels, nan_ok=True)


@pytest.mark.parametrize(
    ("angle", "verdict"),
    [
        (0.0, QuantizationVerdict.OK),
        (0.09, QuantizationVerdict.OK),
        (0.12, QuantizationVerdict.WARNING),
        (0.15, QuantizationVerdict.CRITICAL),
        (3.0, QuantizationVerdict.CRITICAL),
    ],
)
def test_the_cosine_decides_the_verdict(angle: float, verdict: QuantizationVerdict) -> None:
    trace = error_between([1.0, 0.0], [math.cos(angle), math.sin(angle)])
    assert trace.verdict is verdict
    assert len(list(quantization.anomalies(trace))) == (verdict is not QuantizationVerdict.OK)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_an_output_that_is_not_finite_is_critical(broken: float) -> None:
    assert error_between([1.0, 2.0], [1.0, broken]).verdict is QuantizationVerdict.CRITICAL


def test_two_equal_outputs_have_no_noise_to_compare_with() -> None:
    assert error_between([1.0, 2.0], [1.0, 2.0]).snr_db is None
    assert error_between([0.0], [0.0]).verdict is QuantizationVerdict.OK
    assert error_between([0.0], [1.0]).snr_db == -math.inf


STATE = KvCacheStateTrace(100, 4096, 30, 40, 0, 0, 0, 29, 30)


def test_a_contiguous_cache_has_no_holes() -> None:
    assert (STATE.utilisation, STATE.fragmentation, STATE.hit_rate) == (0.75, 0.0, None)
    assert replace(STATE, newest_position=59).fragmentation == 0.5


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"valid_positions": 700, "max_positions": 512, "newest_position": 699},
         "700 valid positions exceed the 512 that the cache has"),
        ({"newest_position": 28}, "30 valid positions exceed the 29 from the oldest to the newest"),
        ({"accessed_positions": 31}, "31 accessed positions exceed the 30 valid ones"),
    ],
)  # fmt: skip
def test_a_cache_with_more_positions_than_it_can_have_is_an_anomaly(change: dict[str, int], complaint: str) -> None:
    assert list(kv_cache.anomalies([replace(STATE, **change)])) == [complaint]  # type: ignore[arg-type]
    assert list(kv_cache.anomalies([replace(STATE, valid_positions=40, newest_position=39)])) == []


def test_evictions_in_more_than_a_tenth_of_the_steps_are_high() -> None:
    assert not has_high_eviction(replace(STATE, evictions=10))
    assert has_high_eviction(replace(STATE, evictions=11))
    assert "11 evictions in 100 steps" in next(kv_cache.anomalies([replace(STATE, evictions=11)]))


def test_a_cache_that_evicts_at_every_other_step_is_thrashing() -> None:
    later = replace(STATE, step=116, evictions=9)
    assert has_thrashing([STATE, later])
    assert not has_thrashing([STATE, replace(later, evictions=8)])
    assert not has_thrashing([replace(STATE, hit_rate=0.9), replace(later, hit_rate=0.9)])
    assert not has_thrashing([later])


def test_what_is_spread_keeps_both_ends() -> None:
    assert spread(range(5)) == [0, 1, 2, 3, 4]
    chosen = spread(range(200), 48)
    assert (len(set(chosen)), chosen[0], chosen[-1]) == (48, 0, 199)
