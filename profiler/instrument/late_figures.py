"""Reads figures (vectors of numbers) that were computed on a device, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class LateFigures:
    """A vector of figures. They may arrive some time after the call that made them."""

    __slots__ = ("_figures",)

    def __init__(self, figures: Tensor) -> None:
        self._figures = figures

    def read(self) -> list[float] | None:
        """Return the figures, or None if they have not arrived. Figures on a CPU have always arrived."""
        figures: list[float] = self._figures.tolist()
        return figures


def can_read(device: torch.device) -> bool:
    """Return whether figures on `device` are read, which is so only for a CPU.

    On a GPU, a norm would read every gradient, and the budget (`Budget` in gradients.py) measures only the host's
    time.
    """
    return str(device.type) == "cpu"
