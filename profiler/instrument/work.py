"""Computes the FLOP and bytes of a module's call from its stored weights and the elements of the call.

Rules
- The elements of a call are the elements of its first tensor (`rows x columns`). The work is a linear function of
  them.
- Bytes are the activations and the weights as stored (packed bytes and scales for 4-bit weights).
- Unknown work is not guessed. Examples are custom classes, experts that a router chooses, and masks with unknown
  contents.
- The multiplied type is part of the work. Under autocast it differs from the type of the weights (see multiplied.py).
- If the host times a module on another device, it times only the launch. The work is then unknown, because a launch
  has no rate.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from cbtop.profiler.instrument.adapters import (
    has_adapters,
    has_several_adapters,
    low_rank_products,
    may_have_adapters,
    state_of_adapters,
)
from cbtop.profiler.instrument.convolutions import convolved, is_convolution
from cbtop.profiler.instrument.experts import flops_per_element
from cbtop.profiler.instrument.module_tree import (
    attribute_of,
    children_of,
    first_tensor,
    home_of,
    home_of_class,
    kinds_of,
    modules_of,
    tensors_of,
)
from cbtop.profiler.instrument.multiplied import (
    CONVOLUTION,
    PACKED,
    PLAIN,
    PRODUCT,
    Mode,
    autocast_type,
    computed_type,
    type_name,
    types_of_float32,
    unknown_with,
)
from cbtop.profiler.instrument.torch_internals import child_named, own_buffers, own_parameters
from cbtop.protocol.attributes import UNKNOWN_TYPE, UNKNOWN_WORK, Work
from cbtop.protocol.vocabulary import LAUNCHES, BrickId

if TYPE_CHECKING:
    from torch import nn

_NORM_FLOPS = 4  # FLOP of an RMS norm per element: square, add, scale, multiply by the weight
_NORMS = {BrickId.RMS_NORM: _NORM_FLOPS, BrickId.LAYER_NORM: _NORM_FLOPS + 1}
# Attributes with the sizes of a linear layer, in this order: torch and most libraries, AutoGPTQ, vLLM and SGLang for
# one rank, vLLM and SGLang for all ranks, GPT-2's Conv1D.
_COLUMNS = ("in_features", "infeatures", "input_size_per_partition", "input_size", "nx")
_ROWS = ("out_features", "outfeatures", "output_size_per_partition", "output_size", "nf")
SIZES = frozenset((*_COLUMNS, *_ROWS, "embedding_dim", "weight"))  # attributes of a module that decide its work

# Libraries with products that multiply the type of their weights, or of autocast.
_KNOWN = ("torch.nn.modules.", "transformers.", "vllm.", "sglang.")
_TORCHS = "torch.nn.modules.linear"  # Python module of the class of torch's own linear layers


def work_of(
    module: nn.Module,
    brick: BrickId | str,
    *,
    is_timed_there: bool = False,
    mode: Mode = PLAIN,
    top_k: int | None = None,
    size: Sequence[int] | None = None,
) -> Work:
    """Return the work of a call of `module`. Parts of it may be unknown.

    `is_timed_there` says that the module is timed on its device. `top_k` is how many grouped experts each token runs
    through. `size` is the image size for a convolution.
    """
    if device_of(module) != "cpu" and not is_timed_there:
        return UNKNOWN_WORK
    itemsize = _itemsize(module)
    if brick in _NORMS:
        return _work_of_norm(module, _NORMS[brick], itemsize, mode)  # type: ignore[index]
    if brick == BrickId.EMBEDDING:
        columns = attribute_of(module, "embedding_dim")
        # Each token reads and writes one row of the embedding.
        return (
            Work(flops_per_call=0, bytes_per_element=2 * columns * itemsize) if columns and itemsize else UNKNOWN_WORK
        )
    if brick == BrickId.ACTIVATION:
        return Work(bytes_per_element=2 * itemsize) if itemsize else UNKNOWN_WORK
    if has_adapters(module):
        return _work_of_adapted(module, mode)
    if is_convolution(module):
        return _work_of_convolution(module, mode, size)
    flops = flops_per_element(module, top_k)
    if flops is not None:  # the tokens decide which experts are read, so the bytes are unknown
        return Work(flops_per_element=flops, dtype=_type_of_experts(module, mode))
    return _work_of_product(module, mode)


def _work_of_norm(module: nn.Module, flops: int, itemsize: int, mode: Mode) -> Work:
    kind: Any = type(module)
    if _may_add(kind):
        return UNKNOWN_WORK
    is_double = any([tensor.dtype is torch.float64 for tensor in tensors_of(module)])
    dtype = "float64" if is_double else "float32"  # a norm converts half precision to float32
    # The input may have a different type than the weights, so its bytes are unknown.
    if not itemsize or mode.autocast is not None:
        return Work(flops_per_element=flops, dtype=dtype)
    return Work(
        flops_per_element=flops, bytes_per_call=stored_bytes(module), bytes_per_element=2 * itemsize, dtype=dtype
    )


def _work_of_product(module: nn.Module, mode: Mode) -> Work:
    sizes = product_sizes(module)
    if sizes is None:
        return UNKNOWN_WORK
    columns, rows = sizes
    packed = _packed_weights(module)
    if packed is not None:
        return _work_of_packed(packed, columns, rows)
    if any([first_tensor(child) is not None for _, child in children_of(module)]):
        return UNKNOWN_WORK  # it computes its weights during a call, or multiplies by several matrices
    if all([one is None for one in (*own_parameters(module).values(), *own_buffers(module).values())]):
        return Work(flops_per_element=2 * rows, dtype=UNKNOWN_TYPE)  # the layer does not store its weights itself
    weight = own_parameters(module).get("weight", attribute_of(module, "weight"))
    # Use the part of a DTensor that this process has.
    shape = tuple(getattr(getattr(weight, "_local_tensor", weight), "shape", ()))
    if len(shape) > 2:
        return _work_of_matrices(module, rows, mode)
    if home_of_class(type(module)) == _TORCHS and len(shape) == 2 and all(shape):
        rows, columns = shape  # the attributes may differ from the real sizes, so use the sizes of the weights
    itemsize, dtype = _types(module, mode)
    if not itemsize:
        return Work(flops_per_element=2 * rows, dtype=dtype)
    return Work(None, 2 * rows, _read_bytes(module, mode), itemsize * (1 + rows / columns), dtype=dtype)


def _work_of_matrices(module: nn.Module, rows: int, mode: Mode) -> Work:
    """Return the work of a module with one matrix per expert. Each input row is multiplied by one matrix."""
    kind = type(module)
    if not home_of_class(kind).startswith("transformers.") or not kind.__name__.endswith("ParallelExperts"):
        return UNKNOWN_WORK
    return Work(flops_per_element=2 * rows, dtype=_types(module, mode)[1])


def _work_of_convolution(module: nn.Module, mode: Mode, size: Sequence[int] | None) -> Work:
    found = convolved(module, size)
    if found is None:
        return UNKNOWN_WORK
    itemsize, dtype = _types(module, mode, CONVOLUTION)
    return Work(None, found.flops, _read_bytes(module, mode), itemsize * (1 + found.outputs), dtype=dtype)


def _work_of_adapted(module: nn.Module, mode: Mode) -> Work:
    """Return the work of a matrix product and of its adapters' low-rank products."""
    found = low_rank_products(module)
    base = UNKNOWN_WORK if found is None else _work_of_product(found[0], mode)
    sizes = None if found is None else product_sizes(found[0])
    if found is None or sizes is None or base.flops_per_element is None:
        return UNKNOWN_WORK
    columns, flops, moved, dtypes = sizes[0], base.flops_per_element, base.bytes_per_call, {base.dtype}
    for product in found[1]:
        weight = own_parameters(product).get("weight")
        if home_of_class(type(product)) != _TORCHS or weight is None:
            return UNKNOWN_WORK
        flops += 2 * weight.numel() / columns
        moved = None if moved is None else moved + _read_bytes(product, mode)
        dtypes.add(_types(product, mode)[1])
    dtype = dtypes.pop() if len(dtypes) == 1 else UNKNOWN_TYPE
    return Work(None, flops, moved, base.bytes_per_element, dtype=dtype)


class _Packed(NamedTuple):
    """Weights that torch's eager quantisation stores outside of parameters and buffers."""

    itemsize: int  # number of bytes that one weight takes
    bias_bytes: int
    is_whole: bool  # whether the product multiplies integers instead of floats
    activation_bytes: int


def _packed_weights(module: nn.Module) -> _Packed | None:
    activation_bytes = PACKED.get(home_of_class(type(module)))
    holder = child_named(module, "_packed_params")
    if activation_bytes is None or holder is None:
        return None
    dtype, packed = attribute_of(holder, "dtype"), attribute_of(holder, "_packed_params")
    if dtype not in (torch.qint8, torch.float16) or type(packed) is not torch.ScriptObject:
        return None
    bias = packed.bias()
    is_whole = dtype is torch.qint8
    return _Packed(1 if is_whole else 2, 0 if bias is None else int(bias.nbytes), is_whole, activation_bytes)


def _work_of_packed(packed: _Packed, columns: int, rows: int) -> Work:
    """Return the work of a product with packed weights.

    Scales are left out of the bytes, because they are at most 8 bytes per row.
    """
    return Work(
        flops_per_element=2 * rows,
        bytes_per_call=columns * rows * packed.itemsize + packed.bias_bytes,
        bytes_per_element=packed.activation_bytes * (1 + rows / columns),
        dtype="int8" if packed.is_whole else "float32",  # this product converts float16 to float32
    )


def _types(module: nn.Module, mode: Mode, operator: str = PRODUCT) -> tuple[int, str]:
    """Return the bytes of one activation (0 if unknown), and the number type that the product multiplies."""
    held = [tensor for name in ("_parameters", "_buffers") for tensor in getattr(module, name).values()]
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in held if tensor is not None]
    if not tensors:
        return 0, UNKNOWN_TYPE
    largest = max(tensors, key=lambda tensor: tensor.numel())
    if type(largest) not in (Parameter, Tensor):
        return _itemsize(module), UNKNOWN_TYPE
    if not largest.is_floating_point() or largest.element_size() == 1:
        return _itemsize(module), unknown_with(largest.dtype)
    kind: Any = type(module)
    if not home_of(kind, "forward").startswith(_KNOWN):
        # The type is unknown, because the class may convert its weights to the type of the input.
        return 0, unknown_with(largest.dtype)
    computed = computed_type(largest.dtype, mode)
    return computed.itemsize, type_name(computed, mode, operator)


def _type_of_experts(experts: nn.Module, mode: Mode) -> str:
    """Return the number type that grouped experts multiply.

    Under autocast it is unknown, because their kernels may ignore autocast.
    """
    weights = first_tensor(experts)
    return UNKNOWN_TYPE if weights is None or mode.autocast is not None else type_name(weights.dtype, mode)


def _read_bytes(module: nn.Module, mode: Mode) -> int:
    """Return the least number of bytes that a call reads from weights.

    Under autocast, it may read cached copies of the weights in a smaller type.
    """
    stored = stored_bytes(module)
    if mode.autocast is None:
        return stored
    plain = [tensor for tensor in tensors_of(module) if type(tensor) is Parameter]
    smaller = [tensor.element_size() - computed_type(tensor.dtype, mode).itemsize for tensor in plain]
    return stored - int(sum(tensor.numel() * max(0, size) for tensor, size in zip(plain, smaller, strict=True)))


def mode_of(root: nn.Module) -> Mode:
    """Return the current mode of `root`: autocast, adapters, and torch's settings for float32."""
    device, adapted = device_of(root), adapted_in(root)
    adapters = None if adapted is None else state_of_adapters(adapted)
    return Mode(autocast_type(device), adapters, *types_of_float32(device))


def adapted_in(root: nn.Module) -> nn.Module | None:
    """Return the first layer in `root` that has adapters, or None."""
    if not any([may_have_adapters(type(module)) for module in kinds_of(root)]):
        return None
    return next(filter(has_adapters, modules_of(root)), None)


def takes_turns(root: nn.Module) -> bool:
    """Return whether `root` has several adapters, so that its steps may have different ones."""
    if not any([may_have_adapters(type(module)) for module in kinds_of(root)]):
        return False
    return has_several_adapters(filter(has_adapters, modules_of(root)))


def device_of(*modules: nn.Module) -> str:
    """Return the kind of device (`cpu`, `cuda`) of the first of `modules` that has weights, or `cpu`."""
    for module in modules:
        tensor = first_tensor(module)
        if tensor is not None:
            return str(tensor.device.type)
    return "cpu"


def backend_of(*modules: nn.Module, is_timed_there: bool = False) -> str:
    """Return the backend of the first of `modules` that has weights.

    The suffix LAUNCHES says that the host times the launches for a different device.
    """
    device = device_of(*modules)
    if device == "cpu":
        return "torch"
    return f"torch on {device}" if is_timed_there else f"torch on {device}{LAUNCHES}"


@functools.lru_cache(maxsize=256)
def _may_add(kind: Any) -> bool:
    """Whether a norm of class `kind` may add a residual first, as in vLLM and SGLang."""
    methods = (getattr(kind, name, None) for name in ("forward", "forward_native"))
    return any(["residual" in inspect.signature(method).parameters for method in methods if method is not None])


def product_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return the columns and rows of the matrix of `module`. None if it does not have exactly one matrix."""
    columns = _first_attribute(module, _COLUMNS)
    rows = None if columns is None else _first_attribute(module, _ROWS)
    if not isinstance(columns, int) or not isinstance(rows, int) or min(columns, rows) <= 0:
        return None
    return (columns, rows) if _holds_a_matrix(module, columns * rows) else None


def _holds_a_matrix(module: nn.Module, elements: int) -> bool:
    """Return whether the weights of `module` can hold `elements` numbers. Those of a low-rank product cannot."""
    held = [tensor for name in ("_parameters", "_buffers") for tensor in getattr(module, name).values()]
    tensors = [tensor for tensor in held if tensor is not None]
    if not tensors or home_of_class(type(module)) == _TORCHS:
        # torch hides the weights of dynamic quantisation. In torch's other layers, the sizes are known to be right.
        return True
    if all([tensor.is_floating_point() and tensor.element_size() > 1 for tensor in tensors]):
        return bool(max([tensor.numel() for tensor in tensors]) >= elements)
    return 8 * stored_bytes_of(tensors) >= elements  # even a packed number takes at least one bit


def _first_attribute(module: nn.Module, names: tuple[str, ...]) -> Any:
    for name in names:
        value = attribute_of(module, name)
        if value is not None:
            return value
    return None


def stored_bytes(module: nn.Module) -> int:
    """Return the stored bytes of a module's weights and buffers, with the data that quantisation adds."""
    return stored_bytes_of(tensors_of(module))


def stored_bytes_of(held: list[Tensor]) -> int:
    """Return the stored bytes of tensors, with the data that quantisation adds (such as scales)."""
    total = 0
    for tensor in held:
        kind = type(tensor)
        total += int(tensor.nbytes) if kind is Parameter or kind is Tensor else _tensor_bytes(tensor)
    for tensor in held:
        # In bitsandbytes, this attribute of 4-bit weights has their scales.
        state = getattr(tensor, "quant_state", None)
        if state is not None:
            total += sum(_tensor_bytes(scales) for scales in _tensors_of(state))
    return total


def _tensors_of(state: Any) -> list[Tensor]:
    found = [getattr(state, name, None) for name in ("absmax", "code", "offset")]
    nested = getattr(state, "state2", None)
    tensors: list[Tensor] = [tensor for tensor in found if hasattr(tensor, "element_size")]
    return tensors if nested is None else tensors + _tensors_of(nested)


def _tensor_bytes(tensor: Tensor) -> int:
    # A DTensor or a quantised weight of torchao consists of other tensors.
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return int(tensor.nbytes)
    names, _ = flatten()
    held = [getattr(tensor, name) for name in names]
    return sum(_tensor_bytes(one) for one in held if hasattr(one, "nbytes"))


def _itemsize(module: nn.Module) -> int:
    """Return the bytes per element of a module's first floating-point weight, or 0 without one. Activations have the
    same size.
    """
    for tensor in tensors_of(module):
        if tensor.is_floating_point():
            return int(tensor.element_size())
    return 0
