"""Reads figures that were computed on a device, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class LateFigures:
    """A vector of figures. They may arrive some time after the call that made them."""

    __slots__ = ("_figures",)

    def __init__(self, figures: Tensor) -> None:
        self._figures = figures

    def read(self) -> list[float] | None:
        """Return the figures, or None if they have not arrived. Those of a CPU have."""
        figures: list[float] = self._figures.tolist()
        return figures


def can_read(device: torch.device) -> bool:
    """Whether figures of `device` are read: only those of a CPU.

    On a GPU, a norm reads every gradient, and the budget knows only the host's time for it.
    """
    return str(device.type) == "cpu"
