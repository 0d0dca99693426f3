"""Tests of model files that cannot run: whatever is wrong, the error is one line."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.compute import gguf, gguf_header, gguf_stream
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.errors import ModelError
from cbtop.compute.gguf import GgufFile
from cbtop.compute.gguf_header import aligned
from cbtop.compute.gguf_writer import written_header
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from tests.protocol.test_hostile import peak_of

from .rewritten import rewritten


def message_of(path: Path) -> str:
    """Return the error message of reading the model in `path`. Check that it is one line."""
    with pytest.raises(ModelError) as caught:
        read_model(path, FAMILIES)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    return message


def write_gguf(path: Path, architecture: str = "llama", edit: Callable[[GGUFWriter], None] | None = None) -> Path:
    """Write a GGUF file with the keys of a tiny llama, changed by `edit`. Its only tensor is the embedding."""
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
    assert "is a directory without config.json" in message_of(tmp_path)


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
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"a", 77), "with 77 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 0, 0), "has no general.architecture"),
    ],
)
def test_damage_is_told(tmp_path: Path, content: bytes, wanted: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert wanted in message_of(path)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture="mamba")
    assert "'mamba'; supported are qwen2, qwen3, qwen3moe, llama, phi3, gemma2, gemma3, stablelm:" in message_of(path)


def test_no_other_file_is_advised_of_a_model_of_an_unknown_architecture(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("x", np.zeros((2, 66), np.uint8), raw_dtype=GGMLQuantizationType.IQ2_XXS)

    message = message_of(write_gguf(tmp_path / "m.gguf", "gpt-oss", add))
    assert "is of architecture 'gpt-oss'; supported are qwen2, " in message
    assert "IQ2_XXS" not in message


def test_scales_of_whole_matrices_are_refused_by_their_name(model_files: dict[str, Path], tmp_path: Path) -> None:
    scales = {f"blk.0.attn_{which}.scale": np.ones(1, np.float32) for which in "qk"}
    path = rewritten(model_files["llama"], tmp_path / "m.gguf", {}, scales)
    assert "has a scale for each whole matrix ('blk.0.attn_q.scale' and 1 more)" in message_of(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    assert "has no tensor 'blk.0.attn_q.weight'" in message_of(write_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (lambda w: w.add_head_count_kv(3), "a multiple is wanted"),
        (lambda w: w.add_value_length(4), "only equal ones are supported"),
        (lambda w: w.add_expert_count(8), "has no llama.expert_used_count"),
        (lambda w: w.add_string("llama.rope.scaling.type", "dynamic"), "rope scaling 'dynamic'"),
        (lambda w: w.add_rope_dimension_count(7), "rotates 7 of 8 dimensions"),
        (lambda w: w.add_rope_freq_base(float("nan")), "a finite number above zero"),
        (lambda w: w.add_key_length(0), "has '0' as llama.attention.key_length"),
        (lambda w: w.add_string("general.alignment", "x"), "damaged"),
        (
            lambda w: w.add_tensor("x", np.zeros((2, 66), np.uint8), raw_dtype=GGMLQuantizationType.IQ2_XXS),
            "tensor 'x' is of type IQ2_XXS; supported are F32, F16, BF16, Q8_0, ",
        ),
        (lambda w: w.add_tensor("output.weight", np.ones((15, 32), np.float32)), "no tensor"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(tmp_path: Path, edit: Any, wanted: str) -> None:
    assert wanted in message_of(write_gguf(tmp_path / "m.gguf", edit=edit))


def test_a_tensor_that_would_be_ignored_is_refused(model_files: dict[str, Path]) -> None:
    with GgufFile.open(model_files["llama"]) as file:
        file.matrix("token_embd.weight", 512, 256)
        assert "token_embd.weight" not in file.untaken_tensors()
        assert "output.weight" in file.untaken_tensors()


def test_a_wrong_shape_is_refused(model_files: dict[str, Path]) -> None:
    with (
        GgufFile.open(model_files["llama"]) as file,
        pytest.raises(ModelError, match=r"has shape \[256, 512\]; its metadata wants \[256, 500\]"),
    ):
        file.matrix("token_embd.weight", 500, 256)


def test_every_truncation_is_refused(model_files: dict[str, Path], tmp_path: Path) -> None:
    whole = model_files["qwen2"].read_bytes()
    path = tmp_path / "short.gguf"
    for size in [*range(4, 3000, 97), len(whole) // 2, len(whole) - 33]:
        path.write_bytes(whole[:size])
        assert "truncated" in message_of(path)


class WatchedFile(io.FileIO):
    """A file that calls `before_read` before each read, with the number of bytes to read."""

    def __init__(self, path: Path, before_read: Callable[[int], None]) -> None:
        super().__init__(path)
        self._before_read = before_read

    def read(self, size: int | None = -1) -> Any:
        self._before_read(-1 if size is None else size)
        return super().read(size)


def header_error(path: Path, before_read: Callable[[int], None]) -> str:
    """Return the error message of reading only the header of `path`. Check that it is one line."""
    file: Any = WatchedFile(path, before_read)
    with file, pytest.raises(ModelError) as caught:
        gguf_header.read_header(file, path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_array(kind: int, count: int, elements: bytes) -> bytes:
    """Return the bytes of a file with one key. Its value is an array that claims to have `count` items."""
    return b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, kind, count) + elements


@pytest.mark.parametrize("count", [300_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_empty_strings_by_the_million_are_passed_over_and_none_is_kept(tmp_path: Path, count: int) -> None:
    path = tmp_path / "model.gguf"
    # A list of these strings in memory would need at least as many bytes as the file.
    path.write_bytes(with_array(8, count, bytes(8 * count)))
    with peak_of() as peak:
        assert "has no general.architecture" in message_of(path)
    assert peak() < 1 << 20


@pytest.mark.parametrize("kind", [0, 8, 12])
def test_a_count_is_compared_with_the_file_size_before_anything_is_read(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_array(kind, 1_900_000, bytes(1000)))
    read: list[int] = []
    assert "is truncated" in header_error(path, read.append)
    assert len(read) < 20


@pytest.mark.parametrize("piece_bytes", [8, 9, 40, 1 << 18])
def test_texts_are_passed_over_and_found_wherever_a_piece_of_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(gguf_header, "PIECE_BYTES", piece_bytes)
    texts = ["", "a", "b" * 7, "", "c" * 8, "d" * 9, "é" * 40, "e" * 300, ""]
    path = write_gguf(tmp_path / "m.gguf", edit=lambda writer: writer.add_array("texts", texts))
    with GgufFile.open(path) as file:
        assert file.metadata.texts("texts") == texts
        assert file.metadata.unasked_keys("general.")


@pytest.mark.parametrize("length", [1, 1 << 20, 1 << 63, (1 << 64) - 1])
def test_a_text_that_is_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_array(8, 3, struct.pack("<Q2sQQ", 2, b"ab", 0, length)))
    assert "is truncated" in message_of(path)


def test_texts_of_a_file_that_is_cut_while_it_is_read_are_missed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_array(8, 100_000, bytes(800_000)))

    def cut(size: int) -> None:
        # The file becomes shorter while its texts are read, which happens in pieces of this size.
        if size == gguf_header.PIECE_BYTES:
            os.truncate(path, 400_000)

    assert "is truncated" in header_error(path, cut)


def test_a_limit_is_named_with_what_passed_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_array(8, 3_000_000, bytes(24_000_000)))
    assert "has 3,000,000 elements in its metadata, over the limit of 2,000,000" in message_of(path)


def test_a_long_text_is_passed_over_but_for_its_beginning(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        for number in range(8):
            writer.add_string(f"text {number}", "x" * (4 << 20))

    path = write_gguf(tmp_path / "m.gguf", edit=edit)
    with peak_of() as peak:
        assert "has no tensor" in message_of(path)
    assert peak() < 2 << 20


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    key = struct.pack("<Q1sIB", 1, b"a", 0, 7)
    tensor = struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 0, 0)
    for content in (struct.pack("<IQQ", 3, 0, 2) + key * 2, struct.pack("<IQQ", 3, 2, 0) + tensor * 2 + bytes(256)):
        path = tmp_path / "model.gguf"
        path.write_bytes(b"GGUF" + content)
        assert "twice" in message_of(path)


def test_a_file_truncated_while_its_header_is_read_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_array(8, 500_000, bytes(4_000_000)))

    def cut(size: int) -> None:
        if size == 1:  # The file becomes shorter just before the read of one byte, the name of a key.
            os.truncate(path, 33)

    assert "is truncated" in header_error(path, cut)


def read_after(path: Path, change: Callable[[], None]) -> str:
    """Return the error message of reading the model in `path`.

    `change` runs after the header was read, but before the weights are read.
    """
    real = GgufFile.load

    def changed(file: GgufFile) -> None:
        change()
        real(file)

    with mock.patch.object(GgufFile, "load", changed):
        return message_of(path)


@pytest.fixture
def copied(model_files: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(model_files["qwen2"].read_bytes())
    os.utime(path, (1e9, 1e9))
    return path


def overwrite(path: Path) -> None:
    """Overwrite the whole file with other bytes. Its size stays the same."""
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.write(b"\xff" * size)


def test_a_file_truncated_before_its_weights_are_read_is_refused_in_one_line(copied: Path) -> None:
    assert "was cut short while it was read" in read_after(copied, lambda: os.truncate(copied, 90_000))


@pytest.mark.parametrize("change", [overwrite, lambda path: os.utime(path), lambda path: os.truncate(path, 1 << 24)])
def test_a_file_that_is_written_to_while_it_is_read_is_refused_in_a_line(
    copied: Path, change: Callable[[Path], None]
) -> None:
    assert "was written to while it was read" in read_after(copied, lambda: change(copied))


def test_what_becomes_of_the_file_of_a_model_that_was_read_changes_no_weight(
    copied: Path, model_files: dict[str, Path]
) -> None:
    model = read_model(copied, FAMILIES)
    wanted = read_model(model_files["qwen2"], FAMILIES)
    overwrite(copied)
    os.truncate(copied, 0)
    assert (model.embedding.data == wanted.embedding.data).all()
    assert (model.layers[1].down.weight.data == wanted.layers[1].down.weight.data).all()


def test_a_file_that_cannot_be_read_any_more_is_refused_in_a_line(copied: Path) -> None:
    failing = mock.Mock(side_effect=OSError(5, "Input/output error"))
    with mock.patch.object(os, "preadv", failing):
        assert "cannot be read (Input/output error)" in message_of(copied)


def test_what_the_system_gives_at_a_time_is_put_together(copied: Path) -> None:
    with mock.patch.object(gguf_stream, "READ_BYTES", 1000):
        model = read_model(copied, FAMILIES)
    assert (model.embedding.data == read_model(copied, FAMILIES).embedding.data).all()


def test_a_model_larger_than_the_free_memory_is_refused_before_it_is_read(copied: Path) -> None:
    with (
        mock.patch.object(gguf, "available_bytes", return_value=500_000),
        mock.patch.object(GgufFile, "load", side_effect=AssertionError),
    ):
        assert "GB of memory for its weights, and 0.0 GB are available here" in message_of(copied)
    with mock.patch.object(gguf, "available_bytes", return_value=None):
        read_model(copied, FAMILIES)


def test_memory_that_the_system_does_not_give_is_told_in_a_line(copied: Path) -> None:
    with mock.patch.object(gguf, "on_huge_pages", side_effect=OSError(12, "Cannot allocate memory")):
        assert "the system does not give (Cannot allocate memory)" in message_of(copied)


@pytest.mark.parametrize(
    ("second", "wanted"), [(0, "'b' and 'a' in the same bytes"), (96, "'a' and 'b' in the same"), (128, "no general")]
)
def test_tensors_in_the_same_bytes_are_refused(tmp_path: Path, second: int, wanted: str) -> None:
    tensors = b"".join(
        struct.pack("<Q1sIQIQ", 1, name, 1, 32, 0, at) for name, at in ((b"b", second), (b"a", 0))
    )  # 128 bytes each
    path = tmp_path / "model.gguf"
    path.write_bytes((b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + tensors).ljust(96, b"\0") + bytes(256))
    assert wanted in message_of(path)


def test_a_tensor_beside_its_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 0, 8) + bytes(256))
    assert "'t' that does not lie at a multiple of 32" in message_of(path)


@pytest.mark.parametrize("kind", GGMLQuantizationType)
def test_a_type_has_its_name_and_its_block(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    if kind in FORMATS:
        known = FORMATS[kind]
        assert (known.name, (known.block_elements, known.block_bytes)) == (kind.name, GGML_QUANT_SIZES[kind])
    else:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 256, kind, 0))
        assert f"is of type {kind.name}; supported are F32" in message_of(path)


@given(
    metadata=st.dictionaries(
        st.text(min_size=1, max_size=20).map(lambda name: f"x.{name}"),
        st.text(min_size=1) | st.integers(0, (1 << 32) - 1) | st.floats(width=32),
        max_size=9,
    ),
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_header_is_written_as_ggufs_own_writer_does(
    tmp_path: Path, metadata: dict[str, Any], shapes: list[tuple[int, ...]]
) -> None:
    writer = GGUFWriter(tmp_path / "theirs.gguf", "llama")
    for key, value in metadata.items():
        kind = {str: "string", int: "uint32", float: "float32"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    for number, shape in enumerate(shapes):
        writer.add_tensor(f"tensor {number}", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = written_header(
        {"general.architecture": "llama"} | metadata,
        [(f"tensor {number}", shape, F32) for number, shape in enumerate(shapes)],
    )
    for shape in shapes:
        data = np.ones(shape, np.float32).tobytes()
        ours += data.ljust(aligned(len(data)), b"\0")
    assert ours == (tmp_path / "theirs.gguf").read_bytes()


@pytest.mark.slow
def test_a_model_is_written_and_read_without_the_package_gguf(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from pathlib import Path\n"
        "from cbtop.compute.decoder import FAMILIES\n"
        "from cbtop.compute.decoder.base import read_model\n"
        "from cbtop.compute.demo_model import TINY, write_model\n"
        "path = Path(sys.argv[1])\n"
        "write_model(path, TINY, lambda *_: None)\n"
        "print(read_model(path, FAMILIES).vocabulary)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.gguf")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "512\n"


def test_tensors_and_keys_are_those_that_ggufs_own_reader_finds(model_files: dict[str, Path]) -> None:
    for path in model_files.values():
        theirs = GGUFReader(path)
        wanted = {name: item.contents() for name, item in theirs.fields.items()}
        with GgufFile.open(path) as ours:
            own = {name: value for name, value in wanted.items() if not name.startswith("GGUF.")}
            assert own == ours.metadata.values
            assert [tensor.name for tensor in theirs.tensors] == ours.untaken_tensors()
            read = [
                (ours.vector, ours.matrix, ours.matrices)[len(tensor.shape) - 1](
                    tensor.name, *reversed(tensor.shape.tolist())
                )
                for tensor in theirs.tensors
            ]
            ours.load()
        for tensor, one in zip(theirs.tensors, read, strict=True):
            data = one.data if isinstance(one, QuantizedMatrix) else one
            assert data.tobytes() == tensor.data.tobytes()
            assert data.ndim == 1 or data.ctypes.data % 64 == 0


BYTES = st.binary(max_size=9) | st.integers(0, (1 << 64) - 1).map(lambda number: struct.pack("<Q", number))


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_damaged_header_ends_in_a_model_or_a_model_error(
    model_files: dict[str, Path], tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(model_files["qwen2"].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at, cut, put = data.draw(st.tuples(st.integers(4, 2500), st.integers(0, 9), BYTES))
        content[at : at + data.draw(st.sampled_from([cut, len(put)]))] = put
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.none() | st.integers(0, 3000))])
    with contextlib.suppress(ModelError):  # If another exception is raised, the test fails.
        read_model(path, FAMILIES)
