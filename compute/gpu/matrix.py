"""A weight matrix on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cbtop.compute.errors import ModelError
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix

if TYPE_CHECKING:
    from cbtop.compute.gpu.device import Gpu


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """A weight matrix in planes (quantization/planes.py).

    `data` is uint8 (size of all planes,) on the device. If the matrix holds the rows of several experts, `data` is
    uint8 (experts, size of one expert's planes). `takes_int8`: whether products round activations to int8. `host` is
    the copy of the matrix on the host, for checks, or None if the matrix was made on the device.
    """

    format: BlockFormat
    data: Any
    rows: int
    columns: int
    takes_int8: bool
    host: QuantizedMatrix | None = None

    @property
    def size_bytes(self) -> int:
        """The size in bytes of the matrix in the model's file."""
        return self.rows * self.format.row_bytes(self.columns)

    def of_expert(self, expert: int) -> DeviceMatrix:
        """Return a view of the matrix of one expert."""
        rows, host = self.rows // len(self.data), self.host
        if host is not None:
            host = replace(host, data=host.data[expert * rows : (expert + 1) * rows])
        return replace(self, data=self.data[expert], rows=rows, host=host)

    def plain(self) -> Iterator[DeviceMatrix]:
        """Yield this matrix, or the matrices of its experts."""
        if self.data.ndim == 1:
            yield self
        else:
            yield from map(self.of_expert, range(len(self.data)))

    @classmethod
    def of(cls, gpu: Gpu, matrix: QuantizedMatrix, *, takes_int8: bool, experts: int | None = None) -> DeviceMatrix:
        """Move a host matrix to the device.

        If `experts` is given, the host matrix consists of this number of experts' matrices. Raises ModelError if the
        weight format has no planes, and ComputeError if the matrix does not fit.
        """
        layout = matrix.format.planes
        if layout is None:
            raise ModelError(f"weights of {matrix.format.name} run on no GPU yet: run it with --backend cpu")
        planes = gpu.planes(layout, matrix, experts)
        return cls(matrix.format, planes, matrix.rows, matrix.columns, takes_int8, matrix)
