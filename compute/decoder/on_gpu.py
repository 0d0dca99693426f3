"""Run the decoder on a GPU. The weights and the cache stay there.

Kernels read the tokens and positions on the device. So passes with the same number of tokens make the same launches,
which are prepared once and repeated. The launches for one token are captured as a graph, unless `is_eager`. The
launches for a prompt run one by one.

Rules
- A recorded step launches the variants of kernels that stamp (store) their times. Other steps launch the plain
  variants. Both variants of a one-token pass are prepared with the first token.
- The measurements of a recorded step are published while the device computes the next step, or when the sequence
  ends. `tell` publishes the last step. If the measurements are lost, the step is still recorded, and its kernels
  count as lost.
- If a pass ends in an error or an interrupt, none of its tokens is appended. The pass has then ended on the device,
  too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from cbtop.compute.brick import ComputeBrick, Profiler
from cbtop.compute.checks import AssertionResult
from cbtop.compute.cuda.sampling import PLACE_BITS
from cbtop.compute.cuda.turns import shape_of
from cbtop.compute.decoder.base import LayerWeights, Model, Norm, Projection
from cbtop.compute.decoder.decoder import Decoder, Observer, one_call_at_a_time
from cbtop.compute.decoder.int8 import OF_EXPERTS
from cbtop.compute.decoder.ranks import ALONE, Rank
from cbtop.compute.decoder.workspace import Workspace
from cbtop.compute.errors import ModelError, NoTokenError
from cbtop.compute.gpu.checks import Matrices, checked
from cbtop.compute.gpu.device import BrickLaunches, Gpu
from cbtop.compute.gpu.matrix import DeviceMatrix
from cbtop.compute.gpu.passes import STAMPS, LaunchedPass, PassParts, Times, have_run
from cbtop.compute.kernels import attention
from cbtop.compute.kernels.base import Arguments
from cbtop.compute.kernels.kv_caches import plain_caches
from cbtop.compute.kernels.linear_bf16 import CudaScratch
from cbtop.compute.kernels.linear_int8 import LINEAR_INT8, Int8Scratch
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.settings import GREEDY, DecoderSettings, TokenSampling
from cbtop.profiler.steps import ActiveStep
from cbtop.protocol.vocabulary import TransferDirection

TOGETHER = 8
# largest number of launches in a pass with stamps; the measurements of a longer pass are lost
MOST_LAUNCHES = 1 << 14
# Number of prompt passes that are kept to repeat their launches. A kept pass can be repeated for the same number of
# tokens at the same position.
KEPT_PROMPTS = 4

Elements = Mapping[ComputeBrick, int]
# the key of a pass: number of tokens, position of the first token (0 if there is one token), whether it is stamped
_Key = tuple[int, int, bool]


def model_on(gpu: Gpu, model: Model, *, is_exact: bool, rank: Rank = ALONE) -> Model:
    """Return `model` with its weights on the GPU. Products use int8 activations unless `is_exact`.

    `model` is this rank's part of the model. It stays on the host unchanged. Raises ModelError if the model cannot
    run on the GPU or does not fit.
    """
    if model.head_dim > attention.LARGEST_HEAD or model.vocabulary > 1 << PLACE_BITS:
        raise ModelError(
            f"heads of {model.head_dim} numbers and {model.vocabulary:,} tokens; on a GPU at most "
            f"{attention.LARGEST_HEAD} and {1 << PLACE_BITS:,} are possible: run it with --backend cpu"
        )
    gpu.require_room(model.weights_bytes, "the weights")

    def moved(name: str, one: Any) -> Any:
        if isinstance(one, Projection):
            experts = model.experts.count if model.experts is not None and name in OF_EXPERTS else None
            return Projection(matrix(one.weight, takes_int8=not is_exact, experts=experts), gpu.array(one.bias))
        return norm(one) if isinstance(one, Norm) else one

    def norm(one: Norm) -> Norm:
        return Norm(gpu.array(one.weight), None if one.bias is None else gpu.array(one.bias))

    def matrix(one: Any, *, takes_int8: bool, experts: int | None = None) -> Any:
        assert isinstance(one, QuantizedMatrix)
        if one.columns % TOGETHER:
            raise ModelError(f"a matrix of {one.columns:,} columns, no multiple of {TOGETHER}, runs on no GPU yet")
        rounds = takes_int8 and one.format.code in LINEAR_INT8
        # The kernel for int8 products of experts must divide a row among its threads. `shape_of` returns None if the
        # rows are too long to be divided.
        if experts is not None:
            rounds = rounds and shape_of(one.columns) is not None
        return DeviceMatrix.of(gpu, one, takes_int8=rounds, experts=experts)

    layers = tuple(
        LayerWeights(**{field.name: moved(field.name, getattr(layer, field.name)) for field in fields(layer)})
        for layer in model.layers
    )
    head, embedding = model.lm_head, model.embedding  # a matrix that only another rank uses stays on the host
    if rank.chooses:
        head = matrix(model.lm_head, takes_int8=not is_exact)
    if rank.embeds:
        is_tied = rank.chooses and model.embedding is model.lm_head
        embedding = head if is_tied else matrix(model.embedding, takes_int8=False)
    return replace(model, layers=layers, final_norm=norm(model.final_norm), lm_head=head, embedding=embedding)


def host_matrices(model: Model) -> Matrices:
    """Return a dict with the host copy of each matrix on the device. The key is the matrix's device pointer.

    A matrix of experts has one entry for each expert.
    """
    every = (model.embedding, model.lm_head, *_matrices_of_layers(model))
    moved = [one for one in every if isinstance(one, DeviceMatrix)]
    return {one.data.data.ptr: one.host for one in moved if one.host is not None}


def _matrices_of_layers(model: Model) -> Iterator[DeviceMatrix]:
    for layer in model.layers:
        yield from _products_of(layer)


def _products_of(layer: LayerWeights) -> Iterator[DeviceMatrix]:
    for field in fields(layer):
        if isinstance(one := getattr(layer, field.name), Projection):
            yield from one.weight.plain()  # type: ignore[union-attr]


class GpuMachine:
    """The arrays of a decoder on a GPU.

    The inputs of a pass are its tokens, the start of each part, the position after the pass, and the sequence's
    number (for random draws). They are adjacent in memory, so that one copy transfers all of them (see `write`).
    """

    names_launches = True
    # if this number of tokens shares one read of a matrix, products are limited by computation and not by memory
    most_together = 512

    def __init__(self, gpu: Gpu, context: int) -> None:
        self.gpu = gpu
        most = context + -(-context // self.most_together) + 2
        self.sent = gpu.pinned((most,), np.int64)
        self.inputs = gpu.zeros((most,), np.int64)
        self._start = gpu.zeros((1,), np.int32)  # the first position of a pass, if its inputs were not sent
        # `takes_inputs`: whether the inputs of the pass were sent to the device. The next line has the numbers of
        # tokens and of parts in the pass, and how many of the tokens and parts were already passed to kernels.
        self.takes_inputs = False
        self._tokens = self._parts = self._tokens_given = self._parts_given = 0

    def write(self, tokens: Sequence[int], start: int, sequence: int) -> int:
        """Write the inputs of a pass into `sent`.

        From there they are copied to the device. Returns the number of words.
        """
        starts = range(start, start + len(tokens), self.most_together)
        words = [*tokens, *starts, start + len(tokens), sequence]
        self.sent[: len(words)] = words
        return len(words)

    @contextmanager
    def inputs_of(self, tokens: int) -> Iterator[None]:
        """Enter this context to run a pass of `tokens` tokens whose inputs were sent to the device."""
        self._tokens, self._parts = tokens, -(-tokens // self.most_together)
        self._tokens_given = self._parts_given = 0
        self.takes_inputs = True
        try:
            yield
        finally:
            self.takes_inputs = False

    def _number(self, at: int) -> Any:
        """Return word `at` of the inputs on the device, as int32 (1,)."""
        return self.inputs[at : at + 1].view(np.int32)[:1]

    @property
    def end(self) -> Any:
        """The position after the pass, on the device."""
        return self._number(self._tokens + self._parts)

    @property
    def sequence(self) -> Any:
        """The number of the sequence, on the device."""
        return self._number(self._tokens + self._parts + 1)

    def check(self) -> None:
        """Raise ComputeError in a forked process, which cannot use its parent's GPU."""
        self.gpu.check()

    def turn(self) -> AbstractContextManager[None]:
        """Return a context that admits one decoder at a time, because decoders share the GPU."""
        return self.gpu.turn()

    def array(self, values: Any) -> Any:
        """Return a copy of `values` on the device."""
        return self.gpu.array(values)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return zeros on the device."""
        return self.gpu.zeros(shape, dtype)

    def caches(self, layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
        """Return the keys and values of each layer, in the plain layout."""
        return [plain_caches(kv_heads, context, head_dim, dtype, self.gpu.zeros) for _ in range(layers)]

    def attention_scratch(self, model: Model, context: int) -> Any:
        """Return a buffer for partial results. A long context is split into parts, and their results are combined."""
        return self.gpu.zeros(attention.scratch_shape(self.gpu.multiprocessors), np.float32)

    def scratch(self, columns: int) -> Any:
        """Return one row of zeros as scratch memory. The CUDA kernels do not need more."""
        return self.gpu.zeros((1, columns), np.float32)

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        """Return buffers for the int8 codes and factors of activations, and for one matrix in bfloat16.

        Products of many tokens need the matrix.
        """
        codes, factors = (
            self.gpu.zeros((tokens, size), kind) for size, kind in ((columns, "u1"), (columns // 8, "f4"))
        )
        # The output matrix is not considered, because it is always multiplied by a single token.
        rows = max(sum(one.weight.rows for one in (layer.q, layer.k, layer.v)) for layer in model.layers)
        largest = max(rows * model.hidden, *(one.rows * one.columns for one in _matrices_of_layers(model)))
        self.gpu.require_room(2 * largest, "a matrix in bfloat16")
        sizes = ((tokens * columns, "u2"), (largest, "u2"), (tokens * rows, "f4"))
        tiles = CudaScratch(*(self.gpu.zeros((size,), kind) for size, kind in sizes))
        return Int8Scratch(codes, factors, self.gpu.multiprocessors, tiles)

    def put(self, array: Any, values: Sequence[int]) -> Any:
        """Copy `values` into `array` and return it.

        If the inputs were sent to the device, return the part of the inputs that holds `values`.
        """
        if not self.takes_inputs:
            array[...] = self.gpu.array(np.asarray(values, array.dtype))
            return array
        first, self._tokens_given = self._tokens_given, self._tokens_given + len(values)
        return self.inputs[first : self._tokens_given]

    def position(self, value: int) -> Any:
        """Return the position of the pass on the device."""
        if not self.takes_inputs:
            self._start.fill(value)
            return self._start
        self._parts_given += 1
        return self._number(self._tokens + self._parts_given - 1)

    def host(self, array: Any) -> Any:
        """Return a copy of an array on the host, after waiting for all launches."""
        return self.gpu.host(array)


@dataclass(slots=True)
class _KeptPass:
    """A pass with launches that can be repeated, with its parts (launches, bricks and layers).

    `stamps` is the host copy of the pass's stamps. It is None if the pass has no stamps or too many launches.
    """

    launch: Callable[[], object]
    parts: PassParts
    stamps: Times | None


class GpuDecoder(Decoder):
    """A Decoder of a model on `gpu`, made by `model_on`.

    If `is_eager`, a pass of one token runs as single launches and not as a graph.
    """

    def __init__(
        self,
        gpu: Gpu,
        model: Model,
        profiler: Profiler,
        context: int,
        cache_type: str = "f16",
        sampling: TokenSampling = GREEDY,
        *,
        is_eager: bool = False,
        rank: Rank = ALONE,
    ) -> None:
        caches = 2 * len(model.layers) * model.kv_heads * context * model.head_dim
        gpu.require_room(caches * (2 if cache_type == "f16" else 4), f"the KV cache of {context:,} tokens")
        self._on = GpuMachine(gpu, context)
        settings = DecoderSettings(cache_type, sampling)
        super().__init__(model, gpu.label, 1, profiler, context, settings, machine=self._on, rank=rank)
        self._gpu = gpu
        self._is_eager = is_eager
        self._stream = gpu.cupy.cuda.Stream(non_blocking=True)
        self._stamps = gpu.zeros((MOST_LAUNCHES, STAMPS), np.uint64)
        self._told = gpu.pinned((MOST_LAUNCHES, STAMPS), np.uint64)
        self._chosen = gpu.pinned((1,), np.int64)
        self._words = 0
        self._kept: dict[_Key, _KeptPass] = {}  # passes that are kept to be repeated, the most recently used last
        self._untold: tuple[ActiveStep, PassParts, Times | None, Elements] | None = None
        self._told_until_ns = 0  # end of the last stamp that was published, in ns of the device's clock
        with self._on.turn():
            # Wait inside the context `turn`, because waiting for the whole GPU would spoil a graph that another
            # decoder captures.
            gpu.synchronize()  # the weights and caches were written on a different stream, so wait for that stream

    @one_call_at_a_time
    def prefill(self, tokens: Sequence[int], observe: Observer | None = None) -> int:
        """Append `tokens` and return the next token, with the errors of `Decoder.prefill`. `observe` is ignored."""
        self._check(tokens)
        start = self.position
        try:
            with self._profiler.step("prefill", tokens=len(tokens)) as step:
                self._say(step)
                token = self._ran(tokens, step)
            self.tell()
        # Forget the appended tokens, because the caller passes the same tokens again after an error.
        except BaseException:
            self.position = start
            raise
        return token

    @one_call_at_a_time
    def decode(self, token: int, observe: Observer | None = None) -> int:
        """Append one token and return the next one, with the errors of `Decoder.decode`. `observe` is ignored."""
        self._check((token,))
        with self._profiler.step("decode", tokens=1) as step:
            self._say(step)
            return self._ran((token,), step)

    def _begin(self) -> None:
        """Publish the measurements of the last recorded step, then begin a new sequence."""
        self.tell()
        super()._begin()

    def _check_of_pass(
        self,
    ) -> Callable[[ComputeBrick, tuple[Arguments, ...]], Iterator[tuple[str, str, AssertionResult]]]:
        return partial(checked, self._gpu, host_matrices(self.model), BrickLaunches(self._code_space))

    @property
    def logits(self) -> Any:
        """The logits of the last token, copied to the host."""
        return self._gpu.host(self._space.logits)[0]

    def _choice(self, space: Workspace) -> Arguments:
        if self._sampling.is_greedy:
            return super()._choice(space)
        how, on = self._sampling, self._on
        if not on.takes_inputs:
            on.end.fill(self.position)
            on.sequence.fill(self._sequence)
        return space.logits, how.temperature, how.top_k, how.top_p, how.seed, on.end, on.sequence, space.choice

    @contextmanager
    def _whole_or_none(self) -> Iterator[None]:
        """Run a pass on the stream, while no other decoder's pass runs.

        After an error or an interrupt, waits for the launches of the pass, and undoes it.
        """
        start = self.position
        with self._on.turn(), self._stream:
            try:
                yield
            except BaseException:
                self.position = start
                # do not raise this error, because the exception that is being raised says more
                with suppress(self._gpu.cupy.cuda.runtime.CUDARuntimeError):
                    self._stream.synchronize()
                raise

    def _ran(self, tokens: Sequence[int], step: ActiveStep) -> int:
        """Run a pass over the tokens and return the token that it chose."""
        is_recorded, start, count = self._profiler.recording, self.position, len(tokens)
        with self._whole_or_none():
            self._words = self._on.write(tokens, start, self._sequence)
            one = self._launched(count, is_recorded)
            self.tell()  # publish the last step now, while the device computes this one
            self._stream.synchronize()
            chosen = self._token()
            if is_recorded:
                self._hold(step, one.parts, one.stamps, self._elements_at(start) if count == 1 else {})
            self.position = start + count
        return chosen

    def _launched(self, count: int, is_recorded: bool) -> _KeptPass:
        """Launch a pass of `count` tokens. If a pass of this size was kept, its launches are repeated."""
        start = self.position
        key = count, 0 if count == 1 else start, is_recorded
        kept = self._kept.pop(key, None)
        if kept is None and count == 1:
            # The pass already runs while its launches are prepared. Each run writes the same values into the cache.
            for is_stamped in (False, True):
                self._kept[1, 0, is_stamped] = self._prepared(is_stamped=is_stamped)
                self.position = start
            kept = self._kept.pop(key)
        if kept is not None:
            self._kept[key] = kept
            kept.launch()
            return kept
        ran = self._pass(is_stamped=is_recorded)
        self._launch(ran, count)
        stamps = self._copy_stamps(ran) if is_recorded and len(ran.launched) <= MOST_LAUNCHES else None
        kept = _KeptPass(ran.again, PassParts(ran.launched), stamps)
        # In a mixture of experts, a pass cannot be repeated, because its launches depend on the chosen experts.
        if self.model.experts is None:
            self._kept[key] = kept
            prompts = [one for one in self._kept if one[0] > 1]
            for one in prompts[:-KEPT_PROMPTS]:
                del self._kept[one]
        return kept

    def _prepared(self, *, is_stamped: bool) -> _KeptPass:
        """Run the pass of one token. Returns the pass in a form that can be repeated."""
        ran = self._pass(is_stamped=is_stamped, is_early=True)
        # Run the pass once before its capture, because no module must be loaded during the capture.
        self._launch(ran, 1)
        self._stream.synchronize()
        stamps = self._copy_stamps(ran) if is_stamped else None
        return _KeptPass(ran.again if self._is_eager else self._captured(ran), PassParts(ran.launched), stamps)

    def _captured(self, ran: LaunchedPass) -> Callable[[], object]:
        """Return a function that launches one graph. The graph contains all launches of `ran`."""
        # this function does not use `self`, because the returned function would then keep the decoder alive
        stream = self._stream
        try:
            stream.begin_capture()
            ran.again()
            captured = stream.end_capture()
        except BaseException:
            # the capture has not begun, has produced no graph, or has ended already
            with suppress(self._gpu.cupy.cuda.runtime.CUDARuntimeError):
                stream.end_capture()
            raise
        captured.upload(stream)
        return lambda: captured.launch(stream)

    def _pass(self, *, is_stamped: bool, is_early: bool = False) -> LaunchedPass:
        return LaunchedPass(self._gpu, self._stamps if is_stamped else None, self._code_space, is_early=is_early)

    @property
    def _code_space(self) -> Int8Scratch | None:
        """Scratch memory for the int8 activations of a pass, or None if no product takes int8."""
        return self.int8_scratch if self.model.layers[0].q.weight.takes_int8 else None

    def _launch(self, ran: LaunchedPass, count: int) -> None:
        words = self._words
        with self._on.inputs_of(count):
            ran.copy(self._on.inputs[:words], self._on.sent[:words], TransferDirection.H2D)
            self._whole_pass(range(count), ran.run, ran.layer)
            ran.copy(self._chosen, self._space.choice, TransferDirection.D2H)

    def _token(self) -> int:
        token = int(self._chosen[0])
        # The sampling kernel returns an invalid token if a logit is not finite (sampling.py).
        if not 0 <= token < self.model.vocabulary:
            raise NoTokenError
        return token

    def _copy_stamps(self, ran: LaunchedPass) -> Times:
        """Copy the stamps of a pass into host memory, after all earlier launches. Returns the host array."""
        stamps: Times = self._told[: len(ran.launched)]
        ran.tell(stamps, self._stamps[: len(stamps)])
        return stamps

    # --- publish the measurements of a recorded step ----------------------------------------------------------------

    def _hold(self, step: ActiveStep, parts: PassParts, stamps: Times | None, elements: Elements) -> None:
        step.wait()
        self._untold = step, parts, None if stamps is None else stamps.copy(), elements

    def _elements_at(self, position: int) -> Elements:
        """Return the elements of bricks (such as attention) that have more work at later positions.

        The pass has one token.
        """
        heads = self.model.heads
        return {
            layer.bricks.attention: heads * attention.positions_seen(position, 1, layer.window)
            for layer in self._layers
        }

    def tell(self) -> None:
        """Publish the measurements of the last recorded step."""
        if self._untold is None:
            return
        (step, parts, stamps, elements), self._untold = self._untold, None
        if self._gpu.is_of_parent:  # a forked process must not publish a step of its parent
            return
        offset_ns = None
        try:
            if stamps is not None and have_run(stamps, self._told_until_ns):
                self._told_until_ns = int(stamps[-1, 1])
                offset_ns = self._gpu.offset_ns(self._told_until_ns)
            # The device's clock may have been set back. Clear the stamps, because kernels only increase the end times
            # (`atomicMax`).
            elif stamps is not None:
                self._told_until_ns = 0
                with self._on.turn(), self._stream:
                    self._stamps.fill(0)
        finally:
            if stamps is None or offset_ns is None:
                step.told(None)
        if stamps is not None and offset_ns is not None:
            step.record_known_parts(parts.alike, *parts.times(stamps, offset_ns), parts.elements(elements))
