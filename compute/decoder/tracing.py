"""Trace a decoder: sample its steps, run the probes, and publish the results."""

# The time that tracing takes is recorded as a brick, `Trace`, inside the traced layer or step.

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cbtop.compute.brick import ComputeBrick, Profiler
from cbtop.compute.decoder.decoder import Decoder, Observer
from cbtop.compute.decoder.probes import (
    ActivationProbe,
    AttentionProbe,
    Calls,
    KvCacheProbe,
    LogitProbe,
    Probe,
    QuantizationProbe,
    Watch,
)
from cbtop.profiler.traces import TRACED_EVERY_STEPS
from cbtop.profiler.traces.base import TracerConfig
from cbtop.profiler.traces.tracer import ModelTracer

TRACE_BRICK = "Trace"
MIN_INTERVAL_S = 1.0
# A summary is published again when its age exceeds this share of the run's time. A catalog only grows, so a long run
# must publish less often.
MAX_AGE_SHARE = 0.05


class DecodeTracing:
    """Traces one in TRACED_EVERY_STEPS decode steps of `decoder`. Call `observer` before each step, and `finish`
    after the last step.
    """

    def __init__(
        self,
        decoder: Decoder,
        profiler: Profiler,
        config: TracerConfig,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tracer = ModelTracer(config)
        self._decoder = decoder
        self._profiler = profiler
        self._clock_s = clock_s
        self._began_s = self._published_s = clock_s()
        self._published_turn = 0
        self._steps = self._turn = 0
        self._kv = KvCacheProbe(decoder.bricks, self.tracer, decoder.context)
        probes: tuple[tuple[bool, Probe], ...] = (
            (config.trace_activations, ActivationProbe(decoder.bricks, self.tracer)),
            (config.trace_attention, AttentionProbe(decoder.bricks, self.tracer)),
            (config.trace_logits, LogitProbe(decoder.bricks, self.tracer)),
            (config.trace_quant_error, QuantizationProbe(decoder.bricks, self.tracer)),
            (config.trace_kv_cache, self._kv),
        )
        self._probes = tuple(probe for is_on, probe in probes if is_on)
        self._watches: dict[ComputeBrick, list[Watch]] = {}

    def observer(self) -> Observer | None:
        """Return the function that observes the next decode step, or None if this step is not traced."""
        self._kv.step(self._decoder.position)
        self._steps += 1
        if (self._steps - 1) % TRACED_EVERY_STEPS:
            return None
        self._watches = {}
        for probe in self._probes:
            for brick, watch in probe.watches(self._turn):
                self._watches.setdefault(brick, []).append(watch)
        self._watches.setdefault(self._decoder.bricks.sampling, []).append(self._end)
        self._turn += 1
        self.tracer.begin_forward(self._decoder.position)
        return self._observe

    def finish(self) -> None:
        """Publish the summaries that are not yet published."""
        if self._published_turn != self._turn:
            self._publish()

    def _observe(self, brick: ComputeBrick, calls: Calls) -> None:
        watches = self._watches.get(brick)
        if watches:
            timer = self._profiler.start_brick(TRACE_BRICK)
            # Do not warn about values that are not finite, because the trace reports them as anomalies.
            with np.errstate(all="ignore"):
                looked_at = sum(watch(calls) for watch in watches)
            self._profiler.stop_brick(timer, looked_at)

    def _end(self, calls: Calls) -> int:
        self.tracer.end_forward()
        now_s = self._clock_s()
        wanted_s = max(MIN_INTERVAL_S, MAX_AGE_SHARE * (now_s - self._began_s))
        if not self._published_turn or now_s - self._published_s >= wanted_s:
            self._publish()
        return 0

    def _publish(self) -> None:
        self._published_s, self._published_turn = self._clock_s(), self._turn
        for summary in self.tracer.trace_summaries():
            self._profiler.announce(summary)
