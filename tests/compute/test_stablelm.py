"""Tests of StableLM: it equals llama.cpp. The tests notice if any feature is left out.

Other variants of the model are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import llama_peer
from cbtop.compute import demo_model
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, Norm, read_model
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.demo_model import TINY_STABLELM
from cbtop.compute.errors import ModelError
from cbtop.compute.quantization.floats import F32

from .rewritten import rewritten

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 512, 60)]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a float32 model with additional keys of its architecture.

    Tensors with `without` in their names are left out.
    """
    tensors: Any = demo_model.tensors_of

    def written(keys: dict[str, Any] | None = None, without: str = "nothing") -> Path:
        def own(shape: Any) -> Iterator[Any]:
            return (replace(one, format=F32) for one in tensors(shape) if without not in one.name)

        monkeypatch.setattr(demo_model, "tensors_of", own)
        llama_peer.write_model(tmp_path / "plain.gguf", TINY_STABLELM)
        said = {f"stablelm.{key}": value for key, value in (keys or {}).items()}
        return rewritten(tmp_path / "plain.gguf", tmp_path / "stablelm.gguf", said)

    return written


def in_every_norm(model: Model, change: Callable[[Norm], Norm]) -> Model:
    layers = []
    for layer in model.layers:
        norms = {one.name: getattr(layer, one.name) for one in fields(layer)}
        layers.append(replace(layer, **{name: change(one) for name, one in norms.items() if isinstance(one, Norm)}))
    return replace(model, layers=tuple(layers), final_norm=change(model.final_norm))


def without_means(model: Model) -> Model:
    return in_every_norm(model, lambda norm: Norm(norm.weight))


def without_biases(model: Model) -> Model:
    return in_every_norm(model, lambda norm: replace(norm, bias=np.zeros_like(norm.weight)))


def without_weights(model: Model) -> Model:
    return in_every_norm(model, lambda norm: replace(norm, weight=np.ones_like(norm.weight)))


def without_the_last_bias(model: Model) -> Model:
    return replace(model, final_norm=replace(model.final_norm, bias=np.zeros(model.hidden, np.float32)))


def rotates_all(model: Model) -> Model:
    rope = replace(model.rope, dimensions=model.head_dim)
    return replace(model, rope=rope, sliding_rope=rope)


def rotates_neighbours(model: Model) -> Model:
    rope = replace(model.rope, layout="normal")
    return replace(model, rope=rope, sliding_rope=rope)


def of_another_epsilon(model: Model) -> Model:
    return replace(model, epsilon=0.1)


FAULTS = (
    without_means, without_biases, without_weights, without_the_last_bias, rotates_all, rotates_neighbours,
    of_another_epsilon,
)  # fmt: skip


def test_logits_are_llama_cpps_and_nothing_of_the_family_may_be_left_out(write: Write) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    path = write()
    model = read_model(path, FAMILIES)
    llama = llama_peer.Llama(path)
    found = llama.decode(TOKENS)
    llama.close()

    def error(model: Model) -> float:
        expected = forward_reference(model, TOKENS)[-1]
        return float(np.abs(found - expected).max() / np.abs(expected).max())

    assert error(model) < 5e-3
    assert {fault.__name__: error(fault(model)) > 5e-2 for fault in FAULTS} == {
        fault.__name__: True for fault in FAULTS
    }


def test_sequential_halves_run_even_if_a_converter_says_they_are_parallel(write: Write) -> None:
    plain, said = (read_model(write(keys), FAMILIES) for keys in ({}, {"use_parallel_residual": True}))
    np.testing.assert_array_equal(forward_reference(said, TOKENS[:5]), forward_reference(plain, TOKENS[:5]))


def test_a_model_without_biases_of_products_runs(write: Write) -> None:
    model = read_model(write(without="attn_q.bias"), FAMILIES)
    assert (model.layers[0].q.bias.size, model.layers[0].k.bias.size) == (0, 128)


@pytest.mark.parametrize(
    ("without", "wanted"),
    [
        ("ffn_norm", "has no 'blk.0.ffn_norm.weight': both halves of its layers read the same input, as those of"),
        ("1.ffn_norm.weight", "has no tensor 'blk.1.ffn_norm.weight'"),
        ("attn_norm.bias", "has no tensor 'blk.0.attn_norm.bias'"),
        ("output_norm.bias", "has no tensor 'output_norm.bias'"),
    ],
)
def test_a_model_whose_norms_are_not_there_is_refused_by_what_it_lacks(
    write: Write, without: str, wanted: str
) -> None:
    with pytest.raises(ModelError) as refused:
        read_model(write(without=without), FAMILIES)
    assert wanted in str(refused.value)
    assert "\n" not in str(refused.value)


def test_norms_of_heads_and_an_epsilon_of_rms_norms_are_refused_by_name(
    write: Write, model_files: dict[str, Path], tmp_path: Path
) -> None:
    norms = {
        f"blk.0.attn_{name}_norm.weight": np.ones((heads, 64), np.float32) for name, heads in (("q", 4), ("k", 2))
    }
    for path, wanted in (
        (
            rewritten(model_files["stablelm"], tmp_path / "heads.gguf", {}, norms),
            "'blk.0.attn_q_norm.weight' and 1 more",
        ),
        (write({"attention.layer_norm_rms_epsilon": 1e-6}), "'stablelm.attention.layer_norm_rms_epsilon' = "),
    ):
        with pytest.raises(ModelError, match="a stablelm decoder would ignore") as refused:
            read_model(path, FAMILIES)
        assert wanted in str(refused.value)
