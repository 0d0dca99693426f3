"""Our decoder beside llama.cpp on the same file: decode, prefill, and how far the logits of both are from float64.

One thread each, CPU time of the process, in rounds that take turns. llama.cpp is PyPI's `xllamacpp` with its
defaults, which repack the weights it can. It reads them from its heap: run this with
GLIBC_TUNABLES=glibc.malloc.hugetlb=1, so that its heap lies on huge pages, as our weights do. The model is the
demo's: 82 MB, Q4_K and Q6_K. Distances are roots of mean squares of the last token's logits, in their standard
deviations.
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
from cbtop.compute.demo_model import DEMO

PEER = "llama.cpp"
ROUNDS, DECODED, CACHED = 11, 24, 64
PREFILLS = (128, 512)
COMPARED = 12  # prompts whose logits are compared
PROMPT_TOKENS = 24
HUGE_PAGES = "glibc.malloc.hugetlb=1"


def run() -> list[Figure]:
    try:
        library()
    except ImportError:
        print("  xllamacpp is not installed: pip install xllamacpp", file=sys.stderr)
        return []
    if HUGE_PAGES not in os.environ.get("GLIBC_TUNABLES", ""):
        print(f"  llama.cpp's heap is on small pages: run with GLIBC_TUNABLES={HUGE_PAGES}", file=sys.stderr)
    from cbtop.compute.backends import cpu_backend
    from cbtop.compute.decoder.base import Model
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.compute.decoder.int8 import model_to_run
    from cbtop.compute.decoder.reference import forward_reference
    from cbtop.profiler.profiler import BrickProfiler

    context = max(PREFILLS) + DECODED
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_model(path, replace(DEMO, context_length=context))
        llama = Llama(path, context=context)
        backend = cpu_backend(1)
        exact = model_to_run(path, is_exact=True)

        def decoder(model: Model) -> Decoder:
            return Decoder(model, backend.label, 1, BrickProfiler(enabled=False), context)

        ways = {PEER: _Peer(llama), "int8": decoder(model_to_run(path)), "exact": decoder(exact)}
        tokens = np.random.default_rng(1).integers(0, DEMO.vocabulary, context).tolist()
        figures = [*_figures(f"decode at {CACHED}", _decoded(ways, tokens))]
        for count in PREFILLS:
            figures += _figures(f"prefill of {count}", _prefilled(ways, tokens[:count]))
        figures += _distances(ways, lambda prompt: forward_reference(exact, prompt)[-1])
        llama.close()
    return figures


Logits = NDArray[np.floating[Any]]


class _Peer:
    """llama.cpp under the names of our decoder."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self.logits: Logits = np.zeros(0)

    def restart(self) -> None:
        self._llama.forget()

    def prefill(self, tokens: Sequence[int]) -> None:
        self.logits = self._llama.decode(tokens)

    def decode(self, token: int) -> None:
        self.logits = self._llama.decode([token])


def _decoded(ways: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, list[float]]:
    def decode(way: Any) -> None:
        for token in tokens[:DECODED]:
            way.decode(token)

    return _times(ways, lambda way: way.prefill(tokens[:CACHED]), decode, DECODED)


def _prefilled(ways: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, list[float]]:
    return _times(ways, lambda way: None, lambda way: way.prefill(tokens), len(tokens))


def _times(
    ways: Mapping[str, Any], begin: Callable[[Any], None], call: Callable[[Any], None], tokens: int
) -> dict[str, list[float]]:
    """Milliseconds a token, round by round; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            way.restart()
            begin(way)
            begun_ns = time.process_time_ns()
            call(way)
            if turn:
                found[name].append((time.process_time_ns() - begun_ns) / tokens / 1e6)
    return found


def _figures(what: str, times: dict[str, list[float]]) -> Iterator[Figure]:
    peer = times.pop(PEER)
    yield Figure(f"{what}, {PEER}", statistics.median(peer), "ms/token")
    for name, each in times.items():
        yield Figure(f"{what}, {name}", statistics.median(each), "ms/token", f"{PEER}'s speed", Ratio.of(peer, each))


def _distances(ways: Mapping[str, Any], expected: Callable[[list[int]], Logits]) -> Iterator[Figure]:
    """How far the logits of a prompt's last token are off, of each over so many prompts."""
    off: dict[str, list[float]] = {name: [] for name in ways}
    missed = dict.fromkeys(ways, 0)
    for seed in range(COMPARED):
        prompt = np.random.default_rng(seed).integers(0, DEMO.vocabulary, PROMPT_TOKENS).tolist()
        right = expected(prompt)
        for name, way in ways.items():
            way.restart()
            way.prefill(prompt[:-1])
            way.decode(prompt[-1])
            off[name].append(float(np.sqrt(((way.logits - right) ** 2).mean()) / right.std()))
            missed[name] += int(way.logits.argmax() != right.argmax())
    for name, each in off.items():
        ratio = None if name == PEER else Ratio.of(each, off[PEER])
        what = f"distance to float64, {name} (another first choice in {missed[name]} of {COMPARED})"
        yield Figure(what, 1e3 * statistics.median(each), "‰ of σ", "" if name == PEER else f"{PEER}'s", ratio)
