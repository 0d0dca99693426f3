"""Crossovers. A crossover is the amount of work above which a kernel uses threads, or uses bfloat16.

`cbtop calibrate` measures crossovers and stores them next to the roofs.

Rules
- Stored figures are used only if they were measured on this machine, by this version of cbtop, and with the same
  number of processors. Otherwise, reading them raises an error.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cbtop.protocol.codec import reader_for
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.kept_file import read_list, write_list
from cbtop.protocol.roofs import roofs_file
from cbtop.protocol.vocabulary import Provenance
from cbtop.version import __version__

SCHEMA = "cbtop.crossovers/1"
MAX_MACHINES = 32  # most machines in the file of crossovers; if there are more, the oldest measurements are dropped
MAX_CROSSOVERS = 8  # per machine
MAX_VALUE = NEVER = 1 << 40  # a crossover of this size is never reached, because no call has this much work
MAX_US = 1e9


@dataclass(frozen=True, slots=True)
class Crossover:
    """A crossover between two methods. The second method is used from the amount of work `value` on.

    A crossover is measured or static. The `note` of a static one explains why it was not measured.

    A measured one has `before_us` and `after_us`, the median times of both methods for a call with that amount of
    work. Its `spread_percent` is the interquartile range of a method's rounds, in percent of their median. Of both
    methods, the larger value is used.

    Raises ValueError if a figure is impossible.
    """

    name: str
    value: int
    provenance: Provenance
    note: str = ""
    before_us: float | None = None
    after_us: float | None = None
    spread_percent: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.value <= MAX_VALUE:
            raise ValueError(f"a crossover of {self.value}; 1 to {MAX_VALUE} are wanted")
        if self.provenance not in (Provenance.MEASURED, Provenance.STATIC):
            raise ValueError(f"a crossover is measured or static, not {self.provenance}")
        for figure in (self.before_us, self.after_us, self.spread_percent):
            if figure is not None and not (math.isfinite(figure) and 0 <= figure <= MAX_US):
                raise ValueError(f"a figure of {figure}")


@dataclass(frozen=True, slots=True)
class MachineCrossovers:
    """The crossovers of one machine, measured by one version of cbtop.

    `threads` is the number of threads that the process may use.
    """

    device: str
    threads: int
    version: str
    measured_on: str  # date and time
    crossovers: tuple[Crossover, ...]

    @property
    def title(self) -> str:
        return f"{self.device}, {self.threads} thread{'s' * (self.threads != 1)}"

    @property
    def day(self) -> str:
        return self.measured_on[: len("2026-11-22")]


@dataclass(frozen=True, slots=True)
class _Machine:
    """All fields of a `MachineCrossovers` except its list of crossovers.

    The codec uses this class to check a stored map.
    """

    device: str
    threads: int
    version: str
    measured_on: str


_read_machine, _read = reader_for(_Machine), reader_for(Crossover)


def crossovers_file() -> Path:
    """Return the path of the file that stores the crossovers."""
    return roofs_file().with_name("crossovers.json")


def known_crossovers() -> tuple[MachineCrossovers, ...]:
    """Return all stored crossovers, the newest last, or () without a file. Raises RoofsError if the file is
    unreadable.
    """
    found = read_list(crossovers_file(), SCHEMA, "machines", MAX_MACHINES, _machine)
    return () if found is None else found


def keep_crossovers(measured: MachineCrossovers) -> None:
    """Store the crossovers of this machine.

    They replace the older crossovers of this machine. The crossovers of other machines stay.

    Raises RoofsError.
    """
    try:
        known = known_crossovers()
    except RoofsError:
        known = ()  # a file that cannot be read is replaced
    of_others = [one for one in known if one.title != measured.title]
    machines = [*of_others, measured][-MAX_MACHINES:]
    write_list(crossovers_file(), SCHEMA, "machines", [asdict(one) for one in machines])


def crossovers_of(device: str, threads: int) -> MachineCrossovers | None:
    """Return the stored crossovers of a machine, or None if none are stored.

    Raises RoofsError if the stored crossovers belong to other machines or to a different version.
    """
    known = known_crossovers()
    here = [one for one in known if (one.device, one.threads) == (device, threads)]
    if known and not here:
        own = f"{device}, {threads} thread{'s' * (threads != 1)}"
        raise RoofsError(f"{crossovers_file()} is of {known[-1].title}; this is {own}")
    if here and here[-1].version != __version__:
        raise RoofsError(f"{crossovers_file()} is by cbtop {here[-1].version}; this is {__version__}")
    return here[-1] if here else None


def _machine(raw: dict[str, Any]) -> MachineCrossovers:
    found: _Machine = _read_machine(raw)
    if found.threads < 1:
        raise ValueError(f"a machine of {found.threads} threads")
    parts = raw.get("crossovers")
    if not isinstance(parts, list) or len(parts) > MAX_CROSSOVERS or not all(isinstance(one, dict) for one in parts):
        raise ValueError(f"a list of at most {MAX_CROSSOVERS} crossovers was wanted")
    crossovers = tuple(map(_read, parts))
    return MachineCrossovers(found.device, found.threads, found.version, found.measured_on, crossovers)
