"""Tests of Gemma 2 and 3: they equal llama.cpp and a float64 pass. The tests notice if any feature is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import llama_peer
from cbtop.compute import demo_model
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import LayerWeights, Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.machine import Host
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.demo_model import TINY_GEMMA2, TINY_GEMMA3, ModelShape
from cbtop.compute.errors import ModelError
from cbtop.compute.quantization.floats import F32
from cbtop.compute.settings import DecoderSettings
from cbtop.profiler.profiler import BrickProfiler
from tests.representatives import first_by_default

from .rewritten import rewritten

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 512, 60)]
PROMPT = 40  # number of tokens in the prompt; all later tokens are decoded one by one
GEMMA2 = replace(TINY_GEMMA2, context_length=256)
GEMMA3 = replace(TINY_GEMMA3, context_length=256)
# In GEMMA3, the sixth layer attends to all positions. In this variant, no layer does so.
WHOLE_GEMMA3 = replace(GEMMA3, window_period=0, layers=7)
# A head has 32 dimensions, although hidden / heads is 16.
SMALL = {"hidden": 64, "key_length": 32, "feed_forward": 96}
Keys = dict[str, Any]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a float32 model with additional keys of its architecture."""
    tensors: Any = demo_model.tensors_of
    monkeypatch.setattr(demo_model, "tensors_of", lambda shape: (replace(one, format=F32) for one in tensors(shape)))

    def written(shape: ModelShape, keys: Keys) -> Path:
        llama_peer.write_model(tmp_path / "plain.gguf", shape)
        said = {f"{shape.architecture}.{key}": value for key, value in keys.items()}
        return rewritten(tmp_path / "plain.gguf", tmp_path / "gemma.gguf", said)

    return written


def without_post_norms(layer: LayerWeights) -> LayerWeights:
    return replace(layer, attention_post_norm=None, ffn_post_norm=None)


def without_head_norms(layer: LayerWeights) -> LayerWeights:
    return replace(layer, q_norm=None, k_norm=None)


def slides_elsewhere(layer: LayerWeights) -> LayerWeights:
    return replace(layer, slides=not layer.slides)


def of_layers(change: Callable[[LayerWeights], LayerWeights]) -> Callable[[Model], Model]:
    return lambda model: replace(model, layers=tuple(map(change, model.layers)))


def but(**changed: Any) -> Callable[[Model], Model]:
    return lambda model: replace(model, **changed)


def rotates_alike(model: Model) -> Model:
    return replace(model, sliding_rope=model.rope)


def slides(model: Model) -> Model:
    return slides_elsewhere_in_all(replace(model, window=24))


def unscaled(model: Model) -> Model:
    return replace(model, rope=replace(model.rope, scale=1.0))


slides_elsewhere_in_all = of_layers(slides_elsewhere)
OF_BOTH = [
    but(embedding_scale=1.0),
    but(activation="silu"),
    but(window=0),
    but(window=23),
    but(window=25),
    of_layers(without_post_norms),
    slides_elsewhere_in_all,
]
CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 10.0}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
    "rope.scaling.attn_factor": 1.2,
}  # fmt: skip
CASES = {
    "gemma2": (GEMMA2, {}, [*OF_BOTH, but(logit_cap=0.0), but(attention_scale=0.11)]),
    "gemma2 with low caps": (GEMMA2, CAPS, [but(attention_cap=0.0), but(attention_cap=50.0), but(logit_cap=30.0)]),
    "gemma2 with a window of one": (replace(GEMMA2, window=1), {}, [but(window=2)]),
    "gemma2 scaled": (GEMMA2, LINEAR, [unscaled]),
    "gemma2 with a base of its windows'": (GEMMA2, {"rope.freq_base_swa": 500.0}, [rotates_alike]),
    "gemma2 of three layers a turn": (replace(GEMMA2, window_period=3), {}, [slides_elsewhere_in_all]),
    "gemma2 of 27 B": (replace(GEMMA2, layers=46, **SMALL), {}, [but(attention_scale=32**-0.5)]),
    "gemma3": (GEMMA3, {}, [*OF_BOTH, rotates_alike, but(attention_scale=0.2), of_layers(without_head_norms)]),
    "gemma3 of seven layers": (WHOLE_GEMMA3, {}, [slides_elsewhere_in_all, rotates_alike]),
    "gemma3 scaled": (GEMMA3, LINEAR, [unscaled, rotates_alike]),
    "gemma3 extended by YaRN": (GEMMA3, YARN, [unscaled, rotates_alike]),
    "gemma3 with a base of its windows'": (GEMMA3, {"rope.freq_base_swa": 500.0}, [rotates_alike]),
    "gemma3 with a cap": (GEMMA3, {"final_logit_softcapping": 10.0}, [but(logit_cap=0.0)]),
    "gemma3 without windows": (replace(GEMMA3, window=0), {}, [slides]),
    "gemma3 whose layers are named": (GEMMA3, {"attention.sliding_window_pattern": [False, True]}, []),
    "gemma3 of 27 B": (replace(GEMMA3, window_period=0, layers=62, **SMALL), {}, [but(attention_scale=32**-0.5)]),
}  # fmt: skip


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@first_by_default(
    ("shape", "keys", "faults"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if case[0].layers > 40 else ())  # decoding takes seconds
        for name, case in CASES.items()
    ],
    5,
)
def test_logits_are_llama_cpps_beyond_the_window_and_no_part_can_be_omitted(
    write: Write, shape: ModelShape, keys: Keys, faults: list[Callable[[Model], Model]]
) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    path = write(shape, keys)
    model = read_model(path, FAMILIES)
    llama = llama_peer.Llama(path)
    found = np.array([llama.decode(TOKENS[:PROMPT]), *(llama.decode([token]) for token in TOKENS[PROMPT:])])
    llama.close()

    def error(model: Model) -> float:
        return error_of(found, forward_reference(model, TOKENS)[PROMPT - 1 :])

    assert error(model) < 5e-3  # The allowed error includes that llama.cpp reads GELU from a table in float16.
    for fault in faults:
        assert error(fault(model)) > 1e-2


@first_by_default(("shape", "keys"), [(GEMMA2, CAPS), (WHOLE_GEMMA3, LINEAR)], 2, ids=["gemma2", "gemma3"])
@first_by_default("threads", [1, 2], 2)
def test_a_decoder_agrees_with_float64_in_several_passes_beyond_the_window(
    write: Write,
    profiler: BrickProfiler,
    monkeypatch: pytest.MonkeyPatch,
    shape: ModelShape,
    keys: Keys,
    threads: int,
) -> None:
    model = read_model(write(shape, keys), FAMILIES)
    monkeypatch.setattr(Host, "most_together", 16)
    decoder = Decoder(model, "numba", threads, profiler, 64, DecoderSettings("f32"))
    decoder.prefill(TOKENS[:PROMPT])
    found = [decoder.logits.copy()]
    for token in TOKENS[PROMPT:]:
        decoder.decode(token)
        found.append(decoder.logits.copy())
    assert error_of(np.array(found), forward_reference(model, TOKENS)[PROMPT - 1 :]) < 1e-4


SIZES = st.fixed_dictionaries(
    {
        "architecture": st.sampled_from(["gemma2", "gemma3", "llama", "phi3", "qwen3"]),
        "hidden": st.integers(1, 40),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "key_length": st.integers(1, 20).map(lambda half: 2 * half),
        "feed_forward": st.integers(1, 40),
        "layers": st.integers(1, 3),
        "window": st.integers(1, 12),
        "window_period": st.integers(1, 3),
        "tied": st.booleans(),
    }
)


def test_a_model_of_any_shape_and_window_decodes_like_a_float64_pass(
    write: Write, profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "most_together", 4)

    @settings(max_examples=40, deadline=None, database=None)
    @given(SIZES)
    def check(sizes: dict[str, Any]) -> None:
        group = sizes.pop("group")
        shape = ModelShape(heads=group * sizes["kv_heads"], vocabulary=40, context_length=12, **sizes)
        model = read_model(write(shape, {}), FAMILIES)
        decoder = Decoder(model, "numba", 1, profiler, model.context_length, DecoderSettings("f32"))
        tokens = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7][: model.context_length]
        decoder.prefill(tokens[: (len(tokens) + 1) // 2])
        for token in tokens[(len(tokens) + 1) // 2 :]:
            decoder.decode(token)
        assert error_of(decoder.logits, forward_reference(model, tokens)[-1]) < 1e-4

    check()


def test_a_model_that_names_no_window_caps_or_period_has_those_of_its_family(write: Write) -> None:
    model = read_model(write(replace(GEMMA2, window=0, layers=4), {}), FAMILIES)
    assert (model.window, model.attention_cap, model.logit_cap) == (4096, 50.0, 30.0)
    assert [layer.slides for layer in model.layers] == [True, False, True, False]
    model = read_model(write(WHOLE_GEMMA3, {}), FAMILIES)
    assert (model.window, model.attention_cap, model.logit_cap) == (24, 0.0, 0.0)
    assert [layer.slides for layer in model.layers] == [True] * 5 + [False, True]
    assert (model.rope.base, model.sliding_rope.base) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("shape", "keys", "wanted"),
    [
        (replace(GEMMA2, architecture="gemma3n"), {}, "is of architecture 'gemma3n'; supported are qwen2,"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "'gemma3.attn_logit_softcapping' = '50.0', which a gemma3"),
        (GEMMA3, {"rope.local.freq_base": 1e4}, "'gemma3.rope.local.freq_base' = '10000.0', which a gemma3"),
        (GEMMA3, {"attention.sliding_window_pattern": [True]}, "has 'an array of 1' as"),
        (GEMMA3, {"attention.sliding_window_pattern": [1, 2]}, "one for each of 2 layers, of true or false,"),
        (GEMMA3, {"attention.sliding_window_pattern": 0}, "gemma3.attention.sliding_window_pattern; a whole number"),
        (
            GEMMA2,
            {"attention.sliding_window": 0},
            "has '0' as gemma2.attention.sliding_window; a whole number from 1",
        ),
        (GEMMA2, {"attn_logit_softcapping": -1.0}, "gemma2.attn_logit_softcapping; a finite number above zero"),
    ],
)
def test_what_would_give_wrong_text_is_refused_by_its_name(
    write: Write, shape: ModelShape, keys: Keys, wanted: str
) -> None:
    with pytest.raises(ModelError) as refused:
        read_model(write(shape, keys), FAMILIES)
    assert wanted in str(refused.value)


def test_a_model_that_reads_images_runs_by_its_text_model_alone(tmp_path: Path, model_files: dict[str, Path]) -> None:
    keys = {"gemma3.mm.tokens_per_image": 256, "gemma3.vision.block_count": 27}
    read_model(rewritten(model_files["gemma3"], tmp_path / "text.gguf", keys), FAMILIES)
    images = {"v.blk.0.ln1.weight": np.ones(4, np.float32), "mm.input_projection.weight": np.ones(4, np.float32)}
    with pytest.raises(ModelError, match=r"reads images \('v\.blk\.0.* and 1 more .* file of its text model alone"):
        read_model(rewritten(model_files["gemma3"], tmp_path / "both.gguf", keys, images), FAMILIES)
