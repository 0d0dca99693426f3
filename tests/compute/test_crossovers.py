"""Tests below and above each crossover: the right method runs, and its results fulfil the contract of the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cbtop.compute.errors import ComputeError
from cbtop.compute.kernels import attention, gated, linear, linear_bf16, linear_int8, products, qkv
from cbtop.compute.kernels.base import Kernel, with_copies
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.settings import (
    CROSSOVERS,
    STATIC_CROSSOVERS,
    Crossovers,
    crossovers,
    use_crossovers,
    with_crossovers,
)
from cbtop.compute.verification import Variant, verified

SIZE = 32
BY_BYTES = {
    "linear": (linear.kernel_for(Q4_K, 1, 2), "on_threads"),
    "linear_int8": (linear_int8.kernel_for(Q4_K, 3, 2), "on_threads"),
    "qkv": (qkv.kernel_for((Q4_K.code,) * 3, 1, 2, is_int8=True), "_three"),
    "gated": (gated.kernel_for((Q4_K.code,) * 2, 1, 2, is_int8=True), "_gated"),
}


@pytest.fixture(autouse=True)
def _static() -> Iterator[None]:
    with with_crossovers(STATIC_CROSSOVERS):
        yield


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the name of each loop that runs over several threads."""
    ran: list[str] = []

    def counted(name: str, loop: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            ran.append(name)
            loop(*arguments)

        return run

    for module, names in (
        (products, ("on_threads", "_three", "_gated")),
        (attention, ("_attend_parallel", "_attend_held_parallel")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return ran


def is_right(kernel: Kernel, arguments: tuple[Any, ...]) -> bool:
    expected = with_copies(arguments, kernel.outputs)
    kernel.implementation(*arguments)
    kernel.reference(*expected)
    pairs = [(arguments[place], expected[place]) for place in kernel.outputs]
    return all(np.abs(a - b).max() <= kernel.contract.tolerance * np.abs(b).max() for a, b in pairs)


def work_of(kernel: Kernel, arguments: tuple[Any, ...]) -> int:
    """Return the work of a kernel: bytes of weights times number of tokens."""
    matrices = [one for one in arguments if isinstance(one, np.ndarray) and one.dtype == np.uint8]
    tokens = len(arguments[kernel.outputs[0]])
    return tokens * sum(matrix.size for matrix in matrices)


@pytest.mark.parametrize("name", BY_BYTES)
def test_a_product_uses_threads_from_its_crossover_on_and_is_right_before_it(name: str, threaded: list[str]) -> None:
    kernel, loop = BY_BYTES[name]
    arguments = kernel.examples(np.random.default_rng(3), SIZE)
    work = work_of(kernel, arguments)
    use_crossovers(Crossovers(product_bytes=work + 1))
    assert is_right(kernel, arguments)
    assert threaded == []
    use_crossovers(Crossovers(product_bytes=work))
    assert is_right(kernel, arguments)
    assert threaded == [loop]


@pytest.mark.parametrize(("cap", "loop"), [(0.0, "_attend_parallel"), (2.0, "_attend_held_parallel")])
def test_attention_uses_threads_from_its_crossover_on_and_is_right_before_it(
    cap: float, loop: str, threaded: list[str]
) -> None:
    kernel = attention.kernel_for(2, 2, cap=cap)
    arguments = kernel.examples(np.random.default_rng(3), SIZE)
    q, start = arguments[0], arguments[3]
    work = q.size * (start + len(q))
    use_crossovers(Crossovers(attention_products=work + 1))
    assert is_right(kernel, arguments)
    assert threaded == []
    use_crossovers(Crossovers(attention_products=work))
    assert is_right(kernel, arguments)
    assert threaded == [loop]


def test_small_work_never_goes_to_threads_unless_it_was_measured_to_pay(threaded: list[str]) -> None:
    for kernel in (*(kernel for kernel, _ in BY_BYTES.values()), attention.kernel_for(1, 2)):
        kernel.implementation(*kernel.examples(np.random.default_rng(3), 1))
    assert threaded == []


def test_with_one_thread_nothing_goes_to_threads_whatever_was_measured(threaded: list[str]) -> None:
    use_crossovers(Crossovers(1, 1, 1))
    for kernel in (linear.kernel_for(Q4_K), qkv.QKV[Q4_K.code], gated.GATED[Q4_K.code], attention.ATTENTION):
        assert is_right(kernel, kernel.examples(np.random.default_rng(3), SIZE))
    assert threaded == []


def test_tokens_use_bfloat16_from_their_crossover_on_and_are_right_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Pretend that the processor has tiles (AMX). On a processor without tiles, a plain loop computes the result.
    monkeypatch.setattr(linear_int8, "HAS_TILES", True)
    rounded: list[int] = []
    round_tokens = linear_bf16.round_tokens

    def counted(x: Any, tiles: Any) -> None:
        rounded.append(len(x))
        round_tokens(x, tiles)

    monkeypatch.setattr(linear_bf16, "round_tokens", counted)
    kernel = linear_int8.kernel_for(Q4_K, 5)
    for from_tokens, expected in ((6, []), (5, [5])):
        use_crossovers(Crossovers(bf16_tokens=from_tokens))
        arguments = kernel.examples(np.random.default_rng(3), 8)
        assert (arguments[-1].tiles is None) == (from_tokens > 5)
        assert is_right(kernel, arguments)
        assert rounded == expected


def test_a_scratch_with_tiles_serves_int8_after_the_bfloat16_crossover_rises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_int8, "HAS_TILES", True)
    # A call of `round_tokens` would raise, because it is None.
    monkeypatch.setattr(linear_bf16, "round_tokens", None)
    use_crossovers(Crossovers(bf16_tokens=5))
    kernel = linear_int8.kernel_for(Q4_K, 5)
    arguments = kernel.examples(np.random.default_rng(3), 8)
    use_crossovers(Crossovers(bf16_tokens=6))
    assert arguments[-1].tiles is not None
    assert is_right(kernel, arguments)


def test_verify_uses_threads_at_every_size_whatever_crossover_was_measured(threaded: list[str]) -> None:
    never = replace(STATIC_CROSSOVERS, product_bytes=1 << 60, attention_products=1 << 60)
    use_crossovers(never)
    found = verified(Variant(linear_int8.kernel_for(Q4_K, 1, 2)))
    assert (found.failed, found.missed) == ((), ())
    assert threaded == ["on_threads"] * len(found.sizes)
    assert crossovers() == never


@pytest.mark.parametrize("name", CROSSOVERS)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, float("nan")])
def test_a_crossover_that_is_no_whole_number_from_one_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ComputeError, match=f"{name} is .*; a whole number from 1 is wanted"):
        replace(STATIC_CROSSOVERS, **{name: value})


def test_what_was_set_for_a_while_ends_with_an_error_too() -> None:
    with contextlib.suppress(ComputeError), with_crossovers(Crossovers(1, 1, 1)):
        assert crossovers() == Crossovers(1, 1, 1)
        raise ComputeError("meanwhile")
    assert crossovers() is STATIC_CROSSOVERS
