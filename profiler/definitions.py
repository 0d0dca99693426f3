"""The fixed attributes of bricks and their kernels: name, category, backend, work, budget. Also the keys of
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass
from importlib import import_module
from os import PathLike
from typing import Any

from cbtop.profiler.analysis.budget import ByteBudget, TokenBudget
from cbtop.profiler.checks import Check
from cbtop.protocol.attributes import NO_MODULE, KernelAttributes, ModuleAttributes, Work
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

    `name` is shown on every screen. Use the display name of a BrickId, or any other name. Two definitions in one
    layer are two nodes, even if both are called RmsNorm. `label` is your own word for this place (`q_proj`), which
    distinguishes such nodes on the screen. `budget` is the allowed cost: a time per token, or a rate for the declared
    bytes. `checks` are conditions on the output, see checks.py. `contract` is the path of a contract file, whose
    conditions and reference become checks, too. It needs the extra `compute`. Raises ContractError if the file is not
    valid. `module` describes the module of torch that the brick calls.
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
    contract: InitVar[str | PathLike[str]] = ""
    module: ModuleAttributes = NO_MODULE

    def __post_init__(self, contract: str | PathLike[str]) -> None:
        if type(self.budget) not in (TokenBudget, ByteBudget, type(None)):
            raise TypeError(f"budget is {self.budget!r}; a TokenBudget or a ByteBudget is wanted")
        for check in self.checks:
            if isinstance(check, type) or not hasattr(check, "evaluate"):
                raise TypeError(
                    f"{check!r} is no check; Finite(), Bounded(low, high) or Equivalent(reference) is one"
                )
            if not isinstance(check.name, str):
                raise TypeError(f"the name of the check {check!r} is {check.name!r}; a str is expected")
        if contract:
            object.__setattr__(self, "checks", (*self.checks, *_checks_of(contract)))

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
        contract: str | PathLike[str] = "",
    ) -> BrickDefinition:
        """Return the definition of a well-known brick, with the name and category of its BrickId.

        Raises TypeError if `brick` is not a BrickId. For other names, use `BrickDefinition(name, category)`.
        """
        if type(brick) is not BrickId:
            raise TypeError(
                f"{brick!r} is not a BrickId; "
                f"pass a BrickId, or write BrickDefinition({brick!r}, BrickCategory.OTHER)"
            )
        return cls(
            brick.display_name, brick.category, brick, backend, work, kernels, budget, label, checks, contract
        )  # fmt: skip


def _checks_of(contract: str | PathLike[str]) -> tuple[Check, ...]:
    """Return the checks of a contract file. Raises ImportError without the extra `compute`."""
    try:
        # Contracts are read by `compute`, which a profiled process otherwise never loads.
        own_contracts: Any = import_module("cbtop.compute.own_contracts")
    except ImportError as error:
        raise ImportError(f"a contract needs pip install 'cbtop[compute]' ({error})") from error
    checks: tuple[Check, ...] = own_contracts.checks_of(contract)
    return checks


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
