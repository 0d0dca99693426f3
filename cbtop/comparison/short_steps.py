"""Find the steps of a run that are not compared, because there are too few with the same work."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from cbtop.comparison.runs import Run, TooShort
from cbtop.protocol.vocabulary import is_warm_up
from cbtop.units import count, counted


@dataclass(frozen=True, slots=True)
class ShortSteps:
    """The steps of one phase in batches with too few steps. `each` has the number of steps of each batch."""

    phase: str
    each: tuple[TooShort, ...]
    time_us: float  # wall-clock time in µs of these steps that counts as not compared

    @property
    def steps(self) -> int:
        return sum(one.steps for one in self.each)

    @property
    def text(self) -> str:
        """The steps as text: `3 steps, of 20 needed`, or `40 steps in 4 batches of at most 12, of 20 needed in
        each`.
        """
        most = max(self.each, key=lambda one: one.steps)
        if len(self.each) == 1:
            return f"{counted(self.steps, 'step')}, of {count(most.needed)} needed"
        return (
            f"{counted(self.steps, 'step')} in {count(len(self.each))} batches of at most {count(most.steps)}, "
            f"of {count(most.needed)} needed in each"
        )


def short_steps(
    now: Run, phase: str | None, base: Run | None = None, whole: Container[str] | None = None
) -> Iterator[ShortSteps]:
    """Yield the steps that are not compared, of all phases or of `phase`, without warm-ups.

    The whole time of a phase counts if the phase is in `whole`, or if `whole` is None. For other phases, only the
    time above the phase's share in the run `base` counts.
    """
    for name in dict.fromkeys(one.phase for one in now.too_short if phase in (None, one.phase)):
        if is_warm_up(name):
            continue
        ours = tuple(one for one in now.too_short if one.phase == name)
        time_us = sum(one.time_us for one in ours)
        if base is not None and whole is not None and name not in whole and base.time_us:
            before_us = sum(one.time_us for one in base.too_short if one.phase == name)
            time_us -= before_us / base.time_us * now.time_us
        if time_us > 0 or whole is None:
            yield ShortSteps(name, ours, time_us)


def warm_up_steps(run: Run) -> int:
    """Return the number of warm-up steps in groups too small to compare."""
    return sum(one.steps for one in run.too_short if is_warm_up(one.phase))
