"""Tests of files that are not a model: the error names their real type and what to do."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from cbtop.compute.gguf_header import ARRAY
from tests.compute.test_gguf import message_of, write_gguf


def test_the_second_file_of_a_split_model_is_named_with_the_first_one(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00003.gguf"
    writer = GGUFWriter(path, "llama")
    # When llama-gguf-split splits a model, it writes this key only into the first file.
    del writer.kv_data[0]["general.architecture"]
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = message_of(path)
    assert "is one of 3 files of a split model (number 2)" in message
    assert "llama-gguf-split --merge m-00001-of-00003.gguf" in message


@pytest.mark.parametrize(
    ("kind", "named", "what_to_do"),
    [
        ("adapter", "is a LoRA adapter", "llama-export-lora"),
        ("imatrix", "is an importance matrix", "give the model itself"),
        ("mmproj", "(mmproj)", "give the .gguf file of its model"),
    ],
)
def test_a_gguf_file_of_another_kind_is_named(tmp_path: Path, kind: str, named: str, what_to_do: str) -> None:
    message = message_of(write_gguf(tmp_path / "m.gguf", edit=lambda writer: writer.add_type(kind)))
    assert named in message
    assert what_to_do in message


def test_a_projector_that_says_no_type_is_named_by_its_architecture(tmp_path: Path) -> None:
    assert "(mmproj)" in message_of(write_gguf(tmp_path / "m.gguf", "clip"))


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "is a Git LFS pointer" in message_of(path)
    assert "git lfs pull" in message_of(path)


@pytest.mark.parametrize(
    ("name", "joined"),
    [
        ("m.gguf.part1of2", "cat m.gguf.part*of2 > m.gguf`"),
        ("m.Q8_0.gguf.part2of2", "cat m.Q8_0.gguf.part*of2 > m.Q8_0.gguf`"),
        ("m.gguf-split-b", "cat m.gguf-split-* > m.gguf`"),
    ],
)
def test_a_piece_of_a_cut_file_is_named_and_how_to_join_the_pieces(tmp_path: Path, name: str, joined: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF" if "1of" in name else b"some weights")
    assert "is one piece of a file that was cut" in message_of(tmp_path / name)
    assert joined in message_of(tmp_path / name)


def test_an_array_of_arrays_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = b"tokenizer.nested"
    nested = struct.pack("<IIQ", ARRAY, ARRAY, 1) + struct.pack("<IQB", 0, 1, 7)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + nested)
    assert "has an array of arrays as tokenizer.nested" in message_of(path)


@pytest.mark.parametrize("value", [0, 1])
def test_a_flag_may_be_an_integer(tmp_path: Path, value: int) -> None:
    from cbtop.compute.gguf import GgufFile

    def edit(writer: Any) -> None:
        writer.add_uint32("llama.flag", value)
        writer.add_array("llama.flags", [value, 1])

    with GgufFile.open(write_gguf(tmp_path / "m.gguf", edit=edit)) as file:
        assert file.metadata.flag("llama.flag", default=not value) is bool(value)
        assert file.metadata.flags("llama.flags", 2) == (bool(value), True)


def test_the_largest_token_number_means_that_there_is_no_such_token(tmp_path: Path) -> None:
    from cbtop.compute.gguf import GgufFile
    from cbtop.compute.tokenizer import NO_TOKEN, _token

    written = write_gguf(tmp_path / "m.gguf", edit=lambda writer: writer.add_eos_token_id(NO_TOKEN))
    with GgufFile.open(written) as file:
        assert _token(file, "eos", 16, 2) is None
