"""Measure the wall-clock time of a model's tokens with a given setting. No steps are recorded meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported for types only, because this import loads Numba, which is slow
    from cbtop.compute.decoder.base import Model
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.profiler.profiler import BrickProfiler

SEED = 7


class InterruptedTurnError(Exception):
    """A measurement was interrupted, so it has no result."""


@dataclass(frozen=True, slots=True)
class Test:
    """A speed test that begins with an empty cache: a prompt of `n_prompt` tokens, or `n_gen` generated tokens.

    If one of the two numbers is above 0, the other number is 0.
    """

    n_prompt: int
    n_gen: int

    @property
    def name(self) -> str:
        return f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"

    @property
    def tokens(self) -> int:
        return self.n_prompt or self.n_gen


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """A request of a user, to be measured: a prompt of random tokens, followed by generated tokens."""

    n_prompt: int
    n_gen: int

    @property
    def tokens(self) -> int:
        return self.n_prompt + self.n_gen

    def run(self, decoder: Decoder, should_stop: Callable[[], bool] = lambda: False) -> tuple[int, int]:
        """Run the request. Return the times (ns) of the prompt and of the generated tokens.

        Raises InterruptedTurnError once `should_stop` returns true between passes.
        """
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
    """The setting of a decoder.

    If `is_exact`, matrix products use unrounded activations instead of int8, and weights in their stored layout.
    `cache_type` is the type of the KV cache, f16 or f32.
    """

    threads: int
    is_exact: bool = False
    cache_type: str = "f16"

    @property
    def options(self) -> tuple[str, ...]:
        """The setting as options of `cbtop bench` and `cbtop demo`. Options with their default value are left out."""
        return (
            *("--threads", str(self.threads)),
            *(("--exact",) if self.is_exact else ()),
            *(("--kv-cache", self.cache_type) if self.cache_type != "f16" else ()),
        )

    @property
    def text(self) -> str:
        return " ".join(self.options)


class Bench:
    """Runs the model at `path` with any setting, for sequences of at most `context` tokens.

    The model may be read twice: in its stored layout, and in the layout for int8 products. Each setting has its own
    decoder. Raises ComputeError if the model cannot be run.
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
        """Return the decoder for a setting. From now on, the kernels use the setting's number of threads."""
        from cbtop.compute.backends import cpu_backend
        from cbtop.compute.workload import bare_decoder

        if setting not in self._decoders:
            model = self.model(setting)
            self._decoders[setting] = bare_decoder(model, setting.threads, self.context, setting.cache_type)
        # Set the number of threads each time. The number is valid for the whole process, so another setting may have
        # changed it.
        cpu_backend(setting.threads)
        return self._decoders[setting]

    def took_ns(self, setting: Setting, test: Test, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Return the time (ns) that one speed test takes. Raises InterruptedTurnError once `should_stop` returns true
        between passes.
        """
        return took_ns(self.decoder(setting), test, should_stop)

    def request_ns(
        self, setting: Setting, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[int, int]:
        """Return the times (ns) of the request's prompt and of the tokens generated after it."""
        return request.run(self.decoder(setting), should_stop)

    def recorded(self, setting: Setting, profiler: BrickProfiler) -> Decoder:
        """Return a new decoder with this setting. The decoder records its bricks with `profiler`."""
        from cbtop.compute.backends import cpu_backend
        from cbtop.compute.decoder.decoder import Decoder
        from cbtop.compute.settings import DecoderSettings

        backend = cpu_backend(setting.threads)
        model = self.model(setting)
        settings = DecoderSettings(setting.cache_type)
        return Decoder(model, backend.label, backend.threads, profiler, self.context, settings)


def took_ns(decoder: Decoder, test: Test, should_stop: Callable[[], bool] = lambda: False) -> int:
    """Return the time (ns) that a decoder takes for one speed test.

    The random tokens are the same each time. Raises ComputeError if a logit is not finite, because such a time is
    invalid.
    """
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
