"""The equations of contracts parse, and a mistake in them is named with its line and column in the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cbtop.compute.contracts import all_names, file_of
from cbtop.compute.contracts.equations import equation_faults, lines_of
from cbtop.compute.kernels.base import Kernel
from cbtop.compute.kernels.table import KERNELS

PAGE = Path(__file__).parents[2] / "docs/contracts.md"
ARGUMENTS = ("x", "weight", "epsilon", "out")
NORM = "out[t, i] = x[t, i] / sqrt(mean over j of x[t, j]² + epsilon) * weight[i]"


def faults_of(equations: str) -> list[str]:
    """Return the faults of a file that begins with these equations, of a brick that returns `out`."""
    return equation_faults(lines_of(f"equations: {equations}\ntolerance: 0\n"), ARGUMENTS, ("out",), ("rope",))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_equations_of_our_own_kernel_define_all_its_outputs(kernel: Kernel) -> None:
    contract = kernel.contract
    outputs = [contract.arguments[place] for place in kernel.outputs]
    lines = lines_of(file_of(contract.name).read_text(encoding="utf-8"))
    assert equation_faults(lines, contract.arguments, outputs, all_names()) == []


@pytest.mark.parametrize(
    "equations",
    [
        NORM,
        f"'{NORM}'",
        f"{NORM}  # Zhang and Sennrich 2019",
        "out[t, i] = x[t, i]\n  * weight[i]",
        "|\n  # with words\n  y = x * weight; out = y if epsilon > 0 else -y",
        "|\n  out = x\n    * weight",
        ">\n  out = |x|^-2 + 1.5e-3 * (x if not epsilon == 0 and x > 1 else 2)",
        '|\n  near(a, b): a isn\'t far from b; see "the page"\n    and its $ signs\n'
        "  out[t] = sum over p <= t, h where near(p, t) of x[p] . x[h] // 2 % 3",
        "|\n  half, out = rope(x)",
        "out[:, 2 * i + 1] = x[:, i :][0] * old(weight)[:]",
        "out = exp(-x³) / pi",
    ],
)
def test_an_equation_as_it_is_usually_written_parses(equations: str) -> None:
    assert faults_of(equations) == []


@pytest.mark.parametrize(
    ("equations", "said"),
    [
        ("odd and even columns", "line 1, column 16: '=' is expected and not 'and'; words follow # or `name:`"),
        ("out = wieght * x", "line 1, column 18: 'wieght' is not a known value; did you mean weight?"),
        ("out = expp(x)", "line 1, column 18: 'expp' is not a known function; did you mean exp?"),
        ("out = median over j of x[j]", "line 1, column 18: 'median' is not a known reduction; did you mean mean?"),
        ("out[t i] = x", "line 1, column 18: ']' is expected and not 'i'"),
        ("out = (x + 1", "line 1, column 24: ')' is expected and not the end"),
        ("out = x +", "line 1, column 21: a value is expected and not the end"),
        ("out = x x", "line 1, column 20: an operator or the end is expected and not 'x'"),
        ("out = x $ 2", "line 1, column 20: '$' is no part of an equation; words follow # or `name:`"),
        ("out = x if x > 1", "line 1, column 28: 'else' is expected and not the end"),
        ("out = max over j x", "line 1, column 29: 'of' is expected and not 'x'"),
        ("out = max over of x", "line 1, column 27: an index is expected and not 'of'"),
        ("2 * x = out", "line 1, column 12: the name of a value is expected and not '2'"),
        ("y = x", "line 1, column 12: no equation defines 'out'"),
        (
            "out[t] = sum over j of x[t, j] + weight[j]",
            "line 1, column 52: 'j' is an index of a reduction that has ended; add brackets after `of`",
        ),
        ("|\n  out: the sum of x", "line 2, column 3: 'out' is an argument, which is defined by '='"),
        ("|\n  # only words", "line 2, column 3: no equation defines 'out'"),
        ("|\n  y = 2 * x\n  out = y\n    + q", "line 4, column 7: 'q' is not a known value; values are epsilon, "),
        ("out = x\n  * q", "line 2, column 5: 'q' is not a known value"),
        (f"out = {'(' * 60}x", "line 1, column 68: more than 50 brackets and signs are inside each other"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_its_reason(equations: str, said: str) -> None:
    (fault,) = faults_of(equations)
    assert fault.startswith(said)


def test_the_equations_of_the_page_parse() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (shown,) = [block for block in blocks if block.startswith("equations: |")]
    assert equation_faults(lines_of(shown), ("q", "k", "v", "cap", "out"), ("out",)) == []


def test_a_long_line_is_read_without_recursion() -> None:
    assert faults_of("out = x" + " if x > 1 and x > 2 else x" * 2_000) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("tolerance: 0\nequations: |\n  a = x\n  out = q", "line 4, column 9"),
        ("equations: |-\n\n  a = x\n\n  out = q\n\n# a comment (x\ntolerance: 0\n", "line 5, column 9"),
        ("equations: |  # words\r\n  out = q\r\n", "line 2, column 9"),
        ("equations: |2\n    out = q\n", "line 2, column 11"),
        ("equations:\n  out = q\n", "line 2, column 9"),
        ('{"equations": "out = q", "tolerance": 0}', "line 1, column 22"),
    ],
)
def test_the_place_of_a_mistake_is_that_in_the_file(text: str, place: str) -> None:
    (fault,) = equation_faults(lines_of(text), ARGUMENTS, ("out",))
    assert fault.startswith(f"{place}: 'q' is not a known value")


def test_each_wrong_statement_is_named() -> None:
    assert [fault.partition(":")[0] for fault in faults_of("|\n  out = x +\n  y = weight; z = (y\n  out = 3 3")] == [
        "line 2, column 12",
        "line 3, column 21",
        "line 4, column 11",
    ]
