"""Call llama.cpp from PyPI's `xllamacpp` through its exported C functions, because its Python API lacks `cb_eval`.

The structures of llama.cpp's parameters differ between versions. They are passed as blobs that are larger than in any
version and contain the library's defaults. The callback's position in the blob is found by the default values around
it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute import demo_model
from cbtop.compute.demo_model import ModelShape

CONTEXT_LENGTH = 256
_F16 = 1  # ggml's number of the default type of keys and values in a cache
# The default values of the fields cb_eval, cb_eval_user_data, type_k and type_v in llama.cpp's parameters.
_NO_CALLBACK = struct.pack("<QQii", 0, 0, _F16, _F16)


class _Parameters(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 64),)


_Pointer = ctypes.c_void_p


def write_model(path: Path, shape: ModelShape) -> None:
    """Write a GGUF file of a model with this shape, random weights and an empty vocabulary.

    It has the keys that only llama.cpp needs.
    """
    metadata = demo_model.metadata_of

    def with_words(shape: ModelShape) -> dict[str, Any]:
        words = {"tokenizer.ggml.model": "none", f"{shape.architecture}.vocab_size": shape.vocabulary}
        return metadata(shape) | words

    demo_model.metadata_of = with_words
    try:
        demo_model.write_model(path, shape, lambda *progress: None)
    finally:
        demo_model.metadata_of = metadata


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library of llama.cpp. Raises ImportError if xllamacpp is not installed."""
    import xllamacpp

    path = next(path for path in Path(xllamacpp.__file__).parent.iterdir() if path.suffix == ".so")
    loaded = ctypes.CDLL(str(path))
    loaded.be_quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _Pointer)(lambda level, text, data: None)
    loaded.llama_log_set(loaded.be_quiet, None)
    loaded.llama_backend_init()
    return loaded


def _call(name: str, result: Any, *arguments: tuple[Any, Any]) -> Any:
    """Call the function `name` of the library. Each argument is a pair (type, value)."""
    # Indexing the library returns a new function object each time, so its types can be set.
    function = library()[name]
    function.restype, function.argtypes = result, [kind for kind, _ in arguments]
    return function(*(value for _, value in arguments))


class Llama:
    """A model in llama.cpp with one context.

    `callback` and `user_data` are passed to llama.cpp as its `cb_eval`.
    """

    def __init__(
        self, path: Path, callback: int = 0, user_data: int = 0, *, threads: int = 1, context: int = CONTEXT_LENGTH
    ) -> None:
        parameters = _call("llama_model_default_params", _Parameters)
        self._model = _call(
            "llama_model_load_from_file", _Pointer, (ctypes.c_char_p, str(path).encode()), (_Parameters, parameters)
        )
        parameters = bytearray(bytes(_call("llama_context_default_params", _Parameters)))
        at = next(at for at in range(0, 256, 8) if parameters.startswith(_NO_CALLBACK, at))
        struct.pack_into("<QQ", parameters, at, callback, user_data)
        struct.pack_into("<I", parameters, 0, context)
        self._context = _call(
            "llama_init_from_model",
            _Pointer,
            (_Pointer, self._model),
            (_Parameters, _Parameters.from_buffer_copy(parameters)),
        )
        _call(
            "llama_set_n_threads",
            None,
            (_Pointer, self._context),
            (ctypes.c_int32, threads),
            (ctypes.c_int32, threads),
        )
        self._vocabulary = _call("llama_model_get_vocab", _Pointer, (_Pointer, self._model))
        self._words = _call("llama_vocab_n_tokens", ctypes.c_int32, (_Pointer, self._vocabulary))
        self._decode = library()["llama_decode"]
        self._decode.argtypes = [_Pointer, _Parameters]

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """Add `tokens` to the sequence, and return the logits of the last token."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = _call(
            "llama_batch_get_one", _Parameters, (_Pointer, ctypes.addressof(array)), (ctypes.c_int32, len(tokens))
        )
        if self._decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        logits = _call(
            "llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), (_Pointer, self._context), (ctypes.c_int32, -1)
        )
        return np.ctypeslib.as_array(logits, (self._words,)).copy()

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of `text` by the model's own tokenizer. Names of control tokens become control tokens."""
        data = text.encode()
        tokens = (ctypes.c_int32 * (2 * len(data) + 8))()
        count = _call(
            "llama_tokenize",
            ctypes.c_int32,
            (_Pointer, self._vocabulary),
            (ctypes.c_char_p, data),
            (ctypes.c_int32, len(data)),
            (_Pointer, ctypes.addressof(tokens)),
            (ctypes.c_int32, len(tokens)),
            (ctypes.c_bool, True),
            (ctypes.c_bool, True),
        )
        return list(tokens[:count])

    def piece_of(self, token: int) -> bytes:
        """Return the bytes of a token, or b"" for a control token."""
        buffer = ctypes.create_string_buffer(256)
        count = _call(
            "llama_token_to_piece",
            ctypes.c_int32,
            (_Pointer, self._vocabulary),
            (ctypes.c_int32, token),
            (_Pointer, ctypes.addressof(buffer)),
            (ctypes.c_int32, len(buffer)),
            (ctypes.c_int32, 0),
            (ctypes.c_bool, False),
        )
        return buffer.raw[:count]

    def is_end(self, token: int) -> bool:
        """Return whether this token marks the end of a text."""
        is_end: bool = _call(
            "llama_vocab_is_eog", ctypes.c_bool, (_Pointer, self._vocabulary), (ctypes.c_int32, token)
        )
        return is_end

    def forget(self) -> None:
        """Begin a new sequence of tokens with an empty cache."""
        memory = _call("llama_get_memory", _Pointer, (_Pointer, self._context))
        _call("llama_memory_clear", None, (_Pointer, memory), (ctypes.c_bool, True))

    def close(self) -> None:
        _call("llama_free", None, (_Pointer, self._context))
        _call("llama_model_free", None, (_Pointer, self._model))


class _Init(ctypes.Structure):
    """The structure ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", _Pointer), ("no_alloc", ctypes.c_bool))


# Offset in bytes of the field `extra` in ggml_tensor. A buffer for repacked weights sets this field if it repacks the
# tensor.
_EXTRA = 320
_REPACKED, _PLAIN = "_Z35ggml_backend_cpu_repack_buffer_typev", "ggml_backend_cpu_buffer_type"
_ROOM = 1 << 20  # size in bytes of a ggml context that contains no data


class Product:
    """The product of a weight matrix and some tokens, computed by ggml on one thread.

    Weights are repacked if llama.cpp would repack them.
    """

    def __init__(self, code: int, weights: np.ndarray, columns: int, x: np.ndarray) -> None:
        """Prepare the product of a weight matrix and some tokens.

        `weights`: uint8 (rows, row_bytes) in the format with ggml's number `code`. `x`: float32 (tokens, columns).
        """
        self._contexts: list[int] = []
        self._buffers: list[int] = []
        matrix = self._tensor(_REPACKED, code, columns, len(weights))
        self.is_repacked = bool(ctypes.c_uint64.from_address(matrix + _EXTRA).value)
        if not self.is_repacked:
            matrix = self._tensor(_PLAIN, code, columns, len(weights))
        _set(matrix, weights)
        context = self._context()
        tokens = _call(*_new(context, 0, columns, len(x)))
        product = _call("ggml_mul_mat", _Pointer, (_Pointer, context), (_Pointer, matrix), (_Pointer, tokens))
        self._allocate(context, _PLAIN)
        _set(tokens, x)
        self._graph = _call("ggml_new_graph", _Pointer, (_Pointer, context))
        _call("ggml_build_forward_expand", None, (_Pointer, self._graph), (_Pointer, product))
        self._backend = _call("ggml_backend_cpu_init", _Pointer)
        _call("ggml_backend_cpu_set_n_threads", None, (_Pointer, self._backend), (ctypes.c_int, 1))
        self._compute = library()["ggml_backend_graph_compute"]
        self._compute.argtypes = [_Pointer, _Pointer]

    def __call__(self) -> None:
        self._compute(self._backend, self._graph)

    def close(self) -> None:
        _call("ggml_backend_free", None, (_Pointer, self._backend))
        for buffer in self._buffers:
            _call("ggml_backend_buffer_free", None, (_Pointer, buffer))
        for context in self._contexts:
            _call("ggml_free", None, (_Pointer, context))

    def _tensor(self, kind: str, code: int, columns: int, rows: int) -> int:
        context = self._context()
        matrix: int = _call(*_new(context, code, columns, rows))
        self._allocate(context, kind)
        return matrix

    def _context(self) -> int:
        context: int = _call("ggml_init", _Pointer, (_Init, _Init(_ROOM, None, True)))
        self._contexts.append(context)
        return context

    def _allocate(self, context: int, kind: str) -> None:
        where = _call(kind, _Pointer)
        given = (_Pointer, context), (_Pointer, where)
        self._buffers.append(_call("ggml_backend_alloc_ctx_tensors_from_buft", _Pointer, *given))


def _new(context: int, code: int, columns: int, rows: int) -> tuple[Any, ...]:
    sizes = (ctypes.c_int, code), (ctypes.c_int64, columns), (ctypes.c_int64, rows)
    return "ggml_new_tensor_2d", _Pointer, (_Pointer, context), *sizes


def _set(tensor: int, data: np.ndarray) -> None:
    place = (_Pointer, data.ctypes.data), (ctypes.c_size_t, 0), (ctypes.c_size_t, data.nbytes)
    _call("ggml_backend_tensor_set", None, (_Pointer, tensor), *place)
