"""Tests of the kernels' contracts: they are read strictly.

Every kernel keeps its own contract, and each line of a contract can fail.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute.contracts import all_names, contract, read
from cbtop.compute.errors import ContractError
from cbtop.compute.jit.halves import from_bits
from cbtop.compute.kernels import all_kernels, attention, attention_bf16, kv_write
from cbtop.compute.kernels.attention_loops import scratch_for
from cbtop.compute.kernels.base import Kernel, floats, with_copies
from cbtop.compute.kernels.kv_caches import plain_caches
from cbtop.compute.quantization.floats import F32
from cbtop.compute.verification import FAULTS, SEED, SIZES, planted, variants

CONTRACTS = [contract(name) for name in all_names()]
PAGE = Path(__file__).parents[2] / "docs/architecture.md"
KERNELS = pytest.mark.parametrize("kernel", all_kernels(), ids=lambda kernel: kernel.name)


def named(*lists: str) -> list[Any]:
    """Return a pytest parameter for each entry of these lists (such as `preconditions`) in all contracts."""
    found = []
    for one in CONTRACTS:
        for what in [what for part in lists for what in getattr(one, part)]:
            name = what if isinstance(what, str) else what.name
            found.append(pytest.param(one.name, name, id=f"{one.name}: {name}"))
    return found


def of_contract(name: str) -> Iterator[Kernel]:
    return (kernel for kernel in all_kernels() if kernel.contract.name == name)


def test_every_kernel_has_a_contract_and_every_contract_a_kernel() -> None:
    assert {kernel.contract.name for kernel in all_kernels()} == set(all_names())


@KERNELS
def test_a_contracts_arguments_are_its_kernels_in_their_order(kernel: Kernel) -> None:
    assert kernel.contract.arguments == tuple(inspect.signature(kernel.reference).parameters)


def right_call(kernel: Kernel, size: int) -> tuple[Any, Any]:
    """Return two sets of arguments of a kernel: as they are before a correct call, and as they are after it."""
    arguments = kernel.examples(np.random.default_rng([SEED, size]), size)
    earlier = with_copies(arguments, {*kernel.outputs, *kernel.contract.earlier})
    kernel.reference(*arguments)
    return earlier, arguments


@cache
def found_of(name: str) -> dict[str, list[bool]]:
    """Plant each fault of a kernel at several sizes, and violate each condition of its contract.

    Return for each fault and condition whether it was found at each size.
    """
    found: dict[str, list[bool]] = {}
    held = attention_bf16.kernel_for(slides=True, cap=2.0)
    # Some of these kernels cannot run on this machine. Only their contracts are tested.
    kernels = *(variant.kernel for variant in variants()), held, *all_kernels()
    kernel = next(kernel for kernel in kernels if kernel.contract.name == name)
    for size in SIZES:
        for fault, noticed in planted(kernel, *right_call(kernel, size)):
            found.setdefault(fault, []).append(noticed)
    return found


@pytest.mark.parametrize(("name", "fault"), named("output_faults", "argument_faults"))
def test_a_fault_that_a_contract_names_can_be_planted_and_is_found(name: str, fault: str) -> None:
    assert found_of(name).get(fault)
    assert all(found_of(name)[fault])


@pytest.mark.parametrize(("name", "condition"), named("preconditions", "postconditions"))
def test_a_condition_of_a_contract_can_fail(name: str, condition: str) -> None:
    assert found_of(name)[condition] == [True] * len(SIZES)


def test_a_bias_of_another_size_can_be_planted_in_the_smallest_product() -> None:
    one = np.ones((1, 1), np.float32)
    arguments = F32.code, F32.quantize(one), one[0], one, one, one
    broken = dict(contract("linear").broken(arguments, arguments))
    assert broken["precondition size(bias) == 0 or size(bias) == rows(weights)"]


# A contract applies to the kernels of all formats. By default, faults are planted in the outputs of only one format.
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(one, id=one.name, marks=() if one is next(of_contract(one.contract.name)) else pytest.mark.slow)
        for one in all_kernels()
    ],
)
def test_a_contract_names_every_fault_that_can_be_planted_in_its_outputs(kernel: Kernel) -> None:
    for size in SIZES:
        _, right = right_call(kernel, size)
        for fault, plant in FAULTS.items():
            wrong = with_copies(right, kernel.outputs)
            for place in kernel.outputs:
                plant(from_bits(wrong[place]))
                if not np.array_equal(wrong[place], right[place]):
                    assert fault in kernel.contract.output_faults


def test_old_values_are_those_from_before_the_call() -> None:
    adding = contract("residual_add")
    x, delta = np.ones((1, 4), np.float32), np.full((1, 4), 2, np.float32)
    earlier = (x.copy(), delta)
    x += delta
    assert dict(adding.check_after((x, delta), earlier)) == {
        "postcondition finite(x)": True,
        "postcondition all(x == old(x) + delta)": True,
    }
    x += delta
    assert not dict(adding.check_after((x, delta), earlier))["postcondition all(x == old(x) + delta)"]


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_contracts_of_caches_hold_where_they_are_plain_as_on_a_gpu(dtype: type) -> None:
    rng, caches = np.random.default_rng(3), plain_caches(2, 41, 24, dtype)
    k, v, out = floats(rng, 37, 48), floats(rng, 37, 48), np.zeros((37, 144), np.float32)
    scratch = scratch_for(1, 24)
    written = kv_write.kernel_for(dtype), (k, v, 4, *caches)
    attended = attention.kernel_for(dtype=dtype), (floats(rng, 37, 144), *caches, 4, 24**-0.5, 0, 0.0, out, scratch)
    for kernel, arguments in (written, attended):
        earlier = with_copies(arguments, {*kernel.outputs, *kernel.contract.earlier})
        conditions = kernel.contract.check_before(arguments)
        kernel.reference(*arguments)
        conditions += kernel.contract.check_after(arguments, earlier)
        assert [name for name, holds in conditions if not holds] == []


def test_what_cannot_be_evaluated_does_not_hold() -> None:
    choosing = contract("greedy")
    beyond = np.ones((1, 4), np.float32), np.array([9])
    assert dict(choosing.check_after(beyond, beyond)) == {
        "postcondition all(out >= 0)": True,
        "postcondition all(out < columns(logits))": False,
        "postcondition all(logits <= at(logits, out))": False,
    }


RIGHT = """
equations: y = x
arguments: [x, y]
tolerance: 1.0e-5
preconditions:
  finite(x): {x: x / 0}
postconditions:
  all(y == old(x)): {y: y + 1}
falsification:
  outputs: [a NaN]
  arguments:
    negated: {x: -x}
performance: {roof: dram_read, fraction: 0.5, where: here, when: 2026-11-23, regression: 1.1}
"""


def test_a_contract_is_read_whole() -> None:
    found = read("copy", RIGHT)
    assert (found.name, found.equations, found.arguments, found.tolerance) == ("copy", "y = x", ("x", "y"), 1e-5)
    assert [one.name for one in found.preconditions] == ["precondition finite(x)"]
    assert [one.name for one in found.postconditions] == ["postcondition all(y == old(x))"]
    assert found.output_faults == ("a NaN",)
    (negated,) = found.argument_faults
    assert negated.of((3, 4)) == (-3, 4)
    assert found.earlier == {0}
    assert found.performance is not None
    assert (found.performance.fraction, found.performance.when) == (0.5, "2026-11-23")


def test_the_contract_on_the_page_can_be_read() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (shown,) = blocks
    assert read("page", shown).arguments == ("x", "delta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("equations: y = x", "equation: y = x"), "the file: 'equation' is not a key; did you mean equations? keys"),
        (("equations: y = x", ""), "the file: has no 'equations'"),
        (("equations: y = x", "equations: 7"), "equations: is 7; a text is wanted"),
        (("[x, y]", "x"), "arguments: is 'x'; a list of texts is wanted"),
        (("[x, y]", "[x, on]"), "arguments: is ['x', True]; a list of texts is wanted"),
        (("1.0e-5", "1e-5"), "tolerance: is '1e-5'; a number from 0 is wanted (YAML reads 1.0e-5, and not 1e-5)"),
        (("1.0e-5", "-1"), "tolerance: is -1; a number from 0 is wanted"),
        (("1.0e-5", ".nan"), "tolerance: is nan; a number from 0 is wanted"),
        (("finite(x):", "finite(z):"), "precondition finite(z): 'finite(z)' has 'z'; arguments are x, y"),
        (("finite(x):", "finite(old(x)):"), "precondition finite(old(x)): asks for old values, which only a post"),
        (("{x: x / 0}", "{z: x}"), "precondition finite(x): changes 'z'; arguments are x, y"),
        (("{x: x / 0}", "3"), "precondition finite(x): is 3; texts with what they are to (`a: b`) are wanted"),
        (("{y: y + 1}", "{y: y.size}"), "postcondition all(y == old(x)): y: 'y.size' has 'y.size'; numbers, arg"),
        (("  outputs: [a NaN]\n", ""), "falsification: has no 'outputs'"),
        (("roof:", "ceiling:"), "performance: 'ceiling' is not a key; keys are roof, fraction, where, when"),
        (("[x, y]", "[x, y"), "is not YAML: while parsing a flow sequence"),
        ((RIGHT, "7"), "the file: is 7; texts with what they are to (`a: b`) are wanted"),
    ],
)
def test_an_error_in_a_contract_is_one_line_that_names_the_file_and_the_key(
    change: tuple[str, str], message: str
) -> None:
    assert change[0] in RIGHT
    with pytest.raises(ContractError) as refused:
        read("copy", RIGHT.replace(*change))
    said = str(refused.value)
    assert said.startswith("contracts/copy.yaml")
    assert message in said
    assert "\n" not in said


def test_a_kernel_without_a_contract_cannot_be_made() -> None:
    with pytest.raises(ContractError, match=r"none\.yaml: No such file or directory; each kernel has a contract"):
        contract("none")


def test_a_line_of_a_contract_can_be_pointed_at() -> None:
    found = contract("greedy")
    assert found.line_of("equations") == 1
    assert found.line_of("arguments") < found.line_of("finite(logits)") < found.line_of("counted from the end")
    assert found.line_of("not there") == 1
