"""Tests of the metadata of a GGUF file: the metadata equals what was written. Each value has the requested type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.compute.errors import ModelError
from cbtop.compute.gguf import GgufFile

from .test_gguf import with_array, write_gguf

ARRAYS = {
    "add_uint8": st.integers(0, 255),
    "add_int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "add_uint64": st.integers(0, (1 << 64) - 1),
    "add_float64": st.floats(allow_nan=False),
    "add_bool": st.booleans(),
    "add_string": st.text(min_size=1),  # The package gguf cannot write an empty string.
}


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_values_and_arrays_are_those_that_ggufs_own_writer_wrote(tmp_path: Path, data: st.DataObject) -> None:
    wanted: dict[str, Any] = {}

    def edit(writer: GGUFWriter) -> None:
        for number in range(data.draw(st.integers(0, 6))):
            kind = data.draw(st.sampled_from(list(ARRAYS)))
            value = wanted[f"{number}"] = data.draw(ARRAYS[kind])
            getattr(writer, kind)(f"{number}", value)
        for name, elements in (
            ("texts", st.text()),
            ("numbers", st.integers(-9, 9)),
            ("x", st.floats(width=32)),
        ):
            wanted[name] = data.draw(st.lists(elements, min_size=1, max_size=99))  # gguf cannot write empty lists
            writer.add_array(name, wanted[name])

    with GgufFile.open(write_gguf(tmp_path / "m.gguf", edit=edit)) as file:
        for name in ("numbers", "x"):
            np.testing.assert_equal(file.metadata.numbers(name), wanted.pop(name))
        assert file.metadata.texts("texts") == wanted.pop("texts")
        assert {name: file.metadata.values[name] for name in wanted} == wanted


@pytest.mark.parametrize("kind", [0, 8])
def test_an_array_without_elements_has_none(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_array(kind, 0, b""))
    with GgufFile.open(path) as file:
        assert (file.metadata.texts("a") if kind == 8 else file.metadata.numbers("a")) == []


def test_an_array_is_no_value_and_a_value_is_no_array(tmp_path: Path) -> None:
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", edit=lambda w: w.add_array("list", ["a", "b"]))) as file:
        with pytest.raises(ModelError, match="has 'an array of 2' as list; a string is wanted"):
            file.metadata.text("list")
        with pytest.raises(ModelError, match="an array of numbers is wanted"):
            file.metadata.numbers("list")
        for key in ("general.architecture", "none"):
            with pytest.raises(ModelError, match=f"{key}; an array of strings is wanted"):
                file.metadata.texts(key)
