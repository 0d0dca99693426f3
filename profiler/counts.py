"""Converts the numbers that a host gives, so that they can be recorded and shown."""

from __future__ import annotations

import operator
from typing import Any

from cbtop.protocol.ring import UNKNOWN_AMOUNT


def amount_of_call(value: float | None) -> int:
    """Return the FLOP or bytes of one call as an integer for a record. Raises ValueError if it is too large."""
    if value is None:
        return UNKNOWN_AMOUNT
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{value:g} of one call; less than 2^63 are wanted")
    return round(value)


def whole(tokens: Any) -> Any:
    """Return `tokens` as a Python int if it is a whole number, else unchanged."""
    try:
        return operator.index(tokens)
    except TypeError:
        return tokens


def shown(elements: object) -> str:
    """Return what a host gave as a number of elements, as at most 120 characters."""
    kind = type(elements).__name__
    return f"{elements!r} ({kind})"[:120] if isinstance(elements, (int, float, str)) else f"a {kind}"
