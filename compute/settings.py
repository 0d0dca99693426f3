"""What a user may set of how a model runs; light to import."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, SupportsIndex, get_args

from cbtop.compute.errors import ComputeError

LOWEST_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: of the `top_k` likeliest (0: all) those that together have `top_p` of their
    probability, at a `temperature`, drawn by `seed`. A temperature of 0 is the greedy choice; of one below 1e-6 a
    quotient with it could be infinite, and it chose nothing else.

    ComputeError for what is none of these: drawn with it, some token comes out all the same.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = {
            "temperature": (
                self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < math.inf,
                f"0, or a finite number from {LOWEST_TEMPERATURE:g},",
            ),
            "top_k": (_is_whole(self.top_k, 1 << 63), "a whole number from 0, below 2^63"),
            "top_p": (0 < self.top_p <= 1, "above 0, to 1"),
            "seed": (_is_whole(self.seed, 1 << 64), "a whole number from 0, below 2^64"),
        }
        for name, (is_good, what) in wanted.items():
            if not is_good:
                raise ComputeError(f"{name} is {getattr(self, name)!r:.40}; {what} is wanted")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _is_whole(value: object, end: int) -> bool:
    return isinstance(value, SupportsIndex) and 0 <= value.__index__() < end


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Crossovers:
    """From how much work on it is done the other way.

    `product_bytes`: bytes of weights times tokens of a product, from which on it is spread over threads.
    `attention_products`: products of a number of a query and one of a key, from which on attention is.
    `bf16_tokens`: tokens from which on products are of bfloat16, where the processor has AMX; fewer are of int8.
    `exact_bytes`: bytes of a matrix from which on it is read as it lies in the file, by products of floats; a smaller
    one lies interleaved, for int8.
    `measured` names those that were measured on this machine; the others are static.

    ComputeError for what is no whole number from 1.
    """

    product_bytes: int = 96 << 10  # 10-20 us of one thread's work; to wake a second one takes 2-40 us
    attention_products: int = 1 << 17  # some 20 us of one thread's work
    bf16_tokens: int = 12  # 1.35x of int8's speed there; 0.92x with 8, which are twice its four
    exact_bytes: int = 1 << 40  # no matrix is so large; as `protocol.crossovers.NEVER`
    measured: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in CROSSOVERS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ComputeError(f"{name} is {value!r:.40}; a whole number from 1 is wanted")


CROSSOVERS = tuple(field.name for field in fields(Crossovers) if field.name != "measured")
STATIC_CROSSOVERS = Crossovers()
_in_effect = STATIC_CROSSOVERS


def crossovers() -> Crossovers:
    """Those of this process: kernels ask before every call, in Python, so that others compile nothing anew."""
    return _in_effect


def use_crossovers(wanted: Crossovers) -> None:
    """From now on `wanted` are those of this process: for whoever starts a decoder."""
    global _in_effect
    _in_effect = wanted


@contextmanager
def with_crossovers(wanted: Crossovers) -> Iterator[None]:
    """`wanted` for a while: to run, or to check, both sides of one."""
    before = crossovers()
    use_crossovers(wanted)
    try:
        yield
    finally:
        use_crossovers(before)


BACKENDS = ("cpu", "cuda")
Split = Literal["layers", "heads"]  # what several ranks share out
SPLITS: tuple[Split, ...] = get_args(Split)
GUARD_REACTIONS = ("stop", "log", "fallback")  # to what the guard meets


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Which of `count` processes this one is, each on the GPU of its number, that run a model together. `of_first`:
    in every rank what is made in the first one, once all ask for it. `split`: what of the model they share out."""

    number: int
    count: int
    of_first: Callable[[Callable[[], bytes]], bytes]
    split: Split = "layers"


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What to run. None: the demo model; until stopped; all processors but one; the model's context, up to 2048.

    `cache_type`: of the KV cache, f16 or f32. `is_exact`: products take activations as they are, not rounded to int8.
    `trace` holds names of `cbtop.profiler.traces.TRACES`: what to trace in a sample of the decode steps.
    `guard`: what to do about what a brick computes wrong (GUARD_REACTIONS); None: not to look.
    `check_contracts`: run each brick between the conditions of its kernels' contracts.
    `prompt`: the text to go on from, once, to its end; None: the same random tokens, again and again.
    `backend`: one of BACKENDS. `rank`: of several GPUs; None: it runs the model alone.
    """

    model: Path | None = None
    steps: int | None = None
    threads: int | None = None
    context: int | None = None
    cache_type: str = "f16"
    is_exact: bool = False
    trace: tuple[str, ...] = ()
    sampling: Sampling = GREEDY
    check_contracts: bool = False
    guard: str | None = "log"
    prompt: str | None = None
    backend: str = "cpu"
    rank: RankOptions | None = None
