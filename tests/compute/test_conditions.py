"""The conditions of a contract as one function: they mean what their expressions mean; compiled code reads arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.compute.contracts import Condition, contract, passes
from cbtop.compute.contracts.conditions import failing
from cbtop.compute.contracts.expressions import Expression, ExpressionError, parsed
from cbtop.compute.jit.halves import from_bits, numbers
from cbtop.compute.kernels import all_kernels
from cbtop.compute.kernels.base import Kernel, with_copies

from .test_expressions import EXPRESSIONS, NAMES, NUMBERS

# What no compiled pass is for: once a token, or within a product.
BY_NUMPY = {
    "postcondition all(logits <= at(logits, out))",
    "postcondition top_k == 0 or count(logits > at(logits, out)) < top_k",
    "postcondition max(starts) == size(places)",
    "postcondition finite(factors[: rows(x), : columns(x) // 8])",
    "postcondition abs(max(factors[: rows(x), : columns(x) // 8 : 4]) * 127 - max(abs(x))) <= 1e-5 * max(abs(x)) "
    "+ 1.5e-36",
}
ARRAYS = ("a", "b", "c", "n")
WITH_ARRAYS = "rows(a) == rows(b) and columns(a) == columns(b) and size(c) == columns(a)"  # which are arrays


def meaning(expression: Expression) -> Any:
    return Condition("", expression, None).holds  # type: ignore[arg-type]


def alone(text: str, names: tuple[str, ...], *others: str, ask: Any = None) -> Any:
    """The function for one condition; `ask` is asked for what it does not do itself."""
    expression = parsed(text, names)
    return failing([expression], names, [parsed(one, names) for one in others], [ask or meaning(expression)])


def never(_: Any) -> bool:
    raise AssertionError("NumPy was asked")


@given(EXPRESSIONS, st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_conditions_of_numbers_mean_what_their_expressions_mean(text: str, values: tuple[int, int, int]) -> None:
    try:
        expression = parsed(text, NAMES)
    except ExpressionError:
        return
    assert failing([expression], NAMES, [], [meaning(expression)])(values) == (not meaning(expression)(values))


@pytest.mark.parametrize("kernel", all_kernels(), ids=lambda kernel: kernel.name)
def test_conditions_of_kernels_are_evaluated_without_numpy(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    holds = Condition.holds

    def noted(condition: Condition, values: Any) -> bool:
        asked.add(condition.name)
        return holds(condition, values)

    monkeypatch.setattr(Condition, "holds", noted)
    said = contract.__wrapped__(kernel.contract.name)  # whose functions are not written yet
    arguments = kernel.examples(np.random.default_rng(5), 7)
    earlier = with_copies(arguments, {*kernel.outputs, *said.earlier})
    assert said.before.failed(arguments) == 0
    kernel.reference(*arguments)
    assert said.after.failed(arguments + earlier) == 0
    assert asked <= BY_NUMPY


A = np.array([[1, -2, 3], [4, 5, -6]], np.float32)
ODD = (np.nan, np.inf, -np.inf, 3.4e38, 1e-45)


@pytest.mark.parametrize("odd", [*ODD, 7.0])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(
    "text",
    [
        "finite(a)",
        "finite(a[:, 1:])",
        "finite(a[:, : columns(a) - 1])",
        "max(abs(a)) <= 10",
        "max(abs(a[:, 1 : 3])) <= 10",
        "all(a <= b * n)",
        "all(abs(a) <= abs(b) * 2 + 1e-30)",
        "all(a == old(a))",
        "all(a < n * n + 3)",
        "all(abs(a) <= sqrt(columns(a)) * abs(c) * (1 + 1e-5))",
        "all(lengths(a) <= lengths(b) * max(1, c[0]) * (1 + 1e-5))",
        "all(-a <= -b) or rows(a) == n",
    ],
)
def test_conditions_of_arrays_mean_what_numpy_means(text: str, place: int, odd: float) -> None:
    a = A.copy()
    a.reshape(-1)[place] = odd
    for new, earlier in ((a, a), (a, A), (A, a)):
        values = (new, A + 1, A[0], 2, earlier, A + 1, A[0], 2)
        expected = meaning(parsed(text, ARRAYS))(values)
        may_ask = "c[0]" in text  # one index is NumPy's
        ask = None if may_ask else never
        assert alone(text, ARRAYS, WITH_ARRAYS, ask=ask)(values) == (not expected)


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40), st.integers(0, 4), st.integers(0, 4))
def test_halves_are_read_as_their_bits(bits: list[int], first: int, end: int) -> None:
    a = np.array([bits, bits[::-1]], np.uint16)
    for text in ("finite(a)", "max(abs(a)) <= 1000"):
        assert alone(text, ("a",), "rows(a) > 0", ask=never)((a,)) == (not meaning(parsed(text, ("a",)))((a,)))
    assert passes.finite_between(a, first, end) == np.isfinite(from_bits(a)[:, first:end]).all()


def test_other_shapes_and_numbers_are_left_to_numpy() -> None:
    text = "all(abs(a) <= abs(b) + n)"
    wide = A.astype(np.float64)
    not_finite = wide * np.inf
    for values in ((A, A[:, :1], A[0], 9), (A, A[:1], A[0], 9), (A[None], A, A[0], 9), (not_finite, A, A[0], 9)):
        with np.errstate(all="ignore"):
            expected = meaning(parsed(text, ARRAYS))(values)
        assert alone(text, ARRAYS, WITH_ARRAYS)(values) == (not expected)
    assert alone("finite(a)", ARRAYS)((wide, A, A[0], 1)) == 0
    assert alone("all(a <= b)", ARRAYS, WITH_ARRAYS)((A, A[:, 1:], A[0], 1)) == 1


def test_each_condition_has_its_bit() -> None:
    texts = ("n > 0", "rows(a) == 2", "finite(a)", "n < 5")
    expressions = [parsed(text, ARRAYS) for text in texts]
    failed = failing(expressions, ARRAYS, [], [meaning(one) for one in expressions])
    assert failed((A, A, A, 3)) == 0
    assert failed((A * np.float32(np.nan), A, A, 9)) == 0b1100
    assert failed((A[:1], A, A, -1)) == 0b0011


def test_nothing_is_the_largest_of_nothing() -> None:
    nothing = np.zeros((2, 0), np.float32)
    assert alone("max(abs(a)) <= 9", ARRAYS, WITH_ARRAYS)((nothing, A, A, 1)) == 1
    assert alone("max(abs(a[:, 2 : 1])) <= 9", ARRAYS, WITH_ARRAYS)((A, A, A, 1)) == 1
    assert alone("all(a <= 9)", ARRAYS, WITH_ARRAYS, ask=never)((nothing, A, A, 1)) == 0
    assert numbers((1, nothing))[0] == 1


def in_python(function: Any, *arguments: Any) -> Any:
    """What its Python says, with the overloaded functions that it calls: what each of their overloads is held to."""
    with np.errstate(all="ignore"):
        return function.py_func(*arguments)


@given(
    st.lists(st.integers(0, 0xFFFFFFFF), min_size=6, max_size=6),
    st.sampled_from([np.float32, np.uint16]),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_passes_do_what_their_python_says(bits: list[int], dtype: Any, first: int, end: int) -> None:
    words = np.array(bits, np.uint32)
    a = (words.view(np.float32) if dtype == np.float32 else words.astype(np.uint16)).reshape(2, 3)
    assert passes.finite(a) == in_python(passes.finite, a)
    np.testing.assert_array_equal(passes.largest(a), in_python(passes.largest, a))
    assert passes.finite_between(a, first, end) == in_python(passes.finite_between, a, first, end)
    for call in (passes.finite, lambda wide: in_python(passes.finite, wide)):
        with pytest.raises(ValueError, match="numbers that are not met here"):
            call(np.zeros((2, 3)))


OTHERS = [A + 1, A[0], A[:, :1], A[None], A.astype(np.int8), A.astype(np.int32), 3, 0.1, True]


# Each pair of types is compiled: with one row, most of them are slow.
@pytest.mark.parametrize(
    ("a", "b"),
    [(A, b) for b in OTHERS]
    + [pytest.param(A[0], b, marks=() if at in (0, 1, 6) else pytest.mark.slow) for at, b in enumerate(OTHERS)],
)
def test_comparisons_do_what_their_python_says(a: Any, b: Any) -> None:
    compiled = passes.comparison("element(p0, r0, i) <= element(p0, r1, i)", 2)

    def said(call: Any) -> Any:
        try:
            return bool(call(a, b))
        except ValueError as error:
            return str(error)

    assert said(compiled) == said(compiled.py_func)  # type: ignore[attr-defined]
