"""Tests of all CUDA kernels on a simulated GPU: each gives the result of its reference.

The simulation finds planted faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.cuda import gemm
from cbtop.compute.cuda.launches import CudaLaunch, CudaModule, line
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.on_gpu import GpuMachine, host_matrices, model_on
from cbtop.compute.decoder.plan import planned
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.arguments import run_on
from cbtop.compute.gpu.checks import checked
from cbtop.compute.gpu.device import BrickLaunches
from cbtop.compute.gpu.passes import LaunchedPass
from cbtop.compute.jit.halves import from_bits
from cbtop.compute.kernels.activation import GEGLU, SWIGLU
from cbtop.compute.kernels.base import Arguments, Kernel, floats, with_copies
from cbtop.compute.kernels.kv_caches import empty_caches, keys_of
from cbtop.compute.kernels.kv_write import kernel_for
from cbtop.compute.kernels.layer_norm import LAYER_NORM
from cbtop.compute.kernels.linear_bf16 import ROUND, ROUND_ROWS
from cbtop.compute.kernels.quantize_rows import BLOCK, QUANTIZE_ROWS, empty_codes
from cbtop.compute.kernels.rms_norm import RMS_NORM
from cbtop.compute.kernels.rope import ROPE_NEOX, ROPE_NORMAL, angle_table, together
from cbtop.compute.kernels.sampling import DRAWN, GREEDY
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.floats import F16
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.quantization.q8_0 import Q8_0
from cbtop.compute.verification import Variant, variants_on_gpu, verified
from cbtop.profiler.profiler import BrickProfiler
from tests.compute import cuda_on_cpu
from tests.compute.cuda_on_cpu import CpuAsGpu
from tests.compute.test_cuda_kernels import error_of_product
from tests.compute.test_on_gpu import MIXTURES, NORMS, PROMPT, of_family, off, sums_and_norms, weights_of
from tests.representatives import each_value_once, first_by_default

SIZES = (7, 32)
QUICK = ("add_rms_norm", "combine", "embedding", "greedy", "drawn", "kv_write", "layer_norm", "quantize_rows",
    "residual_add", "rms_norm", "rope_neox", "rope_normal", "route", "soft_cap", "swiglu", "take_rows")  # fmt: skip
QUICK_PRODUCTS = ("q4_k_linear_int8", "q6_k_linear_int8", "q8_0_linear_int8", "q4_k_q6_k_gated_int8",
    "q4_k_q6_k_qkv_int8", "q4_k_linear", "q4_k_expert_gated", "q4_k_expert_linear", "q4_k_expert_linear_int8",
    "q4_k_q6_k_expert_gated_int8")  # fmt: skip


@pytest.fixture(scope="module")
def gpu() -> CpuAsGpu:
    try:
        return CpuAsGpu()
    except ComputeError as error:
        pytest.skip(str(error))


def is_quick(name: str, how: str) -> bool:
    """Return whether a default run tests this kernel in this case. g++ needs about one second for a module."""
    if name == "attention":
        return how in ("1 token, f16 cache", "6 tokens, f16 cache")
    return name in QUICK or (name in QUICK_PRODUCTS and how.startswith(("1 token", "3 experts")))


VARIANTS = [
    pytest.param(one, id=" ".join(key), marks=() if is_quick(*key) else (pytest.mark.slow,))
    for one in variants_on_gpu()
    for key in [(one.kernel.name, one.how)]
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cuda_version_on_the_host_agrees_with_its_reference(variant: Variant, gpu: CpuAsGpu) -> None:
    found = verified(variant, SIZES, partial(run_on, gpu))
    assert (found.failed, found.missed) == ((), ())


@first_by_default(
    ("top_k", "top_p", "weird"),
    each_value_once([(0, 1.0, np.nan), (0, 1.0, np.inf), (5, 0.9, np.nan), (5, 0.9, np.inf), (5, 0.9, -np.inf)]),
)
def test_a_non_finite_logit_draws_no_token_and_the_next_draw_is_right(
    weird: float, top_k: int, top_p: float, gpu: CpuAsGpu
) -> None:
    logits, out, expected = floats(np.random.default_rng(1), 1, 700), np.zeros(1, np.int64), np.zeros(1, np.int64)
    right = logits[0, 77]
    logits[0, 77] = weird
    run_on(gpu, DRAWN, (logits, 0.8, top_k, top_p, 3, 7, 1, out))  # type: ignore[arg-type]
    assert out[0] >= 700  # This is no valid token, so the decoder rejects it.
    logits[0, 77] = right
    run_on(gpu, DRAWN, (logits, 0.8, top_k, top_p, 3, 7, 1, out))  # type: ignore[arg-type]
    DRAWN.reference(logits, 0.8, top_k, top_p, 3, 7, 1, expected)
    assert out[0] == expected[0]


@pytest.mark.parametrize("weird", [np.nan, -np.nan, np.inf, -np.inf], ids=["nan", "-nan", "inf", "-inf"])
def test_a_non_finite_logit_chooses_no_token_and_the_next_choice_is_right(weird: float, gpu: CpuAsGpu) -> None:
    logits, out = floats(np.random.default_rng(1), 1, 700), np.zeros(1, np.int64)
    right = logits[0, 77]
    logits[0, 77] = weird
    run_on(gpu, GREEDY, (logits, out))  # type: ignore[arg-type]
    assert out[0] == 700  # This is no valid token, so the decoder rejects it.
    logits[0, 77] = right
    run_on(gpu, GREEDY, (logits, out))  # type: ignore[arg-type]
    assert out[0] == logits.argmax()


def long_products() -> Iterator[Any]:
    """Yield products with long rows. One warp or several warps compute a row, and the last warp has less work."""
    for columns in (3584, 9216, 18944):
        for name, formats, is_int8, quick in (
            ("linear", (Q4_K,), True, (9216,)),
            ("linear", (Q6_K,), True, (18944,)),
            ("linear", (Q8_0,), True, ()),
            ("linear", (Q4_K,), False, ()),
            ("linear", (F16,), False, ()),
            ("qkv", (Q4_K, Q4_K, Q6_K), True, (3584,)),
            ("qkv", (Q8_0, Q8_0, Q8_0), True, ()),
            ("gated", (Q4_K, Q6_K), True, (9216,)),
            ("gated", (Q8_0, Q8_0), True, ()),
            ("gated", (Q4_K, Q4_K), False, ()),
        ):
            for tokens in (1, 3, 8):
                is_default = tokens == 1 and columns in quick
                label = f"{name} {' '.join(one.name for one in formats)} {columns} {tokens} {is_int8}"
                marks = () if is_default else (pytest.mark.slow,)
                yield pytest.param(name, formats, columns, tokens, is_int8, id=label, marks=marks)


@pytest.mark.parametrize(("name", "formats", "columns", "tokens", "is_int8"), [*long_products()])
def test_products_of_rows_shared_by_several_warps_agree_with_their_reference(
    name: str, formats: Sequence[BlockFormat], columns: int, tokens: int, is_int8: bool, gpu: CpuAsGpu
) -> None:
    assert error_of_product(name, formats, columns, tokens, is_int8, gpu) <= 1


def error_of_norm(kernel: Kernel, hidden: int, gpu: CpuAsGpu, *, has_bias: bool = True) -> float:
    """Return the largest error of a norm, divided by the tolerance of its contract."""
    rng = np.random.default_rng(hidden)
    x, weights = floats(rng, 2, hidden) + np.float32(1), weights_of(kernel, rng, hidden)
    if not has_bias:
        weights = *weights[:-1], np.zeros(0, np.float32)
    arguments = x, *weights, 1e-6, np.zeros_like(x)
    expected = with_copies(arguments, kernel.outputs)
    kernel.reference(*expected)
    run_on(gpu, kernel, arguments)
    error = np.abs(arguments[-1] - expected[-1]).max() / np.abs(expected[-1]).max()
    return float(error / kernel.contract.tolerance)


# The threads share a row in different ways: single numbers (7), groups of four in registers, idle threads, and rows
# that are too long for registers.
@NORMS
@pytest.mark.parametrize("hidden", [7, 40, 768, 3584, 8192, 8256])
def test_a_norm_agrees_with_its_reference_however_its_threads_share_a_row(
    kernel: Kernel, hidden: int, gpu: CpuAsGpu
) -> None:
    assert error_of_norm(kernel, hidden, gpu) <= 1


@pytest.mark.parametrize("hidden", [7, 40])
def test_a_layer_norm_without_a_bias_agrees_with_its_reference(hidden: int, gpu: CpuAsGpu) -> None:
    assert error_of_norm(LAYER_NORM, hidden, gpu, has_bias=False) <= 1


def with_codes(kernel: Kernel, *arguments: Any) -> Sequence[CudaLaunch]:
    assert kernel.cuda is not None
    assert kernel.cuda.with_codes is not None
    return kernel.cuda.with_codes(*arguments)


def codes_of_norm(kernel: Kernel, hidden: int, rows: int, gpu: CpuAsGpu) -> tuple[list[Any], list[Any]]:
    """Return the actual and the expected results of the fused kernel (output, int8 codes, factors).

    The expected results come from a norm and then quantize_rows.
    """
    rng = np.random.default_rng(hidden)
    weights = weights_of(kernel, rng, hidden)
    for one in weights:
        one[:32], one[37] = 0, 1e-42
    x, *by = (gpu.array(one) for one in (floats(rng, rows, hidden), *weights))
    found, expected = (
        [gpu.zeros((rows, hidden), np.float32), gpu.zeros((rows, hidden), "u1"), gpu.zeros((rows, hidden // 8), "f4")]
        for _ in range(2)
    )
    for one in with_codes(kernel, x, *by, 1e-6, *found):
        gpu.launch(one)
    gpu.run(kernel, x, *by, 1e-6, expected[0])
    gpu.run(QUANTIZE_ROWS, *expected)
    return found, expected


@NORMS
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hidden", [64, 768, 3584, 8192, 8256])
def test_codes_that_a_norm_makes_are_to_the_bit_those_of_its_output(
    kernel: Kernel, hidden: int, rows: int, gpu: CpuAsGpu
) -> None:
    for one, other in zip(*codes_of_norm(kernel, hidden, rows, gpu), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hidden", [64, 3584, 8256])
def test_a_sum_and_its_norm_in_one_launch_equal_two_launches_bit_for_bit(
    hidden: int, rows: int, gpu: CpuAsGpu
) -> None:
    fused, apart = sums_and_norms(gpu, rows, hidden)
    for one, other in zip(fused, apart, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(np.any(one) for one in fused)


@NORMS
@pytest.mark.parametrize("weird", [np.nan, np.inf, 3e38])
def test_a_norm_marks_blocks_that_are_not_finite_as_quantize_rows_does(
    kernel: Kernel, weird: float, gpu: CpuAsGpu
) -> None:
    x, weights = np.ones((1, 128), np.float32), weights_of(kernel, np.random.default_rng(1), 128)
    x[0, 5], weights[0][70] = 40, weird
    given, by = gpu.array(x), [gpu.array(one) for one in weights]
    codes, factors = (gpu.array(one) for one in empty_codes(1, 128))
    for one in with_codes(kernel, given, *by, 1e-6, gpu.zeros((1, 128), np.float32), codes, factors):
        gpu.launch(one)
    out, expected = np.zeros((1, 128), np.float32), empty_codes(1, 128)
    run_on(gpu, kernel, (x, *weights, 1e-6, out))
    QUANTIZE_ROWS.implementation(out, *expected)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(factors, expected[1])


@NORMS
@pytest.mark.parametrize("hidden", [130, 128], ids=["in parts", "in registers"])
def test_the_norm_of_a_row_whose_squares_float32_cannot_add_up_is_nan(
    kernel: Kernel, hidden: int, gpu: CpuAsGpu
) -> None:
    rng = np.random.default_rng(1)
    x, weights, out = floats(rng, 2, hidden), weights_of(kernel, rng, hidden), np.zeros((2, hidden), np.float32)
    x[1, 7] = 1e30
    run_on(gpu, kernel, (x, *weights, 1e-6, out))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    if hidden % BLOCK == 0:
        codes, factors = (gpu.array(one) for one in empty_codes(2, hidden))
        by = [gpu.array(one) for one in weights]
        for one in with_codes(kernel, gpu.array(x), *by, 1e-6, gpu.zeros((2, hidden), np.float32), codes, factors):
            gpu.launch(one)
        assert np.isfinite(factors[0]).all()
        assert np.isnan(factors[1, ::4]).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.float32], ids=["f16", "f32"])
def test_what_a_cache_cannot_hold_is_nan_there(dtype: Any, gpu: CpuAsGpu) -> None:
    k, v = np.ones((1, 64), np.float32), np.ones((1, 64), np.float32)
    k[0, 3], v[0, 5] = np.inf, -np.inf
    if dtype == np.uint16:
        k[0, 4], v[0, 6] = 65520, 65519
    caches = empty_caches(2, 4, 32, dtype)
    run_on(gpu, kernel_for(dtype), (k, v, 1, *caches))
    keys, values = keys_of(caches[0])[:, 1].reshape(-1), from_bits(caches[1])[:, 1].reshape(-1)
    assert np.flatnonzero(np.isnan(keys)).tolist() == ([3, 4] if dtype == np.uint16 else [3])
    assert np.flatnonzero(np.isnan(values)).tolist() == [5]
    assert not np.isinf(keys).any()
    assert not np.isinf(values).any()


@pytest.mark.parametrize("hidden", [64, 3584, 8256])
@pytest.mark.parametrize("kernel", [RMS_NORM, LAYER_NORM, SWIGLU, GEGLU], ids=lambda kernel: kernel.name)
def test_rounding_inside_a_kernel_equals_rounding_its_output_bit_for_bit(
    kernel: Kernel, hidden: int, gpu: CpuAsGpu
) -> None:
    rng = np.random.default_rng(hidden)
    x, out = floats(rng, 13, hidden), np.zeros((13, hidden), np.float32)
    x[3, 5], x[4, :8] = np.nan, 3e38
    weights = weights_of(kernel, rng, hidden)
    given = (x, *weights, 1e-6, out) if weights else (x, floats(rng, 13, hidden), out)
    moved = [gpu.array(one) if isinstance(one, np.ndarray) else one for one in given]
    rounded, expected = (gpu.zeros((x.size,), np.uint16) for _ in range(2))
    assert kernel.cuda is not None
    assert kernel.cuda.with_bf16 is not None
    for one in kernel.cuda.with_bf16(*moved, rounded):
        gpu.launch(one)
    run_on(gpu, kernel, given)
    np.testing.assert_array_equal(moved[-1], given[-1])
    gpu.launch(CudaLaunch(ROUND, ROUND_ROWS, *line(x.size // 8, 1), (moved[-1], expected, np.int64(x.size // 8))))
    np.testing.assert_array_equal(rounded, expected)
    assert np.any(rounded)


def test_rows_are_rounded_to_the_bit_as_on_the_cpu_whatever_is_in_them(gpu: CpuAsGpu) -> None:
    rng = np.random.default_rng(1)
    x = floats(rng, 9, 64)
    x[0], x[1], x[2, 40], x[3, 3], x[4, 63] = 0, -0.0, np.nan, np.inf, -np.inf
    x[5] *= np.float32(1e-41)  # becomes subnormal
    x[6, :32], x[6, 32:] = 1e-38, 3e38
    x[7] = np.arange(64) * 0.5 - 16  # Each of these numbers is exactly between two int8 codes.
    x[7, 0] = 127
    found, expected = empty_codes(9, 64), empty_codes(9, 64)
    run_on(gpu, QUANTIZE_ROWS, (x, *found))
    QUANTIZE_ROWS.implementation(x, *expected)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kernel", [ROPE_NORMAL, ROPE_NEOX], ids=lambda one: one.name)
def test_queries_and_keys_that_rotate_in_one_launch_do_as_in_two(kernel: Any, tokens: int, gpu: CpuAsGpu) -> None:
    assert error_of_rotation(kernel, tokens, gpu) < 1e-6


def error_of_rotation(kernel: Any, tokens: int, gpu: CpuAsGpu) -> float:
    rng, head_dim, start = np.random.default_rng(tokens), 20, 4
    table = angle_table(9, 1e4 ** (-np.arange(8) / 8))  # only a part of each head is rotated
    both = floats(rng, tokens, 14 * head_dim), floats(rng, tokens, 2 * head_dim)
    neox = kernel is ROPE_NEOX
    moved = [gpu.array(one) for one in both]
    how = gpu.array(np.array([start], np.int32)), gpu.array(table), neox
    for one in together(*((x, head_dim, *how) for x in moved)):
        gpu.launch(one)
    for x in both:
        kernel.reference(x, head_dim, start, table, neox)
    return max(float(np.abs(one - other).max()) for one, other in zip(moved, both, strict=True))


def test_threads_that_run_backwards_make_the_same(gpu: CpuAsGpu) -> None:
    backwards = CpuAsGpu(is_reversed=True)
    assert error_of_product("linear", (Q4_K,), 9216, 1, True, backwards) <= 1
    for kernel in (RMS_NORM, LAYER_NORM):
        for one, other in zip(*(codes_of_norm(kernel, 3584, 3, on)[0] for on in (backwards, gpu)), strict=True):
            np.testing.assert_array_equal(one, other)


# --- a pass of a decoder --------------------------------------------------------------------------------------------


def decoder_on(gpu: CpuAsGpu, path: Path, *, is_exact: bool) -> Decoder:
    return decoder_of(gpu, read_model(path, FAMILIES), is_exact=is_exact)


def decoder_of(gpu: CpuAsGpu, model: Model, *, is_exact: bool) -> Decoder:
    on = model_on(gpu, model, is_exact=is_exact)
    return Decoder(on, "cuda", 1, BrickProfiler(enabled=False), 64, machine=GpuMachine(gpu, 64))


def pass_of(gpu: CpuAsGpu, decoder: Decoder, tokens: Sequence[int]) -> list[str]:
    """Run a pass as GpuDecoder launches it, with fused kernels. Return the entries of its launches."""
    takes_int8 = decoder.model.layers[0].q.weight.takes_int8
    ran = LaunchedPass(gpu, None, decoder.int8_scratch if takes_int8 else None)
    decoder.plan(tokens, ran.run, ran.layer)
    return [one.what.name for one in ran.launched]


def kernel_by_kernel(gpu: CpuAsGpu, decoder: Decoder, tokens: Sequence[int]) -> None:
    """Run a pass without fusing: each kernel has its own launch."""

    def run(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
        for kernel, arguments in zip(brick.kernels, calls, strict=True):
            gpu.run(kernel, *arguments)

    def layer(index: int) -> AbstractContextManager[None]:
        return nullcontext()

    decoder.plan(tokens, run, layer)


@pytest.mark.parametrize("is_exact", [pytest.param(True, marks=pytest.mark.slow), False], ids=["exact", "int8"])
@pytest.mark.parametrize(
    "family",
    [one if one == "qwen2" else pytest.param(one, marks=pytest.mark.slow) for one in (*FAMILIES, "mixtral")],
)
def test_logits_of_a_pass_agree_with_a_float64_pass_and_kernels_one_by_one(
    family: str, is_exact: bool, model_files: dict[str, Path], gpu: CpuAsGpu
) -> None:
    model = of_family(family, model_files)
    expected = forward_reference(model, PROMPT, 64)
    decoder, other = (decoder_of(gpu, model, is_exact=is_exact) for _ in range(2))
    found = []
    for tokens in (PROMPT[:-2], PROMPT[-2:-1], PROMPT[-1:]):
        pass_of(gpu, decoder, tokens)
        kernel_by_kernel(gpu, other, tokens)
        np.testing.assert_array_equal(decoder.logits, other.logits)
        found.append(decoder.logits.copy())
    offs = [off(*both) for both in zip(found, expected[-3:], strict=True)]
    assert max(offs) < (2e-3 if is_exact else 0.12)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_token_of_a_mixture_launches_what_the_plan_says(
    family: str, model_files: dict[str, Path], gpu: CpuAsGpu
) -> None:
    names = pass_of(gpu, decoder_on(gpu, model_files[family], is_exact=False), [1])
    assert names == [one.kernel for one in planned(model_files[family], "cuda") for _ in range(one.launches)]
    assert names.count("route") == names.count("expert_gated_in_turn") == names.count("combine") > 0


@pytest.mark.parametrize(("family", "norm"), [("qwen2", "rms_norm_int8"), ("stablelm", "layer_norm_int8")])
def test_a_pass_launches_what_the_plan_says(
    family: str, norm: str, model_files: dict[str, Path], gpu: CpuAsGpu
) -> None:
    decoder = decoder_on(gpu, model_files[family], is_exact=False)
    names, layers = pass_of(gpu, decoder, [1]), len(decoder.model.layers)
    plan = planned(model_files[family], "cuda")
    assert names == [one.kernel for one in plan for _ in range(one.launches)]
    assert sum(name.endswith(norm) for name in names) == 2 * layers + 1
    assert names.count("add_rms_norm_int8") == (2 * layers - 1 if norm == "rms_norm_int8" else 0)
    # The outputs of attention and of the gated activation are quantized in separate launches.
    assert names.count("quantize_rows") == 2 * layers


@pytest.mark.slow
@pytest.mark.parametrize("is_exact", [pytest.param(True, marks=pytest.mark.slow), False], ids=["exact", "int8"])
@pytest.mark.parametrize(
    "family", [MIXTURES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in MIXTURES[1:])]
)
def test_every_brick_of_a_mixture_passes_its_checks(
    family: str, is_exact: bool, model_files: dict[str, Path], gpu: CpuAsGpu
) -> None:
    decoder = decoder_on(gpu, model_files[family], is_exact=is_exact)
    matrices = host_matrices(decoder.model)
    findings = []
    for tokens in (PROMPT[:-1], PROMPT[-1:]):
        launches = BrickLaunches(None if is_exact else decoder.int8_scratch)

        def run(brick: ComputeBrick, elements: int, *calls: Arguments, by: BrickLaunches = launches) -> None:
            findings.extend(checked(gpu, matrices, by, brick, calls))

        decoder.plan(tokens, run, lambda index: nullcontext())
    assert {brick for brick, _, _ in findings} >= {"MoeRouter", "MoeExperts", "MoeCombine"}
    assert [(brick, what) for brick, what, found in findings if not found.passed] == []


def test_a_check_finds_a_nan_in_a_row_that_no_reference_computes(
    model_files: dict[str, Path], gpu: CpuAsGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], is_exact=False)
    launch, findings = gpu.launch, []

    def run(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
        def faulty(one: CudaLaunch) -> None:
            launch(one)
            if brick is decoder.bricks.lm_head:
                calls[0][4][0, 1] = np.nan

        monkeypatch.setattr(gpu, "launch", faulty)
        launches = BrickLaunches(decoder.int8_scratch)
        findings.extend(checked(gpu, host_matrices(decoder.model), launches, brick, calls))

    decoder.plan([1], run, lambda index: nullcontext())
    failed = [(brick, what) for brick, what, found in findings if not found.passed]
    assert failed == [("LmHead", "finite"), ("Sampling", "equals reference")]  # no token is chosen then


@pytest.mark.slow
def test_a_prompt_of_a_mixture_in_bfloat16_has_the_logits_of_a_float64_pass(
    model_files: dict[str, Path], gpu: CpuAsGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "_run", cuda_on_cpu.bf16_product)
    model, tokens = of_family("mixtral", model_files), [7 * place % 300 for place in range(14)]
    decoder = decoder_of(gpu, model, is_exact=False)
    names = pass_of(gpu, decoder, tokens)
    assert model.experts is not None
    assert names.count("take_rows") == model.experts.count * len(model.layers)
    assert names.count("cublas_gemm_bf16") >= 3 * names.count("take_rows")
    assert off(decoder.logits, forward_reference(model, tokens, 64)[-1]) < 0.12


# --- planted faults are found ---------------------------------------------------------------------------------------


class Faulty(CpuAsGpu):
    """A simulated GPU that plants a fault: it replaces `old` by `new` in all modules before it compiles them."""

    def __init__(self, old: str, new: str, *, is_reversed: bool = False) -> None:
        super().__init__(is_reversed=is_reversed)
        self._old, self._new = old, new

    def source(self, module: CudaModule) -> str:
        """Return the source with `old` replaced by `new`. A module without `old` stays as it is."""
        return module.source.replace(self._old, self._new)


@pytest.fixture
def faulty(gpu: CpuAsGpu) -> type[Faulty]:
    """Return the class `Faulty`. The fixture `gpu` skips the test if there is no compiler."""
    return Faulty


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("apart = 4; apart; apart /= 2) largest", "apart = 2; apart; apart /= 2) largest"),
        ("sum += __shfl_xor_sync(~0u, sum, 2);", ""),
        ("codes += (int64_t)blockIdx.x * (hidden / 4);", ""),
        ("if (at % 8 == 0) factors", "if (at % 16 == 0) factors"),
    ],
    ids=["distance", "exchange", "row", "factors"],
)
def test_a_norm_whose_codes_are_wrong_is_found(old: str, new: str, faulty: type[Faulty]) -> None:
    found, expected = codes_of_norm(RMS_NORM, 64, 3, faulty(old, new))
    assert not all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("own[n].w - mean);", "own[n].w);"),
        ("if (threadIdx.x + n * blockDim.x < fours)\n", ""),
        ("sum += own[n].x + own[n].y", "sum += own[n].y"),
        ("+ more[n].z;", ";"),
        ("(x[i] - mean) * (x[i] - mean)", "x[i] * x[i]"),
        ("+ (bias ? bias[i] : 0.0f)", ""),
    ],
    ids=["mean", "behind the row", "sum", "bias", "mean of a long row", "bias of a long row"],
)
def test_a_layer_norm_that_is_wrong_is_found(old: str, new: str, faulty: type[Faulty]) -> None:
    assert max(error_of_norm(LAYER_NORM, hidden, faulty(old, new)) for hidden in (40, 8256)) > 100


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sum + (matrix.bias ? matrix.bias[row] : 0.0f)", "sum"),
        ("if (other > row) write_row", "if (false) write_row"),
        ("own[threadIdx.x / 32] = sum;\n        __syncthreads();", "own[threadIdx.x / 32] = sum;"),
    ],
    ids=["bias", "row", "barrier"],
)
def test_a_product_that_is_wrong_is_found(old: str, new: str, faulty: type[Faulty]) -> None:
    assert error_of_product("linear", (Q4_K,), 9216, 1, True, faulty(old, new)) > 1


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("q4_k_expert_linear_int8", "experts[blockIdx.z] *", "blockIdx.z *"),
        ("q4_k_expert_linear_int8", "factors + blockIdx.z * (x_step / 8)", "factors"),
        ("q4_k_expert_linear", "x + blockIdx.z * x_step", "x"),
        ("q4_k_expert_gated", "out + (int64_t)blockIdx.z * gate_rows", "out"),
        ("route", "experts[at] = e;", "experts[at] = at;"),
        ("route", "other_value == best_value && other < best", "other_value == best_value && other > best"),
        ("route", "tokens[at] = pair / used;", "tokens[at] = pair % used;"),
    ],
)
def test_experts_that_are_mixed_up_are_found(name: str, old: str, new: str, faulty: type[Faulty]) -> None:
    variant = next(one for one in variants_on_gpu() if one.kernel.name == name)
    kernel = variant.kernel
    arguments = kernel.examples(np.random.default_rng(1), 7)
    if name == "route":
        arguments[0][:] = np.round(arguments[0])  # Round the logits of the router, so that some of them are equal.
    expected = with_copies(arguments, kernel.outputs)
    kernel.reference(*expected)
    run_on(faulty("no such text", ""), kernel, arguments)
    for at in kernel.outputs:
        np.testing.assert_allclose(arguments[at], expected[at], atol=1e-3)
    run_on(faulty(old, new), kernel, arguments)
    assert any(not np.allclose(arguments[at], expected[at], atol=1e-3) for at in kernel.outputs)


def test_a_context_of_one_token_has_room_for_activations_of_all_its_experts(
    model_files: dict[str, Path], gpu: CpuAsGpu
) -> None:
    model = model_on(gpu, of_family("qwen3moe", model_files), is_exact=False)
    decoder = Decoder(model, "cuda", 1, BrickProfiler(enabled=False), 1, machine=GpuMachine(gpu, 64))
    assert model.experts is not None
    assert model.experts.used * model.feed_forward > model.hidden
    pass_of(gpu, decoder, [1])  # If the scratch were too small, a launch would write outside its array and fail.


@pytest.mark.parametrize("old", ["x = other;", "columns = other_columns;"])
def test_a_rotation_of_keys_by_what_belongs_to_queries_is_found(old: str, faulty: type[Faulty]) -> None:
    assert error_of_rotation(ROPE_NEOX, 3, faulty(old, "")) > 1e-3


def test_a_rotation_that_writes_behind_the_keys_is_found(faulty: type[Faulty]) -> None:
    with pytest.raises(ComputeError, match="rope of rope: it wrote beside an array"):
        error_of_rotation(ROPE_NEOX, 3, faulty("each -= size;", ""))


EVERY_OTHER = r"""
KERNEL every_other(int* out STAMP)
{
    ENTER
    if (threadIdx.x % 2) BARRIER
    out[threadIdx.x] = threadIdx.x;
    LEAVE
}
"""
NEIGHBOUR = r"""
KERNEL neighbour(int* out STAMP)
{
    ENTER
    __shared__ int numbers[64];
    numbers[threadIdx.x] = threadIdx.x;
    BARRIER
    out[threadIdx.x] = numbers[threadIdx.x ^ 32];
    LEAVE
}
"""


def launched(gpu: CpuAsGpu, entry: str, source: str, *arguments: Any) -> None:
    gpu.launch(CudaLaunch(CudaModule(entry, source), entry, (2, 1, 1), (64, 1, 1), arguments))


def test_an_exchange_that_half_a_warp_does_not_come_to_is_refused(gpu: CpuAsGpu) -> None:
    source = EVERY_OTHER.replace("BARRIER", "warp_sum(1);\n    else __syncthreads();")
    with pytest.raises(ComputeError, match="every_other of every_other: threads wait for ones that never come"):
        launched(gpu, "every_other", source, gpu.zeros(64, np.int32))


def test_who_has_returned_is_waited_for_no_more(gpu: CpuAsGpu) -> None:
    out = gpu.zeros(64, np.int32)
    launched(gpu, "every_other", EVERY_OTHER.replace("BARRIER", "__syncthreads();"), out)
    assert out.tolist() == [*range(64)]


@pytest.mark.parametrize("is_reversed", [False, True])
def test_what_no_barrier_keeps_in_order_differs_by_the_order_of_threads(is_reversed: bool, gpu: CpuAsGpu) -> None:
    expected = [one ^ 32 for one in range(64)]
    here = CpuAsGpu(is_reversed=is_reversed)
    found, raced = here.zeros(64, np.int32), here.zeros(64, np.int32)
    launched(here, "neighbour", NEIGHBOUR.replace("BARRIER", "__syncthreads();"), found)
    launched(here, "neighbour", NEIGHBOUR.replace("BARRIER", ""), raced)
    assert found.tolist() == expected
    assert raced.tolist() != expected


def test_wrong_argument_sizes_or_counts_and_misaligned_loads_are_refused(gpu: CpuAsGpu) -> None:
    source = "KERNEL first(const float4* x, int at STAMP) { ENTER __ldg(x + at); LEAVE }"
    x = gpu.zeros(128, np.float32)
    launched(gpu, "first", source, x, np.int32(1))
    with pytest.raises(ComputeError, match="an argument is not of its parameter's size"):
        launched(gpu, "first", source, x, np.int64(1))
    with pytest.raises(ComputeError, match="it has other parameters than arguments"):
        launched(gpu, "first", source, x)
    with pytest.raises(ComputeError, match=r"a load of several words .* in thread 0, 0, 0 of block 0, 0, 0"):
        launched(gpu, "first", source, x[1:], np.int32(1))


def test_source_that_is_no_c_is_refused_in_the_words_of_the_compiler(gpu: CpuAsGpu) -> None:
    with pytest.raises(ComputeError, match="ptx_bar_sync"):
        cuda_on_cpu.loaded('KERNEL waits(int* at STAMP) { asm volatile("bar.sync 0;" ::: "memory"); }')


def test_without_a_compiler_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ComputeError, match=r"no g\+\+ to compile CUDA C\+\+ with"):
        CpuAsGpu()
