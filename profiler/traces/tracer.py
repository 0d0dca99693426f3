"""ModelTracer collects the measurements of each traced forward pass and summarises them."""

# Memory is bounded: the last HISTORY_FORWARDS passes, the last MAX_ANOMALIES sentences of each trace, and counts.

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cbtop.profiler.traces import TRACES, activations, attention, kv_cache, logits, quantization
from cbtop.profiler.traces.activations import LayerActivationTrace
from cbtop.profiler.traces.attention import AttentionWeightTrace
from cbtop.profiler.traces.base import HISTORY_FORWARDS, MAX_ANOMALIES, TracerConfig, mean
from cbtop.profiler.traces.kv_cache import KvCacheStateTrace
from cbtop.profiler.traces.logits import LogitEvolutionTrace
from cbtop.profiler.traces.quantization import QuantizationErrorTrace, QuantizationVerdict
from cbtop.protocol.messages import TraceAnomaly, TraceNumber, TraceSummary


@dataclass(slots=True)
class TracedPass:
    """The measurements of the forward pass that is being traced."""

    position: int
    activations: list[LayerActivationTrace] = field(default_factory=list)
    attention: list[AttentionWeightTrace] = field(default_factory=list)
    logits: LogitEvolutionTrace | None = None
    quant_errors: list[QuantizationErrorTrace] = field(default_factory=list)
    kv_state: KvCacheStateTrace | None = None


@dataclass(frozen=True, slots=True)
class TracerTotals:
    """Counts of passes, heads and errors since the tracer was made or cleared."""

    total_forwards: int = 0
    anomalies_detected: int = 0
    attention_traces: int = 0  # number of heads with traced attention
    logit_traces: int = 0
    kv_steps: int = 0
    total_evictions: int = 0
    avg_hit_rate: float | None = None  # mean hit rate over the stored passes; None without lookups
    quant_warnings: int = 0
    quant_criticals: int = 0


class ModelTracer:
    """Traces forward passes: call `begin_forward`, record results, call `end_forward`.

    Results of a trace that is off are ignored. They come from the functions in each trace's file (`tensor_stats`,
    `attention_weights`, `logit_evolution`, `quantization_error`).
    """

    def __init__(self, config: TracerConfig, history_forwards: int = HISTORY_FORWARDS) -> None:
        self.config = config
        self._history_forwards = history_forwards
        self.clear()

    def clear(self) -> None:
        """Forget all measurements and counts. The config does not change."""
        #: The newest traced passes, newest last.
        self.kept: deque[TracedPass] = deque(maxlen=self._history_forwards)
        self._anomalies = {name: deque[str](maxlen=MAX_ANOMALIES) for name in TRACES}
        self._counts = dict.fromkeys(("forwards", "anomalies", "heads", "logits", "kv", "warning", "critical"), 0)
        self._current: TracedPass | None = None

    @property
    def position(self) -> int:
        """The first position of the traced pass, or -1 between passes."""
        return self._current.position if self._current else -1

    def begin_forward(self, position: int) -> None:
        """Begin a pass with its first token at `position`. A pass that has not ended is dropped."""
        self._current = TracedPass(position)

    def record_layer_activation(self, trace: LayerActivationTrace) -> None:
        """Add the activations of a layer to the current pass, if the configuration asks for them."""
        if self._current and self.config.trace_activations:
            self._current.activations.append(trace)

    def record_attention(self, trace: AttentionWeightTrace) -> None:
        """Add the attention weights of a layer to the current pass, if the configuration asks for them."""
        if self._current and self.config.trace_attention:
            self._current.attention.append(trace)

    def record_logits(self, trace: LogitEvolutionTrace) -> None:
        """Set the logits of the current pass, if the configuration asks for them."""
        if self._current and self.config.trace_logits:
            self._current.logits = trace

    def record_quant_error(self, trace: QuantizationErrorTrace) -> None:
        """Add a quantization error to the current pass, if the configuration asks for it."""
        if self._current and self.config.trace_quant_error:
            self._current.quant_errors.append(trace)

    def record_kv_state(self, trace: KvCacheStateTrace) -> None:
        """Set the state of the KV cache of the current pass, if the configuration asks for it."""
        if self._current and self.config.trace_kv_cache:
            self._current.kv_state = trace

    def end_forward(self) -> tuple[str, ...]:
        """End the traced pass. Returns a sentence for each of its anomalies."""
        forward, self._current = self._current, None
        if forward is None:
            return ()
        self.kept.append(forward)
        counts = self._counts
        counts["forwards"] += 1
        counts["heads"] += sum(len(trace.heads) for trace in forward.attention)
        counts["logits"] += forward.logits is not None
        counts["kv"] += forward.kv_state is not None
        for trace in forward.quant_errors:
            if trace.verdict is not QuantizationVerdict.OK:
                counts[trace.verdict.value] += 1
        found: list[str] = []
        for name, sentences in self._examine(forward):
            said = list(sentences)
            self._anomalies[name].extend(said)
            found += said
        counts["anomalies"] += len(found)
        return tuple(found)

    def summary(self) -> TracerTotals:
        """Return the counts of all traced passes."""
        counts, states = self._counts, self._kv_states()
        return TracerTotals(
            total_forwards=counts["forwards"],
            anomalies_detected=counts["anomalies"],
            attention_traces=counts["heads"],
            logit_traces=counts["logits"],
            kv_steps=counts["kv"],
            total_evictions=states[-1].evictions if states else 0,
            avg_hit_rate=mean([state.hit_rate for state in states]),
            quant_warnings=counts["warning"],
            quant_criticals=counts["critical"],
        )

    def trace_summaries(self) -> tuple[TraceSummary, ...]:
        """Return a message for each trace that is on. Its rows are about the stored passes."""
        kept, config = self.kept, self.config
        every: tuple[tuple[str, bool, str, Iterator[TraceNumber]], ...] = (
            (
                "activations",
                config.trace_activations,
                activations.ABOUT,
                activations.numbers([one.activations for one in kept]),
            ),
            (
                "attention",
                config.trace_attention,
                attention.ABOUT,
                attention.numbers([one.attention for one in kept]),
            ),
            ("logits", config.trace_logits, logits.ABOUT, logits.numbers([one.logits for one in kept if one.logits])),
            (
                "quant",
                config.trace_quant_error,
                quantization.ABOUT,
                quantization.numbers([one.quant_errors for one in kept]),
            ),
            ("kv", config.trace_kv_cache, kv_cache.ABOUT, kv_cache.numbers(self._kv_states())),
        )
        return tuple(
            TraceSummary(
                trace=TRACES[name],
                name=name,
                about=about,
                forwards=self._counts["forwards"],
                numbers=tuple(numbers),
                anomalies=tuple(TraceAnomaly(text) for text in self._anomalies[name]),
            )
            for name, is_on, about, numbers in every
            if is_on
        )

    def _examine(self, forward: TracedPass) -> Iterator[tuple[str, Iterable[str]]]:
        for layer in forward.activations:
            yield "activations", activations.anomalies(layer)
        for heads in forward.attention:
            yield "attention", attention.anomalies(heads)
        if forward.logits:
            yield "logits", logits.anomalies(forward.logits)
        for error in forward.quant_errors:
            yield "quant", quantization.anomalies(error)
        if forward.kv_state:
            yield "kv", kv_cache.anomalies(self._kv_states())

    def _kv_states(self) -> list[KvCacheStateTrace]:
        return [one.kv_state for one in self.kept if one.kv_state]
