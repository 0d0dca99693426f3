"""A verdict: its severity, subject, evidence and advice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """The severity of a verdict, from wrong figures down to a remark."""

    ERROR = "error"  # The process's figures cannot be trusted, or nothing runs.
    WARNING = "warning"  # The process loses time that it could save.
    NOTE = "note"  # The process has a limit, or a figure leaves something out.


class About(StrEnum):
    """What a verdict can be about."""

    SOURCE = "source"
    RANK = "rank"
    DEVICE = "device"
    STEPS = "steps"
    LAYER = "layer"
    BRICK = "brick"
    ROOF = "roof"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a verdict is about, by name. For a layer, `node` is its node's id."""

    kind: About
    name: str
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A number that supports a verdict, with its name and unit."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A problem or a limit, with evidence and advice. The rules are in `cbtop.viewmodels.verdicts`.

    `gain_tokens_per_sec` (derived) is the gain in wall-clock tokens/s by Amdahl's law, under the condition `gain_if`.
    """

    id: str
    severity: Severity
    sentence: str
    evidence: tuple[Evidence, ...]
    advice: str
    about: Subject
    gain_tokens_per_sec: float | None = None
    gain_if: str = ""


@dataclass(frozen=True, slots=True)
class Withheld:
    """Verdicts that are not shown although their rules fire, and why their figures cannot be trusted."""

    ids: tuple[str, ...]
    about: str  # what the withheld verdicts are about: "latency" or "speed"
    reason: str  # the reason as a clause after "because"
