"""Tests of running bricks with checks of their contracts before and after: the results are announced.

The computation is not changed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute import ceilings
from cbtop.compute.brick import ComputeBrick
from cbtop.compute.decoder.base import Model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.kernels import rms_norm_int8
from cbtop.compute.settings import GREEDY, DecoderSettings, TokenSampling, WorkloadOptions
from cbtop.compute.workload import run
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import CheckResult
from cbtop.protocol.vocabulary import PRECONDITION

from .conftest import ListRecorder, Norms, of_each_kind

PROMPT = [3, 141, 59, 26, 5, 358, 97]
DRAWN = TokenSampling(temperature=0.8, seed=3)


def results(recorder: ListRecorder) -> list[CheckResult]:
    return [message for message in recorder.messages if isinstance(message, CheckResult)]


def decoded(
    model: Model, profiler: BrickProfiler, sampling: TokenSampling, *, check: bool
) -> tuple[Decoder, list[int]]:
    settings = DecoderSettings(sampling=sampling, check_contracts=check)
    decoder = Decoder(model, "numba", 1, profiler, model.context_length, settings)
    tokens = [decoder.prefill(PROMPT)]
    for _ in range(3):
        tokens.append(decoder.decode(tokens[-1]))
    return decoder, tokens


@of_each_kind
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_every_brick_condition_is_reported_once_holds_and_changes_nothing(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder, sampling: TokenSampling
) -> None:
    unchecked, tokens = decoded(model, profiler, sampling, check=False)
    assert results(recorder) == []
    elements = [count for _, count in recorder.records]
    decoder, found = decoded(model, profiler, sampling, check=True)
    assert found == tokens
    np.testing.assert_array_equal(decoder.logits, unchecked.logits)
    assert [count for _, count in recorder.records] == 2 * elements
    said = [(result.brick, result.assertion) for result in results(recorder)]
    assert [result for result in results(recorder) if not result.passed] == []
    assert len(set(said)) == len(said)
    contracts = [(brick.spec.name, kernel.contract) for brick in decoder.bricks.places() for kernel in brick.kernels]
    assert set(said) == {
        (brick, condition.name) for brick, one in contracts for condition in (*one.preconditions, *one.postconditions)
    }


def test_without_checks_no_condition_is_evaluated(
    model: Model, profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ComputeBrick, "run_checked")
    decoded(model, profiler, GREEDY, check=False)
    with pytest.raises(AttributeError):
        decoded(model, profiler, GREEDY, check=True)


def test_a_condition_that_comes_not_to_hold_is_announced_once(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms, calls = Norms.of(model), 0
    right = norms.kernel.implementation

    def wrong(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        right(*arguments)
        if calls in (3, 6, 7):
            arguments[-1][0, 0] = 1e3

    norms.plant(monkeypatch, wrong)
    decoded(model, profiler, GREEDY, check=True)
    condition = norms.kernel.contract.postconditions[-1].name
    assert "<= sqrt(columns(x)) * abs(weight)" in condition
    of_norms = [one for one in results(recorder) if (one.brick, one.assertion) == (norms.brick, condition)]
    assert [result.passed for result in of_norms] == [True, False]
    assert calls > 7


def test_a_failed_precondition_is_reported_before_the_kernel_runs(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: Any) -> None:
        raise RuntimeError("killed")

    norms = Norms.of(model)
    norms.plant(monkeypatch, ends)
    with pytest.raises(RuntimeError, match="killed"):
        decoded(replace(model, epsilon=-1.0), profiler, GREEDY, check=True)
    failed = [(result.brick, result.assertion) for result in results(recorder) if not result.passed]
    assert failed == [(norms.brick, f"{PRECONDITION}epsilon > 0")]


def test_a_violation_in_a_later_step_of_the_workload_is_announced(
    model_files: dict[str, Path],
    profiler: BrickProfiler,
    recorder: ListRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ceilings, "LARGEST_BUFFER_BYTES", 16 << 20)
    calls = 0

    def wrong(x: Any, weight: Any, epsilon: float, out: Any, *codes: Any) -> None:
        nonlocal calls
        calls += 1
        rms_norm_int8.rms_norm_int8(x, weight, epsilon, out, *codes)
        if calls == 17:  # The first 16 calls are the warm-up and the checks before the first step.
            out[:] = np.nan

    monkeypatch.setattr(rms_norm_int8, "RMS_NORM_INT8", replace(rms_norm_int8.RMS_NORM_INT8, implementation=wrong))
    options = WorkloadOptions(model=model_files["qwen2"], steps=8, threads=1, check_contracts=True)
    run(options, profiler, lambda: False, lambda text, fraction: None)
    failed = {(result.brick, result.assertion) for result in results(recorder) if not result.passed}
    assert failed >= {("RmsNorm", "postcondition finite(out)"), ("QkvProjection", "precondition finite(x)")}
