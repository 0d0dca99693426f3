"""Reads figures that were computed on a device, without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cbtop.profiler.instrument.torch_internals import is_stream_captured


class LateFigures:
    """A copy of a vector of float32. The figures of a CUDA device arrive some time after the call that made them."""

    __slots__ = ("_arrived", "_copy")

    def __init__(self, figures: Tensor) -> None:
        self._copy = figures
        self._arrived: Any = None  # the event after which the copy is complete
        if figures.device.type == "cuda":  # pragma: no cover - gpu
            self._copy = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._arrived = torch.cuda.Event()
            with torch.cuda.device(figures.device):
                self._copy.copy_(figures, non_blocking=True)
                self._arrived.record()

    def read(self) -> list[float] | None:
        """Return the figures, or None if they have not arrived."""
        if self._arrived is not None and not self._arrived.query():  # pragma: no cover - gpu
            return None
        figures: list[float] = self._copy.tolist()
        return figures


def can_read(device: torch.device) -> bool:
    """Whether figures of `device` can be read without waiting. While a CUDA graph is captured, they cannot."""
    return device.type == "cpu" or (device.type == "cuda" and not is_stream_captured())
