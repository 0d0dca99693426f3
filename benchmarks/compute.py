"""Compare our decoder with llama.cpp on the same file: decode, prefill, and how far the logits of both are from
float64.

Each decoder uses one thread. The CPU time of the process is measured, and the decoders take turns in rounds.

llama.cpp is PyPI's `xllamacpp` with its defaults, which repack the weights if possible. It reads them from its heap.
Run this with GLIBC_TUNABLES=glibc.malloc.hugetlb=1, so that its heap is on huge pages, as our weights are.

The model is the demo's: 82 MB, Q4_K and Q6_K. Distances are root mean squares of the logits' differences, in units of
the logits' standard deviation. They are taken over all tokens of some prompts, decoded one by one. The last figure is
how often the most likely token differs from the one in float64.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.base import Figure, Ratio
from benchmarks.llama_peer import Llama, library, write_model
from cbtop.compute.demo_model import DEMO, ModelShape

PEER = "llama.cpp"
QWEN3 = ModelShape("qwen3", 1024, 16, 8, 3072, 28, 151_936, 0, key_length=128)
MODELS = {"82 MB": (DEMO, 11), "0.6 B": (QWEN3, 5)}  # shape of the model, and number of rounds of the measurement
DECODED, CACHED = 24, 64
PREFILLS = (128, 512)
CONTEXT = max(PREFILLS) + DECODED
COMPARED, PROMPT_TOKENS = 48, 24  # number of prompts, and of tokens per prompt, that the comparison of logits uses
HUGE_PAGES = "glibc.malloc.hugetlb=1"


def run() -> list[Figure]:
    try:
        library()
    except ImportError:
        print("  xllamacpp is not installed: pip install xllamacpp", file=sys.stderr)
        return []
    if HUGE_PAGES not in os.environ.get("GLIBC_TUNABLES", ""):
        print(f"  llama.cpp's heap is on small pages: run with GLIBC_TUNABLES={HUGE_PAGES}", file=sys.stderr)
    figures: list[Figure] = []
    for name, (shape, rounds) in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_model(path, replace(shape, context_length=CONTEXT))
            figures += _of_model(name, path, shape, rounds)
    return figures


def _of_model(name: str, path: Path, shape: ModelShape, rounds: int) -> Iterator[Figure]:
    from cbtop.compute.backends import available_threads, cpu_backend
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.compute.decoder.int8 import model_to_run
    from cbtop.compute.decoder.reference import forward_reference
    from cbtop.profiler.profiler import BrickProfiler

    models = {"int8": model_to_run(path)}
    if shape is DEMO:
        models["exact"] = model_to_run(path, is_exact=True)

    def ways_of(threads: int) -> dict[str, Any]:
        backend = cpu_backend(threads)
        ways: dict[str, Any] = {PEER: _Peer(Llama(path, threads=threads, context=CONTEXT))}
        for each, model in models.items():
            ways[each] = Decoder(model, backend.label, threads, BrickProfiler(enabled=False), CONTEXT)
        return ways

    tokens = np.random.default_rng(1).integers(0, shape.vocabulary, CONTEXT).tolist()
    ways = ways_of(1)
    yield from _figures(f"{name}: decode at {CACHED}", _decoded(ways, tokens, rounds, time.process_time_ns))
    for count in PREFILLS:
        yield from _figures(f"{name}: prefill of {count}", _prefilled(ways, tokens[:count], rounds))
    if shape is DEMO:
        yield from _distances(ways, lambda prompt: forward_reference(models["exact"], prompt))
    ways[PEER].close()
    if available_threads() > 1:
        ways = ways_of(2)
        times = _decoded(ways, tokens, rounds, time.perf_counter_ns)
        yield from _figures(f"{name}: decode at {CACHED}, two threads", times)
        ways[PEER].close()


Logits = NDArray[np.floating[Any]]


class _Peer:
    """A decoder of llama.cpp with the interface of our decoder."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self.logits: Logits = np.zeros(0)

    def close(self) -> None:
        self._llama.close()

    def restart(self) -> None:
        self._llama.forget()

    def prefill(self, tokens: Sequence[int]) -> None:
        self.logits = self._llama.decode(tokens)

    def decode(self, token: int) -> None:
        self.logits = self._llama.decode([token])


def _decoded(
    ways: Mapping[str, Any], tokens: Sequence[int], rounds: int, clock: Callable[[], int]
) -> dict[str, list[float]]:
    def decode(way: Any) -> None:
        for token in tokens[:DECODED]:
            way.decode(token)

    return _times(ways, lambda way: way.prefill(tokens[:CACHED]), decode, DECODED, rounds, clock)


def _prefilled(ways: Mapping[str, Any], tokens: Sequence[int], rounds: int) -> dict[str, list[float]]:
    def prefill(way: Any) -> None:
        way.prefill(tokens)

    return _times(ways, lambda way: None, prefill, len(tokens), rounds, time.process_time_ns)


def _times(
    ways: Mapping[str, Any],
    begin: Callable[[Any], None],
    call: Callable[[Any], None],
    tokens: int,
    rounds: int,
    clock: Callable[[], int],
) -> dict[str, list[float]]:
    """Return the milliseconds per token of each decoder, for every round except the first."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            way.restart()
            begin(way)
            begun_ns = clock()
            call(way)
            if turn:
                found[name].append((clock() - begun_ns) / tokens / 1e6)
    return found


def _figures(what: str, times: dict[str, list[float]]) -> Iterator[Figure]:
    peer = times.pop(PEER)
    yield Figure(f"{what}, {PEER}", statistics.median(peer), "ms/token")
    for name, each in times.items():
        yield Figure(f"{what}, {name}", statistics.median(each), "ms/token", f"{PEER}'s speed", Ratio.of(peer, each))


def _distances(ways: Mapping[str, Any], expected: Callable[[list[int]], Logits]) -> Iterator[Figure]:
    """For each decoder, yield how far the logits of each token are from the logits in float64, over
    COMPARED prompts.
    """
    off: dict[str, list[float]] = {name: [] for name in ways}
    missed = dict.fromkeys(ways, 0)
    for seed in range(COMPARED):
        prompt = np.random.default_rng(seed).integers(0, DEMO.vocabulary, PROMPT_TOKENS).tolist()
        of_prompt = expected(prompt)
        for name, way in ways.items():
            way.restart()
            for token, right in zip(prompt, of_prompt, strict=True):
                way.decode(token)
                off[name].append(float(np.sqrt(((way.logits - right) ** 2).mean()) / right.std()))
                missed[name] += int(way.logits.argmax() != right.argmax())
    for name, each in off.items():
        ratio = None if name == PEER else Ratio.of(each, off[PEER])
        what = f"distance to float64, {name} (another first choice in {missed[name]} of {len(each):,})"
        yield Figure(what, 1e3 * statistics.median(each), "‰ of σ", "" if name == PEER else f"{PEER}'s", ratio)
