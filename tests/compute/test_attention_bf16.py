"""Tests of attention in bfloat16: it is right on every processor.

Decoders use this attention if they also round their other products to bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cbtop.compute.decoder import bricks
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import model_to_run
from cbtop.compute.kernels import attention_bf16
from cbtop.compute.settings import DecoderSettings
from cbtop.compute.verification import Variant, verified
from cbtop.profiler.profiler import BrickProfiler
from tests.representatives import first_by_default


@first_by_default(("tokens", "threads"), [(1, 1), (1, 2), (6, 1), (70, 2)], 4)
@first_by_default(("slides", "cap"), [(False, 0.0), (True, 0.0), (True, 2.0)], 4)
def test_it_computes_what_its_contract_says_and_every_planted_fault_is_found(
    tokens: int, threads: int, slides: bool, cap: float
) -> None:
    found = verified(Variant(attention_bf16.kernel_for(tokens, threads, slides, cap), tokens=tokens))
    assert (found.failed, found.missed) == ((), ())


def test_what_is_cut_off_numbers_of_every_size_is_put_back_on_average() -> None:
    numbers = 2 ** np.random.default_rng(1).uniform(-8, 8, 1 << 20)
    halves = numbers.astype(np.float16).astype(np.float64)
    left = attention_bf16.CUT * attention_bf16.cut(halves) / halves
    assert abs(left.mean() - 1) < 2e-5
    assert abs(left - 1).max() < 2**-7


@first_by_default(
    ("is_exact", "cache_type", "pays", "expected"),
    [
        (False, "f16", True, "attention_bf16"),
        (False, "f32", True, "attention"),
        (True, "f16", True, "attention"),
        (False, "f16", False, "attention"),
    ],
    2,
)
def test_a_decoder_uses_it_if_products_are_int8_the_cache_f16_and_it_pays(
    is_exact: bool,
    cache_type: str,
    pays: bool,
    expected: str,
    model_files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bricks, "BF16_PAYS", pays)
    model = model_to_run(model_files["qwen2"], is_exact=is_exact)
    decoder = Decoder(model, "numba", 1, BrickProfiler(enabled=False), 64, DecoderSettings(cache_type))
    assert {kernel.name for layer in decoder.bricks.layers for kernel in layer.attention.kernels} == {expected}
    # data type of the peak rate (roof) that this kernel is compared with
    dtype = "bfloat16" if expected == "attention_bf16" else "float32"
    assert {layer.attention.definition.work.dtype for layer in decoder.bricks.layers} == {dtype}
    assert [one for one in decoder.verify([3, 1, 4, 1, 5]) if not one.passed] == []


def test_heads_of_an_odd_number_of_dimensions_are_of_floats() -> None:
    assert not attention_bf16.can_take(head_dim=7, cache_bytes=2)
    assert attention_bf16.can_take(head_dim=8, cache_bytes=2)
