"""The user's settings of how a model runs; light to import."""

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
class TokenSampling:
    """The choice of the next token: `seed` draws from the `top_k` likeliest tokens (0: all), limited to those that
    together have `top_p` of their probability, at a `temperature`. A temperature of 0 is the greedy choice. Below
    1e-6 a quotient by it could be infinite, and the choice would be greedy anyway.

    Raises ComputeError for other values, because a draw with them would still return a token.
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


GREEDY = TokenSampling()


@dataclass(frozen=True, slots=True)
class Crossovers:
    """The amounts of work at which the faster way changes. Each value belongs to the second way.

    `product_bytes`: bytes of weights times tokens; below it a product runs on one thread, from it on on several.
    `attention_products`: products of a query's number and a key's; below it attention runs on one thread, from it on
    on several.
    `bf16_tokens`: tokens; below it products run in int8, from it on in bfloat16 if the processor has AMX.
    `exact_bytes`: bytes of a matrix; below it a matrix is interleaved, for int8, from it on it stays as in the file,
    for products of floats.
    `measured`: the names of those that were measured on this machine; the rest are static.

    Raises ComputeError for anything but a whole number from 1.
    """

    product_bytes: int = 96 << 10  # 10-20 us of one thread's work; waking a second one takes 2-40 us
    attention_products: int = 1 << 17  # some 20 us of one thread's work
    bf16_tokens: int = 12  # 1.35x of int8's speed at 12; 0.92x at 8, which are twice int8's four
    exact_bytes: int = 1 << 40  # no matrix is so large; equals `protocol.crossovers.NEVER`
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
    """Return the crossovers of this process. Kernels ask before every call, in Python, so that no value compiles
    anew."""
    return _in_effect


def use_crossovers(wanted: Crossovers) -> None:
    """Make `wanted` the crossovers of this process. For the code that starts a decoder."""
    global _in_effect
    _in_effect = wanted


@contextmanager
def with_crossovers(wanted: Crossovers) -> Iterator[None]:
    """Use `wanted` for a while: to run, or to check, both sides of one."""
    before = crossovers()
    use_crossovers(wanted)
    try:
        yield
    finally:
        use_crossovers(before)


BACKENDS = ("cpu", "cuda")
Split = Literal["layers", "heads"]  # what ranks divide
SPLITS: tuple[Split, ...] = get_args(Split)
GUARD_REACTIONS = ("stop", "log", "fallback")  # to a fault that the guard finds


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The number of this process among `count` that run a model together, each on the GPU of its number. `of_first`
    returns in every rank what the first one makes, once all ask for it. `split`: the part of the model that they
    divide."""

    number: int
    count: int
    of_first: Callable[[Callable[[], bytes]], bytes]
    split: Split = "layers"


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """Settings of a decoder. `cache_type` and `check_contracts`: as in WorkloadOptions."""

    cache_type: str = "f16"
    sampling: TokenSampling = GREEDY
    check_contracts: bool = False


DEFAULT_SETTINGS = DecoderSettings()


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What to run. None means: the demo model; until stopped; all processors but one; the model's context, up to
    2048.

    `cache_type`: type of the KV cache, f16 or f32.
    `is_exact`: products take unrounded activations, not int8. `trace` holds names of `cbtop.profiler.traces.TRACES`:
    what to trace in a sample of the decode steps.
    `guard`: the reaction to a brick's wrong output (GUARD_REACTIONS); None: do not check.
    `check_contracts`: run each brick between the conditions of its kernels' contracts.
    `prompt`: the text to continue, once, to its end; None: the same random tokens, again and again.
    `backend`: one of BACKENDS.
    `rank`: this process's part if several GPUs run the model; None: it runs the model alone.
    """

    model: Path | None = None
    steps: int | None = None
    threads: int | None = None
    context: int | None = None
    cache_type: str = "f16"
    is_exact: bool = False
    trace: tuple[str, ...] = ()
    sampling: TokenSampling = GREEDY
    check_contracts: bool = False
    guard: str | None = "log"
    prompt: str | None = None
    backend: str = "cpu"
    rank: RankOptions | None = None
