"""Copies a GGUF file and changes some of its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize


def rewritten(source: Path, path: Path, keys: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """Write the file `source` to `path` with `keys` added or replaced.

    If there are `tensors`, they are appended, and all tensors are written as float32.
    """
    reader = GGUFReader(source)
    values = {name: item.contents() for name, item in reader.fields.items() if not name.startswith("GGUF.")} | keys
    writer = GGUFWriter(path, values.pop("general.architecture"))
    for name, value in values.items():
        kind = {bool: "bool", str: "string", int: "uint32", float: "float32", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(name, value)
    for tensor in reader.tensors:
        if tensors is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
