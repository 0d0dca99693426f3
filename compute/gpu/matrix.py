"""A weight matrix where a GPU has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbtop.compute.errors import ModelError
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix

if TYPE_CHECKING:
    from cbtop.compute.gpu.device import Gpu


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """A matrix in planes (quantization/planes.py): `data` is uint8 (size of all planes,) on the device.

    `takes_int8`: whether its products take activations rounded to int8, or as they are. `host`: the same where it was
    read from, which checks look into; None: it was made on the device.
    """

    format: BlockFormat
    data: Any
    rows: int
    columns: int
    takes_int8: bool
    host: QuantizedMatrix | None = None

    @property
    def size_bytes(self) -> int:
        """As in the file."""
        return self.rows * self.format.row_bytes(self.columns)

    @classmethod
    def of(cls, gpu: Gpu, matrix: QuantizedMatrix, *, takes_int8: bool) -> DeviceMatrix:
        """A matrix of the host. ModelError where its format has no planes, ComputeError where there is no room."""
        layout = matrix.format.planes
        if layout is None:
            raise ModelError(f"weights of {matrix.format.name} run on no GPU yet: run it with --backend cpu")
        planes = gpu.planes(layout, matrix)
        return cls(matrix.format, planes, matrix.rows, matrix.columns, takes_int8, matrix)
