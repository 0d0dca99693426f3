"""From how much work on kernels use threads, or bfloat16: what `cbtop calibrate` found, kept beside its roofs.

Rules
- What was found of another machine, with another number of processors or by another version, whose kernels may be
  others, is not used: it is refused in words.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cbtop.protocol.codec import reader_for
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.kept_file import keep, kept
from cbtop.protocol.roofs import roofs_file
from cbtop.protocol.vocabulary import Provenance
from cbtop.version import __version__

SCHEMA = "cbtop.crossovers/1"
MAX_MACHINES = 32  # the newest are kept
MAX_CROSSOVERS = 8  # of one machine
MAX_VALUE = NEVER = 1 << 40  # no work is so large
MAX_US = 1e9


@dataclass(frozen=True, slots=True)
class Crossover:
    """From `value` on work is done the other way: measured, or static with a `note` why nothing was found.

    Of one that was measured: the medians of a call at that size, one way and the other, and the larger spread of both
    (the middle half of the rounds, of the median). ValueError for what cannot be meant.
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
    """What was found on a machine: with its `threads`, which are all that the process might use, by a version."""

    device: str
    threads: int
    version: str
    measured_on: str  # the moment
    crossovers: tuple[Crossover, ...]

    @property
    def title(self) -> str:
        return f"{self.device}, {self.threads} thread{'s' * (self.threads != 1)}"

    @property
    def day(self) -> str:
        return self.measured_on[: len("2026-11-22")]


@dataclass(frozen=True, slots=True)
class _Machine:
    """The same without its list, as the codec reads it."""

    device: str
    threads: int
    version: str
    measured_on: str


_read_machine, _read = reader_for(_Machine), reader_for(Crossover)


def crossovers_file() -> Path:
    """Where they are kept."""
    return roofs_file().with_name("crossovers.json")


def known_crossovers() -> tuple[MachineCrossovers, ...]:
    """All that are kept, the newest last; none where there is no file. Raises RoofsError where it cannot be read."""
    found = kept(crossovers_file(), SCHEMA, "machines", MAX_MACHINES, _machine)
    return () if found is None else found


def keep_crossovers(measured: MachineCrossovers) -> None:
    """Keep these beside those of other machines, in place of older ones of this. Raises RoofsError."""
    try:
        known = known_crossovers()
    except RoofsError:
        known = ()  # what nobody can read is no loss
    of_others = [one for one in known if one.title != measured.title]
    machines = [*of_others, measured][-MAX_MACHINES:]
    keep(crossovers_file(), SCHEMA, "machines", [asdict(one) for one in machines])


def crossovers_of(device: str, threads: int) -> MachineCrossovers | None:
    """Those of a machine; None where nothing is kept. RoofsError for what is another's, or another version's."""
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
