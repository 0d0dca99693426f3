from collections.abc import Callable, Sequence
from typing import Any

class Conditions:
    """Called with the values of a call: bit n is set where condition n does not hold.

    `nodes` are (operation, operand, …) with the places of nodes before as operands, `conditions` the node of each
    condition, -1 of one that is always asked; `meaning` says of the same values whether it holds. ValueError of what
    are no nodes.
    """

    def __new__(
        cls,
        nodes: list[tuple[Any, ...]],
        conditions: list[int],
        meaning: tuple[Callable[[Sequence[Any]], bool], ...],
        /,
    ) -> Conditions: ...
    def __call__(self, values: Sequence[Any], /) -> int: ...
