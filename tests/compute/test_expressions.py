"""Tests of the expressions in contracts: they mean the same as in Python. Forbidden expressions are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cbtop.compute.contracts.expressions import MAX_CHARACTERS, ExpressionError, parsed

NAMES = ("a", "b", "c")
NUMBERS = st.integers(-9, 9)
ATOMS = st.sampled_from([*NAMES, "0", "1", "2.5", "7"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/%"), inner).map(" ".join),
        st.tuples(inner, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), inner).map(
            "({0[0]} {0[1]} {0[2]})".format
        ),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda x: f"({x[0]} > 0 {x[1]} {x[2]} < 3)"),
        inner.map("-({})".format),
        inner.map("(not {})".format),
        st.tuples(inner, inner).map(lambda x: f"max({x[0]}, {x[1]})"),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS, st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_an_expression_of_numbers_means_what_python_means(text: str, values: tuple[int, int, int]) -> None:
    assume(len(text) <= MAX_CHARACTERS)
    expression = parsed(text, NAMES)
    try:
        wanted = eval(text, {"max": max}, dict(zip(NAMES, values, strict=True)))
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            expression.evaluate(values)
        return
    assert expression.evaluate(values) == wanted


@given(st.text(max_size=MAX_CHARACTERS + 1) | st.text("ab()[]:,.+-*/<=> 019'{}", max_size=MAX_CHARACTERS))
def test_any_text_is_an_expression_or_refused_in_a_line(text: str) -> None:
    said = ""
    try:
        parsed(text, NAMES)
    except ExpressionError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "a.__class__",
        "a ** 9",
        "a << 9",
        "a @ b",
        "~a",
        "[a for a in b]",
        "(lambda: a)()",
        "a if b else c",
        "'text'",
        "1j",
        "1e999",
        "a is b",
        "a in b",
        "(a := 1)",
        "[a, b]",
        "{a: b}",
        "f'{a}'",
        "a[b.c]",
        "max(*a)",
        "finite(values=a)",
        "eval(a)",
        "old(a + b)",
        "old(d)",
        "d",
        "a +",
        "",
        "a\0",
        "(" * 150 + "a" + ")" * 49,
        "a" + " + a" * MAX_CHARACTERS,
    ],
)
def test_what_is_not_of_the_language_is_refused_before_it_is_evaluated(text: str) -> None:
    with pytest.raises(ExpressionError):
        parsed(text, NAMES)


X = np.array([[3, 4, 0], [1, -2, 2]], np.float32)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rows(a)", 2),
        ("columns(a)", 3),
        ("size(a)", 6),
        ("extent(a, 1)", 3),
        ("finite(a)", True),
        ("finite(a / 0)", False),
        ("all(a >= -2)", True),
        ("count(a > 0)", 4),
        ("max(abs(a))", 4),
        ("min(a)", -2),
        ("max(1, 7, 3)", 7),
        ("sqrt(4 + 5)", 3),
        ("all(lengths(a) == 5)", False),
        ("lengths(a)[0]", 5),
        ("lengths(a)[1]", 3),
        ("at(a, b)[1, 0]", -2),
        ("a[1, 2]", 2),
        ("columns(a[:, 1:])", 2),
        ("max(a[: rows(a) - 1])", 4),
        ("a[::-1][0, 0]", 1),
        ("7 // 2 + 7 % 2", 4),
        ("0 < c <= 1", False),
        ("0 < c < 9 < 10", True),
        ("c == 5 and not c > 5", True),
        ("c < 0 or -c < 0", True),
    ],
)
def test_arrays_are_asked_for_what_kernels_care_for(text: str, value: Any) -> None:
    with np.errstate(all="ignore"):
        assert parsed(text, NAMES).evaluate((X, np.array([0, 1]), 5)) == value


def test_old_values_follow_the_new_ones() -> None:
    expression = parsed("a == old(a) + b", NAMES)
    assert expression.earlier == {"a"}
    assert expression.evaluate((5, 2, 0, 3, 0, 0))
    assert not expression.evaluate((5, 2, 0, 4, 0, 0))
