"""Tests of interleaved matrices. They have the same bytes as other matrices, in another order.

Products with them are right.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numba
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cbtop.compute.decoder import FAMILIES, int8
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import interleaved
from cbtop.compute.decoder.plan import planned
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.jit import cpu
from cbtop.compute.kernels import linear_int8
from cbtop.compute.kernels.quantize_rows import empty_codes, quantize_rows, reference
from cbtop.compute.quantization import FORMATS, INTERLEAVABLE
from cbtop.compute.quantization import interleaved as interleaved_matrices
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from cbtop.compute.quantization.interleaved import InterleavedMatrix, can_interleave, interleave, rows_of
from cbtop.compute.settings import STATIC_CROSSOVERS, Crossovers, DecoderSettings, with_crossovers
from cbtop.compute.verification import SIZES
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.crossovers import NEVER
from tests.representatives import first_by_default

from .conftest import Norms

PROMPT = [3, 141, 59, 26, 5, 358, 97]


@given(
    code=st.sampled_from(list(INTERLEAVABLE)),
    groups=st.integers(1, 4),
    blocks=st.integers(1, 3),
    at_once_bytes=st.sampled_from([1, 8_000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_every_byte_is_found_where_it_was_put(
    code: int, groups: int, blocks: int, at_once_bytes: int, seed: int
) -> None:
    block_format = FORMATS[code]
    shape = 16 * groups, blocks * block_format.block_bytes
    data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    reordered = data.copy()
    with mock.patch.object(interleaved_matrices, "AT_ONCE_BYTES", at_once_bytes):
        interleave(block_format, reordered)
    np.testing.assert_array_equal(rows_of(block_format, reordered, np.arange(len(data))), data)
    np.testing.assert_array_equal(np.sort(reordered, axis=None), np.sort(data, axis=None))


@pytest.mark.parametrize("code", INTERLEAVABLE)
def test_a_units_bytes_are_those_of_a_block(code: int) -> None:
    units = INTERLEAVABLE[code].units
    assert sum(size * count * len(firsts) for size, count, firsts in units) == FORMATS[code].block_bytes


def test_only_whole_groups_of_a_format_with_units_are_interleaved() -> None:
    q4_k = FORMATS[12]
    assert can_interleave(QuantizedMatrix.of(q4_k, np.ones((32, 256), np.float32)))
    assert not can_interleave(QuantizedMatrix.of(q4_k, np.ones((33, 256), np.float32)))
    assert not can_interleave(QuantizedMatrix.of(F32, np.ones((32, 256), np.float32)))


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32))
@example([0.0] * 31 + [2.0**-126])  # The inverse of this block's scale is infinite.
@example([0.0] * 31 + [2.0**-149])
def test_rows_of_any_size_are_rounded_as_the_reference_rounds_them(values: list[float]) -> None:
    x = np.array([values], np.float32)
    found, expected = empty_codes(1, 32), empty_codes(1, 32)
    quantize_rows(x, *found)
    reference(x, *expected)
    codes, wanted = (one[0][0].view(np.int8).astype(int) for one in (found, expected))
    np.testing.assert_array_equal(codes, wanted)
    scale = float(found[1][0, 0])
    assert np.abs(codes * scale - x).max() <= 0.51 * scale + 1e-37
    sums = -scale * np.array([codes.sum(), codes[:16].sum(), codes[16:].sum()])
    np.testing.assert_allclose(found[1][0, 1:4], sums, rtol=1e-6, atol=1e-37)


def test_a_value_halfway_between_two_codes_is_rounded_as_by_the_reference() -> None:
    rng = np.random.default_rng(1)
    largest = rng.uniform(0.1, 10, (3, 64, 1)).astype(np.float32)
    halfway = (rng.integers(-126, 126, (3, 64, 32)) + 0.5) * largest / 127
    x = np.concatenate([largest, halfway[..., 1:].astype(np.float32)], axis=2).reshape(3, -1)
    found, expected = empty_codes(*x.shape), empty_codes(*x.shape)
    quantize_rows(x, *found)
    reference(x, *expected)
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize("sign", [1, -1])
# By default, test one format with blocks of 32 weights (code 8, Q8_0) and one format with blocks of 256 (code 14,
# Q6_K).
@pytest.mark.parametrize(
    "code", [code if code in (8, 14) else pytest.param(code, marks=pytest.mark.slow) for code in INTERLEAVABLE]
)
def test_sums_of_the_largest_weights_and_codes_fit(code: int, sign: int) -> None:
    block_format = FORMATS[code]
    # The row is so long that the kernel cannot sum up all products as integers before it converts them to float.
    columns = 1280
    levels = np.where(np.arange(columns) % 2, 1, 0.999).astype(np.float32)
    matrix = InterleavedMatrix.of(QuantizedMatrix.of(block_format, np.tile(sign * levels, (16, 1))))
    # Five tokens: a group of four, which is computed together, and a single one.
    x = np.ones((5, columns), np.float32) * np.array([[1], [-1], [1], [-1], [1]], np.float32)
    out, expected = np.zeros((5, 16), np.float32), np.zeros((5, 16), np.float32)
    arguments = code, matrix.data, np.zeros(0, np.float32), x
    scratch = linear_int8.Int8Scratch(*empty_codes(5, columns), 1, None)
    linear_int8.linear_int8(*arguments, out, scratch)
    linear_int8.reference(*arguments, expected, scratch)
    assert np.abs(expected).min() > 1250
    np.testing.assert_allclose(out, expected, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_none_of_what_its_token_is_multiplied_with(value: float) -> None:
    kernel = linear_int8.kernel_for(FORMATS[12], tokens=5)
    code, weights, bias, x, out, scratch = kernel.examples(np.random.default_rng(1), 9)
    x[2, 40] = value
    for run in (kernel.implementation, kernel.reference):
        out[:] = 0
        run(code, weights, bias, x, out, scratch)
        np.testing.assert_array_equal(np.isnan(out).all(axis=1), [False, False, True, False, False])
        assert np.isfinite(np.delete(out, 2, axis=0)).all()


def test_int8_products_differ_from_float64_by_activation_rounding(
    model_files: dict[str, Path], profiler: BrickProfiler
) -> None:
    # `mixtral` is left out, because rounding would make it choose other experts.
    for path in (model_files[family] for family in FAMILIES):
        expected = forward_reference(read_model(path, FAMILIES), PROMPT)[-1]
        errors = []
        for change in (lambda model: model, interleaved):
            decoder = Decoder(change(read_model(path, FAMILIES)), "numba", 1, profiler, 64, DecoderSettings("f32"))
            decoder.prefill(PROMPT)
            errors.append(np.abs(decoder.logits - expected).max() / np.abs(expected).max())
        assert errors[0] < 1e-5 < errors[1] < 0.03


@first_by_default("threads", [1, 2], 8)
def test_int8_bricks_pass_their_checks_and_repeat_the_next_token_and_logits(
    model: Model, decoder_for: Callable[[Model, int], Decoder], threads: int
) -> None:
    decoder = decoder_for(interleaved(model), threads)
    assert isinstance(decoder.model.layers[0].q.weight, InterleavedMatrix)
    assert [result for result in decoder.verify(PROMPT) if not result.passed] == []
    (kernel,) = decoder.bricks.layers[0].qkv.kernels
    assert kernel.name.endswith("_qkv_int8")
    token = decoder.prefill(PROMPT)
    logits = decoder.logits.copy()
    decoder.restart()
    assert decoder.prefill(PROMPT) == token
    np.testing.assert_array_equal(decoder.logits, logits)


def test_a_product_that_is_wrong_in_one_format_fails_its_check(
    model: Model, decoder_for: Callable[[Model, int], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_for(interleaved(model), 1)
    rounded = linear_int8.quantize_rows

    def coarse(x: np.ndarray, codes: np.ndarray, factors: np.ndarray) -> None:
        rounded(np.round(x, 1), codes, factors)

    monkeypatch.setattr(linear_int8, "quantize_rows", coarse)
    failed = {result.brick for result in decoder.verify(PROMPT) if not result.passed}
    down = "DownProjection" if model.experts is None else "MoeExperts"
    assert failed >= {"OutputProjection", down}
    # A model with RMSNorm has already rounded these inputs in its norm. Only a model with LayerNorm rounds them in
    # the product.
    is_rounded_here = Norms.of(model).brick == "LayerNorm"
    assert ["QkvProjection" in failed, "LmHead" in failed] == [is_rounded_here, is_rounded_here]


@pytest.mark.parametrize("model", ["llama", "gemma2"], indirect=True)
@pytest.mark.parametrize("what", ["codes", "factors"])
def test_a_norm_whose_codes_for_products_differ_from_its_output_fails(
    model: Model, decoder_for: Callable[[Model, int], Decoder], what: str
) -> None:
    decoder = decoder_for(interleaved(model), 1)
    for brick in (decoder.bricks.layers[1].attention_norm, decoder.bricks.final_norm):
        (kernel,) = brick.kernels
        right, place = kernel.implementation, kernel.contract.arguments.index(what)

        def wrong(*arguments: Any, right: Any = right, place: int = place) -> None:
            right(*arguments)
            arguments[place][0, 20] += arguments[place].dtype.type(1)  # Change the scale of one block of activations.

        brick.implementations = (wrong,)
    failed = {result.brick for result in decoder.verify(PROMPT) if not result.passed}
    assert failed == {"AddRmsNorm (fused)", "RmsNorm", "QkvProjection", "LmHead"}


# Features of a processor with AVX2 and without AVX-512, with LLVM's names.
FEATURES_WITH_AVX2 = "+sse4.2,+ssse3,+popcnt,+avx,+avx2,+fma,+f16c,+bmi2"
VNNI = "AVX-512 VNNI", "znver4", f"{FEATURES_WITH_AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni"
AVX512 = {"avx512f", "avx512vnni", "avx512bf16"}
AVX2, GENERIC = ("AVX2", "haswell", FEATURES_WITH_AVX2), ("generic", "generic", "")
needs_another = pytest.mark.skipif(
    not cpu.HAS_AVX2 or cpu.TIER == "AVX2", reason="AVX2 is what all kernels are compiled for here, or it has none"
)

# A program that tests rows of the table of `cbtop verify`: the first row of each kernel and peer, or all rows.
ON_ANY_PROCESSOR = """
import sys
from cbtop.compute.jit import cpu
from cbtop.compute.verification import PEERS, variants, verified
tier, sizes, is_whole, *names = sys.argv[1:]
assert cpu.TIER == tier and cpu.HAS_F16C == (tier != "generic")
rows = [one for one in variants() if one.kernel.name in names]
firsts = {(one.kernel.name, one.peer): one for one in reversed(rows)}
for one in rows if is_whole == "True" else firsts.values():
    found = verified(one, tuple(map(int, sizes.split(","))))
    assert found.passed and found.planted >= len(one.kernel.contract.output_faults), found
assert {name for name, _ in firsts} == set(names) and {peer for _, peer in firsts} == set(PEERS)
print("passed")
"""
# Attention is left out here, because it takes long. kv_write uses the same code for half precision.
ALONE = "attention", "embedding", "rms_norm", "swiglu"
# These kernels have separate code for some processors: half precision, and products of bytes.
BY_TIER = "kv_write", "f16_linear", "q8_0_linear_int8", "q8_0_gated_int8"


def of_format(name: str) -> tuple[str, ...]:
    return f"{name}_linear_int8", f"{name}_qkv_int8", f"{name}_gated_int8"


@pytest.mark.parametrize(
    ("tier", "formats", "is_whole"),
    [
        (GENERIC, [], False),
        pytest.param(AVX2, [], False, marks=needs_another),
        pytest.param(GENERIC, [FORMATS[code].name for code in INTERLEAVABLE], True, marks=pytest.mark.slow),
        pytest.param(
            AVX2, [FORMATS[code].name for code in INTERLEAVABLE], True, marks=[needs_another, pytest.mark.slow]
        ),
    ],
    ids=["generic", "AVX2", "generic, all kernels and formats", "AVX2, all kernels and formats"],
)
@pytest.mark.slow
def test_kernels_fused_and_apart_are_right_on_a_processor_that_can_do_less(
    tier: tuple[str, str, str], formats: list[str], is_whole: bool
) -> None:
    name, processor, features = tier
    # Numba's cache distinguishes processors, so the compiled code stays in the cache for later runs.
    environment = os.environ | {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
    of_formats = (kernel for one in formats for kernel in of_format(one.lower()))
    names = (*{*BY_TIER, *of_formats, *(ALONE if is_whole else ())},)
    sizes = ",".join(map(str, SIZES)) if is_whole else "7,200"
    command = [sys.executable, "-c", ON_ANY_PROCESSOR, name, sizes, str(is_whole), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr


MACHINE_CODE = """
import sys
from numba import types
from cbtop.compute.jit import cpu
from cbtop.compute.kernels import linear_int8
tier, code = sys.argv[1:]
assert cpu.TIER == tier
function, words = linear_int8.ROWS_OF[int(code)].function, types.Array(types.uint8, 2, "C")
numbers, bias = types.Array(types.float32, 2, "C"), types.Array(types.float32, 1, "C")
function.compile((words, bias, words, numbers, numbers, types.int64, types.int64))
print(next(iter(function.inspect_asm().values())))
"""


def machine_code_of(code: int, tier: tuple[str, str, str]) -> str:
    """Return the machine code of a product for another processor. This code must not run here.

    `code` is the format of the weights.
    """
    name, processor, features = tier
    environment = os.environ | {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": os.devnull,  # Compile without a cache, because code from the cache has no assembly text.
    }
    command = [sys.executable, "-c", MACHINE_CODE, name, str(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("told", [{"NUMBA_CPU_FEATURES": "-avx2,-f16c"}, {"NUMBA_ENABLE_AVX": "0"}])
@pytest.mark.slow
def test_a_product_is_compiled_without_the_features_that_numba_disables(told: dict[str, str]) -> None:
    """With these settings, LLVM once ended the process instead of raising an error."""
    environment = os.environ | told | {"NUMBA_CACHE_DIR": os.devnull}
    command = [sys.executable, "-c", MACHINE_CODE, "generic", "8"]  # Format 8 is Q8_0, which compiles fastest.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("told", "lacks"),
    [
        ("", set()),
        ("+popcnt", set()),
        ("-avx2", {"avx2", *AVX512}),
        ("-f16c", {"f16c", *AVX512}),
        ("-avx", {"avx", "f16c", "avx2", *AVX512}),
        ("-avx,+avx2", {"avx", "f16c", *AVX512}),
        ("+avx2,-avx2", {"avx2", *AVX512}),
        ("-neon", {"neon", "sve"}),
        ("-amx-tile", {"amx-tile", "amx-bf16"}),
    ],
)
def test_what_llvm_is_told_that_this_processor_lacks_goes_with_what_needs_it(
    told: str, lacks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", None)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", told)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: dict.fromkeys(cpu.FEATURES, True))
    assert {feature for feature in cpu.FEATURES if not cpu.has_feature(feature)} == lacks


@pytest.mark.slow  # The default run skips this test, because it checks the speed of the code, not its results.
@pytest.mark.parametrize(
    ("code", "one_token"),
    [
        pytest.param(13, 8, id="Q5_K"),
        pytest.param(14, 8, id="Q6_K", marks=pytest.mark.slow),
        pytest.param(11, 16, id="Q3_K", marks=pytest.mark.slow),
        pytest.param(10, 16, id="Q2_K", marks=pytest.mark.slow),
    ],
)
def test_machine_code_goes_through_a_block_in_a_loop_of_few_loads(code: int, one_token: int) -> None:
    # In the code for one token, the number of products differs by format. The code for four tokens is a loop with 32
    # products. Without a loop, the code for one token would have 64.
    four_tokens = 4 * 8
    assert machine_code_of(code, VNNI).count("vpdpbusd") == one_token + four_tokens


@pytest.mark.slow  # The default run skips this test, because tests above already run the kernels for AVX2.
@pytest.mark.parametrize(
    ("code", "four_tokens"),
    [(12, 64), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((8, 96), (13, 64), (14, 64)))],
    ids=["Q4_K", "Q8_0", "Q5_K", "Q6_K"],
)
def test_machine_code_for_avx2_multiplies_pairs_and_has_nothing_of_avx_512(code: int, four_tokens: int) -> None:
    text = machine_code_of(code, AVX2)
    assert "vpmaddubsw" in text
    assert "vpmaddwd" in text
    assert "vpdpbusd" not in text
    assert "zmm" not in text
    # An iteration of the loop has two or four products per token. LLVM may put two iterations into one and compile
    # the last one separately. Without a loop, a block of Q4_K would have 128 products for one token.
    assert text.count("vpmaddubsw") - four_tokens <= 16


@pytest.mark.parametrize(
    ("tier", "is_exact", "kind"),
    [
        ("generic", False, QuantizedMatrix),
        ("AVX2", False, InterleavedMatrix),
        ("AVX-512 VNNI", False, InterleavedMatrix),
        ("AVX-512 VNNI", True, QuantizedMatrix),
    ],
)
def test_a_model_is_interleaved_where_the_processor_multiplies_integers_fast(
    tier: str, is_exact: bool, kind: type, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "TIER", tier)
    model = int8.model_to_run(model_files["llama"], is_exact=is_exact)
    assert isinstance(model.layers[0].q.weight, kind)


@pytest.mark.parametrize(("wanted", "least"), [(1, 1), (20_000, 20_000), (NEVER, NEVER)])
@pytest.mark.parametrize("tier", ["generic", "AVX2"])
def test_matrices_from_the_measured_size_on_stay_plain_and_the_plan_agrees(
    tier: str,
    wanted: int,
    least: int,
    model_files: dict[str, Path],
    profiler: BrickProfiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int8, "TIER", tier)
    if tier == "generic" and wanted == NEVER:
        least = 1  # On an unknown processor, weights are always multiplied as floats.
    assert STATIC_CROSSOVERS.exact_bytes == NEVER
    assert int8.exact_bytes() == (1 if tier == "generic" else NEVER)
    with with_crossovers(Crossovers(measured=frozenset({"exact_bytes"}))):
        assert int8.exact_bytes() == NEVER
    with with_crossovers(Crossovers(exact_bytes=wanted)):
        model = int8.model_to_run(model_files["llama"])
        plan = {(one.brick, one.kernel) for one in planned(model_files["llama"], "cpu")}
    layer = model.layers[0]
    for matrix in (layer.q.weight, layer.k.weight, layer.down.weight, model.lm_head):
        assert isinstance(matrix, InterleavedMatrix) == (matrix.size_bytes < least), matrix.size_bytes
    decoder = Decoder(model, "numba", 1, profiler, 64)
    assert [result for result in decoder.verify(PROMPT) if not result.passed] == []
    assert plan >= {(brick.spec.name, kernel.name) for brick in (decoder.bricks.lm_head,) for kernel in brick.kernels}
