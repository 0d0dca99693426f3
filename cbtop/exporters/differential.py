"""The times of two runs as stacks, for differential flame graphs and speedscope."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbtop.exporters.speedscope import SCHEMA


@dataclass(frozen=True, slots=True)
class DiffStack:
    """A place and its own time in both runs. `names` begins with the outermost name."""

    names: tuple[str, ...]
    before_ns: int
    now_ns: int


# Speedscope does not draw differences. So besides both runs, there is a profile of added and one of saved times.
_PROFILES: dict[str, Callable[[DiffStack], int]] = {
    "before": lambda one: one.before_ns,
    "now": lambda one: one.now_ns,
    "longer than before": lambda one: max(0, one.now_ns - one.before_ns),
    "shorter than before": lambda one: max(0, one.before_ns - one.now_ns),
}


def folded(stacks: Sequence[DiffStack]) -> str:
    """Return lines `phase;layer;brick before now`. `flamegraph.pl` draws differences from such lines."""
    return "\n".join(
        f"{';'.join(name.replace(';', ',') for name in one.names)} {one.before_ns} {one.now_ns}" for one in stacks
    )


def speedscope(stacks: Sequence[DiffStack], title: str) -> str:
    """Return a file of four sampled profiles with the same frames: before, now, longer, and shorter."""
    frames: dict[str, int] = {}
    samples = [[frames.setdefault(name, len(frames)) for name in one.names] for one in stacks]
    profiles = []
    for name, weight in _PROFILES.items():
        weights = [weight(one) for one in stacks]
        profiles.append(
            {
                "type": "sampled",
                "name": name,
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        )
    shared = {"frames": [{"name": name} for name in frames]}
    return json.dumps({"$schema": SCHEMA, "exporter": "cbtop", "name": title, "shared": shared, "profiles": profiles})
