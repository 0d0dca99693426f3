"""The Python functions that ran in the time that no brick covers, with the intervals of their shares."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.sample_messages import CpuSamples, SampledFunction, SampledPlace
from cbtop.protocol.vocabulary import NodeKind

MOST_FUNCTIONS = 5
# With fewer samples, the 95 % interval of a share is wider than 40 points, so no share is shown.
LEAST_SAMPLES = 20
MOSTLY_PERCENT = 30.0  # A sentence names a function with at least this share.
Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class FunctionShare:
    """A Python function, and its share of the samples with a 95 % interval (Wilson).

    The shares are None if there are fewer than LEAST_SAMPLES samples. `asleep_percent` is the share of the function's
    own samples that found the thread waiting: for a lock, a file, a socket or a time.
    """

    name: str
    file: str
    line: int
    samples: int
    percent: float | None
    low_percent: float | None
    high_percent: float | None
    asleep_percent: float
    called_from: str


@dataclass(frozen=True, slots=True)
class SampledTimeView:
    """The functions that were sampled in one sort of untimed time: between steps, not instrumented, or a part of a
    training step.

    Samples were taken during `over_s` seconds. `unread_percent` is the share of samples without a
    known function, and `own_percent` the share of cbtop's own functions.
    """

    place: str
    samples: int
    over_s: float
    unread_percent: float
    own_percent: float
    functions: tuple[FunctionShare, ...]

    @property
    def is_enough(self) -> bool:
        """Whether there are enough samples to show shares."""
        return self.samples >= LEAST_SAMPLES


def sampled_time(found: CpuSamples | None, nodes: NodeTable, phase: str | None) -> tuple[SampledTimeView, ...]:
    """Return the sampled functions between steps, in training, and in the steps of `phase`, most samples first."""
    if found is None:
        return ()
    steps = [node for node in nodes.children[None] if node.kind is NodeKind.STEP and display_name(node) == phase]
    keys = {("", ""), *((step.name, step.label) for step in steps)}
    over_s = (found.until_ns - found.since_ns) / 1e9
    places = [place for place in found.places if (place.phase, place.model) in keys and place.samples]
    return tuple(_view(place, over_s) for place in places)


def _view(place: SampledPlace, over_s: float) -> SampledTimeView:
    functions = tuple(_shares(place.functions[:MOST_FUNCTIONS], place.samples))
    unread, own = 100 * place.unread / place.samples, 100 * place.own / place.samples
    return SampledTimeView(place.name, place.samples, over_s, unread, own, functions)


def _shares(functions: Iterable[SampledFunction], samples: int) -> Iterable[FunctionShare]:
    for one in functions:
        percent = low = high = None
        if samples >= LEAST_SAMPLES:
            percent = 100 * one.samples / samples
            low, high = interval_percent(one.samples, samples)
        asleep = 100 * one.asleep / one.samples if one.samples else 0.0
        yield FunctionShare(one.name, one.file, one.line, one.samples, percent, low, high, asleep, one.called_from)


def mostly(sampled: Iterable[SampledTimeView], place: str) -> str:
    """Return the most frequent function as the end of a sentence: `; mostly in Tokenizer.encode tok/fast.py:88 (60 %
    of 100 samples)`. Return "" if it is not known or has a small share.
    """
    for view in sampled:
        first = view.functions[0] if view.functions else None
        if view.place == place and first is not None and (first.percent or 0.0) >= MOSTLY_PERCENT:
            found = f"{first.name} {first.file}:{first.line} ({first.percent:.0f} % of {view.samples:,} samples)"
            return f"; mostly in {found}"
    return ""


def interval_percent(count: int, samples: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, in percent. It is within 0 and 100 for every count."""
    share, square = count / samples, Z_95 * Z_95
    whole = 1 + square / samples
    middle = (share + square / (2 * samples)) / whole
    reach = Z_95 * math.sqrt(share * (1 - share) / samples + square / (4 * samples * samples)) / whole
    return max(0.0, 100 * (middle - reach)), min(100.0, 100 * (middle + reach))
