"""The grammar of thresholds: what is read, and what is said of what cannot be."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.errors import UsageError
from cbtop.protocol.vocabulary import BrickCategory
from cbtop.viewmodels.run_diff import diff
from cbtop.viewmodels.thresholds import Outcome, judge, parse
from tests.cbtop.viewmodels.made_runs import made_run


@pytest.mark.parametrize(
    ("text", "names", "layer", "figure", "sign", "value", "unit"),
    [
        ("attn.p50<=1.05x", ("attn",), None, "p50", "<=", 1.05, "x"),
        ("decode.tokens_per_sec>=40", ("decode", "tokens_per_sec"), None, "p50", ">=", 40, ""),
        ("RmsNorm.p99 <= 12 us", ("RmsNorm",), None, "p99", "<=", 12, "us"),
        ("RmsNorm<0.5ms", ("RmsNorm",), None, "p50", "<", 500, "ms"),
        ("loss==0", ("loss",), None, "p50", "==", 0, ""),
        ("unattributed<=1%", ("unattributed",), None, "p50", "<=", 1, "%"),
        ("Attention (fused)@3.p99<=1e3µs", ("Attention (fused)",), "3", "p99", "<=", 1000, "µs"),
        ("decode.step.per_token<=2s", ("decode", "step"), None, "per_token", "<=", 2e6, "s"),
    ],
)
def test_a_threshold_is_read(
    text: str, names: tuple[str, ...], layer: str | None, figure: str, sign: str, value: float, unit: str
) -> None:
    found = parse(text)
    assert (found.names, found.layer, found.figure, found.sign, found.unit) == (names, layer, figure, sign, unit)
    assert found.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("attn.p50", "there is no <=, >=, == in it"),
        ("attn.p50<=1,05x", "'1,05x' is no number with a unit"),
        ("attn.p50<=1.0.5x", "'1.0.5' is no number"),
        ("attn.p50<=5", "a time is wanted"),
        ("attn.p50==1x", "nothing that is timed is equal"),
        ("p50<=1x", "of what?"),
        ("loss<=1x", "write loss==0"),
        ("unattributed<=3us", "unattributed<=1%"),
        ("tokens_per_sec>=4ms", "tokens_per_sec>=40"),
        ("a" * 1000 + "<=1x", "wanted are such as"),
    ],
)
def test_what_is_no_threshold_says_what_is_wanted(text: str, said: str) -> None:
    with pytest.raises(UsageError, match="threshold '") as error:
        parse(text)
    assert said in str(error.value)
    assert len(str(error.value)) < 600


@given(st.text(max_size=40) | st.text("attnp50.<>=@x%us 1e-", max_size=40))
def test_any_text_is_a_threshold_or_an_error_of_ours(text: str) -> None:
    with suppress(UsageError):
        assert parse(text).names


def test_a_threshold_within_the_noise_is_unsure_and_one_beyond_it_broken() -> None:
    base, now = made_run(1), made_run(2, slower=1.2, in_layer=None)
    found = diff(base, now)
    (part,) = found.parts
    (down,) = [one for one in part.bricks if one.name == "DownProjection"]
    assert down.change
    ratio, half = down.change.now / down.change.before, down.change.half / down.change.before
    for limit, outcome in (
        (ratio - 2 * half, Outcome.BROKEN),
        (ratio - half / 2, Outcome.UNSURE),
        (ratio + half, Outcome.HOLDS),
    ):
        (judged,) = judge(parse(f"DownProjection<={limit:.6f}x"), found)
        assert judged.outcome is outcome
        assert bool(judged.guilty) == (outcome is Outcome.BROKEN)


def test_what_the_clock_cannot_tell_apart_breaks_nothing() -> None:
    """Calls of 20 µs are 1.2 times as long as before, on a clock that tells 10 µs apart, and on one of 30 ns."""
    outcomes = []
    for resolution_us in (10.0, 0.03):
        base, now = (
            replace(made_run(seed, slower=1.2, in_layer=None), clock_resolution_us=resolution_us) for seed in (1, 2)
        )
        (judged,) = judge(parse("RmsNorm.p50<=18us"), diff(base, now))
        outcomes.append(judged.outcome)
    assert outcomes == [Outcome.UNSURE, Outcome.BROKEN]
    base, now = (replace(run, clock_resolution_us=100.0) for run in (made_run(1), made_run(2, slower=1.5)))
    assert not diff(base, now).slower


def test_what_cannot_be_judged_is_no_pass() -> None:
    """A p99 of 60 steps, a brick that is gone, and a new one beside what it was."""
    base, now = made_run(1, steps=60), made_run(2, steps=60, rename="Renamed")
    now = replace(now, kernels={("Renamed", BrickCategory.FFN): ("another",)})  # so that it is no other name
    for text in ("step.p99<=1s", "DownProjection<=2x", "Renamed<=2x"):
        (judged,) = judge(parse(text), diff(base, now))
        assert judged.outcome is Outcome.UNKNOWN, text
