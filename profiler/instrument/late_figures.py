"""Reads figures (vectors of numbers) that were computed on a device, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class LateFigures:
    """A vector of figures that may arrive some time after the call that made them.

    Figures on a GPU are copied to the host in the caller's stream, and read when the copy is complete.
    """

    __slots__ = ("_arrived", "_figures")

    def __init__(self, figures: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if figures.is_cuda:
            # The host may have set another default device. Only memory of the CPU can be pinned.
            copy = torch.empty(figures.shape, dtype=figures.dtype, device="cpu", pin_memory=True)
            copy.copy_(figures, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(figures.device))
            figures = copy
        self._figures = figures

    def read(self) -> list[float] | None:
        """Return the figures, or None if they have not arrived from the device. On a CPU they are always there."""
        if self._arrived is not None and not self._arrived.query():
            return None
        figures: list[float] = self._figures.tolist()
        return figures


def can_read(device: torch.device) -> bool:
    """Return whether norms of tensors on `device` are read. They are read only on a CPU.

    On a GPU, a norm would read every gradient. The time limit (`Budget` in gradients.py) counts only the host's time.
    """
    return str(device.type) == "cpu"
