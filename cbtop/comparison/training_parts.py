"""Collect the times of training steps' parts in a run. A process reports them for its newest steps."""

# Rules
# - A report is about the newest steps, at most 64, so two may share steps. It is stored if at least half of its steps
#   ended after the previous stored report.
# - Two reports that share half of their steps count as one independent report.

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from cbtop.comparison.noise import MIN_BLOCKS, Figure, figures
from cbtop.protocol.training_messages import TrainingTimes

MAX_REPORTS = 512  # Reports stored per phase. Older ones are dropped.
MAX_PHASES = 64  # Stored combinations of phase and model.
NEW_STEPS = 0.5  # A report is stored if at least this share of its steps is new.


@dataclass(slots=True)
class _Reports:
    """The stored reports of one phase and model. `at_step` is the number of ended steps at the newest one."""

    at_step: int
    kept: deque[TrainingTimes] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))


class TrainingParts:
    """Collects a process's reports about training steps, in the order of its recording."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], _Reports] = {}

    def take(self, times: TrainingTimes, steps_ended: int) -> None:
        """Add a report, which the process made after `steps_ended` of its steps."""
        key = times.phase, times.model
        known = self._reports.get(key)
        if known is None:
            if len(self._reports) >= MAX_PHASES:
                return
            known = self._reports[key] = _Reports(steps_ended)
        elif steps_ended - known.at_step < NEW_STEPS * times.steps:
            return
        known.at_step = steps_ended
        known.kept.append(times)

    def medians(self, phase: str, model: str) -> Mapping[str, Figure]:
        """Return the time (µs) of each part in the median step. Empty with too few reports.

        A part that a report lacks counts as 0. `model` may be "" if only one model reports steps of `phase`.
        """
        of_phase = [reports for (name, _), reports in self._reports.items() if name == phase]
        exact = self._reports.get((phase, model))
        found = exact or (of_phase[0] if len(of_phase) == 1 and not model else None)
        if found is None or len(found.kept) < MIN_BLOCKS:
            return {}
        names = list(dict.fromkeys(part.name for times in found.kept for part in times.parts))
        medians_us = [{part.name: part.p50_ns / 1e3 for part in times.parts} for times in found.kept]
        steps = np.array([float(times.steps) for times in found.kept])
        us = np.array([[each.get(name, 0.0) for name in names] for each in medians_us])
        each = figures(us * steps[:, None], steps)
        return {
            name: replace(figure, error=figure.error / sqrt(NEW_STEPS))
            for name, figure in zip(names, each, strict=True)
        }
