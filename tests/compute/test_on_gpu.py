"""The decoder on a GPU beside a float64 pass: launch by launch, as a captured graph, and recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.on_gpu import GpuDecoder, model_on
from cbtop.compute.decoder.plan import planned
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.errors import ComputeError, ModelError
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.kernels.quantize_rows import QUANTIZE_ROWS
from cbtop.compute.kernels.rms_norm import with_codes
from cbtop.compute.settings import Sampling
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.compute.conftest import ListRecorder

pytestmark = pytest.mark.gpu
DENSE = [name for name in FAMILIES if name != "qwen3moe"]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """The root of the mean square, in standard deviations of what is expected."""
    return float(np.sqrt(((found - expected) ** 2).mean()) / expected.std())


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "int8"])
@pytest.mark.parametrize("family", DENSE)
def test_logits_are_those_of_a_float64_pass(
    family: str, is_exact: bool, is_eager: bool, model_files: dict[str, Path], gpu: Gpu
) -> None:
    model = read_model(model_files[family], FAMILIES)
    on = model_on(gpu, model, is_exact=is_exact)
    decoder = GpuDecoder(gpu, on, BrickProfiler(enabled=False), 64, is_eager=is_eager)
    tokens = list(PROMPT)
    tokens.append(decoder.prefill(tokens))
    found = [decoder.logits]
    for _ in range(6):
        tokens.append(decoder.decode(tokens[-1]))
        found.append(decoder.logits)
    expected = forward_reference(model, tokens[:-1], 64)[len(PROMPT) - 1 :]
    assert max(off(*both) for both in zip(found, expected, strict=True)) < (2e-3 if is_exact else 0.12)


def test_every_brick_passes_its_checks(model_files: dict[str, Path], gpu: Gpu) -> None:
    on = model_on(gpu, read_model(model_files["qwen2"], FAMILIES), is_exact=False)
    results = GpuDecoder(gpu, on, BrickProfiler(enabled=False), 64).verify(PROMPT)
    assert {one.brick for one in results} >= {"Embedding", "RmsNorm", "QkvProjection", "LmHead", "Sampling"}
    assert [one for one in results if not one.passed] == []


def test_drawn_tokens_are_the_same_in_a_graph_and_launch_by_launch(model_files: dict[str, Path], gpu: Gpu) -> None:
    on = model_on(gpu, read_model(model_files["qwen2"], FAMILIES), is_exact=True)
    drawn = []
    for is_eager in (True, False):
        how = Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=3)
        decoder = GpuDecoder(gpu, on, BrickProfiler(enabled=False), 64, sampling=how, is_eager=is_eager)
        for _ in range(2):
            decoder.restart()
            tokens = [decoder.prefill(PROMPT)]
            for _ in range(12):
                tokens.append(decoder.decode(tokens[-1]))
            drawn.append(tokens)
    first, again, of_graph, again_of_graph = drawn
    assert (of_graph, again_of_graph) == (first, again)
    assert first != again  # another sequence has other draws


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
def test_a_recorded_token_has_each_launch_of_the_plan_under_its_brick_and_layer(
    is_eager: bool,
    model_files: dict[str, Path],
    gpu: Gpu,
    recorder: ListRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where others use the GPU, its clock cannot always be compared with the host's, and a step is lost.
    monkeypatch.setattr(gpu, "offset_ns", lambda device_ns: 0)
    on = model_on(gpu, read_model(model_files["qwen2"], FAMILIES), is_exact=False)
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
    for one in planned(model_files["qwen2"], "cuda"):
        place = "-" if one.layer is None else str(one.layer), one.brick, one.kernel
        expected[place] = expected.get(place, 0) + one.launches
    assert found == expected


def test_a_mixture_of_experts_is_refused_by_name(model_files: dict[str, Path], gpu: Gpu) -> None:
    with pytest.raises(ModelError, match="mixture of experts runs on no GPU yet"):
        model_on(gpu, read_model(model_files["qwen3moe"], FAMILIES), is_exact=False)


def test_a_cache_that_has_no_room_is_refused_with_what_is_wanted_and_what_is_there(model: Model, gpu: Gpu) -> None:
    if model.experts is not None:
        pytest.skip("experts run on no GPU yet")
    on = model_on(gpu, model, is_exact=False)
    pool = gpu.cupy.get_default_memory_pool()
    before = pool.used_bytes()
    with pytest.raises(ComputeError, match=r"the KV cache of .* take .* GB; of .* GB .* GB are free on "):
        GpuDecoder(gpu, on, BrickProfiler(enabled=False), 1 << 40)
    assert pool.used_bytes() == before


@pytest.mark.parametrize("hidden", [64, 768, 3584, 8192, 8256, 40])
def test_codes_of_a_norm_are_those_of_its_output(hidden: int, gpu: Gpu) -> None:
    rng = np.random.default_rng(hidden)
    x, weight, out = (gpu.array(rng.standard_normal((1, hidden), np.float32)) for _ in range(3))
    made, expected = (
        [gpu.zeros((1, hidden), np.uint8), gpu.zeros((1, max(hidden // 8, 4)), np.float32)] for _ in range(2)
    )
    if hidden % 32:
        hidden -= hidden % 32
        x, weight, out = x[:, :hidden], weight[:, :hidden], out[:, :hidden]
    for one in with_codes(x, weight[0], 1e-6, out, *made):
        gpu.launch(one)
    gpu.run(QUANTIZE_ROWS, out, *expected)
    for found, wanted in zip(made, expected, strict=True):
        np.testing.assert_array_equal(gpu.host(found), gpu.host(wanted))
