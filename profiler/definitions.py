"""What is known of a brick and its kernels before they run: name, category, backend, work, budget."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields

from cbtop.protocol.messages import MAX_QUANTITY
from cbtop.protocol.vocabulary import BrickCategory, BrickId


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations and bytes moved, as a straight line in the record's `elements`.

    A call with `n` elements does `flops_per_call + n * flops_per_element` operations and touches
    `bytes_per_call + n * bytes_per_element` bytes. Every operation of a decoder fits this line exactly:
    a matrix product's weights cost bytes per call, attention grows with its elements (heads x positions).
    Bytes count once a call, however often the call touches them: what must come from memory at least.
    """

    flops_per_call: float = 0.0
    flops_per_element: float = 0.0
    bytes_per_call: float = 0.0
    bytes_per_element: float = 0.0
    of_call: Callable[[int], tuple[float | None, float | None]] | None = None

    def __post_init__(self) -> None:
        for field_ in fields(self):
            if field_.name == "of_call":
                continue
            value = float(getattr(self, field_.name))  # NumPy's numbers come here too
            if not 0 <= value < MAX_QUANTITY:
                raise ValueError(f"{field_.name} is {value}; a finite number from zero on is wanted")
            object.__setattr__(self, field_.name, value)


@dataclass(frozen=True, slots=True)
class KernelDefinition:
    """One kernel that a brick launches. `grid`, `block` and `shared_memory_bytes` are a GPU launch's own."""

    name: str
    backend: str
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_memory_bytes: int | None = None
    ptx_hash: int | None = None

    def __post_init__(self) -> None:
        for name in ("grid", "block"):
            shape = getattr(self, name)
            if shape is not None:
                x, y, z = (operator.index(size) for size in shape)
                object.__setattr__(self, name, (x, y, z))
        for name in ("shared_memory_bytes", "ptx_hash"):
            value = getattr(self, name)
            if value is not None and not 0 <= operator.index(value) < 1 << 64:
                raise ValueError(f"{name} is {value}; a 64-bit number from zero on is wanted")


@dataclass(frozen=True, slots=True, eq=False)
class BrickDefinition:
    """A brick as it stands in one place of a model; make it once, and pass it to `BrickProfiler.start_brick`.

    `name` is what every screen shows: a BrickId's display name, or any name for a dynamic brick.
    Two definitions under one layer are two nodes even when they carry the same name (the two RmsNorms).
    `budget_us_per_token` is None when nobody set one.
    """

    name: str
    category: BrickCategory
    brick: BrickId | None = None
    backend: str = ""
    work: Work | None = None
    kernels: tuple[KernelDefinition, ...] = ()
    budget_us_per_token: float | None = None

    def __post_init__(self) -> None:
        if self.budget_us_per_token is not None:
            budget = float(self.budget_us_per_token)
            if not 0 < budget < MAX_QUANTITY:
                raise ValueError(f"budget_us_per_token is {budget}; a finite number above zero is wanted")
            object.__setattr__(self, "budget_us_per_token", budget)

    @classmethod
    def of(
        cls,
        brick: BrickId,
        *,
        backend: str = "",
        work: Work | None = None,
        kernels: tuple[KernelDefinition, ...] = (),
        budget_us_per_token: float | None = None,
    ) -> BrickDefinition:
        """A definition of a well-known brick, with its own name and category."""
        return cls(brick.display_name, brick.category, brick, backend, work, kernels, budget_us_per_token)
