from collections.abc import Callable, Sequence
from typing import Any

class Conditions:
    """A function of the values of a call. In the result, bit n is set if condition n does not hold.

    `nodes` are tuples (operation, operand, …). An operand is the place of an earlier node. `conditions` has the place
    of each condition's node, or -1 if `meaning` always decides the condition. `meaning` has a Python function for
    each condition, which takes the same values and returns whether the condition holds. Raises ValueError for invalid
    nodes.
    """

    def __new__(
        cls,
        nodes: list[tuple[Any, ...]],
        conditions: list[int],
        meaning: tuple[Callable[[Sequence[Any]], bool], ...],
        /,
    ) -> Conditions: ...
    def __call__(self, values: Sequence[Any], /) -> int: ...
