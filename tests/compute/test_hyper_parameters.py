"""Tests of the hyper-parameters in a model file: each is used as in llama.cpp, or it is rejected by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import Keys

from benchmarks.llama_peer import Llama
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import DESCRIBING, Model, Rope, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.errors import ModelError
from cbtop.compute.settings import DecoderSettings
from cbtop.profiler.profiler import BrickProfiler
from tests.representatives import each_value_once, first_by_default

from .rewritten import rewritten

PROMPT = [3, 141, 59, 26, 5, 358, 97]
Rewrite = Callable[..., Path]


@pytest.fixture(params=list(FAMILIES))
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saying(model_files: dict[str, Path], tmp_path: Path, architecture: str) -> Rewrite:
    """Return a function that writes the tiny model of the architecture with some keys added or replaced.

    If the function gets `tensors`, it appends them and writes all tensors as float32.
    """

    def rewrite(
        keys: dict[str, Any], general: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
    ) -> Path:
        said = {f"{architecture}.{name}": value for name, value in keys.items()} | (general or {})
        return rewritten(model_files[architecture], tmp_path / "said.gguf", said, tensors)

    return rewrite


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_model(path, FAMILIES)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    return message


# Each case: keys of the file, then the factor on positions, then the factor on the length of rotated vectors.
HONOURED = [
    ({}, 1.0, 1.0),
    ({"rope.scale_linear": 4.0}, 0.25, 1.0),
    ({"rope.scaling.factor": 4.0}, 0.25, 1.0),
    ({"rope.scaling.factor": 4.0, "rope.scale_linear": 8.0}, 0.25, 1.0),
    ({"rope.scaling.factor": 4.0, "rope.scaling.type": "linear"}, 0.25, 1.0),
    ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, 1.0, 1.0),
    ({"rope.scale_linear": 4.0, "rope.scaling.type": "none"}, 1.0, 1.0),
    ({"rope.scaling.attn_factor": 1.5}, 1.0, 1.5),
    ({"rope.scaling.attn_factor": 1.5, "rope.scaling.type": "none"}, 1.0, 1.5),
    ({"rope.scaling.attn_factor": 1.5, "rope.scaling.factor": 4.0}, 0.25, 1.5),
]


@pytest.mark.parametrize(
    ("architecture", "keys", "scale", "magnitude"),
    each_value_once((family, *case) for family in FAMILIES for case in HONOURED),
    indirect=["architecture"],
)
def test_what_scales_positions_is_honoured(
    saying: Rewrite,
    keys: dict[str, Any],
    scale: float,
    magnitude: float,
    decoder_for: Callable[[Model, int], Decoder],
) -> None:
    model = read_model(saying(keys), FAMILIES)
    assert (model.rope.scale, model.rope.magnitude) == (scale, magnitude)
    decoder = decoder_for(model, 1)
    decoder.prefill(PROMPT)
    expected = forward_reference(model, PROMPT)[-1]
    assert np.abs(decoder.logits - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("architecture", "keys"),
    each_value_once(product(FAMILIES, [keys for keys, _, _ in HONOURED] + [{"attention.causal": True}])),
    indirect=["architecture"],
)
def test_llama_cpp_finds_the_same_logits(saying: Rewrite, keys: dict[str, Any]) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    path = saying(keys | {"vocab_size": 512}, {"tokenizer.ggml.model": "none"})
    expected = forward_reference(read_model(path, FAMILIES), PROMPT)[-1]
    llama = Llama(path)
    found = llama.decode(PROMPT)
    llama.close()
    # llama.cpp rounds activations, so results differ a little. Each of these keys changes the logits by at least 20
    # %.
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


LONG_PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 512, 60)]
EXTENDED = {"context_length": 256, "rope.scaling.original_context_length": 32}
YARN = EXTENDED | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
LONGROPE = EXTENDED | {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.2}
FACTORS = {
    "rope_factors_long.weight": np.linspace(1, 9, 32, dtype=np.float32),
    "rope_factors_short.weight": np.linspace(3, 1, 32, dtype=np.float32),
}


def test_every_family_in_floats_is_llama_cpps_unless_gate_and_up_are_swapped(saying: Rewrite) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    keys: dict[str, Any] = {"vocab_size": 512}
    path = saying(keys, {"tokenizer.ggml.model": "none"}, {})
    model = read_model(path, FAMILIES)
    if model.experts is not None:  # Use all experts, because rounding would choose other experts on some processors.
        path = saying(keys | {"expert_used_count": model.experts.count}, {"tokenizer.ggml.model": "none"}, {})
        model = read_model(path, FAMILIES)
    llama = Llama(path)
    found = llama.decode(LONG_PROMPT)
    llama.close()
    swapped = tuple(replace(layer, gate=layer.up, up=layer.gate) for layer in model.layers)
    rotated = tuple(replace(layer, k=layer.v, v=layer.k) for layer in model.layers)
    errors = []
    for layers in (model.layers, swapped, rotated):
        expected = forward_reference(replace(model, layers=layers), LONG_PROMPT)[-1]
        errors.append(np.abs(found - expected).max() / np.abs(expected).max())
    assert errors[0] < 5e-3
    assert min(errors[1:]) > 2e-2


@pytest.mark.parametrize("architecture", ["phi3"])
def test_products_of_one_tensor_are_multiplied_where_they_lie(
    model_files: dict[str, Path], architecture: str
) -> None:
    for layer in read_model(model_files[architecture], FAMILIES).layers:
        for together in ((layer.q, layer.k, layer.v), (layer.gate, layer.up)):
            rows = [product.weight.data for product in together]
            ends = [data.ctypes.data + data.nbytes for data in rows]
            assert ends[:-1] == [data.ctypes.data for data in rows[1:]]


@first_by_default("architecture", ["llama"], 3)
@first_by_default(
    ("keys", "tensors", "faults"),
    [
        (
            YARN,
            {},
            (
                {"turns": (1.0, 1.0)},
                {"turns": (32.0, 0.3)},
                {"magnitude": 1.0},
                {"extrapolation": 0.0},
                {"original_context": 16},
            ),
        ),
        (YARN | {"rope.scaling.attn_factor": 1.3}, {}, ({"scale": 0.3},)),
        (YARN | {"rope.scaling.factor": 0.5}, {}, ({"magnitude": 1 + 0.1 * np.log(0.5)},)),
        (LONGROPE, FACTORS, ({"original_context": 256}, {"magnitude": 1.0})),
        (LONGROPE | {"rope.scaling.original_context_length": 256}, FACTORS, ({"original_context": 255},)),
        (LONGROPE | {"rope.scaling.factor": 4.0}, FACTORS, ({"scale": 1.0},)),
        (LONGROPE, {}, ({"magnitude": 1.0},)),
    ],
    3,
    ids=["yarn", "yarn times a factor", "yarn that shrinks", "long", "short", "long and scaled", "no factors"],
)
def test_an_extended_context_is_llama_cpps_and_no_other_one(
    saying: Rewrite, keys: dict[str, Any], tensors: dict[str, Any], faults: tuple[dict[str, Any], ...]
) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    path = saying(keys | {"vocab_size": 512}, {"tokenizer.ggml.model": "none"}, tensors)
    model = read_model(path, FAMILIES)
    llama = Llama(path, context=256)
    found = llama.decode(LONG_PROMPT)
    llama.close()

    def error(rope: Rope) -> float:
        expected = forward_reference(replace(model, rope=rope), LONG_PROMPT)[-1]
        return float(np.abs(found - expected).max() / np.abs(expected).max())

    assert error(model.rope) < 5e-3
    for fault in faults:
        assert error(replace(model.rope, **fault)) > 2e-2


@first_by_default("architecture", ["llama"], 3)
@first_by_default(
    ("keys", "tensors"),
    [
        (YARN, {}),
        (YARN | {"rope.scaling.yarn_ext_factor": 0.5, "rope.scaling.yarn_beta_fast": 8.0}, {}),
        (YARN | {"rope.scaling.yarn_ext_factor": 0.0, "rope.scaling.yarn_attn_factor": 1.5}, {}),
        (LONGROPE, FACTORS),
    ],
    3,
)
@first_by_default("context", [256, 32], 3)
def test_a_decoder_turns_by_the_context_that_it_has(
    saying: Rewrite, profiler: BrickProfiler, keys: dict[str, Any], tensors: dict[str, Any], context: int
) -> None:
    model = read_model(saying(keys, tensors=tensors), FAMILIES)
    decoder = Decoder(model, "numba", 1, profiler, context, DecoderSettings("f32"))
    decoder.prefill(LONG_PROMPT[:30])
    expected = forward_reference(model, LONG_PROMPT[:30], context)[-1]
    assert np.abs(decoder.logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("architecture", ["llama"])
def test_factors_for_long_contexts_alone_are_no_whole_model(saying: Rewrite) -> None:
    long = {name: data for name, data in FACTORS.items() if "long" in name}
    assert "has no tensor 'rope_factors_short.weight'" in refusal(saying(LONGROPE, tensors=long))
    zeros = FACTORS | {"rope_factors_long.weight": np.zeros(32, np.float32)}
    assert "rope_factors_long.weight holds factors that are not above zero" in refusal(
        saying(LONGROPE, tensors=zeros)
    )


REFUSED = [
    ({"attention.causal": False}, ".attention.causal = false"),
    ({"attention.causal": 2}, ".attention.causal; true or false is wanted"),
    ({"router_logit_softcapping": 50.0}, ".router_logit_softcapping' = '50.0', which a"),
    ({"rope.scaling.factor": 0.0}, ".rope.scaling.factor; a finite number above zero is wanted"),
    ({"rope.scale_linear": float("inf")}, ".rope.scale_linear; a finite number above zero is wanted"),
    ({"rope.scaling.attn_factor": -1.0}, ".rope.scaling.attn_factor; a finite number above zero is wanted"),
    ({"rope.scaling.type": "dynamic"}, "rope scaling 'dynamic'; supported are none, linear, yarn and longrope"),
    ({"rope.scaling.yarn_ext_factor": -1.0}, ".rope.scaling.yarn_ext_factor; a finite number above zero"),
    ({"rope.scaling.yarn_beta_fast": 0.0}, ".rope.scaling.yarn_beta_fast; a finite number above zero"),
    ({"rope.scaling.yarn_log_multiplier": 0.5}, ".rope.scaling.yarn_log_multiplier' = '0.5', which a"),
    ({"rope.scaling.type": "yarn", "rope.freq_base": 1.0}, "has 1 as"),
    ({"rope.scaling.original_context_length": 0}, ".rope.scaling.original_context_length; a whole number"),
    ({"attention.sliding_window": "wide"}, "has 'wide' as"),
    ({"unheard.of": [1, 2, 3]}, ".unheard.of' = 'an array of 3', which a"),
    ({"\x1b[2J\n\u202e": "\x1b[31m"}, r".\x1b[2J\n\u202e' = '\x1b[31m', which a"),
    ({"x" * 900: "y" * 900}, "yyy', which a"),
    ({"attention.head_count_kv": [2, 1]}, ".attention.head_count_kv (1 to 2), which is not supported"),
    ({"attention.head_count_kv": [2, 2, 2]}, "has 'an array of 3' as"),
    ({"attention.head_count_kv": [0, 0]}, "one for each of 2 layers, of whole numbers from 1 to 1,024,"),
    ({"attention.head_count_kv": [2.0, 2.0]}, "one for each of 2 layers, of whole numbers"),
    ({"attention.head_count_kv": ["2", "2"]}, "an array of numbers is wanted"),
]


@pytest.mark.parametrize(
    ("architecture", "keys", "wanted"),
    each_value_once((family, *case) for family in FAMILIES for case in REFUSED),
    indirect=["architecture"],
)
def test_what_would_give_wrong_text_is_refused_by_its_name(
    saying: Rewrite, keys: dict[str, Any], wanted: str
) -> None:
    assert wanted in refusal(saying(keys))


def test_one_file_of_several_is_refused_with_the_way_out(saying: Rewrite) -> None:
    assert "is one of 3 files of a split model; merge them" in refusal(saying({}, {"split.count": 3}))
    read_model(saying({}, {"split.count": 1}), FAMILIES)


@pytest.mark.parametrize("name", ["attention.head_count_kv", "attention.head_count", "feed_forward_length"])
def test_what_stands_once_for_each_layer_and_is_the_same_runs(
    saying: Rewrite, model_files: dict[str, Path], architecture: str, name: str
) -> None:
    wanted = read_model(model_files[architecture], FAMILIES)
    value = {"attention.head_count_kv": wanted.kv_heads, "attention.head_count": wanted.heads}
    found = read_model(saying({name: [value.get(name, wanted.feed_forward)] * 2}), FAMILIES)
    assert (found.heads, found.kv_heads, found.feed_forward) == (wanted.heads, wanted.kv_heads, wanted.feed_forward)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_a_token_sees_exactly_as_many_positions_as_its_window_is_wide(
    saying: Rewrite, profiler: BrickProfiler
) -> None:
    model = read_model(saying({"attention.sliding_window": 16}), FAMILIES)
    assert (model.window, model.context_length) == (16, 64)
    decoder = Decoder(model, "numba", 1, profiler, 64, DecoderSettings("f32"))
    tokens = LONG_PROMPT[:40]
    decoder.prefill(tokens[:-1])
    decoder.decode(tokens[-1])
    errors = []
    for window in (16, 15, 17, 0):
        expected = forward_reference(replace(model, window=window), tokens)[-1]
        errors.append(np.abs(decoder.logits - expected).max() / np.abs(expected).max())
    assert errors[0] < 1e-4
    assert min(errors[1:]) > 1e-2


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize(("window", "context"), [(0, 64), (16, 16), (64, 64), (4096, 64)])
def test_a_context_ends_where_a_window_would_slide(saying: Rewrite, window: int, context: int) -> None:
    assert read_model(saying({"attention.sliding_window": window}), FAMILIES).context_length == context


def every_key() -> list[str]:
    """Return all keys that the package gguf knows for an architecture."""
    found, groups = [], [Keys]
    for group in groups:
        groups += [item for item in vars(group).values() if isinstance(item, type)]
        texts = [item for item in vars(group).values() if isinstance(item, str)]
        found += [text.removeprefix("{arch}.") for text in texts if text.startswith("{arch}.")]
    return found


READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "expert_count", "attention.causal",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["llama"])
def test_every_other_key_is_refused_unless_it_is_off_or_computes_nothing(saying: Rewrite) -> None:
    others = [key for key in every_key() if key not in READ]
    assert len(others) > 50
    for key in others:
        if key in DESCRIBING:
            read_model(saying({key: 7}), FAMILIES)
        else:
            assert f"has 'llama.{key}' = '7', which" in refusal(saying({key: 7}))
    read_model(saying(dict.fromkeys(others, 0)), FAMILIES)
