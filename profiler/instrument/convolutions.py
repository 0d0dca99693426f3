"""Computes the FLOP and the output size of torch's convolutions from their settings.

A convolution needs a fixed number of multiplications per output element, and a transposed convolution per input
element. If the ratio of outputs to inputs is not fixed, the work also depends on the image size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cbtop.profiler.instrument.module_tree import attribute_of, home_of_class

if TYPE_CHECKING:
    from torch import nn

_TORCHS = "torch.nn.modules.conv"


class Convolved(NamedTuple):
    """The work of a convolution per input element: FLOP and output elements."""

    flops: float
    outputs: float


class _Settings(NamedTuple):
    columns: int  # number of channels of the input
    rows: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # padding of an axis of the image, on both sides together
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    is_transposed: bool


def is_convolution(module: nn.Module) -> bool:
    """Return whether the class of `module` is one of torch's convolutions, not a subclass."""
    return home_of_class(type(module)) == _TORCHS and "Lazy" not in type(module).__name__


def dimensions(module: nn.Module) -> int:
    """Return the number of spatial axes of the images that a convolution takes."""
    return len(attribute_of(module, "kernel_size"))


def depends_on_size(module: nn.Module) -> bool:
    """Return whether `module` is a convolution with different work per input element for different image sizes."""
    return is_convolution(module) and convolved(module) is None


def convolved(module: nn.Module, size: Sequence[int] | None = None) -> Convolved | None:
    """Return the work of a convolution per input element, for an image of `size`.

    Returns None if the work depends on a size that is not given, or if there would be no output.
    """
    it = _settings(module)
    if size is None and not all(map(_keeps_ratio, *_axes(it), [it.is_transposed] * len(it.kernel))):
        return None
    if size is None:
        spread = math.prod(it.stride)
        outputs = it.rows / it.columns * (spread if it.is_transposed else 1)
    else:
        sizes = list(map(_size_after, size, *_axes(it), [it.is_transposed] * len(it.kernel)))
        if not all([after > 0 for after in sizes]):
            return None
        outputs = it.rows * math.prod(sizes) / (it.columns * math.prod(size))
    weights = it.rows * it.columns // it.groups * math.prod(it.kernel)
    if it.is_transposed:
        return Convolved(2 * weights / it.columns, outputs)
    return Convolved(2 * weights / it.rows * outputs, outputs)


def _settings(module: nn.Module) -> _Settings:
    def of(name: str) -> Any:
        return attribute_of(module, name)

    kernel, dilation, padding = of("kernel_size"), of("dilation"), of("padding")
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if padding == "same":
        both = reach
    elif padding == "valid":
        both = [0] * len(kernel)
    else:
        both = [2 * one for one in padding]
    return _Settings(
        of("in_channels"),
        of("out_channels"),
        of("groups"),
        kernel,
        of("stride"),
        tuple(both),
        dilation,
        of("output_padding"),
        of("transposed"),
    )


def _axes(it: _Settings) -> tuple[tuple[int, ...], ...]:
    return it.kernel, it.stride, it.padding, it.dilation, it.output_padding


def _keeps_ratio(kernel: int, stride: int, padding: int, dilation: int, more: int, is_transposed: bool) -> bool:
    """Return whether the output length of an axis is a fixed multiple of the input length.

    The multiple is the stride for a transposed convolution, and 1 for any other convolution.
    """
    if is_transposed:
        return dilation * (kernel - 1) + more + 1 == stride + padding
    return stride == 1 and padding == dilation * (kernel - 1)


def _size_after(
    size: int, kernel: int, stride: int, padding: int, dilation: int, more: int, is_transposed: bool
) -> int:
    if is_transposed:
        return (size - 1) * stride - padding + dilation * (kernel - 1) + more + 1
    return (size + padding - dilation * (kernel - 1) - 1) // stride + 1
