"""A safetensors model computes what transformers computes, and a damaged or another one is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.cli import main
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.errors import ModelError
from cbtop.compute.gguf import GgufFile
from tests.compute.safetensors_models import decoded, expected, saved

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
        ("Llama", {"attention_bias": True}),
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_tokens_and_logits_are_those_of_transformers(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path, kind, **options)
    tokens, logits = decoded(tmp_path)
    right_tokens, right_logits = expected(model)
    assert tokens == right_tokens
    assert len(set(tokens)) > 1
    assert np.abs(logits - right_logits).max() < 1e-4 * np.abs(right_logits).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_two_bytes_are_read_as_they_are(dtype: str, tmp_path: Path) -> None:
    model = saved(tmp_path, "Llama", getattr(torch, dtype))
    tokens, _ = decoded(tmp_path / "model.safetensors")
    assert tokens == expected(model)[0]
    assert read_model(tmp_path, FAMILIES).quantization == {"bfloat16": "BF16", "float16": "F16"}[dtype]


def test_a_model_in_several_files_is_read_from_the_folder_or_a_file(tmp_path: Path) -> None:
    model = saved(tmp_path, "Llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    files = sorted(tmp_path.glob("*-of-*.safetensors"))
    assert len(files) > 2
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    right = expected(model)[0]
    assert decoded(tmp_path)[0] == right
    assert decoded(files[-1])[0] == right
    files[0].unlink()
    with pytest.raises(ModelError, match=r"00001-of-.* does not exist; download the whole folder"):
        read_model(tmp_path, FAMILIES)


@pytest.mark.slow
def test_the_demo_runs_a_safetensors_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, "Llama", hidden_size=256, intermediate_size=256)
    assert main(["demo", "--model", str(tmp_path), "--headless", "--steps", "4", "--threads", "1"]) == 0
    assert "LmHead" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "has the model_type 'gpt2'; of safetensors models llama, mistral, qwen2, qwen3 are"),
        ({"hidden_act": "gelu"}, "has 'gelu' as hidden_act, which is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "as quantization_config, which is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "has RoPE of the type 'yarn'; default, linear",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "has RoPE parameters that cannot be read"),
        ({"num_hidden_layers": 1}, "has tensors that a llama decoder would ignore"),
        ({"hidden_size": 128}, "has shape [64, 96]; its metadata wants [128, 96]"),
        ({"rms_norm_eps": None}, "has no llama.attention.layer_norm_rms_epsilon"),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    saved(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError) as caught:
        read_model(tmp_path, FAMILIES)
    assert said in str(caught.value)


def one_tensor(**entry: Any) -> bytes:
    """Return a file with one tensor of four bytes. `entry` replaces its fields."""
    header = json.dumps({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry}).encode()
    return struct.pack("<Q", len(header)) + header + b"1234"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is shorter than its header"),
        (struct.pack("<Q", 1 << 62) + b"{}", "has a header of 4,611,686,018,427,387,904 bytes in a file of 10"),
        (struct.pack("<Q", 2) + b"[1", "has a header that is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "has a header that is not a JSON object"),
        (one_tensor(data_offsets=[0, 8]), "has a tensor 't' that is not within the file"),
        (one_tensor(data_offsets=[4, 8]), "has a tensor 't' that is not within the file"),
        (one_tensor(data_offsets=[-4, 0]), "has a tensor 't' that is not within the file"),
        (one_tensor(shape=[2]), "has a tensor 't' that is not within the file"),
        (one_tensor(shape=[1.0]), "has a tensor 't' that is not within the file"),
        (one_tensor(shape=None), "has a tensor 't' without dtype, shape and data_offsets"),
        (one_tensor(dtype="F8_E4M3"), "tensor 't' is of type F8_E4M3; supported are F32, F16, BF16"),
    ],
)
def test_a_damaged_file_is_refused_with_its_fault(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError) as caught:
        GgufFile.open(tmp_path)
    assert said in str(caught.value)


def test_a_file_without_its_configuration_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(one_tensor())
    with pytest.raises(ModelError, match=r"config\.json does not exist; a safetensors model needs it"):
        GgufFile.open(path)


def test_a_model_that_is_written_to_while_it_is_read_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "Llama")
    with GgufFile.open(tmp_path) as file:
        file.matrix("output.weight", 96, 64)
        with (tmp_path / "model.safetensors").open("ab") as written:
            written.write(b"more")
        with pytest.raises(ModelError, match="was written to while it was read"):
            file.load()
