"""Format numbers and units for screens, reports, messages and verdicts."""

# None means that a number was not measured, and is written as `n/a`. 0 is a measured zero. In text, a number of 1,000
# or more has separators. Ids (of processes, ports, rings) and numbers in JSON and CSV have no separators.

from __future__ import annotations

import math

NOT_MEASURED = "n/a"
NONE_THERE = "–"

_SI_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# With fixed decimals, values below these two limits would be written as 0.00 and 0.0000.
_LEAST_TWO_DECIMALS, _LEAST = 0.005, 0.00005
_MAX_PLAIN = 9_999_999  # width of the widest number in a column: seven digits and two separators


def number(value: float | None) -> str:
    """Format `value` to about four digits, never with an exponent: `0.0042`, `8.45`, `123.4`, `12,345`, `12.3M`.

    Only 0 is written as 0. Below 0.0001 it is `<.0001`.
    """
    if value is None or math.isnan(value):
        return NOT_MEASURED
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    if size >= _MAX_PLAIN:
        return si(value)
    if size >= 999.95:
        return f"{value:,.0f}"
    if size >= 99.995:
        return f"{value:.1f}"
    if not size or size >= _LEAST_TWO_DECIMALS:
        return f"{value:.2f}"
    return f"{value:.4f}" if size >= _LEAST else "<.0001" if value > 0 else ">-.0001"


def count(value: float | None) -> str:
    """Format a whole number: `12,345`, or `12.3M` from ten million on."""
    if value is None:
        return NOT_MEASURED
    return si(value) if abs(value) > _MAX_PLAIN else f"{value:,.0f}"


def exact_count(value: int | None) -> str:
    """Format a whole number with all of its digits: `12,345,678`. Reports use it, because programs read them, too."""
    return NOT_MEASURED if value is None else f"{value:,}"


def si(value: float | None, unit: str = "") -> str:
    """Format `value` with a decimal prefix and its unit: `1.23 GFLOP`, or `12.3M` without a unit."""
    if value is None:
        return NOT_MEASURED
    space = " " if unit else ""
    for factor, prefix in _SI_PREFIXES:
        if abs(value) >= 0.9995 * factor:
            return f"{_three_digits(value / factor)}{space}{prefix}{unit}"
    return f"{_three_digits(value)}{space}{unit}"


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def duration(us: float | None) -> str:
    """Format microseconds in a suitable unit: `840 ns`, `8.45 µs`, `8.45 ms`, `1.23 s`."""
    if us is None:
        return NOT_MEASURED
    size = abs(us)
    if size >= 999_950:
        return f"{number(us / 1e6)} s"
    if size >= 999.95:
        return f"{number(us / 1e3)} ms"
    if size >= 0.9995 or us == 0:
        return f"{number(us)} µs"
    return f"{us * 1e3:.0f} ns"


def milliseconds(us: float | None) -> str:
    """Format microseconds as a number of milliseconds, without the unit."""
    return NOT_MEASURED if us is None else number(us / 1e3)


def percent(value: float | None) -> str:
    """Format a percentage, for example `42.1 %`. A share below the last decimal is written as `<0.1 %`, not as 0."""
    return NOT_MEASURED if value is None else f"{percent_number(value)} %"


def percent_number(value: float | None) -> str:
    """Format a percentage without the sign, for columns that have the sign in their header."""
    if value is None:
        return NOT_MEASURED
    return "<0.1" if 0 < value < 0.05 else f"{value:,.1f}"


def size_bytes(value: float | None) -> str:
    """Format a size in decimal units: `78.2 MB`."""
    return si(value, "B")


def bytes_per_second(value: float | None) -> str:
    """Format a rate in decimal units: `12.3 GB/s`."""
    return si(value, "B/s")


def whole(value: float | None) -> str:
    """Format a number without decimals, such as watts, megahertz or degrees."""
    return NOT_MEASURED if value is None else count(round(value))


def with_unit(text: str, unit: str) -> str:
    """Return the formatted number `text` with its unit. The text n/a gets no unit."""
    return text if text == NOT_MEASURED else f"{text} {unit}"


def counted(value: int, what: str) -> str:
    """Format a count with its noun: `1 step`, `12 steps`."""
    return f"{count(value)} {what}" if value == 1 else f"{count(value)} {what}s"


def with_article(what: str) -> str:
    """Return a noun with its article: `a decode step`, `an encode step`."""
    return f"{'an' if what[:1].lower() in tuple('aeiou') else 'a'} {what}"


def exact(ns: int) -> str:
    """Format nanoseconds as exact microseconds: `-1,234.567 µs`."""
    whole_us, rest = divmod(abs(ns), 1000)
    return f"{'-' * (ns < 0)}{whole_us:,}.{rest:03d} µs"


def scientific(value: float | None) -> str:
    """Format a numerical error or a tolerance: `1.2e-06`."""
    return NOT_MEASURED if value is None else f"{value:.1e}"
