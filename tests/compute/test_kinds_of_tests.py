"""Every kernel has all of the five kinds of tests that its contract requires."""

# Cases of tests are counted from their pytest marks, so a removed case makes this test fail. `pytest -s` prints the
# list.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import kernels as measured
from cbtop.compute.contracts import all_names, contract
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES
from cbtop.compute.kernels import all_kernels
from cbtop.compute.verification import PARTS, REFERENCE, SINGLE_TOKENS, Variant
from tests.compute import test_contracts, test_kernels

# These kernels run only on processors with tiles or fast bfloat16. Their contracts are tested on every processor.
NOT_HERE = {*["linear_bf16"] * (not HAS_TILES), *["attention_bf16"] * (not BF16_PAYS)}


def cases(test: Callable[..., None]) -> list[tuple[Any, ...]]:
    """Return the arguments of each case of a parametrized test."""
    (mark,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    return [one.values if hasattr(one, "values") else (one,) for one in mark.args[1]]


def variants_beside(*peers: str) -> list[Variant]:
    """Return the cases (kernel and peer) whose kernel is compared with one of these peers.

    Slow cases are included.
    """
    table = cases(test_kernels.test_a_kernel_agrees_with_what_it_is_beside_and_no_planted_fault_passes)
    return [variant for variant, _ in table if variant.peer in peers]


def of_variants(*peers: str) -> Counter[str]:
    return Counter(variant.kernel.contract.name for variant in variants_beside(*peers))


def of_contracts(test: Callable[..., None]) -> Counter[str]:
    return Counter(name for name, _ in cases(test))


KINDS: dict[str, Counter[str]] = {
    "equals its reference": of_variants(REFERENCE),
    "conditions that can fail": of_contracts(test_contracts.test_a_condition_of_a_contract_can_fail),
    "faults that are found": of_contracts(
        test_contracts.test_a_fault_that_a_contract_names_can_be_planted_and_is_found
    ),
    "equals its parts or single tokens": of_variants(PARTS, SINGLE_TOKENS),
    "a bound that is measured": Counter(list(measured.CASES)),
}


def test_the_five_kinds_of_tests_are_listed_for_each_kernel() -> None:
    print()  # noqa: T201
    for name in all_names():
        counts = ", ".join(f"{kind} {of[name]}" for kind, of in KINDS.items())
        print(f"{name:<14}{counts}")  # noqa: T201
    for kind, of in KINDS.items():
        assert set(of) <= set(all_names()), kind


@pytest.mark.parametrize("name", all_names())
def test_every_kernel_has_tests_of_its_reference_its_conditions_and_faults(name: str) -> None:
    found = contract(name)
    assert name in NOT_HERE or KINDS["equals its reference"][name]
    assert KINDS["conditions that can fail"][name] == len(found.preconditions) + len(found.postconditions)
    assert found.preconditions
    assert found.postconditions
    assert KINDS["faults that are found"][name] == len(found.output_faults) + len(found.argument_faults)
    assert found.output_faults
    assert found.argument_faults


def test_every_kernel_that_has_parts_and_no_other_is_compared_with_them() -> None:
    fused = {kernel.contract.name for kernel in all_kernels() if kernel.parts is not None}
    assert fused
    assert set(of_variants(PARTS)) == fused


@pytest.mark.parametrize("name", sorted({kernel.contract.name for kernel in all_kernels() if kernel.parallel}))
def test_a_threaded_kernel_is_tested_on_1_and_2_threads_and_by_single_tokens(name: str) -> None:
    if name in NOT_HERE:
        pytest.skip("this processor multiplies no tiles, or no pairs of bfloat16")
    hows = [variant.how for variant in variants_beside(REFERENCE) if variant.kernel.contract.name == name]
    assert any("2 threads" in how for how in hows)
    assert any("1 thread" in how for how in hows)
    assert of_variants(SINGLE_TOKENS)[name]


@pytest.mark.parametrize("name", all_names())
def test_the_bound_of_each_contract_is_measured(name: str) -> None:
    assert KINDS["a bound that is measured"][name] == 1
