"""Parse the numbers in options of the command line."""

from __future__ import annotations

import argparse

from cbtop.compute.settings import LOWEST_TEMPERATURE


def count(text: str) -> int:
    """Parse `text` as a whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return value


def whole(text: str) -> int:
    """Parse `text` as a whole number of at least 0 with at most 64 bits."""
    if not text.isdecimal() or int(text) >= 1 << 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def temperature(text: str) -> float:
    """Parse `text` as a sampling temperature: 0, or at least LOWEST_TEMPERATURE."""
    value = _number(text, 0.0, 100.0)
    if 0 < value < LOWEST_TEMPERATURE:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor from {LOWEST_TEMPERATURE:g} on")
    return value


def part(text: str) -> float:
    """Parse `text` as a number that is above 0 and at most 1."""
    value = _number(text, 0.0, 1.0)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _number(text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
    return value
