"""Compare variants of a step with the bare step: short blocks in random order, each between two bare blocks.

A block begins by switching its variant on. It then runs steps until the interpreter has specialised its code again,
because the switch undid that. The next steps are timed, by the thread's CPU time unless a clock is given. Then the
variant is switched off. The ratio of a block is its mean divided by the mean of both bare neighbours. The result is
the median of a variant's ratios, with a 95 % interval from a bootstrap.

Attaching makes the interpreter forget what it has learnt. That takes far longer than a single recorded step. So a
recorded step is compared with the plain steps before and after it, and all of these run attached
(`run_beside_plain`).
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.base import Ratio
from cbtop.profiler.instrument.governor import Governor

RESAMPLED = 1000
NEVER = 1 << 62  # a sampling interval that is so long that no step is recorded
# Numbers of steps. PAYING is the recorded step and the next ones, in which the recording code is removed and the
# interpreter specialises its code again.
PLAIN_BEFORE, PAYING, PLAIN_AFTER = 4, 4, 8
Switch = Callable[[], Callable[[], None]]  # switches a variant on, and returns a function that switches it off again


def record_when_told(governor: Governor) -> Callable[[bool], None]:
    """Return a function that sets whether the next steps are recorded.

    It changes the governor's own settings, so that steps take the default path. The governor makes no decisions
    afterwards.
    """
    governor.look_at_step = NEVER
    governor.floor = 0

    def tell(is_recorded: bool) -> None:
        governor.every = 1 if is_recorded else NEVER

    return tell


@dataclass
class Variant:
    """One way to run the step. It runs once in every `every` cycles."""

    begin: Switch
    every: int = 1
    # for each block, its time divided by the time of the bare blocks next to it
    ratios: list[float] = field(default_factory=list)


def run_beside_bare(
    step: Callable[[], None],
    bare: Switch,
    variants: Sequence[Variant],
    *,
    seconds: float,
    settle: int,
    timed: int,
    clock_ns: Callable[[], int] | None = None,
) -> float:
    """Run as many cycles as fit into `seconds`, and add the ratios of all variants.

    Returns the median time (ns) of a bare step.
    """

    now_ns = clock_ns or time.thread_time_ns

    def block(begin: Switch) -> float:
        end = begin()
        total_ns = 0
        for number in range(-settle, timed):
            begun_ns = now_ns()
            step()
            if number >= 0:
                total_ns += now_ns() - begun_ns
        end()
        return total_ns / timed

    with _without_collections():
        bare_ns: list[float] = [block(bare)]
        until_s, cycle = time.monotonic() + seconds, 0
        while not cycle or time.monotonic() < until_s:
            turns = [variant for variant in variants if cycle % variant.every == 0]
            random.shuffle(turns)
            for variant in turns:
                found_ns = block(variant.begin)
                bare_ns.append(block(bare))
                variant.ratios.append(2 * found_ns / (bare_ns[-2] + bare_ns[-1]))
            cycle += 1
            gc.collect()
    return statistics.median(bare_ns)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Prevent garbage collection while the context is open. Later collections ignore objects from before it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def run_beside_plain(
    step: Callable[[], None],
    tell: Callable[[bool], None],
    *,
    seconds: float,
    clock_ns: Callable[[], int] | None = None,
) -> Variant:
    """Return a variant with the additional cost of recording a step, as a multiple of a plain step, in `ratios`.

    The cost includes the slower steps after the recorded step.
    """
    now_ns = clock_ns or time.thread_time_ns
    found = Variant(lambda: lambda: None)
    with _without_collections():
        until_s = time.monotonic() + seconds
        while not found.ratios or time.monotonic() < until_s:
            took_ns = []
            for number in range(-PLAIN_BEFORE, PAYING + PLAIN_AFTER):
                tell(number == 0)
                begun_ns = now_ns()
                step()
                took_ns.append(now_ns() - begun_ns)
            tell(False)
            plain_ns = statistics.mean(took_ns[:PLAIN_BEFORE] + took_ns[-PLAIN_AFTER:])
            found.ratios.append(sum(took_ns[PLAIN_BEFORE:-PLAIN_AFTER]) / plain_ns - PAYING)
            gc.collect()
    return found


def median_of(*variants: Variant, made: Callable[..., float] = lambda median: median) -> Ratio:
    """Return the median of a variant's ratios with its 95 % interval.

    With several variants, `made` combines their medians.
    """
    chance = random.Random(0)
    drawn = sorted(
        made(*(statistics.median(chance.choices(one.ratios, k=len(one.ratios))) for one in variants))
        for _ in range(RESAMPLED)
    )
    middle = made(*(statistics.median(one.ratios) for one in variants))
    return Ratio(middle, drawn[RESAMPLED // 40], drawn[-1 - RESAMPLED // 40])
