"""Tests of the grammar of thresholds: which thresholds are accepted, and the errors for all other texts."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.comparison.threshold_grammar import Threshold, parse
from cbtop.errors import UsageError


@pytest.mark.parametrize(
    ("text", "names", "layer", "figure", "sign", "value", "unit"),
    [
        ("attn.p50<=1.05x", ("attn",), None, "p50", "<=", 1.05, "x"),
        ("decode.tokens_per_sec>=40", ("decode", "tokens_per_sec"), None, "p50", ">=", 40, ""),
        ("RmsNorm.p99 <= 12 us", ("RmsNorm",), None, "p99", "<=", 12, "us"),
        ("RmsNorm<0.5ms", ("RmsNorm",), None, "p50", "<", 500, "ms"),
        ("RmsNorm.p50>=250ns", ("RmsNorm",), None, "p50", ">=", 0.25, "ns"),
        ("step.p50>2s", ("step",), None, "p50", ">", 2_000_000, "s"),
        ("loss==0", ("loss",), None, "p50", "==", 0, ""),
        ("unattributed<=1%", ("unattributed",), None, "p50", "<=", 1, "%"),
        ("Attention (fused)@3.p99<=1e3µs", ("Attention (fused)",), "3", "p99", "<=", 1000, "µs"),
        ("RmsNorm<=1\N{GREEK SMALL LETTER MU}s", ("RmsNorm",), None, "p50", "<=", 1, "\N{GREEK SMALL LETTER MU}s"),
        ("decode.loss==0", ("decode", "loss"), None, "p50", "==", 0, ""),
        ("train.loss<=2ms", ("train", "loss"), None, "p50", "<=", 2e3, "ms"),
        ("train.loss<=2x", ("train", "loss"), None, "p50", "<=", 2, "x"),
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
    ("text", "names", "batch", "figure"),
    [
        ("decode[batch=6].tokens_per_sec>=61", ("decode", "tokens_per_sec"), 6, "p50"),
        ("decode [ batch = 16 ] . RmsNorm.p99 <= 9us", ("decode", "RmsNorm"), 16, "p99"),
        ("Qwen decode[batch=1].step@2.p50<=9x", None, 1, ""),
        ("a.b[batch=3].norm@2<=9x", ("a", "b", "norm"), 3, "p50"),
        ("decode[batch=6].p50<=9ms", ("decode", "step"), 6, "p50"),
        ("a.b[batch=3]<=9x", ("a", "b", "step"), 3, "p50"),
        ("decode.in_steps>=61", ("decode", "in_steps"), None, "p50"),
        ("in_steps>=0.9x", ("in_steps",), None, "p50"),
    ],
)
def test_a_batch_stands_behind_its_phase(
    text: str, names: tuple[str, ...] | None, batch: int | None, figure: str
) -> None:
    if names is None:
        with pytest.raises(UsageError, match="step covers all layers"):
            parse(text)
        return
    found = parse(text)
    assert (found.names, found.batch, found.figure) == (names, batch, figure)
    assert found.text == " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[batch=6].step<=1us", "write a batch after its phase, as in decode[batch=6].step.p50<=9ms"),
        ("decode.step[batch=6]<=1us", "write a batch after its phase"),
        ("decode.step.p50[batch=6]<=1us", "write a batch after its phase"),
        ("loss[batch=6]==0", "write a batch after its phase"),
        ("decode[batch=six].step<=1us", "is not a number with a unit"),
        ("decode[batch=6.step<=1us", "is not a number with a unit"),
        ("in_steps<=1us", "write in_steps>=40"),
        ("in_steps@2>=4", "in_steps covers all layers"),
        ("attn.p50", "it has no <=, >= or =="),
        ("attn.p50<=1,05x", "'1,05x' is not a number with a unit"),
        ("attn.p50<=1.0.5x", "'1.0.5' is not a number"),
        ("attn.p50<=5", "expected a time"),
        ("attn.p50==1x", "measured values cannot be compared"),
        ("p50<=1x", "the name of a brick or figure is missing"),
        ("loss<=1x", "write loss==0"),
        ("unattributed<=3us", "unattributed<=1%"),
        ("tokens_per_sec>=4ms", "tokens_per_sec>=40"),
        ("a" * 1000 + "<=1x", "write it like"),
        ("tokens_per_sec>=-1x", "expected a number of 0 or more"),
        ("Attention<=1e400us", "expected a number of 0 or more"),
        ("loss<=5", "write loss==0 or loss<=0.1%"),
        ("step@2<=1us", "step covers all layers: omit @2"),
        ("loss@2==0", "loss covers all layers"),
        ("unattributed@2<=1%", "unattributed covers all layers"),
        ("loss.p50==0", "write loss==0 or loss<=0.1%"),
        ("loss<=5us", "write loss==0 or loss<=0.1%"),
        ("unattributed.p50<=1%", "write unattributed<=1%"),
        ("unattributed==1%", "measured values cannot be compared"),
        ("tokens_per_sec.p50>=40", "write tokens_per_sec>=40"),
        ("attn<=5%", "expected a time"),
        (".attn<=1x", "the name of a brick or figure is missing"),
        ("decode..p99<=1x", "the name of a brick or figure is missing"),
        ("@2<=1us", "the name of a brick or figure is missing"),
        ("tokens_per_sec@2>=1", "tokens_per_sec covers all layers"),
    ],
)
def test_what_is_no_threshold_says_what_is_wanted(text: str, said: str) -> None:
    with pytest.raises(UsageError, match="threshold '") as error:
        parse(text)
    assert said in str(error.value)
    assert len(str(error.value)) < 600


def test_a_threshold_may_have_200_characters_and_a_longer_one_is_shown_cut() -> None:
    longest = "a" * 195 + "<=1us"
    assert parse(longest).names == ("a" * 195,)
    for text, shown in (("a" + longest, ("a" + longest)[:200] + "…"), (longest[:-2] + "um", longest[:-2] + "um")):
        with pytest.raises(UsageError) as error:
            parse(text)
        assert f"threshold {shown!r}: " in str(error.value)


def test_a_threshold_of_several_lines_is_said_in_one() -> None:
    found = parse("RmsNorm \n<=\r\n1us")
    assert (found.text, found.where) == ("RmsNorm <= 1us", ("", 1))
    assert Threshold(*(getattr(found, name) for name in Threshold.__match_args__[:7])) == found


@given(st.text(max_size=40) | st.text("attnp50.<>=@x%us 1e-", max_size=40))
def test_any_text_is_a_threshold_or_an_error_of_ours(text: str) -> None:
    with suppress(UsageError):
        assert parse(text).names


def test_a_rate_by_the_name_of_the_screen_has_a_hint() -> None:
    with pytest.raises(UsageError, match="did you mean tokens_per_sec"):
        parse("tokens/s>=20")
