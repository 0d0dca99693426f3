"""The user's settings for running a model. This module is quick to import."""

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
    """The settings for choosing the next token.

    With a `temperature` of 0, the likeliest token is chosen (greedy). Otherwise a generator with the seed `seed`
    draws at this temperature from the `top_k` likeliest tokens (0: all). `top_p` limits these further, to the
    likeliest tokens that together have this share of the probability.

    Raises ComputeError for values out of range, because a draw with them would still return a token. Temperatures
    below 1e-6 are also refused, because dividing by them could give infinity.
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
    """The amounts of work at which a second method replaces the first.

    - `product_bytes`: bytes of weights times tokens. Smaller products run on one thread, others on several.
    - `attention_products`: number of multiplications of query and key numbers. Smaller attentions run on one thread,
      others on several.
    - `bf16_tokens`: number of tokens. Products of fewer tokens run in int8, others in bfloat16 if the processor has
      AMX.
    - `exact_bytes`: bytes of a matrix. Smaller matrices are interleaved for int8. Others stay as in the file, for
      products of floats.
    - `measured`: the names of the crossovers that were measured on this machine. The others are static.

    Raises ComputeError for a value that is not a whole number from 1.
    """

    # One thread does this amount of work in 10-20 us; waking a second thread takes 2-40 us.
    product_bytes: int = 96 << 10
    attention_products: int = 1 << 17  # one thread does this amount of work in about 20 us
    # bfloat16 has 1.35x the speed of int8 at 12 tokens, but 0.92x at 8, which int8 processes as two groups of four
    bf16_tokens: int = 12
    exact_bytes: int = 1 << 40  # no matrix is as large as this; equals `protocol.crossovers.NEVER`
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
    """Return the crossovers of this process.

    Python code reads them before every kernel call, because a compiled kernel would keep the values from when it was
    compiled.
    """
    return _in_effect


def use_crossovers(wanted: Crossovers) -> None:
    """Make `wanted` the crossovers of this process. The code that starts a decoder calls this."""
    global _in_effect
    _in_effect = wanted


@contextmanager
def with_crossovers(wanted: Crossovers) -> Iterator[None]:
    """Use `wanted` inside this context. In this way, tests and measurements run both methods of a crossover."""
    before = crossovers()
    use_crossovers(wanted)
    try:
        yield
    finally:
        use_crossovers(before)


BACKENDS = ("cpu", "cuda")
Split = Literal["layers", "heads"]  # the part of a model that the ranks divide among them
SPLITS: tuple[Split, ...] = get_args(Split)
GUARD_REACTIONS = ("stop", "log", "fallback")


@dataclass(frozen=True, slots=True)
class RankOptions:
    """One of the `count` processes that run a model together. Process number n uses GPU number n.

    All ranks must call the function `of_first`. It returns a value that the first rank has computed. `split` is the
    part of the model that is divided among the ranks.
    """

    number: int
    count: int
    of_first: Callable[[Callable[[], bytes]], bytes]
    split: Split = "layers"


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """Settings of a decoder. `cache_type` is the type of the KV cache, f16 or f32.

    With `check_contracts`, each brick also checks the conditions of its kernels' contracts.
    """

    cache_type: str = "f16"
    sampling: TokenSampling = GREEDY
    check_contracts: bool = False


DEFAULT_SETTINGS = DecoderSettings()


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The options of a run. None means the demo model (`model`), no limit (`steps`), all processors except one
    (`threads`), or the model's context up to 2048 (`context`).

    - `cache_type`: type of the KV cache, f16 or f32.
    - `is_exact`: whether products read unrounded activations instead of int8.
    - `trace`: names of `cbtop.profiler.traces.TRACES`. These traces run in a sample of the decode steps.
    - `guard`: the reaction to a brick's wrong output (GUARD_REACTIONS). None: outputs are not checked.
    - `check_contracts`: whether each brick checks the conditions of its kernels' contracts.
    - `prompt`: a text that is continued once, to its end. None: the same random tokens are repeated.
    - `backend`: one of BACKENDS.
    - `rank`: this process's part of the work if several GPUs run the model. None: this process runs the model alone.
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
