"""The description of a brick and its kernels by a caller: name, category, backend, work, budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbtop.profiler.analysis.budget import ByteBudget, TokenBudget
from cbtop.protocol.attributes import KernelAttributes, Work
from cbtop.protocol.vocabulary import BrickCategory, BrickId

Budget = TokenBudget | ByteBudget
# A function that returns the work of a call for its number of elements. It is needed only if the work is not linear
# in the elements.
WorkOfCall = Callable[[int], Work]


@dataclass(frozen=True, slots=True)
class KernelDefinition(KernelAttributes):
    """One kernel that a brick launches. Attributes of a GPU launch are keyword arguments: `grid=(32, 1, 1)`."""

    name: str
    backend: str


@dataclass(frozen=True, slots=True, eq=False)
class BrickDefinition:
    """A brick at one place of a model. Create it once and pass it to `BrickProfiler.start_brick`.

    `name` is shown on every screen. Use the display name of a BrickId, or any other name. Two definitions in one
    layer become two nodes of the graph, even if both are called RmsNorm. `label` is your own name for the place of
    the brick (`q_proj`). It distinguishes such nodes on the screen. `budget` is the allowed cost: a time per token,
    or a rate for the declared bytes.
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
        """Return the definition of a well-known brick, with the name and category of its BrickId."""
        return cls(brick.display_name, brick.category, brick, backend, work, kernels, budget, label)
