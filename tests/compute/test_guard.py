"""Tests of the guard, which checks outputs of bricks: every reaction to every fault, planted in a running model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.decoder.base import Model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import interleaved
from cbtop.compute.errors import GuardError, NoTokenError
from cbtop.compute.guard import GUARD_BRICK, MAX_SHARE, Fault, JidokaGuard, Reaction, fault_of
from cbtop.compute.kernels.base import Arguments
from cbtop.compute.settings import DecoderSettings
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.traces.activations import EXPLOSION_MAGNITUDE
from cbtop.protocol.messages import CheckResult, Node

from .conftest import ListRecorder, Norms, in_every_family, of_each_kind

PROMPT = [3, 141, 59, 26]
LAYER = 1
PLANTED: dict[Fault, float] = {
    Fault.NAN: float("nan"),
    Fault.INFINITY: float("-inf"),
    Fault.OVERFLOW: 1e7,
    Fault.DIVERGENCE: 0.25,
}


def stopped() -> float:
    """A clock that always shows 0.

    On this clock, samples of the guard cost no time, so the guard takes one in each pass.
    """
    return 0.0


def broken(model: Model, profiler: BrickProfiler, reaction: Reaction, fault: Fault) -> tuple[Decoder, int]:
    """Return a decoder that has a fault in a brick of layer LAYER, and the next token to decode.

    The guard takes its first sample in this layer.
    """
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    token = decoder.prefill(PROMPT)
    brick = decoder.bricks.layers[LAYER].ffn_norm
    plant(brick, PLANTED[fault])
    decoder.guard = JidokaGuard(reaction, profiler, {brick: LAYER} | decoder.bricks.places(), stopped)
    return decoder, token


def plant(brick: ComputeBrick, value: float) -> None:
    """Make the brick wrong from now on: it adds `value` to the first number of its first output."""
    right: Callable[..., None] = brick.kernels[0].implementation

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[-1][0, 0] += value

    brick.implementations = (wrong,)


def of_guard(recorder: ListRecorder) -> list[CheckResult]:
    return [m for m in recorder.messages if isinstance(m, CheckResult) and m.assertion == "guard"]


def failed(recorder: ListRecorder) -> list[CheckResult]:
    return [m for m in recorder.messages if isinstance(m, CheckResult) and not m.passed]


@in_every_family("fault", {fault.name: fault for fault in Fault})
def test_stop_ends_the_run_and_names_brick_layer_position_and_what_was_met(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder, fault: Fault
) -> None:
    decoder, token = broken(model, profiler, Reaction.STOP, fault)
    norm = re.escape(Norms.of(model).behind_sum)
    with pytest.raises(GuardError, match=rf"^{norm} in layer 1 computed .* at position 4; the guard stopped"):
        decoder.decode(token)
    assert [result.note for result in of_guard(recorder)] == [f"{fault.value} in layer 1, position 4; met 1 time"]


@in_every_family("fault", {fault.name: fault for fault in Fault})
def test_log_counts_what_was_met_as_a_failed_check_and_goes_on(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder, fault: Fault
) -> None:
    decoder, token = broken(model, profiler, Reaction.LOG, fault)
    norm = Norms.of(model).behind_sum
    decoder.decode(token)
    first = of_guard(recorder)[0]
    assert (first.brick, first.passed, first.note) == (
        norm,
        False,
        f"{fault.value} in layer 1, position 4; met 1 time",
    )
    while len(of_guard(recorder)) < 3:
        if decoder.position == decoder.context:
            decoder.restart()
        decoder.decode(token)
    assert {result.brick for result in of_guard(recorder)} == {norm}
    assert of_guard(recorder)[2].note.endswith("met 3 times")


@in_every_family("fault", {fault.name: fault for fault in Fault})
def test_fallback_computes_the_brick_in_float64_from_then_on_and_says_so(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder, fault: Fault
) -> None:
    right = Decoder(model, "numba", 1, profiler, model.context_length)
    wanted = right.decode(right.prefill(PROMPT))
    decoder, token = broken(model, profiler, Reaction.FALLBACK, fault)
    brick = decoder.bricks.layers[LAYER].ffn_norm
    assert decoder.decode(token) == wanted
    np.testing.assert_allclose(decoder.logits, right.logits, atol=0.02 * np.abs(right.logits).max())
    said = "met 1 time; computed in float64 from here on"
    assert [result.note for result in of_guard(recorder)] == [f"{fault.value} in layer 1, position 4; {said}"]
    assert brick.definition.backend == "numpy"
    decoder.decode(wanted)
    assert len(of_guard(recorder)) == 1


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize(
    ("what", "planted", "fault", "is_sampled"),
    [
        ("out", np.nan, Fault.NAN, True),
        ("codes", 64, Fault.DIVERGENCE, True),
        ("factors", np.nan, Fault.NAN, True),
        ("factors", np.nan, Fault.NAN, False),
    ],
    ids=["out", "codes", "factors", "factors, as the pass runs again"],
)
def test_a_fault_in_the_output_or_int8_codes_of_a_norm_is_found_and_repaired(
    model: Model,
    profiler: BrickProfiler,
    recorder: ListRecorder,
    what: str,
    planted: float,
    fault: Fault,
    is_sampled: bool,
) -> None:
    model = interleaved(model)
    right, decoder = (Decoder(model, "numba", 1, profiler, model.context_length) for _ in range(2))
    wanted = right.decode(right.prefill(PROMPT))
    token = decoder.prefill(PROMPT)
    brick = decoder.bricks.layers[LAYER].ffn_norm
    (kernel,) = brick.kernels
    place, runs = kernel.contract.arguments.index(what), kernel.implementation

    def wrong(*arguments: Any) -> None:
        runs(*arguments)
        arguments[place][0, 0] = planted

    brick.implementations = (wrong,)
    places = decoder.bricks.places()
    decoder.guard = JidokaGuard(Reaction.FALLBACK, profiler, {brick: LAYER} if is_sampled else places, stopped)
    assert decoder.decode(token) == wanted
    np.testing.assert_allclose(decoder.logits, right.logits, atol=0.02 * np.abs(right.logits).max())
    ((brick_name, note),) = {(one.brick, one.note) for one in of_guard(recorder)}
    assert brick_name == "AddRmsNorm (fused)"
    assert note == f"{fault.value} in layer 1, position 4; met 1 time; computed in float64 from here on"


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_what_float64_does_not_mend_is_said_once_and_counted_at_the_end(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    decoder.guard = JidokaGuard(Reaction.FALLBACK, profiler, decoder.bricks.places(), stopped)
    weight = model.layers[LAYER].ffn_norm.weight
    kept = weight.copy()
    weight[0] = np.nan
    try:
        decoder.prefill(PROMPT)
        for _ in range(3):
            decoder.decode(1)
    finally:
        weight[:] = kept
    said = "NaN in layer 1, position 0; met 1 time; computed in float64 from here on"
    assert [result.note for result in of_guard(recorder)] == [said]
    decoder.guard.finish()
    assert [result.note for result in of_guard(recorder)] == [
        said,
        "NaN in layer 1, position 0; met 4 times, computed in float64, too",
    ]


@pytest.mark.parametrize("model", ["qwen2", "stablelm"], indirect=True)
def test_a_number_too_large_for_later_norms_is_found_where_it_arose(model: Model, profiler: BrickProfiler) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    brick = decoder.bricks.layers[LAYER].output_projection
    right = brick.implementations[0]

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[4][-1, 0] = 1e30

    brick.implementations = (wrong,)
    decoder.guard = JidokaGuard(Reaction.STOP, profiler, decoder.bricks.places(), stopped)
    with pytest.raises(GuardError, match=r"^OutputProjection in layer 1 computed an overflow at position 0"):
        decoder.prefill(PROMPT)


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_what_is_too_large_by_its_reference_as_well_may_be_wrong_besides(
    model: Model, profiler: BrickProfiler
) -> None:
    weight = model.layers[LAYER].ffn_norm.weight
    kept = weight.copy()
    weight *= 1e7
    try:
        decoder = Decoder(model, "numba", 1, profiler, model.context_length)
        brick = decoder.bricks.layers[LAYER].ffn_norm
        decoder.guard = JidokaGuard(Reaction.STOP, profiler, {brick: LAYER}, stopped)
        decoder.prefill(PROMPT)
        right = brick.implementations[0]

        def wrong(*arguments: Any) -> None:
            right(*arguments)
            arguments[-1][:] *= 2

        brick.implementations = (wrong,)
        with pytest.raises(GuardError, match="computed what its reference does not"):
            decoder.decode(1)
    finally:
        weight[:] = kept


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_what_a_norm_leaves_in_int8_is_too_large_only_where_its_output_is(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    large = replace(model.final_norm, weight=3e5 * np.abs(model.final_norm.weight))
    decoder = Decoder(interleaved(replace(model, final_norm=large)), "numba", 1, profiler, model.context_length)
    decoder.guard = JidokaGuard(Reaction.LOG, profiler, decoder.bricks.places(), stopped)
    norm = decoder.bricks.final_norm
    named: dict[str, Any] = {}

    def observe(brick: ComputeBrick, calls: Sequence[Arguments]) -> None:
        if brick is norm:
            named.update(zip(norm.kernels[0].contract.arguments, calls[0], strict=True))

    decoder.prefill(PROMPT, observe)
    assert np.abs(named["out"]).max() < EXPLOSION_MAGNITUDE < np.abs(decoder.logits).max()
    if norm.makes_codes:
        assert np.abs(named["factors"]).max() > EXPLOSION_MAGNITUDE
    assert [result.brick for result in of_guard(recorder)] == ["LmHead"]


def test_what_lies_in_the_weights_is_named_where_it_begins(model: Model, profiler: BrickProfiler) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    decoder.guard = JidokaGuard(Reaction.STOP, profiler, decoder.bricks.places(), stopped)
    weight, norm = model.layers[LAYER].ffn_norm.weight, re.escape(Norms.of(model).behind_sum)
    kept = weight.copy()
    weight[0] = np.nan
    try:
        with pytest.raises(GuardError, match=rf"^{norm} in layer 1 computed a NaN at position 0"):
            decoder.prefill(PROMPT)
    finally:
        weight[:] = kept


@of_each_kind
def test_of_all_bricks_behind_one_that_computes_a_nan_only_that_one_fails(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    decoder.guard = JidokaGuard(Reaction.LOG, profiler, decoder.bricks.places(), stopped)
    weight, norm = model.layers[LAYER].ffn_norm.weight, Norms.of(model).behind_sum
    kept = weight.copy()
    weight[0] = np.nan
    try:
        decoder.prefill(PROMPT)
    finally:
        weight[:] = kept
    decoder.guard.finish()
    results = [message for message in recorder.messages if isinstance(message, CheckResult)]
    assert {result.brick for result in results if not result.passed} == {norm}
    assert ("LmHead", "its input was not finite each time") in {(result.brick, result.skipped) for result in results}


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize(("cache_type", "bias"), [("f16", 7e4), ("f32", np.inf)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_key_that_its_cache_cannot_hold_is_found_where_it_is_written(
    model: Model, profiler: BrickProfiler, cache_type: str, bias: float, sign: int
) -> None:
    """An infinite key would get the weight 0 from queries with the other sign.

    Then all later checks would pass, so the fault must be found when the key is written into its cache.
    """
    decoder = Decoder(model, "numba", 1, profiler, model.context_length, DecoderSettings(cache_type))
    key_bias = model.layers[LAYER].k.bias
    kept = key_bias.copy()
    key_bias[0] = sign * bias
    try:
        with pytest.raises(NoTokenError):
            decoder.prefill(PROMPT)
        assert np.isnan(decoder.logits).all()
        assert decoder.position == 0
        decoder.guard = JidokaGuard(Reaction.STOP, profiler, decoder.bricks.places(), stopped)
        with pytest.raises(GuardError, match=r"in layer 1 computed an? (NaN|infinity) at position 0"):
            decoder.prefill(PROMPT)
    finally:
        key_bias[:] = kept


def beyond_the_rows_that_are_compared(decoder: Decoder, times: int) -> None:
    """Make the output product write a NaN for `times` calls.

    The NaN is in a row that the guard does not compare with the reference.
    """
    (right,) = decoder.bricks.lm_head.implementations

    def wrong(*arguments: Any) -> None:
        nonlocal times
        right(*arguments)
        times -= 1
        if times >= 0:
            arguments[4][0, 1] = np.nan

    decoder.bricks.lm_head.implementations = (wrong,)


@pytest.mark.parametrize("model", ["qwen2", "gemma2"], indirect=True)
def test_a_nan_in_a_row_that_is_not_compared_is_found_and_mended(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    wanted = decoder.prefill(PROMPT)
    decoder.restart()
    beyond_the_rows_that_are_compared(decoder, times=99)
    decoder.guard = JidokaGuard(Reaction.FALLBACK, profiler, decoder.bricks.places(), stopped)
    assert decoder.prefill(PROMPT) == wanted
    assert [(one.brick, one.not_finite) for one in of_guard(recorder)] == [("LmHead", "NaN")]
    assert np.isfinite(decoder.logits).all()


@pytest.mark.parametrize("model", ["qwen2", "gemma2"], indirect=True)
def test_a_fault_in_one_row_is_found_because_each_sample_compares_other_rows(
    model: Model, profiler: BrickProfiler
) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    lm_head = decoder.bricks.lm_head
    (right,) = lm_head.implementations

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        # Row 44 of 512 is wrong. The first sample does not compare rows 41 to 47, so only a later sample can find it.
        arguments[4][0, 44] += 10.0

    def go_on(token: int) -> None:
        for _ in range(8):
            token = decoder.decode(token)

    lm_head.implementations = (wrong,)
    decoder.guard = JidokaGuard(Reaction.STOP, profiler, {lm_head: None}, stopped)
    token = decoder.prefill(PROMPT)
    with pytest.raises(GuardError, match=r"^LmHead computed what its reference does not"):
        go_on(token)


@pytest.mark.parametrize("model", ["gemma2"], indirect=True)
def test_a_nan_that_the_soft_cap_of_logits_makes_is_found_and_mended(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    wanted = decoder.prefill(PROMPT)
    decoder.restart()
    brick = decoder.bricks.soft_cap
    assert brick is not None
    plant(brick, PLANTED[Fault.NAN])
    decoder.guard = JidokaGuard(Reaction.FALLBACK, profiler, decoder.bricks.places(), stopped)
    assert decoder.prefill(PROMPT) == wanted
    assert [(one.brick, one.not_finite) for one in of_guard(recorder)] == [("SoftCap", "NaN")]


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize("reaction", Reaction)
def test_what_was_wrong_once_and_is_not_when_the_step_runs_again_is_said(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder, reaction: Reaction
) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    wanted = decoder.prefill(PROMPT)
    decoder.restart()
    beyond_the_rows_that_are_compared(decoder, times=1)
    decoder.guard = JidokaGuard(reaction, profiler, decoder.bricks.places(), stopped)
    if reaction is Reaction.STOP:
        stopped_by = "a NaN was among the logits at position 0, and no brick wrong as it ran again; the guard stopped"
        with pytest.raises(GuardError, match=f"^{stopped_by}") as raised:
            decoder.prefill(PROMPT)
        assert raised.value.brick is None
    else:
        assert decoder.prefill(PROMPT) == wanted
    assert of_guard(recorder) == []
    (said,) = failed(recorder)
    assert (said.brick, said.assertion, said.not_finite) == ("LmHead", "logits", "NaN")
    assert said.note == "NaN in position 0; met 1 time; no brick was wrong when the step ran again"


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e30])
def test_of_a_brick_that_was_wrong_once_the_logits_are_said_and_no_brick(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder, value: float
) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    brick = decoder.bricks.layers[LAYER].output_projection
    right = brick.implementations[0]

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[4][-1, 0] = value
        brick.implementations = (right,)

    decoder.guard = JidokaGuard(Reaction.LOG, profiler, decoder.bricks.places(), stopped)
    for times in ("1 time", "2 times"):
        brick.implementations = (wrong,)
        decoder.restart()
        decoder.prefill(PROMPT)
        assert np.isfinite(decoder.logits).all()
        said = failed(recorder)[-1]
        assert (said.brick, said.assertion, said.not_finite) == ("LmHead", "logits", "NaN")
        assert said.note == f"NaN in position 0; met {times}; no brick was wrong when the step ran again"
    assert len(failed(recorder)) == 2


def test_samples_of_every_brick_evaluate_every_assertion_during_the_run(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    places = decoder.bricks.places()
    decoder.guard = JidokaGuard(Reaction.STOP, profiler, places, stopped)
    token = decoder.prefill(PROMPT)
    for _ in places:
        if decoder.position == decoder.context:
            decoder.restart()
        token = decoder.decode(token)
    decoder.guard.finish()
    results = [message for message in recorder.messages if isinstance(message, CheckResult)]
    assert {(result.brick, result.assertion) for result in results} == {
        (brick.spec.name, f"{assertion.name}, while it runs")
        for brick in places
        for assertion in brick.spec.assertions
    }
    assert all(result.passed and not result.skipped for result in results)
    assert GUARD_BRICK in {message.name for message in recorder.messages if isinstance(message, Node)}


def test_samples_rest_after_their_share_of_time_and_the_others_are_skipped(
    model: Model, profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    now_s = 0.0

    def clock_s() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    decoder = Decoder(model, "numba", 1, profiler, model.context_length)
    decoder.guard = JidokaGuard(Reaction.STOP, profiler, decoder.bricks.places(), clock_s)
    # A sample takes two seconds. To stay within its allowed share (MAX_SHARE), the guard then waits 400 s.
    token = decoder.prefill(PROMPT)
    for _ in range(3):
        token = decoder.decode(token)
    decoder.guard.finish()
    results = [message for message in recorder.messages if isinstance(message, CheckResult)]
    evaluated = {result.brick for result in results if not result.skipped}
    assert evaluated == {"Embedding"}
    assert {result.skipped for result in results if result.skipped} == {"no sample: they rest at 0.5 % of the time"}
    assert MAX_SHARE == 0.005
    assert "LmHead" in {result.brick for result in results if result.skipped}


def test_what_is_wrong_with_numbers_alone_is_named() -> None:
    right = np.ones((2, 3), np.float32)
    assert fault_of(right) is None
    for fault, value in (*PLANTED.items(),):
        wrong = right.copy()
        wrong[1, 2] = value
        assert fault_of(wrong) is (None if fault is Fault.DIVERGENCE else fault)
    assert fault_of(np.array([10**9])) is None
