"""How long a model takes for tokens under one setting or another, by the wall's clock, with nothing recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they load Numba
    from cbtop.compute.decoder.base import Model
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.profiler.profiler import BrickProfiler

SEED = 7


class InterruptedTurnError(Exception):
    """A turn was cut short: it measured nothing."""


@dataclass(frozen=True, slots=True)
class Test:
    """So many tokens of a prompt, or to be generated from an empty cache: the other is 0."""

    n_prompt: int
    n_gen: int

    @property
    def name(self) -> str:
        return f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"

    @property
    def tokens(self) -> int:
        return self.n_prompt or self.n_gen


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of random tokens taken in, and as many tokens generated after it."""

    n_prompt: int
    n_gen: int

    @property
    def tokens(self) -> int:
        return self.n_prompt + self.n_gen

    def run(self, decoder: Decoder, should_stop: Callable[[], bool] = lambda: False) -> tuple[int, int]:
        """The times (ns) of both parts. InterruptedTurnError once `should_stop` says so between two passes."""
        if should_stop():
            raise InterruptedTurnError
        tokens = _random_tokens(decoder, self.n_prompt)
        decoder.restart()
        begun_ns = time.perf_counter_ns()
        token = decoder.prefill(tokens)
        between_ns = time.perf_counter_ns()
        for _ in range(self.n_gen):
            if should_stop():
                raise InterruptedTurnError
            token = decoder.decode(token)
        return between_ns - begun_ns, time.perf_counter_ns() - between_ns


@dataclass(frozen=True, slots=True)
class Setting:
    """How a decoder runs. `is_exact`: products take activations as they are, not rounded to int8, and weights as they
    lie. `cache_type`: of the KV cache, f16 or f32."""

    threads: int
    is_exact: bool = False
    cache_type: str = "f16"

    @property
    def options(self) -> tuple[str, ...]:
        """As `cbtop bench` and `cbtop demo` take it; what is the default of both is left out."""
        return (
            *("--threads", str(self.threads)),
            *(("--exact",) if self.is_exact else ()),
            *(("--kv-cache", self.cache_type) if self.cache_type != "f16" else ()),
        )

    @property
    def text(self) -> str:
        return " ".join(self.options)


class Bench:
    """The model at `path` under any setting, for sequences of at most `context` tokens.

    It is read once as it lies and once for int8 products, if both are asked for; a decoder is made for each setting.
    ComputeError where the model cannot be run.
    """

    def __init__(self, path: Path, context: int) -> None:
        self.path = path
        self.context = context
        self._models: dict[bool, Model] = {}
        self._decoders: dict[Setting, Decoder] = {}

    def model(self, setting: Setting) -> Model:
        from cbtop.compute.decoder.int8 import model_to_run

        if setting.is_exact not in self._models:
            self._models[setting.is_exact] = model_to_run(self.path, is_exact=setting.is_exact)
        return self._models[setting.is_exact]

    def decoder(self, setting: Setting) -> Decoder:
        """The decoder of a setting, whose threads the kernels use from now on."""
        from cbtop.compute.backends import cpu_backend
        from cbtop.compute.workload import bare_decoder

        if setting not in self._decoders:
            model = self.model(setting)
            self._decoders[setting] = bare_decoder(model, setting.threads, self.context, setting.cache_type)
        cpu_backend(setting.threads)  # of the process: another setting's may be in place
        return self._decoders[setting]

    def took_ns(self, setting: Setting, test: Test, should_stop: Callable[[], bool] = lambda: False) -> int:
        """The time of one test. InterruptedTurnError once `should_stop` says so between two of its passes."""
        return took_ns(self.decoder(setting), test, should_stop)

    def request_ns(
        self, setting: Setting, request: Request, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[int, int]:
        """The times of the prompt and of what is generated after it."""
        return request.run(self.decoder(setting), should_stop)

    def recorded(self, setting: Setting, profiler: BrickProfiler) -> Decoder:
        """Another decoder of a setting, whose bricks `profiler` records."""
        from cbtop.compute.backends import cpu_backend
        from cbtop.compute.decoder.decoder import Decoder

        backend = cpu_backend(setting.threads)
        model = self.model(setting)
        return Decoder(model, backend.label, backend.threads, profiler, self.context, setting.cache_type)


def took_ns(decoder: Decoder, test: Test, should_stop: Callable[[], bool] = lambda: False) -> int:
    """The time a decoder takes for one test, of the same random tokens each time. ComputeError from the decoder: what
    a step takes in which a logit is not finite is no result."""
    if should_stop():
        raise InterruptedTurnError
    tokens = _random_tokens(decoder, test.tokens)
    decoder.restart()
    begun_ns = time.perf_counter_ns()
    if test.n_prompt:
        decoder.prefill(tokens)
    else:
        for token in tokens:
            if should_stop():
                raise InterruptedTurnError
            decoder.decode(token)
    return time.perf_counter_ns() - begun_ns


def _random_tokens(decoder: Decoder, count: int) -> list[int]:
    import numpy as np

    found: list[int] = np.random.default_rng(SEED).integers(0, decoder.model.vocabulary, count).tolist()
    return found
