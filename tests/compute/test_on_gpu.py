"""Tests of the decoder on a real GPU.

The decoder equals a float64 pass in three modes: launch by launch, as a captured graph, and with records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.on_gpu import GpuDecoder, model_on
from cbtop.compute.decoder.plan import planned
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.kernels.add_rms_norm import ADD_RMS_NORM
from cbtop.compute.kernels.base import Arguments, Kernel, floats
from cbtop.compute.kernels.layer_norm import LAYER_NORM
from cbtop.compute.kernels.quantize_rows import QUANTIZE_ROWS
from cbtop.compute.kernels.residual_add import RESIDUAL_ADD
from cbtop.compute.kernels.rms_norm import RMS_NORM
from cbtop.compute.kernels.route import ROUTE
from cbtop.compute.settings import TokenSampling
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.compute.conftest import ListRecorder

pytestmark = pytest.mark.gpu
NORMS = pytest.mark.parametrize("kernel", [RMS_NORM, LAYER_NORM], ids=lambda kernel: kernel.name)
MIXTURES = ("qwen3moe", "mixtral")
EXPERTS_OF_ROUTE = ROUTE.contract.arguments.index("experts")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def weights_of(kernel: Kernel, rng: np.random.Generator, hidden: int) -> tuple[Any, ...]:
    """Return random parameters of a norm: the weight and, if its kernel has one, the bias."""
    return tuple(floats(rng, hidden) for name in ("weight", "bias") if name in kernel.contract.arguments)


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the root mean square error, divided by the standard deviation of the expected values."""
    return float(np.sqrt(((found - expected) ** 2).mean()) / expected.std())


def of_family(family: str, model_files: dict[str, Path]) -> Model:
    """Return a tiny model of the family. A mixture uses all experts, so that rounding cannot change the choice."""
    model = read_model(model_files[family], FAMILIES)
    if model.experts is None:
        return model
    return replace(model, experts=replace(model.experts, used=model.experts.count))


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "int8"])
@pytest.mark.parametrize("family", [*FAMILIES, "mixtral"])
def test_logits_are_those_of_a_float64_pass(
    family: str, is_exact: bool, is_eager: bool, model_files: dict[str, Path], gpu: Gpu
) -> None:
    model = of_family(family, model_files)
    on = model_on(gpu, model, is_exact=is_exact)
    decoder = GpuDecoder(gpu, on, BrickProfiler(enabled=False), 64, is_eager=is_eager)
    tokens = list(PROMPT)
    # A first prompt captures the graph. The prompt below runs this graph with other tokens.
    decoder.prefill(tokens[::-1])
    decoder.restart()
    tokens.append(decoder.prefill(tokens))
    found = [decoder.logits]
    for _ in range(6):
        tokens.append(decoder.decode(tokens[-1]))
        found.append(decoder.logits)
    expected = forward_reference(model, tokens[:-1], 64)[len(PROMPT) - 1 :]
    assert max(off(*both) for both in zip(found, expected, strict=True)) < (2e-3 if is_exact else 0.12)


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "int8"])
@pytest.mark.parametrize("family", ["qwen2", *MIXTURES])
def test_every_brick_passes_its_checks(family: str, is_exact: bool, model_files: dict[str, Path], gpu: Gpu) -> None:
    on = model_on(gpu, read_model(model_files[family], FAMILIES), is_exact=is_exact)
    results = GpuDecoder(gpu, on, BrickProfiler(enabled=False), 64).verify(PROMPT)
    mixed = {"MoeRouter", "MoeExperts", "MoeCombine"} if family in MIXTURES else set()
    assert {one.brick for one in results} >= mixed | {"Embedding", "RmsNorm", "QkvProjection", "LmHead", "Sampling"}
    assert [one for one in results if not one.passed] == []


def test_drawn_tokens_are_the_same_in_a_graph_and_launch_by_launch(model_files: dict[str, Path], gpu: Gpu) -> None:
    on = model_on(gpu, read_model(model_files["qwen2"], FAMILIES), is_exact=True)
    drawn = []
    for is_eager in (True, False):
        how = TokenSampling(temperature=1.5, top_k=20, top_p=0.9, seed=3)
        decoder = GpuDecoder(gpu, on, BrickProfiler(enabled=False), 64, sampling=how, is_eager=is_eager)
        for _ in range(2):
            decoder.restart()
            tokens = [decoder.prefill(PROMPT)]
            for _ in range(12):
                tokens.append(decoder.decode(tokens[-1]))
            drawn.append(tokens)
    first, again, of_graph, again_of_graph = drawn
    assert (of_graph, again_of_graph) == (first, again)
    assert first != again  # The second sequence gets different random numbers.


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
@pytest.mark.parametrize("family", ["qwen2", *MIXTURES])
def test_a_recorded_token_has_each_planned_launch_under_its_brick_and_layer(
    family: str,
    is_eager: bool,
    model_files: dict[str, Path],
    gpu: Gpu,
    recorder: ListRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # If other processes use the GPU, its clock cannot always be compared with the host's, and a step would be lost.
    monkeypatch.setattr(gpu, "offset_ns", lambda device_ns: 0)
    on = model_on(gpu, read_model(model_files[family], FAMILIES), is_exact=False)
    decoder = GpuDecoder(gpu, on, BrickProfiler(recorder=recorder), 2048, is_eager=is_eager)
    decoder.decode(1)
    decoder.restart()
    nodes = {one.id: one for one in recorder.messages if isinstance(one, Node)}
    found: dict[tuple[str, str, str], int] = {}
    for tag, _ in recorder.records:
        node = nodes.get(tag & 0xFFFFFF)
        if node is not None and node.kind is NodeKind.KERNEL:
            brick = nodes[node.parent or 0]
            outer = nodes[brick.parent or 0]
            place = outer.name if outer.kind is NodeKind.LAYER else "-", brick.name, node.name
            found[place] = found.get(place, 0) + 1
    expected: dict[tuple[str, str, str], int] = {}
    for one in planned(model_files[family], "cuda"):
        place = "-" if one.layer is None else str(one.layer), one.brick, one.kernel
        expected[place] = expected.get(place, 0) + one.launches
    assert found == expected


def chosen_experts(model: Model, tokens: Iterable[int]) -> set[tuple[int, ...]]:
    """Return the sets of experts that the first layer chooses on the CPU.

    The model decodes these tokens one by one.
    """
    decoder = Decoder(model, "numba", 1, BrickProfiler(enabled=False), 64)
    first = decoder.bricks.layers[0].experts
    assert first is not None
    chosen = set()

    def observe(brick: ComputeBrick, calls: Sequence[Arguments]) -> None:
        if brick is first.router:
            chosen.add(tuple(calls[1][EXPERTS_OF_ROUTE].tolist()))

    for token in tokens:
        decoder.decode(token, observe)
    return chosen


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "int8"])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_graph_that_runs_again_reads_the_experts_of_its_own_token(
    family: str, is_exact: bool, model_files: dict[str, Path], gpu: Gpu
) -> None:
    on = model_on(gpu, read_model(model_files[family], FAMILIES), is_exact=is_exact)
    captured, eager = (
        GpuDecoder(gpu, on, BrickProfiler(enabled=False), 64, is_eager=is_eager) for is_eager in (False, True)
    )
    tokens = range(3, 51, 4)
    for token in tokens:
        captured.decode(token)
        eager.decode(token)
        np.testing.assert_array_equal(captured.logits, eager.logits)
    assert len(chosen_experts(read_model(model_files[family], FAMILIES), tokens)) > 1


@pytest.mark.parametrize("family", MIXTURES)
def test_a_prompt_with_bfloat16_experts_has_the_logits_of_single_tokens(
    family: str, model_files: dict[str, Path], gpu: Gpu
) -> None:
    model = of_family(family, model_files)
    tokens = [(7 * place) % 300 for place in range(60)]
    found = []
    for parts in ((tokens,), [[one] for one in tokens]):
        decoder = GpuDecoder(gpu, model_on(gpu, model, is_exact=False), BrickProfiler(enabled=False), 64)
        for part in parts:
            decoder.prefill(part)
        found.append(decoder.logits)
    assert off(*found) < 0.12


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
@pytest.mark.parametrize("sign", [1, -1])
def test_where_a_key_is_more_than_its_cache_can_hold_no_token_is_chosen(
    sign: int, is_eager: bool, model_files: dict[str, Path], gpu: Gpu
) -> None:
    model = read_model(model_files["qwen2"], FAMILIES)
    model.layers[1].k.bias[0] = sign * 7e4
    on = model_on(gpu, model, is_exact=False)
    decoder = GpuDecoder(gpu, on, BrickProfiler(enabled=False), 64, is_eager=is_eager)
    for append in (lambda: decoder.prefill(PROMPT), lambda: decoder.prefill(PROMPT * 3), lambda: decoder.decode(1)):
        decoder.restart()
        with pytest.raises(ComputeError, match="no token can be chosen: a logit is NaN or infinite"):
            append()


def test_a_cache_that_does_not_fit_is_refused_with_needed_and_free_memory(model: Model, gpu: Gpu) -> None:
    on = model_on(gpu, model, is_exact=False)
    pool = gpu.cupy.get_default_memory_pool()
    before = pool.used_bytes()
    with pytest.raises(ComputeError, match=r"the KV cache of .* take .* GB; of .* GB .* GB are free on "):
        GpuDecoder(gpu, on, BrickProfiler(enabled=False), 1 << 40)
    assert pool.used_bytes() == before


@NORMS
@pytest.mark.parametrize("hidden", [32, 64, 768, 3584, 8192, 8256])
def test_codes_of_a_norm_are_those_of_its_output(kernel: Kernel, hidden: int, gpu: Gpu) -> None:
    rng = np.random.default_rng(hidden)
    x, out = (gpu.array(floats(rng, 1, hidden)) for _ in range(2))
    weights = [gpu.array(one) for one in weights_of(kernel, rng, hidden)]
    made, expected = (
        [gpu.zeros((1, hidden), np.uint8), gpu.zeros((1, max(hidden // 8, 4)), np.float32)] for _ in range(2)
    )
    assert kernel.cuda is not None
    assert kernel.cuda.with_codes is not None
    for one in kernel.cuda.with_codes(x, *weights, 1e-6, out, *made):
        gpu.launch(one)
    gpu.run(QUANTIZE_ROWS, out, *expected)
    for found, wanted in zip(made, expected, strict=True):
        np.testing.assert_array_equal(gpu.host(found), gpu.host(wanted))


def sums_and_norms(gpu: Any, rows: int, hidden: int) -> tuple[list[Any], list[Any]]:
    """Return the results of a fused sum and norm (float32, int8 codes, bfloat16), and those of separate launches."""
    rng = np.random.default_rng(hidden)
    x, *others = floats(rng, rows, hidden), floats(rng, rows, hidden), floats(rng, hidden)
    delta, weight = (gpu.array(one) for one in others)
    both: tuple[list[Any], list[Any]] = ([], [])
    for found, is_fused in zip(both, (True, False), strict=True):
        for kind in ("launches", "with_codes", "with_bf16"):
            own, out = gpu.array(x), gpu.zeros((rows, hidden), np.float32)
            if kind == "with_codes":
                more = [gpu.zeros((rows, hidden), np.uint8), gpu.zeros((rows, max(hidden // 8, 4)), np.float32)]
            else:
                more = [gpu.zeros((rows * hidden,), np.uint16)] * (kind == "with_bf16")
            kernel, given = ADD_RMS_NORM, (own, delta, weight, 1e-6, out)
            if not is_fused:
                gpu.run(RESIDUAL_ADD, own, delta)
                kernel, given = RMS_NORM, (own, weight, 1e-6, out)
            for one in getattr(kernel.cuda, kind)(*given, *more):
                gpu.launch(one)
            found.extend(gpu.host(one) for one in (own, out, *more))
    return both


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hidden", [64, 3584, 8256])
def test_a_sum_and_its_norm_in_one_launch_equal_two_launches_bit_for_bit(hidden: int, rows: int, gpu: Gpu) -> None:
    for one, other in zip(*sums_and_norms(gpu, rows, hidden), strict=True):
        np.testing.assert_array_equal(one, other)
