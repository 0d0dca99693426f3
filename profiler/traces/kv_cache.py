"""Trace MLT-05: how full the KV cache is, and whether it evicts too many positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cbtop.profiler.traces.base import mean, number
from cbtop.protocol.messages import TraceNumber

ABOUT = "the cache as the latest traced pass left it"
HIGH_EVICTION_SHARE = 0.1  # report an anomaly if a larger fraction of all steps evicts positions
# Report thrashing if a larger fraction of the steps evicts positions, from the first stored pass to the last.
THRASHING_EVICTION_SHARE = 0.5
THRASHING_HIT_RATE = 0.5


@dataclass(frozen=True, slots=True)
class KvCacheStateTrace:
    """The cache after a pass.

    `step` and `evictions` count from the beginning, including untraced passes. An eviction is an event that drops
    positions, and `evicted_positions` is how many. `hit_rate` is None without lookups, as in a decoder's own cache,
    which keeps every position that it needs.
    """

    step: int
    size_bytes: int
    valid_positions: int
    max_positions: int
    evictions: int
    evicted_positions: int
    oldest_position: int
    newest_position: int
    accessed_positions: int
    hit_rate: float | None = None

    @property
    def utilisation(self) -> float:
        return self.valid_positions / self.max_positions

    @property
    def fragmentation(self) -> float:
        """The fraction of positions that are missing between the oldest and the newest one in the cache."""
        span = self.newest_position - self.oldest_position + 1
        return 1 - self.valid_positions / span if self.valid_positions else 0.0


def has_high_eviction(latest: KvCacheStateTrace) -> bool:
    """Return whether more than HIGH_EVICTION_SHARE of all steps had an eviction."""
    return latest.evictions > HIGH_EVICTION_SHARE * latest.step


def has_thrashing(states: Sequence[KvCacheStateTrace]) -> bool:
    """Return whether more than half of the steps in `states` evicted positions, with a low or unknown hit rate."""
    if len(states) < 2:
        return False
    first, last = states[0], states[-1]
    hits = mean([state.hit_rate for state in states])
    evicting = last.evictions - first.evictions > THRASHING_EVICTION_SHARE * (last.step - first.step)
    return evicting and (hits is None or hits < THRASHING_HIT_RATE)


def anomalies(states: Sequence[KvCacheStateTrace]) -> Iterator[str]:
    """Yield the problems in the newest of `states`."""
    latest = states[-1]
    valid, span = latest.valid_positions, latest.newest_position - latest.oldest_position + 1
    if valid > latest.max_positions:
        yield f"{valid} valid positions exceed the {latest.max_positions} that the cache has"
    if valid > span:
        yield f"{valid} valid positions exceed the {span} from the oldest to the newest"
    if latest.accessed_positions > valid:
        yield f"{latest.accessed_positions} accessed positions exceed the {valid} valid ones"
    if has_high_eviction(latest):
        yield f"{latest.evictions} evictions in {latest.step} steps: more than {HIGH_EVICTION_SHARE:.0%}"
    if has_thrashing(states):
        yield f"thrashing: {latest.evictions - states[0].evictions} evictions in the latest traced steps"


def numbers(states: Sequence[KvCacheStateTrace]) -> Iterator[TraceNumber]:
    """Yield the numbers of the newest state of the cache. The hit rate is a mean over all `states`."""
    if not states:
        return
    latest = states[-1]
    yield number("", "step", latest.step)
    yield number("", "size bytes", latest.size_bytes)
    yield number("", "valid positions", latest.valid_positions)
    yield number("", "max positions", latest.max_positions)
    yield number("", "utilisation", latest.utilisation)
    yield number("", "oldest position", latest.oldest_position)
    yield number("", "accessed positions", latest.accessed_positions)
    yield number("", "fragmentation", latest.fragmentation)
    yield number("", "evictions", latest.evictions)
    yield number("", "evicted positions", latest.evicted_positions)
    yield number("", "hit rate", mean([state.hit_rate for state in states]))
