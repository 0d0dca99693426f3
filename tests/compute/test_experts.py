"""Tests of mixtures of experts: their outputs equal llama.cpp and a float64 pass.

Their work is counted from the bytes that were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import llama_peer
from cbtop.compute import brick_specs, demo_model
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import interleaved
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.demo_model import TINY_MIXTRAL, TINY_QWEN3, TINY_QWEN3MOE, ModelShape
from cbtop.compute.errors import ModelError
from cbtop.compute.jit.cpu import HAS_VNNI
from cbtop.compute.kernels import route as route_module
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.interleaved import InterleavedMatrix
from cbtop.compute.quantization.q8_0 import Q8_0
from cbtop.profiler.instrument import classification
from cbtop.protocol.messages import Node
from tests.representatives import first_by_default

from .conftest import ListRecorder

PROMPT = [3, 141, 59, 26, 5, 358, 97]
SHAPES = {"qwen3moe": TINY_QWEN3MOE, "mixtral": TINY_MIXTRAL}
MakeDecoder = Callable[[Model, int], Decoder]


@pytest.fixture(scope="module")
def expert_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return files of tiny models with experts, one for each architecture.

    The files have the keys that llama.cpp and cbtop need.
    """
    folder = tmp_path_factory.mktemp("experts")
    for name, shape in SHAPES.items():
        llama_peer.write_model(folder / name, shape)
    return {name: folder / name for name in SHAPES}


@pytest.fixture(params=list(SHAPES))
def path(request: pytest.FixtureRequest, expert_files: dict[str, Path]) -> Path:
    return expert_files[request.param]


def logits_of(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    """Return the logits after the prompt, and the logits after each further token.

    These tokens are decoded one by one.
    """
    decoder.prefill(tokens[: len(PROMPT)])
    found = [decoder.logits.copy()]
    for token in tokens[len(PROMPT) :]:
        decoder.decode(token)
        found.append(decoder.logits.copy())
    return np.array(found)


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_logits_are_those_of_llama_cpp_for_prompts_and_decoding(path: Path, decoder_for: MakeDecoder) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    tokens = [*PROMPT, 7, 400, 12]
    llama = llama_peer.Llama(path)
    expected = np.array([llama.decode(PROMPT), *(llama.decode([token]) for token in tokens[len(PROMPT) :])])
    llama.close()
    found = logits_of(decoder_for(read_model(path, FAMILIES), 1), tokens)
    assert error_of(found, expected) < 0.05  # llama.cpp rounds activations


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_those_of_a_float64_pass(path: Path, decoder_for: MakeDecoder, threads: int) -> None:
    tokens = [*PROMPT, 7, 400, 12]
    model = read_model(path, FAMILIES)
    expected = forward_reference(model, tokens)[len(PROMPT) - 1 :]
    assert error_of(logits_of(decoder_for(model, threads), tokens), expected) < 1e-3


@pytest.mark.skipif(not HAS_VNNI, reason="this processor has no VNNI")
def test_with_int8_activations_logits_are_near_those_of_a_float64_pass(path: Path, decoder_for: MakeDecoder) -> None:
    tokens = [*PROMPT, 7]
    model = read_model(path, FAMILIES)
    assert model.experts is not None
    # Use all experts for each token, because rounding could otherwise change which are chosen.
    every = replace(model.experts, used=model.experts.count)
    expected = forward_reference(replace(model, experts=every), tokens)[len(PROMPT) - 1 :]
    model = interleaved(model)
    assert isinstance(model.layers[0].gate.weight, InterleavedMatrix)
    assert error_of(logits_of(decoder_for(replace(model, experts=every), 2), tokens), expected) < 0.05
    assert [result for result in decoder_for(model, 2).verify(PROMPT) if not result.passed] == []


def wrong_order(call: Any) -> None:
    weights = call[3]
    weights[:] = weights[:, ::-1].copy()


def not_renormalised(call: Any) -> None:
    route_module.route(call[0], False, *call[2:])


def one_skipped(call: Any) -> None:
    weights = call[3]
    weights[:, -1] = 0


@first_by_default("fault", [wrong_order, not_renormalised, one_skipped], 3)
def test_a_router_that_is_wrong_gives_other_logits_and_fails_its_check(
    path: Path, decoder_for: MakeDecoder, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None]
) -> None:
    def wrong(*call: Any) -> None:
        route_module.route(*call)
        fault(call)

    monkeypatch.setattr(route_module, "ROUTE", replace(route_module.ROUTE, implementation=wrong))
    model = read_model(path, FAMILIES)
    decoder = decoder_for(model, 1)
    assert error_of(logits_of(decoder, PROMPT), forward_reference(model, PROMPT)[-1:]) > 0.05
    failed = {result.brick for result in decoder.verify(PROMPT) if not result.passed}
    assert failed == {"MoeRouter"}


def test_a_non_finite_logit_gives_nan_weights_and_valid_places() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        call = route_module.ROUTE.examples(np.random.default_rng(1), 5)
        call[0][1] = bad
        route_module.route(*call)
        weights, places = call[3], call[4]
        assert np.isnan(weights[1]).all()
        assert np.isfinite(weights[[0, 2]]).all()
        assert sorted(places.reshape(-1)) == list(range(places.size))


def test_each_expert_is_read_once_a_pass_and_only_those_that_are_chosen(
    path: Path, decoder_for: MakeDecoder, recorder: ListRecorder
) -> None:
    model = read_model(path, FAMILIES)
    decoder = decoder_for(model, 1)
    assert model.experts is not None
    count, used, layers = model.experts.count, model.experts.used, len(model.layers)
    per_token = 2 * model.hidden + model.feed_forward

    def ran() -> list[tuple[Node, int]]:
        nodes = {m.id: m for m in recorder.messages if isinstance(m, Node)}
        found = [(nodes[tag], n) for tag, n in recorder.records if nodes[tag].name == "MoeExperts"]
        recorder.records.clear()
        return found

    decoder.prefill(PROMPT)
    prompt = ran()
    assert layers * used <= len(prompt) <= layers * count
    assert sum(elements for _, elements in prompt) == layers * used * len(PROMPT) * per_token
    decoder.decode(7)
    alone = ran()
    alone_per_token = model.hidden + model.feed_forward
    assert [elements for _, elements in alone] == [used * alone_per_token] * layers
    products = 2.0 * 3 * model.hidden * model.feed_forward
    each, of_token = ({node.id: node for node, _ in found}.values() for found in (prompt, alone))
    for nodes, experts, elements in ((each, 1, per_token), (of_token, used, alone_per_token)):
        for node, layer in zip(nodes, model.layers, strict=True):
            of_all = sum(one.weight.size_bytes for one in (layer.gate, layer.up, layer.down))
            assert node.work.bytes_per_call == experts * of_all / count
            assert node.work.flops_per_element is not None
            assert products < node.work.flops_per_element * elements < 1.1 * products


def of_format(monkeypatch: pytest.MonkeyPatch, block_format: BlockFormat) -> None:
    """Make the demo model write the weights of its experts in this format."""
    tensors: Any = demo_model.tensors_of

    def changed(shape: ModelShape) -> Iterator[Any]:
        for tensor in tensors(shape):
            yield replace(tensor, format=block_format) if "_exps" in tensor.name else tensor

    monkeypatch.setattr(demo_model, "tensors_of", changed)


@pytest.mark.parametrize(
    "block_format",
    [pytest.param(one, marks=() if one is Q8_0 else pytest.mark.slow, id=one.name) for one in FORMATS.values()],
)
def test_experts_of_every_format_run(
    block_format: BlockFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoder_for: MakeDecoder
) -> None:
    of_format(monkeypatch, block_format)
    demo_model.write_model(tmp_path / "m.gguf", replace(TINY_MIXTRAL, layers=1), lambda *_: None)
    model = read_model(tmp_path / "m.gguf", FAMILIES)
    found = logits_of(decoder_for(model, 1), PROMPT)
    assert error_of(found, forward_reference(model, PROMPT)[-1:]) < 1e-3


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a tiny model with additional keys of its architecture."""
    metadata = demo_model.metadata_of

    def written(shape: ModelShape, keys: dict[str, Any]) -> Path:
        said = {f"{shape.architecture}.{key}": value for key, value in keys.items()}
        monkeypatch.setattr(demo_model, "metadata_of", lambda shape: metadata(shape) | said)
        demo_model.write_model(tmp_path / "m.gguf", shape, lambda *_: None)
        return tmp_path / "m.gguf"

    return written


def test_what_a_file_says_of_the_weights_of_experts_is_honoured(write: Write, decoder_for: MakeDecoder) -> None:
    model = read_model(write(replace(TINY_MIXTRAL, layers=1), {"expert_weights_scale": 2.5}), FAMILIES)
    assert model.experts is not None
    assert (model.experts.normalised, model.experts.scale) == (True, 2.5)
    for experts in (model.experts, replace(model.experts, normalised=False)):
        mixing = replace(model, experts=experts)
        expected = forward_reference(mixing, PROMPT)[-1:]
        assert error_of(logits_of(decoder_for(mixing, 1), PROMPT), expected) < 1e-3
        assert (
            error_of(forward_reference(replace(model, experts=replace(experts, scale=1.0)), PROMPT), expected) > 0.01
        )


@pytest.mark.parametrize("shape", [TINY_QWEN3, replace(TINY_QWEN3, architecture="llama")])
def test_a_count_of_no_experts_is_a_dense_model(write: Write, shape: ModelShape) -> None:
    model = read_model(write(shape, {"expert_count": 0, "expert_used_count": 0}), FAMILIES)
    assert model.experts is None


@first_by_default(
    ("shape", "keys", "wanted"),
    [
        (TINY_MIXTRAL, {"expert_gating_func": 2}, "has llama.expert_gating_func = 2; supported is 1, a softmax"),
        (TINY_MIXTRAL, {"expert_used_count": 5}, "a whole number from 1 to 4 is wanted"),
        (TINY_MIXTRAL, {"expert_shared_count": 1}, "'llama.expert_shared_count' = '1', which a llama decoder would"),
        (TINY_QWEN3, {"expert_count": 4}, "is a mixture of experts, which no qwen3 decoder here is"),
    ],
    2,
)
def test_what_would_mix_in_another_way_is_refused_by_its_name(
    write: Write, shape: ModelShape, keys: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ModelError) as refused:
        read_model(write(shape, keys), FAMILIES)
    assert wanted in str(refused.value)


def test_a_file_with_a_tensor_for_each_expert_is_refused_with_the_way_out(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: Any = demo_model.tensors_of

    def apart(shape: ModelShape) -> Iterator[Any]:
        for tensor in tensors(shape):
            if "_exps" in tensor.name:
                for expert in range(shape.experts):
                    yield replace(tensor, name=tensor.name.replace("_exps", f".{expert}"), shape=tensor.shape[1:])
            else:
                yield tensor

    monkeypatch.setattr(demo_model, "tensors_of", apart)
    with pytest.raises(
        ModelError, match=r"'blk\.0\.ffn_gate\.0\.weight'.* convert the model again with llama\.cpp's"
    ):
        read_model(write(TINY_MIXTRAL, {}), FAMILIES)


def test_bricks_are_called_as_the_profiler_calls_them_in_other_programs() -> None:
    assert brick_specs.MOE_ROUTER.name == classification.MOE_ROUTER
    assert brick_specs.MOE_EXPERTS.name == classification.MOE_EXPERTS
