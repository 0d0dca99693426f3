"""Write the times of two runs as stacks, for differential flame graphs and speedscope."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbtop.exporters.speedscope import SCHEMA


@dataclass(frozen=True, slots=True)
class DiffStack:
    """A call path with its self time in the old and the new run.

    `names` is the path, and the outermost name comes first.
    """

    names: tuple[str, ...]
    before_ns: int
    now_ns: int


# Speedscope cannot draw differences. So the file has four profiles: each of the two runs, the added time, and the
# saved time.
_PROFILES: dict[str, Callable[[DiffStack], int]] = {
    "before": lambda one: one.before_ns,
    "now": lambda one: one.now_ns,
    "longer than before": lambda one: max(0, one.now_ns - one.before_ns),
    "shorter than before": lambda one: max(0, one.before_ns - one.now_ns),
}


def folded(stacks: Sequence[DiffStack]) -> str:
    """Return lines of the form `phase;layer;brick before now`.

    `flamegraph.pl` draws a differential flame graph from them.
    """
    return "\n".join(
        f"{';'.join(name.replace(';', ',') for name in one.names)} {one.before_ns} {one.now_ns}" for one in stacks
    )


def speedscope(stacks: Sequence[DiffStack], title: str) -> str:
    """Return a speedscope file with four sampled profiles: before, now, longer, and shorter.

    The profiles share their frames (names).
    """
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
