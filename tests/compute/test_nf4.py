"""NF4 is bit-equal to bitsandbytes, and a model with NF4 matrices computes what their weights say."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.errors import ModelError
from cbtop.compute.gguf import GgufFile
from cbtop.compute.quantization import ON_GPU
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from cbtop.compute.quantization.nf4 import LEVELS, NF4, blocks_of
from tests.compute.safetensors_models import decoded, expected, saved

Tensors = dict[str, tuple[str, list[int], bytes]]
OF_BITSANDBYTES = json.loads((Path(__file__).parent / "nf4_bitsandbytes.json").read_text())
NAME, STATE = "model.layers.0.mlp.up_proj.weight", "quant_state.bitsandbytes__nf4"


def stored(kind: str) -> Tensors:
    """Return the tensors of a matrix that bitsandbytes has quantised."""
    return {
        name: (one["dtype"], one["shape"], base64.b64decode(one["data"]))
        for name, one in OF_BITSANDBYTES[kind]["tensors"].items()
    }


def weights_of(kind: str) -> Any:
    """Return the weights that bitsandbytes dequantises, as their bits."""
    return np.frombuffer(base64.b64decode(OF_BITSANDBYTES[kind]["weights"]), np.uint32).reshape(4, 128)


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> None:
    """Write a safetensors file, and a configuration."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    data = b"".join(data for _, _, data in tensors.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def of_blocks(data: Any, columns: int) -> Tensors:
    """Return the tensors that bitsandbytes would write for NF4 blocks, uint8 (rows, row_bytes)."""
    blocks = data.reshape(-1, NF4.block_bytes)
    packed = blocks[:, 4:].reshape(-1, 2, 1, 16)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1)
    pairs = codes[::2] << 4 | codes[1::2]
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [len(data), columns]})
    return {
        "weight": ("U8", [len(pairs), 1], pairs.tobytes()),
        "weight.absmax": ("F32", [len(blocks)], blocks[:, :4].tobytes()),
        "weight.quant_map": ("F32", [16], LEVELS.tobytes()),
        f"weight.{STATE}": ("U8", [len(state)], state.encode()),
    }


def test_blocks_are_bit_equal_to_bitsandbytes() -> None:
    tensors = stored("plain")
    packed = np.frombuffer(tensors["weight"][2], np.uint8)
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1, 64)
    data = blocks_of(np.frombuffer(tensors["weight.absmax"][2], np.float32), codes).reshape(4, -1)
    found = NF4.dequantize(data)
    np.testing.assert_array_equal(found.view(np.uint32), weights_of("plain"))
    np.testing.assert_array_equal(NF4.quantize(found), data)  # the same codes and scales again
    compiled = np.zeros_like(found)
    for row in range(4):
        NF4.dequantize_row(data, np.uint64(row), compiled, np.uint64(row))
    np.testing.assert_array_equal(compiled.view(np.uint32), weights_of("plain"))


@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_a_matrix_of_a_4_bit_model_is_bit_equal_to_bitsandbytes(kind: str, tmp_path: Path) -> None:
    write(
        tmp_path,
        {name.replace("weight", NAME, 1): one for name, one in stored(kind).items()},
        {"model_type": "llama"},
    )
    with GgufFile.open(tmp_path) as file:
        matrix = file.matrix("blk.0.ffn_up.weight", 4, 128)
        file.load()
        assert file.untaken_tensors() == []
        np.testing.assert_array_equal(np.concatenate(list(file.rows("blk.0.ffn_up.weight", 3))), matrix.dequantized())
    assert matrix.format is NF4
    np.testing.assert_array_equal(matrix.dequantized().view(np.uint32), weights_of(kind))


def test_a_4_bit_model_decodes_as_transformers_does_with_its_weights(tmp_path: Path) -> None:
    model = saved(tmp_path, "Llama", intermediate_size=128)
    tensors: Tensors = {}
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        if "_proj." in name:
            data = NF4.quantize(values)
            parameter.copy_(parameter.new_tensor(NF4.dequantize(data)))
            tensors |= {key.replace("weight", name, 1): one for key, one in of_blocks(data, values.shape[1]).items()}
        else:
            tensors[name] = ("F32", list(values.shape), values.tobytes())
    write(tmp_path, tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens, logits = decoded(tmp_path)
    right_tokens, right_logits = expected(model)
    assert tokens == right_tokens
    assert np.abs(logits - right_logits).max() < 1e-4 * np.abs(right_logits).max()
    assert read_model(tmp_path, FAMILIES).quantization == "NF4"


def load(path: Path) -> None:
    with GgufFile.open(path) as file:
        file.matrix("blk.0.ffn_up.weight", 4, 128)
        file.load()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({STATE: ("U8", [2], b"{}")}, "is not NF4 with blocks of 64"),
        ({STATE: ("U8", [2], b"{!")}, "is not NF4 with blocks of 64"),
        ({"quant_map": ("F32", [16], np.zeros(16, np.float32).tobytes())}, "(other levels)"),
        ({"absmax": ("F32", [2], np.ones(2, np.float32).tobytes())}, "2 scales of float32 for 4 x 128"),
        ({"absmax": ("U8", [8], bytes(8))}, "8 scales of uint8 for 4 x 128"),
        ({"absmax": ("F32", [8], np.full(8, np.nan, np.float32).tobytes())}, "has NaN as the scale of block 0"),
    ],
)
def test_a_matrix_that_is_not_nf4_or_damaged_is_refused(
    change: dict[str, tuple[str, list[int], bytes]], said: str, tmp_path: Path
) -> None:
    tensors = stored("plain") | {f"weight.{name}": one for name, one in change.items()}
    write(tmp_path, {name.replace("weight", NAME, 1): one for name, one in tensors.items()}, {"model_type": "llama"})
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert said in str(caught.value)


def test_nf4_does_not_run_on_a_gpu_and_says_so() -> None:
    from cbtop.compute.gpu.matrix import DeviceMatrix

    assert NF4.code not in ON_GPU
    assert F32.code in ON_GPU
    gpu: Any = None  # is not asked
    with pytest.raises(ModelError, match="weights of NF4 run on no GPU yet: run it with --backend cpu"):
        DeviceMatrix.of(gpu, QuantizedMatrix.of(NF4, np.ones((2, 64), np.float32)), takes_int8=False)
