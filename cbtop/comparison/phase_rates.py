"""Compute the rates of each phase of a run with their errors: tokens/s, samples/s, and tokens/s within the phase's
own steps.
"""

# Rules
# - A rate is what the screen, the reports and the metrics show for the whole run: a phase's tokens, divided by
#   wall-clock time since the first step after the warm-up. This includes waits and the steps of other phases. The
#   rate in steps is divided by the time of the phase's own steps.
# - In training, a rate is divided by the time of all training steps, which follow each other. This leaves out
#   evaluations and pauses between epochs.
# - A rate is stored as its inverse, the time of one token, because a mean over blocks exists for times only.
# - Slow steps at the beginning are part of a rate. Only several runs show how much they vary.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.noise import MIN_BLOCKS, Figure, figures, learned, slow_start
from cbtop.comparison.rate_blocks import PhaseSums, RateBlock, RateBlocks
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.vocabulary import is_training

TOKENS, STEPS, SAMPLES, IN_STEPS = "tokens_per_sec", "steps_per_sec", "samples_per_sec", "in_steps"
RATE_UNITS = {TOKENS: "tokens/s", STEPS: "steps/s", SAMPLES: "samples/s", IN_STEPS: "tokens/s without pauses"}


@dataclass(frozen=True, slots=True)
class PhaseRates:
    """The rates of a phase. `times_us` has the time (µs) of one token, step or sample, by name of the rate.

    A rate is missing if it is unknown, or if too few blocks of steps show its error.
    """

    phase: str
    steps: int
    times_us: Mapping[str, Figure] = field(default_factory=dict)
    cached: float | None = None  # mean cached positions before a step
    is_headline: bool = False  # whether the screen shows this phase first

    @property
    def main(self) -> str:
        """The rate to judge: the token rate, or the step rate if some steps do not report their tokens."""
        return TOKENS if TOKENS in self.times_us else STEPS

    def per_sec(self, rate: str) -> float | None:
        """Return the rate with the name `name`, per second."""
        time_us = self.times_us.get(rate)
        return None if time_us is None else 1e6 / time_us.mean


@dataclass(frozen=True, slots=True)
class ShownRates:
    """The rates of a phase over the whole run, as on a screen. None: unknown."""

    per_sec: Mapping[str, float | None]
    is_headline: bool = False


def phase_rates(
    blocks: RateBlocks, table: NodeTable, shown: Mapping[str, ShownRates], *, is_shown_whole: bool
) -> tuple[PhaseRates, ...]:
    """Return the rates of each phase, by first appearance.

    `shown` has each phase's rates on a screen. They are used if `is_shown_whole`: the screen shows exactly the steps
    in `blocks`. Otherwise it also shows steps from before the recording.
    """
    whole, found = blocks.whole, []
    training = [node for node in whole.phases if is_training(table[node].name)]
    for node, sums in whole.phases.items():
        phase = display_name(table[node])
        on_screen = shown.get(phase)
        over = training if node in training else ()
        own = _per_sec(whole, sums, over)
        per_sec = on_screen.per_sec if on_screen is not None and is_shown_whole else own
        times_us = _times_us(blocks.blocks, node, per_sec, over)
        found.append(
            PhaseRates(
                phase=phase,
                steps=sums.steps,
                times_us=times_us,
                cached=sums.cached / sums.told_cached if sums.told_cached else None,
                is_headline=on_screen is not None and on_screen.is_headline,
            )
        )
    return tuple(found)


def rates_together(runs: Sequence[Sequence[PhaseRates]], least: int) -> tuple[PhaseRates, ...]:
    """Return the mean rates of several runs with their scatter. A rate that fewer than `least` runs have is left
    out.
    """
    found = []
    for phase in dict.fromkeys(rates.phase for run in runs for rates in run):
        alike = [rates for run in runs for rates in run if rates.phase == phase]
        rows = {name: [one.times_us[name] for one in alike if name in one.times_us] for name in RATE_UNITS}
        times_us = {name: learned([row])[0] for name, row in rows.items() if len(row) >= least}
        cached = [one.cached for one in alike if one.cached is not None]
        if len(alike) >= least:
            found.append(
                replace(
                    alike[0],
                    steps=sum(one.steps for one in alike),
                    times_us=times_us,
                    cached=sum(cached) / len(cached) if len(cached) == len(alike) else None,
                )
            )
    return tuple(found)


def _rates_ns(block: RateBlock, training: Collection[int]) -> int:
    """Return the time that rates are divided by. In training it is the time of the step nodes `training`."""
    if not training:
        return block.wall_ns
    return min(block.wall_ns, sum(block.phases[node].in_steps_ns for node in training if node in block.phases))


def _per_sec(whole: RateBlock, sums: PhaseSums, training: Collection[int]) -> dict[str, float | None]:
    is_counted, rates_ns = not sums.uncounted and sums.tokens > 0, _rates_ns(whole, training)
    amounts = {
        TOKENS: (sums.tokens if is_counted else 0, rates_ns),
        STEPS: (sums.steps, rates_ns),
        SAMPLES: (sums.sequences if sums.told_sequences == sums.steps else 0, rates_ns),
        IN_STEPS: (sums.tokens if is_counted else 0, sums.in_steps_ns),
    }
    return {name: 1e9 * amount / time_ns if time_ns else None for name, (amount, time_ns) in amounts.items()}


def _times_us(
    blocks: Sequence[RateBlock], node: int, per_sec: Mapping[str, float | None], training: Collection[int]
) -> dict[str, Figure]:
    """Return the time of one token, of one step and of one sample. It is missing if the rate in `per_sec` is None."""
    ran = [at for at, block in enumerate(blocks) if node in block.phases]
    if len(ran) < MIN_BLOCKS:
        return {}
    # A phase may take only a part of the run, for example if all prompts are read first. So use only the blocks from
    # its first to its last step.
    blocks = blocks[ran[0] : ran[-1] + 1]
    blocks = blocks[slow_start(np.array([block.wall_ns / block.steps for block in blocks])) :]
    phases = [block.phases.get(node, PhaseSums()) for block in blocks]
    if sum(one.steps > 0 for one in phases) < MIN_BLOCKS:
        return {}
    wall_us, in_steps_us = (
        np.array(column, float) / 1e3
        for column in ([_rates_ns(block, training) for block in blocks], [one.in_steps_ns for one in phases])
    )
    along = _cached(phases)
    found = {}
    for name, time_us, amounts in (
        (TOKENS, wall_us, [one.tokens for one in phases]),
        (STEPS, wall_us, [one.steps for one in phases]),
        (SAMPLES, wall_us, [one.sequences for one in phases]),
        (IN_STEPS, in_steps_us, [one.tokens for one in phases]),
    ):
        rate, weight = per_sec.get(name), np.array(amounts, float)
        if rate and weight.sum() > 0 and time_us.sum() > 0:
            (figure,) = figures(time_us[:, None], weight, along)
            found[name] = _at_mean(figure, 1e6 / rate, halved=time_us is wall_us)
    return found


def _at_mean(figure: Figure, mean_us: float, *, halved: bool) -> Figure:
    """Return a copy of a figure with another mean and the same relative error.

    `halved` is for times with pauses by other programs. These pauses are rare and long, so few blocks have them. The
    error is computed from half as many blocks.
    """
    ratio = mean_us / figure.mean
    return replace(
        figure,
        mean=mean_us,
        error=figure.error * ratio,
        slope=figure.slope * ratio,
        slope_error=figure.slope_error * ratio,
        blocks=max(MIN_BLOCKS, figure.blocks // 2) if halved else figure.blocks,
    )


def _cached(phases: Sequence[PhaseSums]) -> NDArray[np.float64] | None:
    """Return the mean cached positions in each block of steps. None if some steps do not report them.

    A block without steps of the phase gets the mean of the others, with weight zero.
    """
    if any(one.told_cached < one.steps for one in phases):
        return None
    each = [one.cached / one.steps if one.steps else None for one in phases]
    known = [one for one in each if one is not None]
    return np.array([sum(known) / len(known) if one is None else one for one in each])
