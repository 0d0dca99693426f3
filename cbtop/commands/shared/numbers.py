"""Numbers on the command line."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """`text` as a number from 1 on."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return value
