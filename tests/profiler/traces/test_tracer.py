"""Tests of the tracer, which collects what a model computes.

They test which values it accepts or forgets, and its messages.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from cbtop.profiler.traces import TRACES
from cbtop.profiler.traces.activations import LayerActivationTrace
from cbtop.profiler.traces.attention import attention_weights
from cbtop.profiler.traces.base import HISTORY_FORWARDS, MAX_ANOMALIES, MAX_ROWS, AttentionConfig, TracerConfig
from cbtop.profiler.traces.kv_cache import KvCacheStateTrace
from cbtop.profiler.traces.logits import logit_evolution
from cbtop.profiler.traces.moments import TensorStats, tensor_stats
from cbtop.profiler.traces.quantization import ErrorSource, quantization_error
from cbtop.profiler.traces.tracer import ModelTracer, TracerTotals
from cbtop.protocol import codec

GOOD = tensor_stats(np.array([-1.0, 1.0]))
BAD = tensor_stats(np.array([math.nan, 1.0, 2.0]))


def layer_trace(layer: int, output: TensorStats = GOOD) -> LayerActivationTrace:
    return LayerActivationTrace(layer, GOOD, GOOD, GOOD, GOOD, output)


def trace_everything(
    tracer: ModelTracer, position: int, layers: int = 2, output: TensorStats = GOOD
) -> tuple[str, ...]:
    tracer.begin_forward(position)
    for layer in range(layers):
        tracer.record_layer_activation(layer_trace(layer, output))
        tracer.record_attention(attention_weights(layer, np.array([[0.5, 0.5]] * 3), AttentionConfig()))
        one, other = np.array([1.0, 0.0]), np.array([1.0, 0.12])
        tracer.record_quant_error(quantization_error("LmHead", layer, ErrorSource.KERNEL, "Q8_0", 8.5, one, other))
    final = np.array([1.0, 2.0])
    tracer.record_logits(logit_evolution(position, final, [final] * layers))
    tracer.record_kv_state(KvCacheStateTrace(100 * position + 100, 64, 3, 8, 2, 6, 0, 2, 3))
    return tracer.end_forward()


def test_a_summary_counts_all_that_was_traced() -> None:
    tracer = ModelTracer(TracerConfig.full())
    assert len(trace_everything(tracer, 0)) == 2  # Both anomalies are warnings about the error of quantisation.
    trace_everything(tracer, 1)
    assert tracer.summary() == TracerTotals(
        total_forwards=2, anomalies_detected=4, attention_traces=12, logit_traces=2, kv_steps=2, total_evictions=2,
        avg_hit_rate=None, quant_warnings=4, quant_criticals=0,
    )  # fmt: skip
    assert {s.name: s.trace for s in tracer.trace_summaries()} == TRACES
    assert {s.forwards for s in tracer.trace_summaries()} == {2}


def test_clear_forgets_everything_but_the_config() -> None:
    tracer, fresh = ModelTracer(TracerConfig.full()), ModelTracer(TracerConfig.full())
    trace_everything(tracer, 0, output=BAD)
    tracer.begin_forward(1)
    tracer.clear()
    assert tracer.summary() == fresh.summary()
    assert tracer.trace_summaries() == fresh.trace_summaries()
    assert tracer.end_forward() == ()


@pytest.mark.parametrize("name", TRACES)
def test_one_trace_alone_takes_in_only_its_own(name: str) -> None:
    tracer = ModelTracer(TracerConfig.of([name]))
    trace_everything(tracer, 0)
    (summary,) = tracer.trace_summaries()
    assert (summary.name, summary.trace) == (name, TRACES[name])
    assert summary.numbers


def test_the_presets_are_what_they_say() -> None:
    assert TracerConfig.full() == TracerConfig.of(TRACES)
    assert TracerConfig.lightweight() == TracerConfig.of(["activations", "kv"])


def test_an_anomaly_is_told_at_once_and_kept() -> None:
    tracer = ModelTracer(TracerConfig.of(["activations"]))
    assert trace_everything(tracer, 0, layers=1, output=BAD) == ("layer 0 output: 1 NaN",)
    (summary,) = tracer.trace_summaries()
    assert [anomaly.text for anomaly in summary.anomalies] == ["layer 0 output: 1 NaN"]


@pytest.mark.slow
def test_kept_traces_are_bounded_for_any_run_length_and_model_depth() -> None:
    tracer = ModelTracer(TracerConfig.full())
    for position in range(HISTORY_FORWARDS + 5):
        trace_everything(tracer, position, layers=60, output=BAD)
    assert len(tracer.kept) == HISTORY_FORWARDS
    assert tracer.summary().total_forwards == HISTORY_FORWARDS + 5
    for summary in tracer.trace_summaries():
        assert len({number.row for number in summary.numbers}) <= MAX_ROWS + 1
        assert len(summary.anomalies) <= MAX_ANOMALIES
        assert len(codec.encode(summary)) < 64 << 10


def test_a_pass_that_was_not_ended_is_dropped() -> None:
    tracer = ModelTracer(TracerConfig.full())
    tracer.begin_forward(0)
    tracer.record_layer_activation(layer_trace(0, BAD))
    tracer.begin_forward(1)
    assert tracer.end_forward() == ()
    assert tracer.summary().total_forwards == 1


def test_a_summary_survives_the_wire_and_knows_no_number_that_is_not_finite() -> None:
    tracer = ModelTracer(TracerConfig.full())
    nothing = tensor_stats(np.array([math.nan]))
    trace_everything(tracer, 0, output=nothing)
    for summary in tracer.trace_summaries():
        assert codec.decode(codec.encode(summary)) == replace(summary)
        assert all(number.value is None or math.isfinite(number.value) for number in summary.numbers)
    assert {n.value for n in tracer.trace_summaries()[0].numbers if n.name in ("min", "max", "mean")} == {None}


def test_every_record_outside_of_a_pass_is_passed_over() -> None:
    tracer = ModelTracer(TracerConfig.full())
    tracer.record_layer_activation(layer_trace(0))
    assert tracer.end_forward() == ()
    assert all(getattr(tracer.summary(), f.name) in (0, None) for f in fields(TracerTotals))


def test_the_profiler_and_the_names_of_traces_load_no_numpy() -> None:
    code = (
        "import sys, cbtop.profiler.profiler, cbtop.profiler.traces, cbtop.profiler.traces.base;"
        "print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
