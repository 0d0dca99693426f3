"""The setting of the guard, which looks for faulty values: which values are faulty besides NaN and infinity, and how
to react.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

BOUND: Final = "abs<="  # how the part of the setting that limits values begins
LOG, STOP, DUMP = "log", "stop", "dump"
GRAMMAR: Final = f"{LOG}, {STOP}, {DUMP}, {DUMP}:DIRECTORY and {BOUND}NUMBER, separated by commas"

EXIT_CODE = 4  # exit code of a program that the guard stops


class NotFiniteError(SystemExit):
    """Raised by the guard to stop the host after a fault, if its setting says so.

    The host exits with EXIT_CODE. This is a SystemExit, so that handlers of `Exception` do not continue.
    """

    def __init__(self, line: str) -> None:
        super().__init__(EXIT_CODE)
        self.line = line

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True, slots=True)
class GuardSetting:
    """How to react to a value that is not finite, or larger than `bound`. The fault is always logged."""

    stops: bool = False  # whether an exception stops the host
    dumps: bool = False  # whether the inputs of the faulty brick are saved in a file
    directory: str = ""  # the directory for the file with the inputs of the faulty brick; "" means cbtop's cache
    bound: float = math.inf  # largest allowed magnitude of a value; infinity: no limit


def guard_setting(text: str) -> GuardSetting:
    """Parse the guard's setting, such as `log`, `stop`, `dump:/tmp/faults` or `stop,abs<=1e4`. Raises ValueError."""
    stops, dumps, directory, bound = False, False, "", math.inf
    for part in text.split(","):
        if part.startswith(BOUND):
            bound = _bound(part.removeprefix(BOUND))
        elif part == STOP:
            stops = True
        elif part == DUMP or part.startswith(f"{DUMP}:"):
            dumps, directory = True, part.removeprefix(DUMP).removeprefix(":")
        elif part != LOG:
            raise ValueError(f"guard: {part!r} is not known; expected {GRAMMAR}")
    return GuardSetting(stops, dumps, directory, bound)


def _bound(text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not 0 < bound < math.inf:
        raise ValueError(f"guard: {BOUND}{text} is no limit; expected a number above 0, such as {BOUND}1e4")
    return bound
