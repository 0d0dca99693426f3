"""Read models in safetensors files with their `config.json`, as if they were a GGUF file.

Sources of the formats: the README of huggingface/safetensors, and the configurations of transformers' models.
"""

# Files are not trusted: each offset is checked against the size of its file before it is used. They are read and not
# mapped; gguf.py has the reasons. Tensors of several files follow each other in one range of offsets.

from __future__ import annotations

import json
import math
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cbtop.compute.errors import ModelError, TensorTypeError
from cbtop.compute.gguf_header import GgufHeader, Tensor, Value
from cbtop.compute.gguf_stream import read_exactly, unreadable
from cbtop.compute.quantization.floats import BF16, F16, F32
from cbtop.compute.quantization.nf4 import NF4
from cbtop.compute.safetensors_nf4 import Read, StoredTensor, taken_nf4

SUFFIX, CONFIG, INDEX, SINGLE = ".safetensors", "config.json", "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_CONFIG_BYTES = 1 << 24
DTYPES = {"F32": F32, "F16": F16, "BF16": BF16}
ITEM_BYTES = {name: one.block_bytes for name, one in DTYPES.items()} | {"U8": 1}
NOT_QUANTIZED, BITSANDBYTES = None, "bitsandbytes"  # a quantisation of the latter is in the tensors
# `model_type` of a configuration -> the family that runs it
FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_OF_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_KEYS = {  # key of the configuration -> key of GGUF after the family's name
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of offsets: an open file, or a function that fills a buffer from an offset of this part."""

    begin: int
    size_bytes: int
    path: Path
    file: BinaryIO | None = None
    opened: os.stat_result | None = None
    source: Read | None = None

    @property
    def end(self) -> int:
        return self.begin + self.size_bytes


@dataclass(frozen=True, slots=True)
class SafetensorsStream:
    """The open files of a model. Its methods raise ModelError if a file cannot be read."""

    path: Path
    _parts: list[_Part]

    @classmethod
    def open(cls, path: Path) -> tuple[SafetensorsStream, GgufHeader]:
        """Open a .safetensors file, or a folder with such files. `config.json` must be in the same folder.

        Raises ModelError if a file is missing or damaged, or the model is of a kind that does not run here.
        """
        config = _json_of(_folder_of(path) / CONFIG)
        stream = cls(path, [])
        try:
            tensors = stream._tensors()
            metadata, factors = _metadata_of(path, config)
            if config.get("tie_word_embeddings"):
                tensors.pop("output.weight", None)
            if factors is not None:
                begin = stream._add(factors.nbytes, _source_of(factors.tobytes()))
                tensors[ROPE_FACTORS] = Tensor(F32.code, factors.shape, begin, factors.size, factors.nbytes)
        except BaseException:
            stream.close()
            raise
        return stream, GgufHeader(metadata, tensors, stream._parts[-1].end)

    def _tensors(self) -> dict[str, Tensor]:
        """Open all files, and return their tensors by the names that GGUF files use."""
        stored: dict[str, StoredTensor] = {}
        for file in _files_of(self.path):
            part = _opened(file, self._parts[-1].end if self._parts else 0)
            self._parts.append(part)
            for tensor in _tensors_of(part):
                if tensor.name in stored:
                    raise ModelError(f"{self.path} has the tensor {tensor.name!r} twice; download the model again")
                stored[tensor.name] = tensor
        found = {}
        for name, matrix in taken_nf4(stored, self.read).items():
            begin = self._add(matrix.size_bytes, matrix.read)
            shape = matrix.columns, matrix.rows
            found[_renamed(name)] = Tensor(NF4.code, shape, begin, math.prod(shape), matrix.size_bytes)
        return found | {_renamed(name): _tensor_of(tensor) for name, tensor in stored.items()}

    def _add(self, size_bytes: int, source: Read) -> int:
        """Add a part that `source` makes. Returns the offset of its first byte."""
        begin = self._parts[-1].end
        self._parts.append(_Part(begin, size_bytes, self.path, source=source))
        return begin

    def close(self) -> None:
        """Close all files."""
        for part in self._parts:
            if part.file is not None:
                part.file.close()

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` with the bytes from `offset` on. They must be of one tensor."""
        part = self._parts[bisect_right([one.begin for one in self._parts], offset) - 1]
        if part.file is not None:
            read_exactly(part.path, part.file, into, offset - part.begin)
        elif part.source is not None:
            part.source(into, offset - part.begin)

    def check_unchanged(self) -> None:
        """Raise ModelError if a file has changed since it was opened."""
        for part in self._parts:
            if part.file is None or part.opened is None:
                continue
            now = os.fstat(part.file.fileno())
            if (now.st_size, now.st_mtime_ns) != (part.opened.st_size, part.opened.st_mtime_ns):
                raise self.written_to()

    def written_to(self) -> ModelError:
        """Return the error for a file that has changed since it was opened."""
        return ModelError(f"{self.path} was written to while it was read; run it again once it is whole")


def is_safetensors(path: Path) -> bool:
    """Return whether the path is a .safetensors file, or a folder with a configuration."""
    return path.suffix == SUFFIX or (path / CONFIG).is_file()


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _files_of(path: Path) -> list[Path]:
    """Return the files of the model: the given one, or all files of the index that contains it."""
    folder = _folder_of(path)
    if (folder / INDEX).is_file():
        names = _json_of(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{folder / INDEX} has no weight_map; download the model again")
        files = sorted(set(names.values()))
        if outside := [name for name in files if Path(name).name != name]:
            raise ModelError(f"{folder / INDEX} names {outside[0]!r}, which is not in its folder")
        if path.is_dir() or path.name in files:
            return [folder / name for name in files]
    return [folder / SINGLE] if path.is_dir() else [path]


def _json_of(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes; download the model again")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist; a safetensors model needs it next to its weights: download the whole folder"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}); download the model again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object; download the model again")
    return found


def _opened(path: Path, begin: int) -> _Part:
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path} is not a regular file; give a .safetensors model")
        file = path.open("rb")
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; download the whole folder of the model") from error
    except OSError as error:
        raise unreadable(path, error) from error
    stat = os.fstat(file.fileno())
    return _Part(begin, stat.st_size, path, file, stat)


def _tensors_of(part: _Part) -> Iterator[StoredTensor]:
    """Yield the tensors of a file."""
    assert part.file is not None
    length = np.empty(8, np.uint8)
    if part.size_bytes < 8:
        raise _damaged(part, "is shorter than its header")
    read_exactly(part.path, part.file, length.data, 0)
    (header_bytes,) = struct.unpack("<Q", length.tobytes())
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, part.size_bytes - 8):
        raise _damaged(part, f"has a header of {header_bytes:,} bytes in a file of {part.size_bytes:,}")
    text = bytearray(header_bytes)
    read_exactly(part.path, part.file, memoryview(text), 8)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(part, f"has a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(part, "has a header that is not a JSON object")
    for name, entry in header.items():
        if name != "__metadata__" and not name.endswith("rotary_emb.inv_freq"):
            yield _stored_of(part, name, entry, 8 + header_bytes)


def _stored_of(part: _Part, name: str, entry: Any, data_begin: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_whole = all(type(size) is int and size > 0 for size in shape) and type(begin) is int and type(end) is int
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(part, f"has a tensor {name!r:.80} without dtype, shape and data_offsets") from error
    if dtype not in ITEM_BYTES:
        raise _unsupported(part.path, name, dtype)
    size_bytes = math.prod(shape) * ITEM_BYTES[dtype] if is_whole else -1
    if not shape or not 0 <= begin <= end <= part.size_bytes - data_begin or end - begin != size_bytes:
        raise _damaged(part, f"has a tensor {name!r:.80} that is not within the file")
    return StoredTensor(part.path, name, dtype, shape, part.begin + data_begin + begin, size_bytes)


def _tensor_of(stored: StoredTensor) -> Tensor:
    if stored.dtype not in DTYPES:
        raise _unsupported(stored.path, stored.name, stored.dtype)
    code = DTYPES[stored.dtype].code
    return Tensor(code, stored.shape[::-1], stored.offset, math.prod(stored.shape), stored.size_bytes)


def _unsupported(path: Path, name: str, dtype: object) -> TensorTypeError:
    return TensorTypeError(
        f"{path}: tensor {name!r:.80} is of type {str(dtype)[:20]}; supported are {', '.join(DTYPES)} and NF4 of "
        "bitsandbytes: give the model in bfloat16 or float16, or a .gguf file of it",
        None,
    )


def _source_of(data: bytes) -> Read:
    def read(into: memoryview, offset: int) -> None:
        into[:] = data[offset : offset + len(into)]

    return read


def _renamed(name: str) -> str:
    """Return the name of a tensor in GGUF files. An unknown name stays, so that it is refused later."""
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    begin, _, rest = name.partition("model.layers.")
    number, _, rest = rest.partition(".")
    what, _, kind = rest.rpartition(".")
    if begin or not number.isdecimal() or what not in _OF_LAYER:
        return name
    return f"blk.{int(number)}.{_OF_LAYER[what]}.{kind}"


def _metadata_of(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Value], Any]:
    """Return the metadata that a GGUF file of the model has, and the factors of its RoPE or None."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"{path} has the model_type {str(kind)[:60]!r}; of safetensors models {', '.join(FAMILIES)} are "
            "supported: give a .gguf file of the model"
        )
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    for key, value, expected in (
        ("hidden_act", config.get("hidden_act"), ("silu", None)),
        ("quantization_config", method, (NOT_QUANTIZED, BITSANDBYTES)),
    ):
        if value not in expected:
            raise ModelError(
                f"{path} has {str(value)[:60]!r} as {key}, which is not supported; give a plain model, or a "
                ".gguf file of it"
            )
    family = FAMILIES[kind]
    metadata: dict[str, Value] = {"general.architecture": family, "general.name": path.resolve().stem}
    for key, name in _KEYS.items():
        value = config.get(key)
        if key == "sliding_window" and not config.get("use_sliding_window", kind == "mistral"):
            continue
        if isinstance(value, int | float):
            metadata[f"{family}.{name}"] = value
    rope, factors = _rope_of(path, config)
    return metadata | {f"{family}.rope.{key}": value for key, value in rope.items()}, factors


def _rope_of(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Value], Any]:
    """Return the keys of RoPE, and the factors that Llama 3.1 divides the frequencies by, or None.

    Configurations of transformers 5 have all of them in `rope_parameters`, older ones in two places.
    """
    rope = config.get("rope_parameters") or (config.get("rope_scaling") or {}) | {
        "rope_theta": config.get("rope_theta", 10_000.0)
    }
    try:
        kind = rope.get("rope_type", rope.get("type", "default"))
        base = float(rope.get("rope_theta", 10_000.0))
        if kind == "default" and rope.get("partial_rotary_factor", 1) == 1:
            return {"freq_base": base}, None
        if kind == "linear":
            return {"freq_base": base, "scaling.type": "linear", "scaling.factor": float(rope["factor"])}, None
        if kind == "llama3":
            return {"freq_base": base}, _llama3_factors(config, rope, base)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{path} has RoPE parameters that cannot be read ({error!r}); download it again") from error
    raise ModelError(
        f"{path} has RoPE of the type {str(kind)[:60]!r}; default, linear and llama3 are supported: give a "
        ".gguf file of the model"
    )


def _llama3_factors(config: Mapping[str, Any], rope: Mapping[str, Any], base: float) -> Any:
    """Return float32 (pairs,). Slow pairs have the whole factor, fast pairs 1, and pairs between a mixture."""
    dimensions = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = float(rope["original_max_position_embeddings"]) / (
        2 * np.pi * base ** (np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    )
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def _damaged(part: _Part, what: str) -> ModelError:
    return ModelError(f"{part.path} {what}: it is damaged; download it again")
