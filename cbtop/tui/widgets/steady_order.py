"""Keep an order of table rows that rarely changes while their numbers change."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from cbtop.tui.widgets.columns import Column, RowT

# Two rows swap only if one was ahead by this share in all of the latest redraws. The second number is how many (20 s
# at the default rate). So a single long call moves no row, because it leaves the window after ten seconds. Figures of
# few calls (p99, max) differ from window to window. For these, only every sixth redraw counts, so it takes two
# minutes.
STEADY_MARGIN = 0.15
STEADY_REDRAWS = 40
RARE_APART = 6
# At most this many values are stored over all redraws. For a table with very many rows, fewer redraws are stored.
MAX_VALUES = 200_000

Values = Mapping[object, float | str]


def redraws_apart(column: Column[RowT]) -> int:
    """Return N if only every Nth redraw counts for a table that is sorted by `column`."""
    return RARE_APART if column.of_few else 1


class SteadyOrder:
    """The order of a table's row keys. It changes only after a difference has lasted.

    It is updated at each redraw.
    """

    def __init__(self) -> None:
        self.keys: list[object] = []
        self._redraws: deque[Values] = deque(maxlen=STEADY_REDRAWS)
        self._taken = 0

    def take(self, values: Values, *, descending: bool, apart: int = 1) -> None:
        """Update the order for new `values`, a value for each row key.

        Only every `apart`th redraw is stored for later comparisons.
        """
        if self._redraws and (self._taken - 1) % apart:
            self._redraws.pop()
        self._redraws.append(values)
        self._taken += 1
        while len(self._redraws) > 1 and len(self._redraws) * len(values) > MAX_VALUES:
            self._redraws.popleft()
        self.keys = steady_order(self.keys, self._redraws, descending=descending)


def steady_order(previous: Sequence[object], redraws: Sequence[Values], *, descending: bool) -> list[object]:
    """Return the row keys of the newest redraw in the stable order.

    Two keys of `previous` swap only if one was ahead of the other in all stored redraws.
    """
    values = redraws[-1]
    fresh = sorted(values, key=lambda key: _sortable(values[key]), reverse=descending)
    kept = [key for key in previous if key in values]
    known = set(kept)
    for position, key in enumerate(fresh):
        if key not in known:
            kept.insert(position, key)
    rank = {key: position for position, key in enumerate(fresh)}
    for index in range(len(kept)):
        here = kept[index]
        ahead = [
            key for key in kept[index + 1 :] if rank[key] < rank[here] and _is_ahead(key, here, redraws, descending)
        ]
        if ahead:
            best = min(ahead, key=rank.__getitem__)
            kept.remove(best)
            kept.insert(index, best)
    return kept


def _sortable(value: float | str) -> tuple[float, str]:
    return (0.0, value.casefold()) if isinstance(value, str) else (value, "")


def _is_ahead(one: object, other: object, redraws: Sequence[Values], descending: bool) -> bool:
    """Return whether the row `one` was clearly ahead of the row `other` in each redraw with values of both."""
    if not _differ(redraws[-1][one], redraws[-1][other], descending):
        return False
    pairs = ((values[one], values[other]) for values in reversed(redraws) if one in values and other in values)
    return all(_differ(a, b, descending) for a, b in pairs if _is_measured(a) and _is_measured(b))


def _is_measured(value: float | str) -> bool:
    # A value below 0 means that nothing was measured. Such a row comes last.
    return isinstance(value, str) or value >= 0


def _differ(one: float | str, other: float | str, descending: bool) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one != other
    return (one - other if descending else other - one) > STEADY_MARGIN * max(abs(one), abs(other))
