"""A GGUF file again, with other keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFWriter


def rewritten(source: Path, path: Path, keys: dict[str, Any]) -> Path:
    """Write the file `source` at `path` with `keys`, besides those that it has or in their place."""
    reader = GGUFReader(source)
    values = {name: item.contents() for name, item in reader.fields.items() if not name.startswith("GGUF.")} | keys
    writer = GGUFWriter(path, values.pop("general.architecture"))
    for name, value in values.items():
        kind = {bool: "bool", str: "string", int: "uint32", float: "float32", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
