"""Tests of the conditions of a kernel's contract. The conditions become one function with the same meaning.

C code checks most of them.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.compute.contracts import Condition, conditions, contract
from cbtop.compute.contracts.conditions import failing
from cbtop.compute.contracts.expressions import Expression, ExpressionError, parsed
from cbtop.compute.kernels import all_kernels
from cbtop.compute.kernels.base import Kernel, with_copies
from tests.representatives import each_value_once

from .test_expressions import EXPRESSIONS, NAMES, NUMBERS

ARRAYS = ("a", "b", "c", "n")
BLOCK = 1024  # The compiled C code checks this number of elements at a time.
compiled = pytest.mark.skipif(conditions.compiled is None, reason="no compiler was at hand")


def meaning(expression: Expression) -> Any:
    return Condition("", expression, None).holds  # type: ignore[arg-type]


def alone(text: str, names: tuple[str, ...], ask: Any = None) -> Any:
    """Return the compiled check of one condition. The check calls `ask` if C cannot decide."""
    expression = parsed(text, names)
    return failing([expression], names, [ask or meaning(expression)])


def never(_: Any) -> bool:
    raise AssertionError("NumPy was asked")


def is_said(text: str, names: tuple[str, ...], values: Any) -> bool:
    """Return whether C alone can decide whether a condition holds."""
    return bool(alone(text, names, ask=lambda _: False)(values) == 0)


@given(EXPRESSIONS, st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_conditions_of_numbers_mean_what_their_expressions_mean(text: str, values: tuple[int, int, int]) -> None:
    try:
        expression = parsed(text, NAMES)
    except ExpressionError:
        return
    assert failing([expression], NAMES, [meaning(expression)])(values) == (not meaning(expression)(values))


@compiled
@pytest.mark.parametrize("kernel", all_kernels(), ids=lambda kernel: kernel.name)
def test_conditions_of_kernels_are_evaluated_without_numpy(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    holds = Condition.holds

    def noted(condition: Condition, values: Any) -> bool:
        asked.add(condition.name)
        return holds(condition, values)

    monkeypatch.setattr(Condition, "holds", noted)
    # Read the contract again, because the functions of the cached contract are already compiled.
    said = contract.__wrapped__(kernel.contract.name)
    arguments = kernel.examples(np.random.default_rng(5), 7)
    earlier = with_copies(arguments, {*kernel.outputs, *said.earlier})
    assert said.before.failed(arguments) == 0
    kernel.reference(*arguments)
    assert said.after.failed(arguments + earlier) == 0
    assert asked == set()


A = np.array([[1, -2, 3], [4, 5, -6]], np.float32)
ODD = (np.nan, np.inf, -np.inf, 3.4e38, 1e-45)


TEXTS = [
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
]


@pytest.mark.parametrize(("text", "place", "odd"), each_value_once(product(TEXTS, [0, -1], [*ODD, 7.0])))
def test_conditions_of_arrays_mean_what_numpy_means(text: str, place: int, odd: float) -> None:
    a = A.copy()
    a.reshape(-1)[place] = odd
    for new, earlier in ((a, a), (a, A), (A, a)):
        values = (new, A + 1, A[0], 2, earlier, A + 1, A[0], 2)
        expected = meaning(parsed(text, ARRAYS))(values)
        assert alone(text, ARRAYS, ask=never if expected and conditions.compiled else None)(values) == (not expected)


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40), st.integers(0, 4), st.integers(0, 4))
def test_halves_are_read_as_their_bits(bits: list[int], first: int, end: int) -> None:
    a = np.array([bits, bits[::-1]], np.uint16)
    for text in ("finite(a)", "max(abs(a)) <= 1000", f"finite(a[:, {first} : {end}])", "max(abs(a[:, ::3])) <= 1000"):
        expected = meaning(parsed(text, ("a",)))((a,))
        assert alone(text, ("a",), ask=never if expected and conditions.compiled else None)((a,)) == (not expected)


def test_other_shapes_and_numbers_are_left_to_numpy() -> None:
    text = "all(abs(a) <= abs(b) + n)"
    wide = A.astype(np.float64)
    not_finite = wide * np.inf
    for values in ((A, A[:, :1], A[0], 9), (A, A[:1], A[0], 9), (A[None], A, A[0], 9), (not_finite, A, A[0], 9)):
        with np.errstate(all="ignore"):
            expected = meaning(parsed(text, ARRAYS))(values)
        assert alone(text, ARRAYS)(values) == (not expected)
    assert alone("finite(a)", ARRAYS)((wide, A, A[0], 1)) == 0
    assert alone("all(a <= b)", ARRAYS)((A, A[:, 1:], A[0], 1)) == 1


def test_each_condition_has_its_bit() -> None:
    texts = ("n > 0", "rows(a) == 2", "finite(a)", "n < 5")
    expressions = [parsed(text, ARRAYS) for text in texts]
    failed = failing(expressions, ARRAYS, [meaning(one) for one in expressions])
    assert failed((A, A, A, 3)) == 0
    assert failed((A * np.float32(np.nan), A, A, 9)) == 0b1100
    assert failed((A[:1], A, A, -1)) == 0b0011


def test_nothing_is_the_largest_of_nothing() -> None:
    nothing = np.zeros((2, 0), np.float32)
    assert alone("max(abs(a)) <= 9", ARRAYS)((nothing, A, A, 1)) == 1
    assert alone("max(abs(a[:, 2 : 1])) <= 9", ARRAYS)((A, A, A, 1)) == 1
    assert alone("all(a <= 9)", ARRAYS)((nothing, A, A, 1)) == 0


@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_what_is_not_finite_is_found_wherever_it_stands(dtype: Any, odd: float) -> None:
    asked: list[Any] = []
    failed = alone("finite(a)", ("a",), ask=lambda values: asked.append(values))
    for size in (*range(1, 70), BLOCK + 3):
        a = np.full((1, size), np.finfo(dtype).max, dtype)
        assert conditions.compiled is None or failed((a,)) == 0
        for place in {0, size // 2, *range(max(size - 40, 0), size)}:
            a[0, place] = odd
            asked.clear()
            assert failed((a.view(np.uint16) if dtype == np.float16 else a,)) == 1
            assert asked
            a[0, place] = 0


SIDES = st.recursive(
    st.sampled_from(["a", "b", "c", "n", "2", "0.1", "1e-30", "columns(a)", "a[0, 0]", "old(a)", "a[:, ::-1]"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("({0[0]} {0[1]} {0[2]})".format),
        inner.map("abs({})".format),
        inner.map("(-{})".format),
    ),
    max_leaves=5,
)
ODD_NUMBERS = st.sampled_from([*ODD, 0.0, -0.0, 1.0, -2.5, 1e30, 1e-40])


@given(
    SIDES,
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    SIDES,
    st.sampled_from([(1, 1), (1, 7), (3, 1), (2, 5), (1, BLOCK + 1), (3, BLOCK)]),
    ODD_NUMBERS,
    st.integers(0, 99),
    st.sampled_from(["float32", "float32", "float64", "int32", "int64"]),
)
def test_comparisons_of_elements_mean_what_numpy_means(
    left: str, symbol: str, right: str, shape: tuple[int, int], odd: float, seed: int, dtype: str
) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-3, 4, (2, *shape)).astype(dtype)
    if dtype[0] == "f":
        a.flat[seed % a.size] = odd
    c = b[-1] + a[0]
    values = (a, b, c, 3, np.abs(a), b, c, 3)
    elements = a.size
    for text in (f"all({left} {symbol} {right})", f"count({left} {symbol} {right}) * 2 < {elements}"):
        try:
            expression = parsed(text, ARRAYS)
        except ExpressionError:
            return
        assert alone(text, ARRAYS)(values) == (not meaning(expression)(values))


@compiled
@pytest.mark.parametrize(
    ("text", "a"),
    [
        ("all(a < 9007199254740993)", np.array([[1, 1 << 53]])),  # As float64, both numbers are equal to 1 << 53.
        ("all(a != 1)", np.array([[2, 1 << 60]])),
        ("max(a) == 9007199254740992", np.array([[1, (1 << 53) + 1]])),
        ("finite(a)", np.zeros((1, 2), ">f4")),
        ("all(a == 0)", np.zeros((1, 2), ">f4")),
        ("finite(a)", np.frombuffer(bytes(9), np.uint8)[1:].view(np.float32)[None]),
        ("finite(a)", np.zeros((1, 1, 1, 1, 1), np.float32)),
        ("rows(a) == rows(a)", None),
        ("a == 18446744073709551616", 1 << 64),
    ],
)
def test_what_is_not_met_in_c_is_asked(text: str, a: Any) -> None:
    assert not is_said(text, ("a",), (a,))


def test_deep_conditions_are_asked_and_long_ones_hold() -> None:
    assert alone("-" * 190 + "a == 1", ("a",))((1,)) == 0
    assert alone(" + ".join(["a"] * 40) + " == 40", ("a",))((1,)) == 0


@compiled
@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([("power", 0, 0)], [0]),
        ([("add", 0, 0)], [0]),  # An expression that adds the number to itself.
        ([("constant", 1), ("add", 0, 1)], [1]),
        ([("constant", 1), ("add", 0)], [1]),
        ([("argument", 1 << 40)], [0]),
        ([("argument", -1)], [0]),
        ([("argument", 0), ("extent", 0, -1)], [1]),
        ([("argument", 0), ("slice", -1, -1, -1, -1, 0)], [1]),
        ([("argument",)], [0]),
        (["argument"], [0]),
        ([], [0]),
    ],
)
def test_what_are_no_nodes_is_refused(nodes: Any, found: Any) -> None:
    with pytest.raises((ValueError, OverflowError)):
        conditions.compiled(nodes, found, (never,))  # type: ignore[misc]


@compiled
def test_conditions_take_a_tuple_and_raise_what_who_is_asked_raises() -> None:
    failed = alone("a > 0", ("a",), ask=never)
    assert failed((1,)) == 0
    with pytest.raises(AssertionError, match="NumPy was asked"):
        failed((0,))
    for wrong in ([1], 1):
        with pytest.raises(TypeError, match="a tuple"):
            failed(wrong)
    assert alone("a > 0", ("a",))(()) == 1


def test_without_a_compiler_each_condition_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "compiled", None)
    texts = ("n > 0", "rows(a) == 2", "finite(a)", "n < 5")
    expressions = [parsed(text, ARRAYS) for text in texts]
    failed = failing(expressions, ARRAYS, [meaning(one) for one in expressions])
    assert failed((A, A, A, 3)) == 0
    assert failed((A * np.float32(np.nan), A, A, 9)) == 0b1100


@pytest.mark.parametrize("text", ["all(a <= at(a, n))", "count(a > at(a, n)) < 1", "all(a <= a[:, 9])", "all(a < b)"])
def test_where_there_are_no_elements_numpy_is_asked_what_each_side_is(text: str) -> None:
    values = (A[:, :0], A[:, :0], A[0], np.array([0, 1]), A, A, A[0], np.array([0, 1]))
    assert alone(text, ARRAYS)(values) == (not meaning(parsed(text, ARRAYS))(values))
