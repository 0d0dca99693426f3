"""Make the contents of steps for tests: layers with a norm and a projection.

The test chooses the projection's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbtop.comparison.contents import Contents, PhaseContents, Piece, PieceKind, Range, Total
from cbtop.protocol.attributes import KernelAttributes

ONE: Range = (1, 1)
GEMM = KernelAttributes(grid=(32, 1, 1), block=(128, 1, 1), registers=64)


def kernel(layer: str, name: str, attributes: KernelAttributes = GEMM, brick: str = "DownProjection") -> Piece:
    return Piece(PieceKind.KERNEL, layer, brick, name=name, kernel=attributes)


def layers(count: int = 3, *, dtype: str = "float32", name: str = "gemm") -> dict[Piece, Range]:
    """For each layer, return a norm with one kernel, and a projection with one kernel."""
    found: dict[Piece, Range] = {}
    for number in range(count):
        layer = f"Layer {number}"
        found[Piece(PieceKind.LAYER, layer)] = ONE
        found[Piece(PieceKind.BRICK, layer, "RmsNorm")] = ONE
        found[kernel(layer, "norm", brick="RmsNorm")] = ONE
        found[Piece(PieceKind.BRICK, layer, "DownProjection", dtype=dtype)] = ONE
        found[kernel(layer, name)] = ONE
    return found


def phase(
    pieces: Mapping[Piece, Range] | None = None,
    totals: Mapping[Total, Range] | None = None,
    *,
    name: str = "decode",
    steps: int = 3,
) -> PhaseContents:
    pieces = layers() if pieces is None else pieces
    launches = sum(most for piece, (_, most) in pieces.items() if piece.kind is PieceKind.KERNEL)
    known = {Total.BRICKS: (6, 6), Total.LAUNCHES: (launches, launches)} if totals is None else totals
    return PhaseContents(name, steps, pieces, known)


def contents(*phases: PhaseContents, conditions: Sequence[tuple[str, str]] = ()) -> Contents:
    return Contents(phases or (phase(),), conditions=dict(conditions))
