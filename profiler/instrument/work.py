"""FLOP and bytes of a module's call: derived from its weights as they are stored, and from what the call is given.

Rules
- The elements of a call are those of its first tensor (`rows x columns`): what is counted here is a line in them.
- Bytes are those of the weights as stored (4-bit weights count their packed bytes and scales) and of the activations.
- What is not known stays unknown: a class of its own, experts of which the router takes some, a mask's contents.
- Of a module on another device than the CPU nothing is counted where the host alone times it: that sees when it was
  launched, and no rate is made of that.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from cbtop.profiler.instrument.module_tree import attribute_of, first_tensor, tensors_of
from cbtop.protocol.attributes import UNKNOWN_WORK, Work
from cbtop.protocol.vocabulary import LAUNCHES, BrickId

if TYPE_CHECKING:
    from torch import nn

_NORM_FLOPS = 4  # square, add up, scale, weigh: of each element of an RMS norm; a layer norm's mean is one more
_NORMS = {BrickId.RMS_NORM: _NORM_FLOPS, BrickId.LAYER_NORM: _NORM_FLOPS + 1}
# What linear layers call their sizes: torch and most, AutoGPTQ, vLLM and SGLang (a rank's own), Conv1D of GPT-2.
_COLUMNS = ("in_features", "infeatures", "input_size_per_partition", "input_size", "nx")
_ROWS = ("out_features", "outfeatures", "output_size_per_partition", "output_size", "nf")

_TORCHS = "torch.nn.modules.linear"  # the linear layers of torch itself: others pack their weights


def work_of(module: nn.Module, brick: BrickId | str, *, is_timed_there: bool = False) -> Work:
    """What a call of `module` does, as far as it is known; `is_timed_there`: on its device, whichever that is."""
    if device_of(module) != "cpu" and not is_timed_there:
        return UNKNOWN_WORK
    weights = stored_bytes(module)
    itemsize = _itemsize(module)
    kind: Any = type(module)
    if brick in _NORMS and _may_add(kind):
        return UNKNOWN_WORK
    if brick in _NORMS:
        return Work(flops_per_element=_NORMS[brick], bytes_per_call=weights, bytes_per_element=2 * itemsize)  # type: ignore[index]
    if brick == BrickId.EMBEDDING:
        columns = attribute_of(module, "embedding_dim")
        # A row is read and written for each token.
        return Work() if columns is None else Work(flops_per_call=0, bytes_per_element=2 * columns * itemsize)
    if brick == BrickId.ACTIVATION:
        return Work(bytes_per_element=2 * itemsize) if itemsize else UNKNOWN_WORK
    sizes = product_sizes(module)
    if sizes is None:
        return UNKNOWN_WORK
    columns, rows = sizes
    weight = module._parameters.get("weight", attribute_of(module, "weight"))
    shape = tuple(getattr(getattr(weight, "_local_tensor", weight), "shape", ()))  # of a DTensor this rank's part
    if type(module).__module__ == _TORCHS and len(shape) == 2 and all(shape):
        rows, columns = shape  # what it computes with, whatever its attributes say
    return Work(
        flops_per_element=2 * rows,
        bytes_per_call=weights,
        bytes_per_element=itemsize * (1 + rows / columns) if itemsize else None,
    )


def device_of(*modules: nn.Module) -> str:
    """The kind of device (`cpu`, `cuda`) that the weights of the first of `modules` that has any lie on."""
    for module in modules:
        tensor = first_tensor(module)
        if tensor is not None:
            return str(tensor.device.type)
    return "cpu"


def backend_of(*modules: nn.Module, is_timed_there: bool = False) -> str:
    """What runs the first of `modules` that has weights, and what its times are where the host times a device."""
    device = device_of(*modules)
    if device == "cpu":
        return "torch"
    return f"torch on {device}" if is_timed_there else f"torch on {device}{LAUNCHES}"


@functools.lru_cache(maxsize=256)
def _may_add(kind: Any) -> bool:
    """Whether a call of a norm may add a residual first: vLLM's and SGLang's norms do, except in the first layer."""
    methods = (getattr(kind, name, None) for name in ("forward", "forward_native"))
    return any(["residual" in inspect.signature(method).parameters for method in methods if method is not None])


def product_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Columns and rows of a module that multiplies by one matrix; None of any other."""
    columns = _first_attribute(module, _COLUMNS)
    rows = None if columns is None else _first_attribute(module, _ROWS)
    if not isinstance(columns, int) or not isinstance(rows, int) or min(columns, rows) <= 0:
        return None
    return (columns, rows) if _holds_a_matrix(module, columns * rows) else None


def _holds_a_matrix(module: nn.Module, elements: int) -> bool:
    """Whether the weights in `module` itself can be so many numbers. Those of a low-rank product are fewer."""
    held = [tensor for name in ("_parameters", "_buffers") for tensor in getattr(module, name).values()]
    tensors = [tensor for tensor in held if tensor is not None]
    if not tensors or type(module).__module__ == _TORCHS:
        return True  # packed out of sight, as torch's dynamic quantisation does; or torch's own, which says its size
    if all([tensor.is_floating_point() and tensor.element_size() > 1 for tensor in tensors]):
        return bool(max([tensor.numel() for tensor in tensors]) >= elements)
    return 8 * stored_bytes_of(tensors) >= elements  # packed in a bit or more each


def _first_attribute(module: nn.Module, names: tuple[str, ...]) -> Any:
    for name in names:
        value = attribute_of(module, name)
        if value is not None:
            return value
    return None


def stored_bytes(module: nn.Module) -> int:
    """The bytes of a module's weights and buffers as they are stored, with what quantisation keeps beside them."""
    return stored_bytes_of(tensors_of(module))


def stored_bytes_of(held: list[Tensor]) -> int:
    """The bytes of tensors as they are stored, with what quantisation keeps next to them."""
    plain = [tensor for tensor in held if type(tensor) in (Parameter, Tensor)]
    total = int(sum(tensor.nbytes for tensor in plain))
    special = [tensor for tensor in held if type(tensor) not in (Parameter, Tensor)]
    total += sum(_tensor_bytes(tensor) for tensor in special)
    for tensor in held:
        state = getattr(tensor, "quant_state", None)  # bitsandbytes keeps the scales of 4-bit weights there
        if state is not None:
            total += sum(_tensor_bytes(scales) for scales in _tensors_of(state))
    return total


def _tensors_of(state: Any) -> list[Tensor]:
    found = [getattr(state, name, None) for name in ("absmax", "code", "offset")]
    nested = getattr(state, "state2", None)
    tensors: list[Tensor] = [tensor for tensor in found if hasattr(tensor, "element_size")]
    return tensors if nested is None else tensors + _tensors_of(nested)


def _tensor_bytes(tensor: Tensor) -> int:
    flatten = getattr(
        tensor, "__tensor_flatten__", None
    )  # a DTensor, a quantised weight of torchao's: it holds others
    if flatten is None:
        return int(tensor.nbytes)
    names, _ = flatten()
    held = [getattr(tensor, name) for name in names]
    return sum(_tensor_bytes(one) for one in held if hasattr(one, "nbytes"))


def _itemsize(module: nn.Module) -> int:
    """Bytes of one activation: what the module's floating-point weights have; 0 where it has none."""
    for tensor in tensors_of(module):
        if tensor.is_floating_point():
            return int(tensor.element_size())
    return 0
