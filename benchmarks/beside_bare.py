"""Compare variants of a step with the bare step: short blocks in random order, each between two bare blocks.

A variant is a way to run the step, for example with cbtop attached. A block begins by switching its variant on. It
then runs steps until the interpreter has specialised its code again, because the switch undid that. The next steps
are timed, by the thread's CPU time unless a clock is given. Then the variant is switched off. The ratio of a block is
its mean divided by the mean of both bare neighbours. The result is the median of a variant's ratios, with a 95 %
interval from a bootstrap.

Attaching makes the interpreter forget what it has learnt. Learning it again takes far longer than a single recorded
step. So a recorded step is compared with the plain steps before and after it. All of these steps run with cbtop
attached (`run_beside_plain`).
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
NEVER = 1 << 62  # With this sampling interval, no step is ever recorded.
# Numbers of steps before, during and after the cost of a recording. PAYING is the recorded step and the next ones,
# while the recording code is removed and the interpreter specialises its code again.
PLAIN_BEFORE, PAYING, PLAIN_AFTER = 4, 4, 8
# a function that switches a variant on, and returns a function that switches it off again
Switch = Callable[[], Callable[[], None]]


def record_when_told(governor: Governor) -> Callable[[bool], None]:
    """Return a function that sets whether the next steps are recorded.

    It changes the settings of the governor (which decides what is recorded), so that steps take the default path. The
    governor makes no decisions afterwards.
    """
    governor.look_at_step = NEVER
    governor.floor = 0

    def tell(is_recorded: bool) -> None:
        governor.every = 1 if is_recorded else NEVER

    return tell


@dataclass
class Variant:
    """One way to run the step, such as with cbtop attached. It runs once in every `every` cycles."""

    begin: Switch
    every: int = 1
    # For each block: its time divided by the time of the bare blocks (blocks of the bare step) next to it.
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
    """Run as many cycles of blocks as fit into `seconds`, and add the ratios to all variants.

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
    """Prevent garbage collection while the context is open.

    Later collections ignore objects that were made before.
    """
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
    """Return a variant. Its `ratios` are the additional cost of recording a step, as a multiple of a plain step.

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
