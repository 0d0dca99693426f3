"""The fixed attributes of bricks and their kernels: name, category, backend, work, budget. Also the keys of
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cbtop.profiler.analysis.budget import ByteBudget, TokenBudget
from cbtop.profiler.checks import Check
from cbtop.protocol.attributes import KernelAttributes, Work
from cbtop.protocol.vocabulary import BrickCategory, BrickId

Budget = TokenBudget | ByteBudget
# Returns the work of a call for its number of elements. Only needed if the work is not linear in the elements.
WorkOfCall = Callable[[int], Work]


@dataclass(frozen=True, slots=True)
class KernelDefinition(KernelAttributes):
    """A kernel that a brick launches. Attributes of a GPU launch are keyword arguments: `grid=(32, 1, 1)`."""

    name: str
    backend: str


@dataclass(frozen=True, slots=True, eq=False)
class BrickDefinition:
    """A brick at one place of a model. Create it once, and pass it to `BrickProfiler.start_brick`.

    `name` is shown on every screen: a BrickId's display name, or any other name. Two definitions in a layer are two
    nodes, even if both are called RmsNorm. `label` is your own word for the place (`q_proj`), to tell them apart on
    the screen. `budget` is the allowed cost: a time per token, or a rate for the declared bytes. `checks` are
    conditions on the output (checks.py).
    """

    name: str
    category: BrickCategory
    brick: BrickId | None = None
    backend: str = ""
    work: Work | WorkOfCall | None = None
    kernels: tuple[KernelDefinition, ...] = ()
    budget: Budget | None = None
    label: str = ""
    checks: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        if type(self.budget) not in (TokenBudget, ByteBudget, type(None)):
            raise TypeError(f"budget is {self.budget!r}; a TokenBudget or a ByteBudget is wanted")
        for check in self.checks:
            if isinstance(check, type) or not hasattr(check, "evaluate"):
                raise TypeError(
                    f"{check!r} is no check; Finite(), Bounded(low, high) or Equivalent(reference) is one"
                )
            if not isinstance(check.name, str):
                raise TypeError(f"the name of the check {check!r} is {check.name!r}; a str is expected")

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
        checks: tuple[Check, ...] = (),
    ) -> BrickDefinition:
        """Return the definition of a well-known brick, with the name and category of its BrickId.

        Raises TypeError if `brick` is not a BrickId. For other names, use `BrickDefinition(name, category)`.
        """
        if type(brick) is not BrickId:
            raise TypeError(
                f"{brick!r} is not a BrickId; "
                f"pass a BrickId, or write BrickDefinition({brick!r}, BrickCategory.OTHER)"
            )
        return cls(brick.display_name, brick.category, brick, backend, work, kernels, budget, label, checks)


@dataclass(frozen=True, slots=True, eq=False)
class OwnOperations(BrickDefinition):
    """The operations that a module with children runs outside of its children's calls.

    This brick is named like the module's class. If the host times it, the children's bricks are inside it. If the
    device times it (`on_device`), they are next to it, and it is shown even if it takes little time.
    """

    on_device: bool = False


class OwningKey(tuple[Any, ...]):
    """The key of a layer or step, with the own operations of the called module.

    It equals the tuple without them: (NodeKind.LAYER, index[, stack]) or (NodeKind.STEP, name[, model]).
    """

    own: OwnOperations | None

    @classmethod
    def of(cls, key: Iterable[Any], own: OwnOperations | None) -> OwningKey:
        """Return `key` with the own operations `own`."""
        made = cls(key)
        made.own = own
        return made


def own_operations(key: object) -> OwnOperations | None:
    """Return the own operations of the layer, step or module with this `key`. None if they are not a brick."""
    if isinstance(key, OwningKey):
        return key.own
    return key if isinstance(key, OwnOperations) else None
