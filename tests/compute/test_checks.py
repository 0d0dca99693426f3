"""Tests of checks of a brick's outputs: the text of an assertion, and the combined result of all layers."""

from __future__ import annotations

import numpy as np
import pytest

from cbtop.compute.checks import Assertion, AssertionResult, IsEquivalent, IsFinite, summary

GOOD = np.array([0.25, 0.5], np.float32)


@pytest.mark.parametrize("assertion", [IsFinite(), IsEquivalent(1e-3)], ids=lambda one: one.name)
def test_what_is_not_finite_fails_by_its_name_and_has_no_error(assertion: Assertion) -> None:
    assert assertion.evaluate(GOOD, GOOD).passed
    for bad, met in ((np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")):
        output = np.append(GOOD, np.float32(bad))
        found = assertion.evaluate(output, output)
        assert (found.passed, found.max_error, found.not_finite) == (False, None, met)
    both = assertion.evaluate(np.array([np.inf, np.nan], np.float32), GOOD)
    assert both.not_finite == "NaN"


def test_a_reference_that_is_not_finite_is_met_by_nothing() -> None:
    assert IsEquivalent(1.0).evaluate(GOOD, np.append(GOOD[1:], np.nan)).not_finite == "NaN"


def test_an_error_is_relative_to_the_largest_value() -> None:
    found = IsEquivalent(0.01).evaluate(GOOD + np.float32(0.125), GOOD)
    assert (found.passed, found.max_error, found.not_finite) == (False, 0.25, "")


@pytest.mark.parametrize("order", [1, -1])
def test_a_nan_in_one_place_is_not_said_to_be_the_error_of_another(order: int) -> None:
    places = [
        AssertionResult(True, 1.4e-07, 1e-5),
        AssertionResult(False, None, 1e-5, "NaN"),
        AssertionResult(True, 2e-7, 1e-5),
    ]
    (result,) = summary(("QkvProjection", "equals reference", found) for found in places[::order])
    assert (result.passed, result.max_error, result.not_finite) == (False, None, "NaN")


@pytest.mark.parametrize("order", [1, -1])
def test_a_brick_skipped_in_one_place_is_skipped_unless_it_failed_elsewhere(
    order: int,
) -> None:
    passed, skipped, failed = (
        AssertionResult(True, 1e-7),
        AssertionResult(True, skipped="a reason"),
        AssertionResult(False, 0.5),
    )
    (result,) = summary(("LmHead", "equals reference", found) for found in (passed, skipped)[::order])
    assert result.skipped == "a reason"
    (result,) = summary(("LmHead", "equals reference", found) for found in (passed, skipped, failed)[::order])
    assert (result.passed, result.skipped) == (False, "")
