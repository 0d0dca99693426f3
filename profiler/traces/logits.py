"""Trace MLT-03: how the ranks of likely tokens rise from layer to layer, according to the logit lens."""

# The logit lens (nostalgebraist 2020) treats each layer's output as if it were the last layer's: it applies the final
# norm and the output matrix.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.traces.activations import EXPLOSION_MAGNITUDE
from cbtop.profiler.traces.base import mean, number, spread
from cbtop.protocol.messages import TraceNumber

ABOUT = "each layer's output through final norm and output matrix: logit and rank of the token that won the pass"
TRACKED_TOKENS = 5  # number of tokens to follow if the config names none
RANK_FIRST = 1


@dataclass(frozen=True, slots=True)
class TokenLogitEvolution:
    """Logit and rank of a token after each layer. Rank 1 is the most likely. Equal logits share the better rank."""

    token: int
    per_layer_logit: tuple[float, ...]
    per_layer_rank: tuple[int, ...]

    @property
    def decisive_layer(self) -> int | None:
        """The first layer after which the token always has rank 1. None if it does not at the end."""
        decisive = None
        for layer in reversed(range(len(self.per_layer_rank))):
            if self.per_layer_rank[layer] != RANK_FIRST:
                break
            decisive = layer
        return decisive


@dataclass(frozen=True, slots=True)
class LogitEvolutionTrace:
    """The ranks of the followed tokens in a pass. If the config names none, the first is the most likely one."""

    position: int
    not_finite: int  # number of final logits that are NaN or infinite
    largest: float  # largest finite magnitude of the final logits; 0 without any
    tokens: tuple[TokenLogitEvolution, ...]


def logit_evolution(
    position: int,
    final: NDArray[Any],
    layers: Iterable[NDArray[Any]],
    tracked: Sequence[int] | None = None,
) -> LogitEvolutionTrace:
    """Follow `tracked` tokens through `layers`. Default: the TRACKED_TOKENS most likely tokens of `final`.

    `final` and each of `layers` are logits (vocabulary,). `layers` is read once, item by item, so a generator may
    yield the same buffer every time.
    """
    tokens = _most_likely(final, TRACKED_TOKENS) if tracked is None else list(tracked)
    logits: list[list[float]] = []
    ranks: list[list[int]] = []
    for layer in layers:
        own = layer[tokens]
        logits.append([float(value) for value in own])
        ranks.append([RANK_FIRST + int(np.count_nonzero(layer > value)) for value in own])
    evolutions = (
        TokenLogitEvolution(token, tuple(row[place] for row in logits), tuple(row[place] for row in ranks))
        for place, token in enumerate(tokens)
    )
    finite = np.isfinite(final)
    largest = float(np.abs(final).max(initial=0.0, where=finite))
    return LogitEvolutionTrace(position, int(final.size - finite.sum()), largest, tuple(evolutions))


def anomalies(trace: LogitEvolutionTrace) -> Iterator[str]:
    """Yield a sentence if final logits cannot be ranked, and one if they are too large."""
    if trace.not_finite:
        yield f"position {trace.position}: {trace.not_finite} logits are NaN or infinite"
    if trace.largest > EXPLOSION_MAGNITUDE:
        yield (
            f"position {trace.position}: a logit of magnitude {trace.largest:.3g} exceeds {EXPLOSION_MAGNITUDE:g} "
            "(explosion)"
        )


def numbers(passes: Sequence[LogitEvolutionTrace]) -> Iterator[TraceNumber]:
    """Yield the numbers of the first followed token.

    The first numbers say from which layer on this token was always the most likely one. One row per layer follows,
    over all passes.
    """
    winners = [trace.tokens[0] for trace in passes if trace.tokens]
    decided = [winner.decisive_layer for winner in winners]
    yield number("", "mean decisive layer", mean(decided))
    yield number("", "undecided passes", decided.count(None))
    if winners:
        latest = winners[-1]
        yield number("", "latest token", latest.token)
        yield number("", "its decisive layer", latest.decisive_layer)
    depth = min((len(winner.per_layer_rank) for winner in winners), default=0)
    decided_in = Counter(decided)
    for layer in spread(range(depth)):
        row = f"layer {layer}"
        ranks = [winner.per_layer_rank[layer] for winner in winners]
        yield number(row, "mean logit", mean([winner.per_layer_logit[layer] for winner in winners]))
        yield number(row, "median rank", float(np.median(ranks)))
        yield number(row, "worst rank", max(ranks))
        yield number(row, "first", sum(rank == RANK_FIRST for rank in ranks))
        yield number(row, "decided here", decided_in[layer])


def _most_likely(logits: NDArray[Any], count: int) -> list[int]:
    """Return the `count` tokens with the largest logits, largest first. If logits are equal, the smaller id comes
    first.
    """
    unsorted = np.argpartition(-logits, min(count, logits.size) - 1)[:count]
    return [int(token) for token in sorted(unsorted, key=lambda token: (-logits[token], token))]
