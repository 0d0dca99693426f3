"""The static facts of a brick and its kernels: name, category, backend, work, budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbtop.profiler.analysis.budget import ByteBudget, TokenBudget
from cbtop.protocol.attributes import KernelAttributes, Work
from cbtop.protocol.vocabulary import BrickCategory, BrickId

Budget = TokenBudget | ByteBudget
WorkOfCall = Callable[[int], Work]  # the work of a call by its elements, if that is not a straight line


@dataclass(frozen=True, slots=True)
class KernelDefinition(KernelAttributes):
    """One kernel that a brick launches. Further attributes of a GPU launch are keywords: `grid=(32, 1, 1)`."""

    name: str
    backend: str


@dataclass(frozen=True, slots=True, eq=False)
class BrickDefinition:
    """A brick at one place of a model; make it once, and pass it to `BrickProfiler.start_brick`.

    `name` is what every screen shows: a BrickId's display name, or any name for a dynamic brick. Two definitions
    under one layer are two nodes even if they have the same name (the two RmsNorms); `label` is your own word for
    this place (`q_proj`), and tells them apart on the screen. `budget` is what it may cost: a time per token, or a
    rate of the bytes it declares; None if none is set.
    """

    name: str
    category: BrickCategory
    brick: BrickId | None = None
    backend: str = ""
    work: Work | WorkOfCall | None = None
    kernels: tuple[KernelDefinition, ...] = ()
    budget: Budget | None = None
    label: str = ""

    def __post_init__(self) -> None:
        if type(self.budget) not in (TokenBudget, ByteBudget, type(None)):
            raise TypeError(f"budget is {self.budget!r}; a TokenBudget or a ByteBudget is wanted")

    @classmethod
    def of(
        cls,
        brick: BrickId,
        *,
        backend: str = "",
        work: Work | WorkOfCall | None = None,
        kernels: tuple[KernelDefinition, ...] = (),
        budget: Budget | None = None,
        label: str = "",
    ) -> BrickDefinition:
        """Return a definition of a well-known brick, with its own name and category."""
        return cls(brick.display_name, brick.category, brick, backend, work, kernels, budget, label)
