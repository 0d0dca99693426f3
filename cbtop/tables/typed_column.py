"""A typed column: NumPy values, their texts, and which values are known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_TEXT = -1  # In a column of texts, a row without a text has this code.


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """One column. Its values are numbers or booleans or, if `texts` is given, positions in `texts`.

    `is_known` is a mask of the rows with a value, or None if all rows have one. A row without a text has the position
    NO_TEXT.
    """

    values: NDArray[Any]
    texts: Collection[str] | None = None
    is_known: NDArray[np.bool_] | None = None

    @staticmethod
    def of_texts(texts: Iterable[str | None], codes: dict[str, int]) -> TypedColumn:
        """Return a column of `texts`. `codes` maps a text to its code in the column.

        A text that is missing in `codes` is added.
        """
        values = [NO_TEXT if text is None else codes.setdefault(text, len(codes)) for text in texts]
        return TypedColumn(np.array(values, np.int32), codes)

    @staticmethod
    def of_numbers(numbers: Sequence[float | None], dtype: type[np.number[Any]]) -> TypedColumn:
        """Return a column of `numbers`. In this list, None means an unknown value."""
        values = np.array([0 if number is None else number for number in numbers], dtype)
        return TypedColumn(values, is_known=np.array([number is not None for number in numbers], np.bool_))

    @staticmethod
    def joined(parts: Sequence[TypedColumn]) -> TypedColumn:
        """Join the columns `parts` (at least one) to one column with all of their rows.

        All parts must have the same list `texts`.
        """
        if len(parts) == 1:
            return parts[0]
        masks = None
        if any([part.is_known is not None for part in parts]):
            masks = np.concatenate(
                [np.ones(len(one.values), np.bool_) if one.is_known is None else one.is_known for one in parts]
            )
        return TypedColumn(np.concatenate([part.values for part in parts]), parts[0].texts, masks)

    def rows(self, indices: NDArray[np.int64]) -> TypedColumn:
        """Return a column with only the rows at `indices`."""
        known = None if self.is_known is None else self.is_known[indices]
        return TypedColumn(self.values[indices], self.texts, known)

    def to_numpy(self) -> NDArray[Any]:
        """Return the column as an array, with None for a missing text, and NaN for an unknown number."""
        if self.texts is not None:
            # The code of a missing text is -1 (NO_TEXT), which selects the last element. So append None.
            texts = np.array([*self.texts, None], np.object_)
            found: NDArray[Any] = texts[self.values]
            return found
        if self.is_known is None or self.is_known.all():
            return self.values
        return np.where(self.is_known, self.values, np.nan)

    def known(self) -> NDArray[np.bool_] | None:
        """Return a mask of the rows that have a value, or None if all rows have one."""
        if self.texts is None:
            return self.is_known
        found: NDArray[np.bool_] = self.values != NO_TEXT
        return None if found.all() else found
