"""Tests of the verification of kernels. It checks the code that really runs. Each of its checks can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cbtop.compute import verification
from cbtop.compute.brick_specs import BRICKS, TRAINING_BRICKS
from cbtop.compute.checks import AssertionResult, IsEquivalent
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES
from cbtop.compute.kernels import all_kernels, attention, gated, linear, products
from cbtop.compute.kernels.sampling import FEW
from cbtop.compute.quantization import FORMATS
from cbtop.compute.verification import FAULTS, PARTS, PEERS, SIZES, Variant, variants, variants_on_gpu, verified
from tests.representatives import first_by_default


def test_every_kernel_and_every_brick_of_a_decoder_is_verified() -> None:
    found = list(variants())
    not_here = {*["linear_bf16"] * (not HAS_TILES), *["attention_bf16"] * (not BF16_PAYS)}
    run_here = {kernel.name for kernel in all_kernels() if kernel.contract.name not in not_here}
    assert {variant.kernel.name for variant in found} >= run_here
    bricks = {spec.name for spec in (*BRICKS, *TRAINING_BRICKS)}
    assert {brick for variant in found for brick in variant.bricks} == bricks


def test_a_gpu_verifies_the_same_with_and_without_tiles_in_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for has_tiles in (True, False):
        monkeypatch.setattr(verification, "HAS_TILES", has_tiles)
        found.append({(one.kernel.name, one.how) for one in variants_on_gpu()})
    assert found[0] == found[1]


def test_tile_products_are_verified_on_1_and_2_threads_if_there_are_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verification, "HAS_TILES", True)
    found = {(one.kernel.name, one.how) for one in variants() if one.kernel.contract.name == "linear_bf16"}
    names = {name for name, _ in found}
    assert len(names) > 10
    assert found == {(name, f"127 tokens, {threads}") for name in names for threads in ("1 thread", "2 threads")}


def nothing(*_: Any) -> None:
    pass


def test_a_threaded_path_that_does_nothing_is_found_if_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_attend_parallel", nothing)
    found = [verified(Variant(attention.kernel_for(tokens=6, threads=threads))) for threads in (1, 2)]
    assert [one.passed for one in found] == [True, False]


def test_a_product_verified_with_two_threads_has_work_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    narrowest = min(FORMATS.values(), key=lambda one: one.row_bytes(256))
    over_several: list[int] = []
    monkeypatch.setattr(products, "on_threads", lambda *_: over_several.append(1))
    assert not verified(Variant(linear.kernel_for(narrowest, 1, 2)), (max(SIZES),)).passed
    assert over_several


@pytest.mark.parametrize("peer", PEERS)
def test_each_peer_finds_every_fault_in_a_kernel_of_several_tokens_alone(peer: str) -> None:
    right = gated.kernel_for((8, 8), tokens=6)

    def of_many(fault: str, *arguments: Any) -> None:
        right.implementation(*arguments)
        if len(arguments[6]) > 1:
            FAULTS[fault](arguments[9])

    found = {
        fault: verified(Variant(replace(right, implementation=partial(of_many, fault)), peer=peer), (7,)).failed
        for fault in FAULTS
    }
    assert all(f"equals {peer} at size 7" in failed for failed in found.values())
    assert verified(Variant(right, peer=peer), (7,)).passed


def test_a_fault_in_what_is_fused_alone_is_found_beside_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "multiply_gated", nothing)
    found = {one.peer: verified(one, (7,)).failed for one in variants() if one.kernel.name == "q8_0_gated"}
    assert "equals its parts at size 7" in found[PARTS]


def late_tokens(arguments: Any) -> None:
    arguments[4][100:] *= 1.5


def no_bias_of_many_tokens(arguments: Any) -> None:
    bias, out = arguments[2], arguments[4]
    if bias.size and len(out) > 1:
        out -= bias


def far_positions(arguments: Any) -> None:
    if arguments[3] > 1000:
        arguments[7][:] *= 1.5


def found_by_sorting(arguments: Any) -> None:
    logits, _, top_k, *_, out = arguments
    if logits.shape[1] > FEW and not 0 < top_k <= FEW:
        out[0] = logits[0].argmin()


@first_by_default(
    ("name", "fault"),
    [
        ("q8_0_linear", late_tokens),
        ("q8_0_linear", no_bias_of_many_tokens),
        ("q8_0_linear_int8", late_tokens),
        ("q8_0_linear_int8", no_bias_of_many_tokens),
        ("attention", far_positions),
        ("drawn", found_by_sorting),
    ],
    3,
)
def test_a_fault_that_few_calls_have_is_found(name: str, fault: Callable[[Any], None]) -> None:
    def passes(variant: Variant) -> bool:
        def wrong(*arguments: Any) -> None:
            variant.kernel.reference(*arguments)
            fault(arguments)

        return verified(replace(variant, kernel=replace(variant.kernel, implementation=wrong))).passed

    # On a processor with tiles, the variant for many tokens is the kernel with bf16 in its name.
    names = name, name.replace("int8", "bf16")
    assert not all(passes(variant) for variant in variants() if variant.kernel.name in names)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_planted_fault_fails(fault: str) -> None:
    right = attention.kernel_for(tokens=6)

    def wrong(*arguments: Any) -> None:
        right.implementation(*arguments)
        FAULTS[fault](arguments[7])

    found = verified(Variant(replace(right, implementation=wrong)))
    assert not found.passed
    assert any("equals reference" in one for one in found.failed)


def test_a_check_that_cannot_fail_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IsEquivalent, "evaluate", lambda *_: AssertionResult(True, 0.0, 1.0))
    found = verified(next(iter(variants())))
    assert not found.passed
    assert set(found.missed) == {
        "an output left out", "scaled by 1.5", "two outputs swapped", "the first row for every token",
        "rows counted from the end", "the scale left out",
    }  # fmt: skip
    assert FAULTS.keys() - set(found.missed) == {"a NaN"}


def test_a_condition_that_nothing_breaks_is_a_failure() -> None:
    kernel = next(iter(variants())).kernel
    (condition,) = kernel.contract.postconditions
    unbroken = replace(condition, broken_by=replace(condition.broken_by, values={}))
    found = verified(Variant(replace(kernel, contract=replace(kernel.contract, postconditions=(unbroken,)))))
    assert (found.failed, found.missed) == ((), ("postcondition finite(out)",))


def test_a_condition_that_does_not_hold_of_a_call_is_a_failure() -> None:
    def wrong(code: int, weights: Any, tokens: Any, scale: float, out: Any) -> None:
        out[:] = np.inf

    kernel = next(iter(variants())).kernel
    found = verified(Variant(replace(kernel, implementation=wrong)))
    assert "postcondition finite(out) at size 7" in found.failed
