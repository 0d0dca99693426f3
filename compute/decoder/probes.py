"""Probes read the data of a trace. Each probe reads the arguments of bricks that have just run."""

# A probe measures immediately, because the next layer overwrites the buffers.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.decoder.bricks import ModelBricks
from cbtop.compute.decoder.workspace import Floats
from cbtop.compute.kernels import attention, soft_cap
from cbtop.compute.kernels.base import Arguments, Kernel, Part
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.interleaved import rows_of
from cbtop.compute.quantization.q8_0 import Q8_0
from cbtop.profiler.traces.activations import LayerActivationTrace
from cbtop.profiler.traces.attention import attention_weights
from cbtop.profiler.traces.kv_cache import KvCacheStateTrace
from cbtop.profiler.traces.logits import logit_evolution
from cbtop.profiler.traces.moments import TensorStats, tensor_stats
from cbtop.profiler.traces.quantization import ErrorSource, quantization_error
from cbtop.profiler.traces.tracer import ModelTracer

PRODUCTS = ("linear", "linear_int8")  # names of the contracts of kernels that multiply by weights
Calls = Sequence[Arguments]
# A function that gets the calls of a brick, and returns the number of values that it has read.
Watch = Callable[[Calls], int]


class Probe(Protocol):
    """The interface of a probe, which looks at the bricks of a traced pass."""

    def watches(self, turn: int) -> Iterator[tuple[ComputeBrick, Watch]]:
        """Yield each brick that the probe reads in the traced pass number `turn`.

        Each brick comes with a function to call after the brick has run.
        """


class ActivationProbe:
    """The probe of trace MLT-01. It measures the residual stream before and after each layer.

    It also measures what each half of a layer adds to the residual stream.
    """

    def __init__(self, bricks: ModelBricks, tracer: ModelTracer) -> None:
        self._bricks = bricks
        self._tracer = tracer
        self._measured: list[TensorStats] = []

    def watches(self, turn: int) -> Iterator[tuple[ComputeBrick, Watch]]:
        for layer, bricks in enumerate(self._bricks.layers):
            yield bricks.attention_norm, partial(self._entered, bricks.attention_norm.kernels[0])
            if bricks.attention_post_norm is not None:
                yield bricks.attention_post_norm, self._normed_or_combined
            else:
                yield bricks.output_projection, self._added
            if bricks.ffn_post_norm is not None:
                yield bricks.ffn_post_norm, self._normed_or_combined
            elif bricks.down is not None:
                yield bricks.down, self._added
            elif bricks.experts is not None:
                yield bricks.experts.combine, self._normed_or_combined
            yield self._bricks.adds_up(layer), partial(self._left, layer)

    def _entered(self, norm: Kernel, calls: Calls) -> int:
        x, normed = calls[0][0], calls[0][norm.contract.arguments.index("out")]
        self._measured = [tensor_stats(x), tensor_stats(normed)]
        return int(x.size + normed.size)

    def _added(self, calls: Calls) -> int:
        delta = calls[0][4]
        self._measured.append(tensor_stats(delta))
        return int(delta.size)

    def _normed_or_combined(self, calls: Calls) -> int:
        delta = calls[0][-1]
        self._measured.append(tensor_stats(delta))
        return int(delta.size)

    def _left(self, layer: int, calls: Calls) -> int:
        x = calls[0][0]
        entered, normed, attention, ffn = self._measured
        self._tracer.record_layer_activation(
            LayerActivationTrace(layer, entered, normed, attention, ffn, tensor_stats(x))
        )
        return int(x.size)


class AttentionProbe:
    """The probe of trace MLT-02. It computes the softmax of the last query."""

    def __init__(self, bricks: ModelBricks, tracer: ModelTracer) -> None:
        self._bricks = bricks
        self._tracer = tracer

    def watches(self, turn: int) -> Iterator[tuple[ComputeBrick, Watch]]:
        chosen = self._tracer.config.attention_config.layers
        for layer, bricks in enumerate(self._bricks.layers):
            if chosen is None or layer in chosen:
                yield bricks.attention, partial(self._weighed, layer)

    def _weighed(self, layer: int, calls: Calls) -> int:
        # The attention kernel does not store the softmax weights, so compute them again.
        q, k_cache, _, start, *scores, _, _ = calls[0]
        weights = attention.attention_weights(q[-1], k_cache, start + len(q) - 1, *scores)
        self._tracer.record_attention(
            attention_weights(layer, weights.astype(np.float32), self._tracer.config.attention_config)
        )
        return int(weights.size)


class LogitProbe:
    """The probe of trace MLT-03, the logit lens. It multiplies the output of each layer by the head.

    The outputs are copied during the pass, and multiplied after the pass has chosen its token.
    """

    def __init__(self, bricks: ModelBricks, tracer: ModelTracer) -> None:
        self._bricks = bricks
        self._tracer = tracer
        self._outputs: list[Floats] = []  # the output of each layer, (1, hidden)
        self._norm: Arguments = ()
        self._head: Arguments = ()
        self._cap: Arguments = ()

    def watches(self, turn: int) -> Iterator[tuple[ComputeBrick, Watch]]:
        self._outputs.clear()
        for layer in range(len(self._bricks.layers)):
            yield self._bricks.adds_up(layer), self._left
        yield self._bricks.final_norm, self._normed
        yield self._bricks.lm_head, self._multiplied
        if self._bricks.soft_cap is not None:
            yield self._bricks.soft_cap, self._capped
        yield self._bricks.sampling, self._chosen

    def _left(self, calls: Calls) -> int:
        self._outputs.append(calls[0][0][-1:].copy())
        return self._outputs[-1].size

    def _normed(self, calls: Calls) -> int:
        self._norm = calls[0]
        return 0

    def _multiplied(self, calls: Calls) -> int:
        self._head = calls[0]
        return 0

    def _capped(self, calls: Calls) -> int:
        self._cap = calls[0]
        return 0

    def _chosen(self, calls: Calls) -> int:
        final = calls[0][0][0]
        evolution = logit_evolution(self._tracer.position, final, self._lens(), self._tracer.config.tracked_tokens)
        self._tracer.record_logits(evolution)
        return int(final.size) * (1 + len(self._outputs))

    def _lens(self) -> Iterator[Floats]:
        """Yield the logits of each layer, float32 (vocabulary,). All are written into the same buffer."""
        code, weights, bias, normed_last, logits_last, scratch = self._head
        normed, logits = np.empty_like(normed_last), np.empty_like(logits_last)
        (product,) = self._bricks.lm_head.kernels
        # The kernel of the final norm may also make int8 codes. Here, only the norm of the kernel is used. The
        # existing codes belong only to the output of the last layer.
        norm, (_, *how, _) = next(_taken_apart([(self._bricks.final_norm.kernels[0], self._norm)]))
        if isinstance(scratch, Int8Scratch):
            scratch = replace(scratch, holds_codes=False)
        for output in self._outputs:
            norm.implementation(output, *how, normed)
            product.implementation(code, weights, bias, normed, logits, scratch)
            if self._cap:
                soft_cap.SOFT_CAP.implementation(logits, self._cap[1], logits)
            yield logits[0]


class QuantizationProbe:
    """The probe of trace MLT-04. It compares some rows of products with the same products in float64.

    Each traced pass compares the matrices of the head and of one layer, a different layer each time. It measures two
    errors:
    - the kernel's own error, which includes the rounding of activations if the kernel rounds them;
    - the error that rounding activations to Q8_0 would add, if the kernel does not round them.

    The error of the weights' quantisation cannot be measured, because a GGUF file does not contain the original
    floats.
    """

    def __init__(self, bricks: ModelBricks, tracer: ModelTracer) -> None:
        self._bricks = bricks
        self._tracer = tracer

    def watches(self, turn: int) -> Iterator[tuple[ComputeBrick, Watch]]:
        layer = turn % len(self._bricks.layers)
        bricks = self._bricks.layers[layer]
        mixed = () if bricks.experts is None else (bricks.experts.of_token, bricks.experts.experts)
        dense = (one for one in (bricks.gated, bricks.gate, bricks.up, bricks.down) if one is not None)
        for brick in (bricks.qkv, bricks.output_projection, *dense, *mixed):
            yield brick, partial(self._multiplied, brick, layer)
        yield self._bricks.lm_head, partial(self._multiplied, self._bricks.lm_head, None)

    def _multiplied(self, brick: ComputeBrick, layer: int | None, calls: Calls) -> int:
        looked_at = 0
        for kernel, call in _taken_apart(zip(brick.kernels, calls, strict=True)):
            if kernel.contract.name not in PRODUCTS:
                continue
            code, rows, bias, x, found, scratch = kernel.narrow(call, 0)
            block_format = FORMATS[code]
            is_int8 = isinstance(scratch, Int8Scratch)
            if is_int8:
                rows = rows_of(block_format, rows, np.arange(len(rows)))
            weights = block_format.dequantize(rows).astype(np.float64)  # (sampled rows, columns)
            exact = x.astype(np.float64) @ weights.T
            record = partial(
                self._record,
                brick.spec.name,
                layer,
                block_format.name,
                8 * block_format.block_bytes / block_format.block_elements,
            )
            record(ErrorSource.KERNEL, exact + bias if bias.size else exact, found)
            can_round = x.shape[1] % Q8_0.block_elements == 0 and (np.abs(x) <= Q8_0.largest).all()
            if can_round and not is_int8:  # in int8 products, activations are rounded already
                rounded = Q8_0.dequantize(Q8_0.quantize(np.ascontiguousarray(x)))
                record(ErrorSource.ACTIVATIONS, exact, rounded.astype(np.float64) @ weights.T)
            looked_at += weights.size
        return looked_at

    def _record(
        self,
        brick: str,
        layer: int | None,
        quant_type: str,
        bits: float,
        source: ErrorSource,
        expected: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
        actual: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    ) -> None:
        self._tracer.record_quant_error(quantization_error(brick, layer, source, quant_type, bits, expected, actual))


def _taken_apart(calls: Iterable[Part]) -> Iterator[Part]:
    """Yield kernels with their arguments. If a kernel is fused, yields its parts."""
    for kernel, call in calls:
        yield from ((kernel, call),) if kernel.parts is None else kernel.parts(call)


class KvCacheProbe:
    """The probe of trace MLT-05. It reports the decoder's own cache, which grows by one position per token and is
    always emptied completely.
    """

    def __init__(self, bricks: ModelBricks, tracer: ModelTracer, context: int) -> None:
        self._bricks = bricks
        self._tracer = tracer
        self._context = context
        self._steps = self._evictions = self._evicted_positions = 0
        self._position = -1  # number of cached positions before the latest step
        self._size_bytes = 0

    def step(self, position: int) -> None:
        """Begin a decode step with `position` cached tokens.

        If `position` is not larger than in the previous step, the cache was emptied in between.
        """
        self._steps += 1
        if position <= self._position:
            self._evictions += 1
            self._evicted_positions += self._position + 1
        self._position = position

    def watches(self, turn: int) -> Iterator[tuple[ComputeBrick, Watch]]:
        self._size_bytes = 0
        for bricks in self._bricks.layers:
            yield bricks.kv_write, self._written
        yield self._bricks.layers[-1].attention, self._read

    def _written(self, calls: Calls) -> int:
        _, _, _, k_cache, v_cache = calls[0]
        self._size_bytes += k_cache.nbytes + v_cache.nbytes
        return 0

    def _read(self, calls: Calls) -> int:
        q, _, _, start, _, window, *_ = calls[0]
        positions = start + len(q)
        state = KvCacheStateTrace(
            step=self._steps,
            size_bytes=self._size_bytes,
            valid_positions=positions,
            max_positions=self._context,
            evictions=self._evictions,
            evicted_positions=self._evicted_positions,
            oldest_position=0,
            newest_position=positions - 1,
            accessed_positions=positions - attention.first_seen(start, window),
        )
        self._tracer.record_kv_state(state)
        return 0
