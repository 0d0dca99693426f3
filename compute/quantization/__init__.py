"""The block formats that weights are stored in. The keys are ggml's type numbers, and the one in nf4.py."""

from __future__ import annotations

from importlib import import_module

from cbtop.compute.block_formats import FORMAT_MODULES
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout


def _format(name: str, module: str) -> BlockFormat:
    block_format: BlockFormat = getattr(import_module(f"{__name__}.{module}"), name)
    return block_format


_ALL = [_format(name, module) for name, module in FORMAT_MODULES.items()]
FORMATS: dict[int, BlockFormat] = {one.code: one for one in _ALL}
# The layouts of the formats that can be interleaved.
INTERLEAVABLE: dict[int, InterleavedLayout] = {
    one.code: one.interleaved for one in _ALL if one.interleaved is not None
}
# The formats that run on a GPU.
ON_GPU = frozenset(one.code for one in _ALL if one.planes is not None)


def known(code: int) -> int:
    """Return `code` if it belongs to a format. Otherwise raises ValueError with the known codes."""
    if code not in FORMATS:
        names = ", ".join(f"{code} {block_format.name}" for code, block_format in FORMATS.items())
        raise ValueError(f"weights of block format {code}; known are {names}")
    return code
