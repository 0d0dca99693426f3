"""A model file that cannot be run is told so in one line, whatever is wrong with it."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.errors import ModelError
from cbtop.compute.gguf import GgufFile


def message_of(path: Path) -> str:
    """The one line that reading `path` ends with."""
    with pytest.raises(ModelError) as caught:
        read_model(path, FAMILIES)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    return message


def write_gguf(path: Path, architecture: str = "llama", edit: Callable[[GGUFWriter], None] | None = None) -> Path:
    """A GGUF file with the keys of a tiny llama, what `edit` adds, and no tensors but one embedding."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    if edit is not None:
        edit(writer)
    writer.add_tensor("token_embd.weight", np.ones((16, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert message_of(tmp_path / "none.gguf").endswith("does not exist; give the path of a .gguf model")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in message_of(tmp_path)


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in message_of(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "is empty"),
        (b"not a model at all", "is not a GGUF file"),
        (b"GGUF", "is truncated"),
        (b"GGUF" + struct.pack("<I", 1), "is GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "announces 1,152,921,504,606,846,976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "announces 1,152,921,504,606,846,976 keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "has a name of"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 1 << 61), "elements in its metadata"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"a", 77), "has 77 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 0, 0), "has no general.architecture"),
    ],
)
def test_damage_is_told(tmp_path: Path, content: bytes, wanted: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert wanted in message_of(path)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture="mamba")
    assert "'mamba'; supported are qwen2, llama" in message_of(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    assert "has no tensor 'blk.0.attn_norm.weight'" in message_of(write_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (lambda w: w.add_head_count_kv(3), "a multiple is wanted"),
        (lambda w: w.add_value_length(4), "only equal ones are supported"),
        (lambda w: w.add_expert_count(8), "mixture of experts"),
        (lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "rope scaling 'yarn'"),
        (lambda w: w.add_rope_dimension_count(7), "rotates 7 of 8 dimensions"),
        (lambda w: w.add_rope_freq_base(float("nan")), "a finite number above zero"),
        (lambda w: w.add_key_length(0), "has '0' as llama.attention.key_length"),
        (lambda w: w.add_string("general.alignment", "x"), "damaged"),
        (
            lambda w: w.add_tensor("x", np.zeros((2, 18), np.uint8), raw_dtype=GGMLQuantizationType.Q4_0),
            "tensor 'x' is of type Q4_0; supported are F32, F16, BF16, Q8_0, Q4_K, Q6_K",
        ),
        (lambda w: w.add_tensor("output.weight", np.ones((15, 32), np.float32)), "no tensor"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(tmp_path: Path, edit: Any, wanted: str) -> None:
    assert wanted in message_of(write_gguf(tmp_path / "m.gguf", edit=edit))


def test_a_tensor_that_would_be_ignored_is_refused(model_files: dict[str, Path]) -> None:
    file = GgufFile.open(model_files["llama"])
    file.matrix("token_embd.weight", 512, 256)
    assert "token_embd.weight" not in file.untaken_tensors()
    assert "output.weight" in file.untaken_tensors()


def test_a_wrong_shape_is_refused(model_files: dict[str, Path]) -> None:
    file = GgufFile.open(model_files["llama"])
    with pytest.raises(ModelError, match=r"has shape \[256, 512\]; its metadata wants \[256, 500\]"):
        file.matrix("token_embd.weight", 500, 256)


def test_every_truncation_is_refused(model_files: dict[str, Path], tmp_path: Path) -> None:
    whole = model_files["qwen2"].read_bytes()
    path = tmp_path / "short.gguf"
    for size in [*range(4, 3000, 97), len(whole) // 2, len(whole) - 33]:
        path.write_bytes(whole[:size])
        assert "truncated" in message_of(path)


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_damaged_header_ends_in_a_model_or_a_model_error(
    model_files: dict[str, Path], tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(model_files["qwen2"].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 2500))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelError):  # any other exception fails the test
        read_model(path, FAMILIES)
