"""Measure the cost of timing library calls, and compare the bricks with other clocks. Needs SciPy for its functions.

Cost: ratios of the thread's CPU time with timed calls to its CPU time without, with 95 % intervals. Short blocks take
turns (benchmarks/beside_bare.py). The control is one more bare block.

Bricks: each job runs once. Its calls are timed by cbtop, by `time.perf_counter_ns` around each call, and by cProfile.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import cbtop
from benchmarks.base import Figure, Ratio
from benchmarks.beside_bare import Variant, median_of, run_beside_bare
from cbtop.profiler.profiler import BrickProfiler

SECONDS = 6
SETTLE_CALLS, TIMED_CALLS = 60, 60
JOB_CALLS = 40
BARE = "bare call"

Call = Callable[[], Any]


def run() -> list[Figure]:
    print("  in brackets: 95 % intervals of ratios of CPU time", file=sys.stderr)
    costs = [figure for name, call in _costs().items() for figure in _cost(name, call)]
    return costs + [figure for name, job in _jobs().items() for figure in _agreement(name, *job)]


def _costs() -> dict[str, Call]:
    """Return calls of about 100 us, and of a few us."""
    random = np.random.default_rng(1)
    signal, matrix, values = random.normal(size=8192), random.normal(size=(160, 160)), random.normal(size=20_000)
    return {
        "fft of 8192": lambda: np.fft.fft(signal),
        "160 x 160 @ 160 x 160": lambda: matrix @ matrix,
        "exp of 20,000": lambda: np.exp(values),
        "fft of 64": lambda: np.fft.fft(signal[:64]),
        "sum of 64": lambda: np.sum(signal[:64]),
        "sum of two arrays of 64": lambda: signal[:64] + signal[:64],
    }


def _cost(name: str, call: Call) -> list[Figure]:
    profiler = BrickProfiler()

    def timed() -> Callable[[], None]:
        return cbtop.instrument(np, profiler=profiler).stop

    def bare() -> Callable[[], None]:
        timed()()
        return lambda: None

    variants = {"bare call again": Variant(bare), "timed": Variant(timed)}
    bare_ns = run_beside_bare(
        call,
        bare,
        list(variants.values()),
        seconds=SECONDS,
        settle=SETTLE_CALLS,
        timed=TIMED_CALLS,
    )
    profiler.close()
    ratios = {what: median_of(variant) for what, variant in variants.items()}
    return [Figure(f"{BARE}, {name}", bare_ns / 1000, "µs/call")] + [
        Figure(f"{what}, {name}", bare_ns / 1000 * ratio.median, "µs/call", BARE, ratio)
        for what, ratio in ratios.items()
    ]


def _jobs() -> dict[str, tuple[str, Call, str]]:
    """Return a job for each domain: the name of its brick, a call, and the name of the function in cProfile."""
    random = np.random.default_rng(1)
    signal, matrix = random.normal(size=1 << 16), random.normal(size=(300, 300))
    positive = matrix @ matrix.T + 300 * np.eye(300)
    jobs: dict[str, tuple[str, Call, str]] = {
        "FFT": ("numpy.fft.fft", lambda: np.fft.fft(signal), "fft"),
        "Cholesky": ("numpy.linalg.cholesky", lambda: np.linalg.cholesky(positive), "cholesky"),
        "einsum": ("numpy.einsum", lambda: np.einsum("ij,jk->ik", matrix, matrix), "einsum"),
    }
    try:
        from scipy import signal as filters
        from scipy import sparse
    except ImportError:
        print("  SciPy is not installed: SpMV and convolution are left out", file=sys.stderr)
        return jobs
    graph = sparse.random_array((20_000, 20_000), density=1e-3, format="csr", rng=random)
    return jobs | {
        "SpMV": ("scipy.sparse SpMV", lambda: graph @ signal[:20_000], "_matmul_vector"),
        "convolution": (
            "scipy.signal.convolve2d",
            lambda: filters.convolve2d(matrix, matrix[:5, :5]),
            "convolve2d",
        ),
    }


def _agreement(name: str, brick: str, call: Call, function: str) -> list[Figure]:
    by_hand: list[float] = []
    profile: Any = cProfile.Profile()
    with cbtop.instrument("numpy", "scipy", profiler=BrickProfiler()) as run:
        call()  # the first call opens the ring and looks for the roofs
        run.profiler.reset()
        profile.enable()
        for _ in range(JOB_CALLS):
            begun_ns = time.perf_counter_ns()
            call()
            by_hand.append(time.perf_counter_ns() - begun_ns)
        profile.disable()
    stats = run.profiler.stats_for(brick)
    run.profiler.close()
    if stats is None or stats.calls.count != JOB_CALLS:
        raise RuntimeError(f"{brick}: {JOB_CALLS} calls were made, {stats and stats.calls.count} recorded")
    table: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    by_profile_ns = 1e9 * max(row[3] for (_, _, called), row in table.items() if called == function)
    found_us = stats.calls.total_ns / JOB_CALLS / 1000
    return [
        Figure(f"{name}: {brick}", found_us, "µs/call", peer, Ratio(ratio, ratio, ratio))
        for peer, ratio in (
            ("perf_counter", stats.calls.total_ns / sum(by_hand)),
            ("cProfile", stats.calls.total_ns / by_profile_ns),
        )
    ]
