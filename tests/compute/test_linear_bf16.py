"""Tests of products of many tokens in bfloat16. Without tiles (AMX), a plain loop computes the same result."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import binding

from cbtop.compute.decoder.base import Model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import interleaved
from cbtop.compute.jit import cpu
from cbtop.compute.kernels import linear_bf16, linear_int8
from cbtop.compute.kernels.linear_bf16 import TileScratch
from cbtop.compute.quantization import FORMATS, INTERLEAVABLE
from cbtop.compute.quantization.floats import BF16
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.settings import STATIC_CROSSOVERS
from cbtop.compute.verification import Variant, verified

FROM_TOKENS = STATIC_CROSSOVERS.bf16_tokens
# The length of this prompt is not a multiple of the tile size.
PROMPT = np.random.default_rng(5).integers(0, 512, 2 * FROM_TOKENS + 11).tolist()
# On a processor without tiles (AMX), the test of a format takes 20 s, half of that to compile.
SOON = {Q4_K.code}
CODES = [
    pytest.param(code, marks=[] if code in SOON else [pytest.mark.slow], id=FORMATS[code].name)
    for code in INTERLEAVABLE
]


def product(code: int, tokens: int, rows: int, columns: int, seed: int = 1) -> tuple[Any, ...]:
    """Return the arguments of a matrix product with bias."""
    kernel = linear_bf16.kernel_for(FORMATS[code], tokens)
    _, weights, _, x, *_ = kernel.examples(np.random.default_rng(seed), max(8 * (rows // 16 - 1), columns // 8 - 32))
    rng = np.random.default_rng(seed)
    bias = rng.standard_normal(len(weights), dtype=np.float32)
    out = np.full((tokens, len(weights)), 7, np.float32)
    return code, weights, bias, x, out, TileScratch.of(tokens, x.shape[1], 1)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_tokens_of_any_number_meet_rows_that_are_no_whole_number_of_pairs(code: int, tokens: int) -> None:
    *arguments, out, scratch = product(code, tokens, 48, 1280)
    assert len(out[0]) % 32 == 16
    assert arguments[3].shape[1] > linear_bf16.STRETCH
    expected = np.zeros_like(out)
    linear_bf16.reference(*arguments, expected, scratch)
    linear_bf16.linear_bf16(*arguments, out, scratch)
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("code", INTERLEAVABLE, ids=lambda code: FORMATS[code].name)
@pytest.mark.parametrize(("tokens", "threads"), [(37, 1), (127, 2)])
def test_products_of_every_format_are_verified_and_no_planted_fault_passes(
    code: int, tokens: int, threads: int
) -> None:
    found = verified(Variant(linear_bf16.kernel_for(FORMATS[code], tokens, threads)))
    assert (found.failed, found.missed) == ((), ())


@given(st.lists(st.floats(width=32), min_size=32, max_size=32))
def test_activations_are_rounded_as_the_reference_rounds_them(values: list[float]) -> None:
    x = np.array([values], np.float32)
    # The processor's instruction converts the smallest numbers to zero. The products also treat the smallest numbers
    # as zero.
    if cpu.HAS_BF16:
        x[np.abs(x) < np.finfo(np.float32).tiny] = 0
    tiles = TileScratch.of(1, 32, 1).tiles
    linear_bf16.round_tokens(x, tiles)
    found, expected = tiles[0, :16].view(np.uint16), BF16.quantize(x).view(np.uint16)[0]
    is_number = ~np.isnan(x[0])
    np.testing.assert_array_equal(found[is_number], expected[is_number])
    assert np.isnan(BF16.dequantize(found.view(np.uint8)[None])[0][~is_number]).all()
    assert not tiles[0, 16:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_makes_none_of_its_own_token_alone(value: float) -> None:
    *arguments, out, scratch = product(Q4_K.code, 20, 48, 1280)
    arguments[3][17, 40] = value
    linear_bf16.linear_bf16(*arguments, out, scratch)
    assert not np.isfinite(out[17]).any()
    assert np.isfinite(np.delete(out, 17, axis=0)).all()


def test_a_product_uses_bfloat16_from_a_number_of_tokens_on_if_it_has_tiles() -> None:
    for tokens in (FROM_TOKENS - 1, FROM_TOKENS):
        *arguments, out, tiles = product(Q4_K.code, tokens, 48, 1280)
        scratch = linear_int8.Int8Scratch.of(tokens, arguments[3].shape[1], 1)
        found, expected = {}, {}
        for name, one in (("int8", replace(scratch, tiles=None)), ("bf16", replace(scratch, tiles=tiles))):
            linear_int8.linear_int8(*arguments, out, one)
            found[name] = out.copy()
            linear_int8.reference(*arguments, out, one)
            expected[name] = out.copy()
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5 * np.abs(out).max())
        assert np.array_equal(*found.values()) == (tokens < FROM_TOKENS)
        assert np.array_equal(*expected.values()) == (tokens < FROM_TOKENS)


@pytest.mark.slow
def test_a_decoder_with_tiles_passes_checks_that_fail_if_rounding_is_coarse(
    model: Model, decoder_for: Callable[[Model, int], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_int8, "HAS_TILES", True)
    decoder = decoder_for(interleaved(model), 1)
    assert [result for result in decoder.verify(PROMPT) if not result.passed] == []
    rounded = linear_bf16.round_tokens

    def coarse(x: Any, tiles: Any) -> None:
        rounded(np.round(x, 1), tiles)

    monkeypatch.setattr(linear_bf16, "round_tokens", coarse)
    failed = {result.brick for result in decoder.verify(PROMPT) if not result.passed}
    assert "QkvProjection" in failed
    assert "LmHead" not in failed  # The LM head multiplies only one token, so it does not use the faulty code.


FEATURES_WITH_TILES = (
    "+sse4.2,+ssse3,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni,"
    "+avx512vbmi,+avx512bf16,+amx-tile,+amx-bf16"
)
MACHINE_CODE = """
from numba import types
from cbtop.compute.jit import cpu
from cbtop.compute.kernels import linear_bf16
assert cpu.HAS_TILES
function, words = linear_bf16.ROWS_OF[12].function, types.Array(types.uint32, 2, "C")
numbers, bias, weights = (types.Array(kind, d, "C") for kind, d in
                          ((types.float32, 2), (types.float32, 1), (types.uint8, 2)))
function.compile((weights, bias, words, numbers, numbers, types.int64, types.int64))
print(next(iter(function.inspect_asm().values())))
"""


@pytest.mark.slow  # compiling takes seconds
def test_machine_code_uses_tiles_only_between_configuration_and_release() -> None:
    environment = os.environ | {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": FEATURES_WITH_TILES,
        "NUMBA_CACHE_DIR": os.devnull,  # Compile without a cache, because code from the cache has no assembly text.
    }
    done = subprocess.run(
        [sys.executable, "-c", MACHINE_CODE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    function = done.stdout.split(".Lfunc_end0:")[0]  # The code after this label only converts arguments from Python.
    instructions = [line.split()[0] for line in function.splitlines() if line.startswith("\t")]
    of_tiles = [one for one in instructions if one.startswith(("tile", "tdp", "ldtile"))]
    assert of_tiles[0] == "ldtilecfg"
    assert instructions.count("tilerelease") == instructions.count("retq") == 1
    assert "tilerelease" in instructions[: instructions.index("retq")]
    assert {"tdpbf16ps", "tileloadd", "tilestored", "tilezero"} <= set(of_tiles)
    # For each vector of 32 weights, count the instructions that expand, convert, scale and round.
    assert instructions.count("vcvtne2ps2bf16") == 64
    assert instructions.count("vpshufb") <= 130
    assert not {"vpermw", "vpermt2b", "vpermi2b"} & set(instructions)


@pytest.mark.parametrize(("answer", "may"), [(0, True), (-1, False)])
def test_tiles_are_not_used_where_the_system_refuses_them(
    answer: int, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def syscall(*arguments: int) -> int:
        asked.append(arguments)
        return answer

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(
        binding, "get_host_cpu_features", lambda: dict.fromkeys(("amx-tile", "amx-bf16", "avx512bf16"), True)
    )
    monkeypatch.setattr(numba.config, "CPU_NAME", None)
    specification = importlib.util.spec_from_file_location("another_cpu", cpu.__file__)
    assert specification is not None
    assert specification.loader is not None
    another = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(another)
    assert may == another.HAS_TILES
    assert asked == [(158, 0x1023, 18)]  # arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
