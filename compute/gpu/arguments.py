"""Move a kernel's arguments to a GPU, and copy its outputs back to the host."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cbtop.compute.gpu.device import Gpu
from cbtop.compute.kernels import attention, kv_caches
from cbtop.compute.kernels.base import Arguments, Kernel
from cbtop.compute.kernels.embedding import INTERLEAVED_EMBEDDING
from cbtop.compute.kernels.linear_bf16 import CudaScratch, TileScratch
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat, Bytes
from cbtop.compute.quantization.interleaved import rows_of

# Arguments that are int32 (1,) on the device, so that a captured graph reads new values in each run.
POSITIONS = ("start", "position", "sequence")


def on_device(kernel: Kernel, arguments: Arguments, device: Gpu) -> Arguments:
    """Convert arguments of a kernel's Numba version to arguments of its CUDA version.

    Weights are stored in planes, caches in the plain layout, and the arguments in POSITIONS as arrays.
    """
    names = kernel.contract.arguments
    of_interleaved = isinstance(arguments[-1], Int8Scratch | TileScratch)
    is_interleaved = of_interleaved or kernel is INTERLEAVED_EMBEDDING
    found: list[Any] = []
    for at, (name, one) in enumerate(zip(names, arguments, strict=True)):
        if name.endswith("weights") and one.dtype == np.uint8:
            of = partial(planes_of, FORMATS[arguments[at - 1]], is_interleaved=is_interleaved)
            found.append(device.array(of(one) if one.ndim == 2 else np.stack([of(each) for each in one])))
        elif name in POSITIONS:
            found.append(device.array(np.array([one], np.int32)))
        elif name == "k_cache":
            found.extend(_plain_on_device(one, arguments[at + 1], device))
        elif name == "v_cache":
            pass  # the values of a cache are converted together with its keys
        elif name == "scratch" and kernel.contract.name == "attention":
            found.append(device.zeros(attention.scratch_shape(device.multiprocessors), np.float32))
        elif isinstance(one, TileScratch):
            found.append(_scratch(arguments, device))
        elif is_dataclass(one) and not isinstance(one, type):
            arrays = {field.name: getattr(one, field.name) for field in fields(one)}
            moved = {key: device.array(value) for key, value in arrays.items() if isinstance(value, np.ndarray)}
            if getattr(one, "tiles", None) is not None:
                moved["tiles"] = _scratch(arguments, device)
            found.append(replace(one, **moved))
        else:
            found.append(device.array(one) if isinstance(one, np.ndarray) else one)
    return tuple(found)


def _scratch(arguments: Arguments, device: Gpu) -> CudaScratch:
    """Return scratch memory for bfloat16 products of all matrices among `arguments`.

    The scratch is large enough for formats of one or more bits per weight, because these have at most eight weights
    per byte.
    """
    weights = sum(8 * one.size for one in arguments if isinstance(one, np.ndarray) and one.dtype == np.uint8)
    numbers = [one.size for one in arguments if isinstance(one, np.ndarray) and one.dtype == np.float32]
    return CudaScratch(
        device.zeros(max(numbers), np.uint16),
        device.zeros(weights, np.uint16),
        device.zeros(sum(numbers), np.float32),
    )


def run_on(gpu: Gpu, kernel: Kernel, arguments: Arguments) -> None:
    """Call a kernel on the GPU with host arguments. Its outputs are copied into these arguments."""
    moved = on_device(kernel, arguments, gpu)
    gpu.run(kernel, *moved)
    for place in kernel.outputs:
        found, out = gpu.host(moved[place]), arguments[place]
        if kernel.contract.arguments[place] == "k_cache":
            kv_heads, _, head_dim, lanes = out.shape
            out[...] = found.reshape(kv_heads, -1, lanes, head_dim).transpose(0, 1, 3, 2)
        elif kernel.contract.arguments[place] == "v_cache":
            out[..., : found.shape[2]] = found
        else:
            out[...] = found


def _plain_on_device(k_cache: Any, v_cache: Any, device: Gpu) -> tuple[Any, Any]:
    """Copy caches from `empty_caches` to the device, and return the copies.

    The copies have the layout of `plain_caches`.
    """
    kv_heads, context, _ = v_cache.shape
    head_dim = k_cache.shape[2]
    plain = kv_caches.plain_caches(kv_heads, context, head_dim, k_cache.dtype, device.zeros)
    keys = np.ascontiguousarray(kv_caches.keys_of(k_cache)).view(k_cache.dtype)
    for to, values in zip(plain, (keys, v_cache[..., :head_dim]), strict=True):
        to[...] = device.array(np.ascontiguousarray(values))
    return plain


def planes_of(block_format: BlockFormat, weights: Bytes, *, is_interleaved: bool = False) -> Bytes:
    """Return the planes of a matrix, uint8 (size_bytes,). `weights` is uint8 (rows, row_bytes), as in a file or
    interleaved."""
    layout = block_format.planes
    assert layout is not None
    rows = rows_of(block_format, weights, np.arange(len(weights))) if is_interleaved else weights
    blocks = rows.reshape(-1, block_format.block_bytes)
    out = np.zeros(layout.size_bytes(len(blocks), block_format.block_elements), np.uint8)
    layout.fill(blocks, out)
    return out
