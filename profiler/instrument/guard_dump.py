"""Saves the arguments of a faulty call in a file, to repeat the call. Read it with `torch.load` and
`weights_only=True`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbtop.protocol.cache import cache_dir, file_beside

MAX_DUMP_BYTES = 256 << 20
PLAIN = bool, int, float, str, type(None)


def dump(directory: str, name: str, facts: dict[str, object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path:
    """Save the arguments of a call, and `facts` about it, as the file `name`.pt. Returns its path.

    Tensors are copied to the host's memory. A value that is not plain is replaced by the name of its type. Raises
    ValueError if the tensors have more than MAX_DUMP_BYTES, and OSError.
    """
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors_of((args, kwargs)))
    if size_bytes > MAX_DUMP_BYTES:
        raise ValueError(f"its inputs take {size_bytes} bytes; at most {MAX_DUMP_BYTES} are saved")
    folder = Path(directory) if directory else cache_dir() / "guard"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pt"
    descriptor, beside = file_beside(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save({**facts, "args": _plain(args), "kwargs": _plain(kwargs)}, file)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
    return path


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if issubclass(type(value), Tensor):
        yield value
    elif type(value) in (tuple, list):
        for one in value:
            yield from _tensors_of(one)
    elif type(value) is dict:
        yield from _tensors_of(list(value.values()))


def _plain(value: Any) -> Any:
    """Return a copy of `value` that `torch.load` takes with `weights_only=True`."""
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        return value.detach().to("cpu", copy=True)
    if type(value) in (tuple, list):
        return type(value)(_plain(one) for one in value)
    if type(value) is dict:
        return {key if type(key) in PLAIN else type(key).__name__: _plain(one) for key, one in value.items()}
    return value if type(value) in PLAIN else f"<{type(value).__name__}>"
