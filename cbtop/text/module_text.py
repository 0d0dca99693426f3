"""Write the modules of torch that a brick calls: class, place of the `forward`, and weight."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.protocol.attributes import ModuleAttributes
from cbtop.units import counted
from cbtop.viewmodels.bricks import BrickModule

MAX_MODULES = 3  # Modules in fewer places are only counted.


def module(row: BrickModule) -> str:
    """Format a module: `torch.nn.Linear, torch/nn/modules/linear.py:134, weight 4864x896 float32, 24 places`."""
    return ", ".join(filter(None, (described(row), counted(row.places, "place"))))


def described(row: BrickModule | ModuleAttributes) -> str:
    """Return the class, place and weight of a module, separated by commas, as far as they are known."""
    weight = f"weight {row.weight_shape} {row.weight_dtype}" if row.weight_shape else ""
    return ", ".join(filter(None, (row.module_class, row.module_source, weight)))


def modules(rows: Sequence[BrickModule]) -> list[str]:
    """Format each of the modules at most places. If there are more modules, the last text has their number."""
    shown = [module(row) for row in rows[:MAX_MODULES]]
    more = len(rows) - len(shown)
    return [*shown, f"{more} more kinds of modules"] if more else shown
