"""Find how much work makes threads, bfloat16 or plain weights faster on this machine.

Each crossover compares two methods, such as one thread and several. Both methods are timed with the decoder's own
kernels.
"""

# Rules
# - Times are wall-clock times, because the question is whether several threads end sooner.
# - Each round times both methods at all sizes in turn, so that a disturbance of the machine affects all of them.
# - Before each call there is a pause as long as between two bricks of a decoder, because idle threads may fall
#   asleep.
# - At the crossover and at all larger measured sizes, the second method is faster by more than the spread of the
#   times. Without such a size, the static value stays in use.
# - The static value for the layout of weights is NEVER. It counts as measured if the second method is slower by more
#   than the spread.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES, TIER
from cbtop.compute.kernels import attention, attention_bf16, linear, linear_int8
from cbtop.compute.kernels.attention_loops import scratch_for
from cbtop.compute.kernels.kv_caches import empty_caches
from cbtop.compute.kernels.linear_bf16 import TileScratch
from cbtop.compute.kernels.quantize_rows import empty_codes
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import ROWS, InterleavedMatrix
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.settings import CROSSOVERS, STATIC_CROSSOVERS, Crossovers, with_crossovers
from cbtop.protocol.crossovers import NEVER, Crossover
from cbtop.protocol.vocabulary import Provenance

ROUNDS = 51
PAUSE_NS = 20_000  # time that Python and small kernels take between two products of a decoder
# number of columns of the measured matrices, as in a small model; products of larger models take more work
COLUMNS = 768
# Numbers of rows of the measured matrices. The matrices take 7 KB to 3.5 MB in Q4_K.
PRODUCT_ROWS = tuple(ROWS << step for step in range(10))
HEADS, KV_HEADS, HEAD_DIM = 14, 2, 64
# Numbers of positions in the measured attention; attention then takes 14 K to 3.7 M multiplications.
POSITIONS = tuple(16 << step for step in range(9))
TOKENS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
TOKEN_ROWS = 768
# Numbers of rows of the measured matrices. The matrices take 7 KB to 28 MB in Q4_K. Each size fits in a different
# level of cache, except the largest, which fits in no cache of a core.
LAYOUT_ROWS = tuple(ROWS << step for step in (0, 3, 6, 9, 12))
SEED = 11

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Rung:
    """One amount of work that is measured.

    `before` calls the method for work below the crossover, and `after` calls the method for work above the crossover.
    """

    size: int
    before: Run
    after: Run


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """The durations of both methods' calls for one amount of work, in each round."""

    size: int
    before_ns: list[int]
    after_ns: list[int]

    @property
    def wins(self) -> bool:
        """Whether the second method is faster by more than the spread.

        Its upper quartile is then below the first method's lower quartile.
        """
        return statistics.quantiles(self.after_ns)[2] < statistics.quantiles(self.before_ns)[0]

    @property
    def loses(self) -> bool:
        """Whether the second method is slower by more than the spread: its lower quartile is above the first method's
        upper quartile.
        """
        return statistics.quantiles(self.before_ns)[2] < statistics.quantiles(self.after_ns)[0]

    @property
    def spread_percent(self) -> float:
        """The larger of the two methods' interquartile ranges, in percent of the median."""
        quartiles = [statistics.quantiles(each) for each in (self.before_ns, self.after_ns)]
        return max((100 * (high - low) / middle if middle else 0.0) for low, middle, high in quartiles)


def measure_crossovers(threads: int, progress: Callable[[str], None] = lambda what: None) -> tuple[Crossover, ...]:
    """Measure each field of `Crossovers`, comparing one thread with `threads` threads.

    Takes seconds. The first call also compiles kernels that are not cached.
    """
    ladders: dict[str, Callable[[], Sequence[Rung]] | str] = {
        "product_bytes": partial(_products, threads) if threads > 1 else "one thread",
        "attention_products": partial(_attentions, threads) if threads > 1 else "one thread",
        "bf16_tokens": _tokens if HAS_TILES else "no AMX",
        "exact_bytes": _layouts,
    }
    found = []
    for name in CROSSOVERS:
        ladder = ladders[name]
        if isinstance(ladder, str):
            found.append(Crossover(name, getattr(STATIC_CROSSOVERS, name), Provenance.STATIC, ladder))
            continue
        progress(name)
        # with every crossover set to 1, the second method is used for work of every size
        with with_crossovers(Crossovers(1, 1, 1)):
            found.append(crossover(name, timed(ladder())))
    return tuple(found)


def timed(
    rungs: Sequence[Rung], clock_ns: Callable[[], int] = time.perf_counter_ns, pause_ns: int = PAUSE_NS
) -> list[PairedTimes]:
    """Time both methods at every size, in ROUNDS rounds. Returns the times for each size."""
    found = [PairedTimes(rung.size, [], []) for rung in rungs]
    for rung in rungs:
        # Call both methods once before the rounds, because the first call compiles a kernel or loads it from the
        # cache.
        rung.before()
        rung.after()
    for _ in range(ROUNDS):
        for rung, times in zip(rungs, found, strict=True):
            for run, each_ns in ((rung.before, times.before_ns), (rung.after, times.after_ns)):
                _busy(clock_ns, pause_ns)
                begun_ns = clock_ns()
                run()
                each_ns.append(clock_ns() - begun_ns)
    return found


def crossover(name: str, ladder: Sequence[PairedTimes], note: str = "") -> Crossover:
    """Return the crossover for the times in `ladder`, which is sorted by size.

    A measured crossover has the note `note`. If the times show no crossover, the result has the static value, and its
    note says why. A static value of NEVER counts as measured if the second method is slower.
    """
    at = len(ladder)
    while at and ladder[at - 1].wins:
        at -= 1
    times = ladder[min(at, len(ladder) - 1)]
    before_us, after_us = (statistics.median(each) / 1e3 for each in (times.before_ns, times.after_ns))
    figures = before_us, after_us, times.spread_percent
    if at < len(ladder):
        return Crossover(name, times.size, Provenance.MEASURED, note, *figures)
    static, said = getattr(STATIC_CROSSOVERS, name, NEVER), "slower" if times.loses else "unsure"
    is_never = times.loses and static == NEVER and name in CROSSOVERS
    provenance = Provenance.MEASURED if is_never else Provenance.STATIC
    return Crossover(name, static, provenance, f"{said} at {times.size:,}", *figures)


def _busy(clock_ns: Callable[[], int], pause_ns: int) -> None:
    until_ns = clock_ns() + pause_ns
    while clock_ns() < until_ns:
        pass


def _products(threads: int) -> list[Rung]:
    """Return products of one token with Q4_K weights of different sizes.

    These are the most common products of a decoder. They run in int8 if this processor multiplies in int8.
    """
    x, no_bias = _floats(1, COLUMNS), np.zeros(0, np.float32)
    if TIER == "generic":
        run: Callable[..., None] = linear.linear
        weights = _weights(PRODUCT_ROWS[-1]).data
        scratches: list[Any] = [np.zeros((count, COLUMNS), np.float32) for count in (1, threads)]
    else:
        run = linear_int8.linear_int8
        weights = InterleavedMatrix.of(_weights(PRODUCT_ROWS[-1])).data
        codes, factors = empty_codes(1, COLUMNS)
        scratches = [linear_int8.Int8Scratch(codes, factors, count, None) for count in (1, threads)]
    found = []
    for rows in PRODUCT_ROWS:
        out = np.zeros((1, rows), np.float32)
        ways = [partial(run, Q4_K.code, weights[:rows], no_bias, x, out, scratch) for scratch in scratches]
        found.append(Rung(weights[:rows].size, *ways))
    return found


def _attentions(threads: int) -> list[Rung]:
    """Return attention calls of one token over float16 caches. Each call has a different number of positions."""
    q, out = _floats(1, HEADS * HEAD_DIM), np.zeros((1, HEADS * HEAD_DIM), np.float32)
    caches = empty_caches(KV_HEADS, POSITIONS[-1], HEAD_DIM, np.uint16)
    for cache in caches:
        cache[:] = _floats(*cache.shape).astype(np.float16).view(np.uint16)
    scratches = [scratch_for(count, HEAD_DIM) for count in (1, threads)]
    attend = attention_bf16.attention_bf16 if BF16_PAYS else attention.attention
    found = []
    for positions in POSITIONS:
        start, scale = positions - 1, HEAD_DIM**-0.5
        ways = [partial(attend, q, *caches, start, scale, 0, 0.0, out, each) for each in scratches]
        found.append(Rung(q.size * positions, *ways))
    return found


def _tokens() -> list[Rung]:
    """Return products of different numbers of tokens on one thread.

    The first method is int8, the second is bfloat16 in tiles.
    """
    weights, no_bias = InterleavedMatrix.of(_weights(TOKEN_ROWS)).data, np.zeros(0, np.float32)
    found = []
    for tokens in TOKENS:
        x, out = _floats(tokens, COLUMNS), np.zeros((tokens, TOKEN_ROWS), np.float32)
        codes = empty_codes(tokens, COLUMNS)
        scratches = [
            linear_int8.Int8Scratch(*codes, 1, tiles) for tiles in (None, TileScratch.of(tokens, COLUMNS, 1))
        ]
        ways = [partial(linear_int8.linear_int8, Q4_K.code, weights, no_bias, x, out, each) for each in scratches]
        found.append(Rung(tokens, *ways))
    return found


def _layouts() -> list[Rung]:
    """Return products of one token on one thread. The first method multiplies interleaved weights in int8, the second
    plain weights in floats."""
    plain, x, no_bias = _weights(LAYOUT_ROWS[-1]), _floats(1, COLUMNS), np.zeros(0, np.float32)
    interleaved = InterleavedMatrix.of(_weights(LAYOUT_ROWS[-1])).data
    int8, floats = linear_int8.Int8Scratch.of(1, COLUMNS, 1), np.zeros((1, COLUMNS), np.float32)
    found = []
    for rows in LAYOUT_ROWS:
        out = np.zeros((1, rows), np.float32)
        ways = (
            partial(linear_int8.linear_int8, Q4_K.code, interleaved[:rows], no_bias, x, out, int8),
            partial(linear.linear, Q4_K.code, plain.data[:rows], no_bias, x, out, floats),
        )
        found.append(Rung(plain.data[:rows].size, *ways))
    return found


def _weights(rows: int) -> QuantizedMatrix:
    """Return a matrix that repeats ROWS random rows. Computing the scales of different rows would take seconds."""
    few = QuantizedMatrix.of(Q4_K, _floats(ROWS, COLUMNS))
    data = np.tile(few.data, (rows // ROWS, 1))
    # Numba compiles different code for writable arrays. A decoder's weights are read-only, so these weights must also
    # be read-only.
    data.flags.writeable = False
    return QuantizedMatrix(Q4_K, data, COLUMNS)


def _floats(*shape: int) -> Any:
    return np.random.default_rng(SEED).standard_normal(shape, dtype=np.float32)
