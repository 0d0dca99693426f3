"""Finds the number type that a matrix product multiplies: the type of its weights, or the type of autocast.

Rules
- An unknown type is `UNKNOWN_TYPE`, which has no roof. If the weights are plain tensors, their type follows it.
- Autocast is checked once per step, when the first layer begins, because a program may enter autocast around the
  model or inside it.
- cbtop does not see autocast that is only used in a part of a model.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from cbtop.profiler.instrument.torch_internals import precision_of_float32
from cbtop.protocol.attributes import UNKNOWN_TYPE

# Autocast converts these types. It leaves float64 and integers as they are.
_CONVERTED = frozenset({torch.float32, torch.float16, torch.bfloat16})
_FULL = ("none", "ieee")  # with these values of torch's settings, float32 products keep their full precision
_BACKENDS = {"cpu": "mkldnn", "cuda": "cuda"}
AUTOCAST_DEVICES = frozenset(_BACKENDS)  # types of devices for which autocast is checked
PRODUCT, CONVOLUTION = "matmul", "conv"


class Mode(NamedTuple):
    """The settings of a program that, together with the weights, decide the number types of matrix products."""

    autocast: torch.dtype | None = None  # autocast converts to this type; None if autocast is off
    adapters: Any = None  # state of the adapters of the first layer that has adapters (see adapters.py)
    products: str = "float32"  # the number type that a product of float32 weights really multiplies
    convolutions: str = "float32"


PLAIN = Mode()
# Linear layers of torch's eager quantisation: Python module of the class -> bytes of an activation.
PACKED = {"torch.ao.nn.quantized.dynamic.modules.linear": 4, "torch.ao.nn.quantized.modules.linear": 1}


def autocast_type(device: str) -> torch.dtype | None:
    """Return the type that autocast uses on `device` now, or None if autocast is off."""
    if device not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def type_of_float32(device: str, operator: str) -> str:
    """Return the number type that products of float32 really multiply on `device`, by torch's settings."""
    setting = _setting(device, operator)
    if setting in _FULL:
        return "float32"
    if device == "cuda" and setting == "tf32":
        return "tf32"
    return UNKNOWN_TYPE  # a CPU without the lower precision ignores the setting


def types_of_float32(device: str) -> tuple[str, str]:
    """Return the number types that float32 products and float32 convolutions really multiply on `device`."""
    return type_of_float32(device, PRODUCT), type_of_float32(device, CONVOLUTION)


def _setting(device: str, operator: str) -> str:
    backend = _BACKENDS.get(device)
    if backend is None:
        return ""
    if precision_of_float32 is not None:
        get = precision_of_float32
        settings = (get(backend, operator), get(backend, "all"), get("generic", "all"))
        return next((setting for setting in settings if setting != "none"), "none")
    if device == "cuda" and operator == CONVOLUTION:  # for torch before 2.9
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    return "ieee" if operator == CONVOLUTION or torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.lru_cache(maxsize=64)
def multiplied_type(stored: torch.dtype, device: str, autocast: torch.dtype | None) -> str:
    """Return the number type that products of `stored` tensors multiply. Cached: clear the cache if torch's settings
    change.
    """
    mode = Mode(autocast, products=type_of_float32(device, PRODUCT))
    return type_name(computed_type(stored, mode), mode)


def computed_type(stored: torch.dtype, mode: Mode) -> torch.dtype:
    """Return the number type that a product with weights of type `stored` is computed with."""
    return stored if mode.autocast is None or stored not in _CONVERTED else mode.autocast


def unknown_with(stored: torch.dtype) -> str:
    """Return the name of an unknown type of a product. Its weights are stored as `stored`."""
    return f"{UNKNOWN_TYPE} (weights in {str(stored).removeprefix('torch.')})"


def type_name(computed: torch.dtype, mode: Mode, operator: str = PRODUCT) -> str:
    """Return the name of the type that a product multiplies. `computed` is the result of `computed_type`."""
    if computed is torch.float32:
        return mode.convolutions if operator == CONVOLUTION else mode.products
    return str(computed).removeprefix("torch.") if computed.is_floating_point else UNKNOWN_TYPE
