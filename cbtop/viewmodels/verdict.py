"""A verdict: its severity, its subject, its evidence and its advice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """The severity of a verdict."""

    ERROR = "error"  # the figures cannot be trusted, or nothing runs
    WARNING = "warning"  # time is wasted
    NOTE = "note"  # what limits it, or what a figure does not include


class About(StrEnum):
    """The kind of thing a verdict is about."""

    SOURCE = "source"
    RANK = "rank"
    DEVICE = "device"
    STEPS = "steps"
    LAYER = "layer"
    BRICK = "brick"
    ROOF = "roof"


@dataclass(frozen=True, slots=True)
class Subject:
    """The thing a verdict is about, by name; for a layer also the id of its node."""

    kind: About
    name: str
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A number that supports a verdict."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A problem or limit, its evidence, and advice. `cbtop.viewmodels.verdicts` has all rules.

    `gain_tokens_per_sec` is derived: the gain in wall-clock tokens/s by Amdahl's law, under the condition `gain_if`.
    """

    id: str
    severity: Severity
    sentence: str
    evidence: tuple[Evidence, ...]
    advice: str
    about: Subject
    gain_tokens_per_sec: float | None = None
    gain_if: str = ""
