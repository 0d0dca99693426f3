"""Split a model over several processes, called ranks. Each rank has an even share of the layers, or a part of every
layer.

Split by layers: a rank sends its output to the next rank, and the last rank sends the chosen token to all.

Split of every layer, by heads and by columns of the feed-forward network (Shoeybi et al., "Megatron-LM", 2019,
section 3): the outputs of the ranks are added up twice per layer. All ranks receive exactly the same sums (NCCL's
user guide, "AllReduce"). So each rank chooses tokens on its own, with a copy of the embedding and the output matrix.

With either split, every rank runs the same passes in the same order and returns the same tokens.

An exchange is a brick in the category Communication. It has the name, label and counts of a torch.distributed
exchange (profiler/instrument/collectives.py), and no assertions, because it computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from cbtop.compute.brick import BrickLaunch, ComputeBrick, Profiler
from cbtop.compute.brick_specs import ALL_REDUCE, BROADCAST, RECV, SEND, BrickSpec
from cbtop.compute.contracts import Contract, Performance
from cbtop.compute.cuda.launches import CudaKernel, LibraryCall
from cbtop.compute.decoder.base import LayerWeights, Model, Norm, Projection
from cbtop.compute.errors import ModelError
from cbtop.compute.kernels.base import FLOAT_BYTES, Kernel, KernelWork
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import Matrix
from cbtop.compute.settings import Split
from cbtop.protocol.attributes import Work

TOKEN_BYTES = 8
# The performance in the contract of an exchange. It has no roof, because the speed of the link between ranks is not
# measured.
UNBOUND = Performance("", 0.0, "", "", math.inf)


class RankLink(Protocol):
    """The interface that a rank uses to exchange arrays with the other ranks.

    Arrays arrive in the order of sending. They are in the decoder's memory, contiguous, float32 or int64. On a
    device, a transfer runs after everything that was launched before it.
    """

    def send(self, array: Any, to: int) -> None: ...

    def recv(self, array: Any, sender: int) -> None:
        """Receive into `array`."""

    def broadcast(self, array: Any, sender: int) -> None:
        """Copy the sender's `array` into the `array` of every rank."""

    def all_reduce(self, array: Any) -> None:
        """Set the `array` of every rank to the sum over all ranks."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The role of this process among `count` ranks.

    It consists of the rank's number, its link to the other ranks (None if the rank is alone), and the kind of split
    of the model.
    """

    number: int
    count: int
    link: RankLink | None
    split: Split = "layers"

    @property
    def embeds(self) -> bool:
        """Whether this rank looks up the tokens' embeddings."""
        return self.number == 0 or self.split == "heads"

    @property
    def chooses(self) -> bool:
        """Whether this rank chooses the next token."""
        return self.number == self.count - 1 or self.split == "heads"

    def layers_of(self, layers: int) -> range:
        """Return this rank's even share of the layers.

        If the shares differ, the last rank has the smallest share, because it also runs the head. Raises ModelError
        if a rank would have no layer.
        """
        if self.count > layers:
            raise ModelError(f"a model of {layers} layers for {self.count} GPUs; give --gpus {layers} or fewer")
        own = self._of(layers)
        return range(own.start, own.stop)

    def share_of(self, total: int, unit: int, what: str) -> slice:
        """Return this rank's share of `total`, in multiples of `unit`.

        Raises ModelError if a rank would get nothing.
        """
        units = total // unit
        if self.count > units:
            ways = f"--gpus {units} or fewer, or --split layers" if units > 1 else "--split layers"
            raise ModelError(f"{total:,} {what} are {units} x {unit:,} for {self.count} GPUs; give {ways}")
        own = self._of(units)
        return slice(own.start * unit, own.stop * unit)

    def _of(self, count: int) -> slice:
        """Return this rank's share of `count`. Shares differ by at most one."""
        first, end = (-(-number * count // self.count) for number in (self.number, self.number + 1))
        return slice(first, end)


ALONE = Rank(0, 1, None)


def part_of(model: Model, rank: Rank) -> Model:
    """Return the part of a model that a rank runs. Raises ModelError if this number of ranks cannot split the model.

    An embedding or head that the rank does not use stays in the model, because its sizes are needed.
    """
    if rank.count == 1:
        return model
    if rank.split == "heads":
        part = _share_of_layers(model, rank)
    else:
        own = rank.layers_of(len(model.layers))
        part = replace(model, layers=model.layers[own.start : own.stop], first_layer=own.start)
    size_bytes = sum(_bytes_of(layer) for layer in part.layers)
    if rank.chooses:
        size_bytes += model.lm_head.size_bytes + model.final_norm.size_bytes
    if rank.embeds and not (rank.chooses and model.embedding is model.lm_head):
        size_bytes += model.embedding.size_bytes
    return replace(part, weights_bytes=size_bytes)


def _share_of_layers(model: Model, rank: Rank) -> Model:
    """Return the rank's part of every layer: its heads, and its columns of the feed-forward network.

    Both consist of whole blocks of the weights' formats.
    """
    seen_by = model.heads // model.kv_heads
    # Number of elements in a block of the weights' format: 1, 32 or 256.
    block = max(_blocks_of(layer.output) for layer in model.layers)
    kv_unit = math.lcm(seen_by * model.head_dim, block) // (seen_by * model.head_dim)
    kv_heads = rank.share_of(model.kv_heads, kv_unit, "heads of keys and values")
    heads = slice(kv_heads.start * seen_by, kv_heads.stop * seen_by)
    unit = max(_blocks_of(layer.down) for layer in model.layers)
    inner = rank.share_of(model.feed_forward, unit, "columns of the feed-forward network")

    def of_layer(layer: LayerWeights) -> LayerWeights:
        experts = 1 if layer.router is None or model.experts is None else model.experts.count
        columns = slice(heads.start * model.head_dim, heads.stop * model.head_dim)
        return replace(
            layer,
            q=_rows(layer.q, heads, model.heads),
            k=_rows(layer.k, kv_heads, model.kv_heads),
            v=_rows(layer.v, kv_heads, model.kv_heads),
            output=_columns(layer.output, columns, has_bias=rank.number == 0),
            gate=_rows(layer.gate, inner, model.feed_forward, experts),
            up=_rows(layer.up, inner, model.feed_forward, experts),
            down=_columns(layer.down, inner, has_bias=rank.number == 0),
        )

    return replace(
        model,
        layers=tuple(map(of_layer, model.layers)),
        heads=heads.stop - heads.start,
        kv_heads=kv_heads.stop - kv_heads.start,
        feed_forward=inner.stop - inner.start,
    )


def _blocks_of(one: Projection) -> int:
    return one.weight.format.block_elements


def _rows(one: Projection, own: slice, parts: int, groups: int = 1) -> Projection:
    """Return some rows of a matrix that consists of `groups` groups of rows.

    Each group is divided into `parts` equal parts. The slice `own` says which parts of each group to return.
    """
    data = one.weight.data.reshape(groups, parts, -1, one.weight.data.shape[1])[:, own]
    bias = one.bias.reshape(parts, -1)[own].reshape(-1) if one.bias.size else one.bias
    return Projection(_matrix(one.weight, data.reshape(-1, data.shape[-1]), one.weight.columns), bias)


def _columns(one: Projection, own: slice, *, has_bias: bool) -> Projection:
    """Return the columns `own` of a projection. Only one rank sets `has_bias`, so that the bias is added once."""
    first, end = (one.weight.format.row_bytes(at) for at in (own.start, own.stop))
    matrix = _matrix(one.weight, one.weight.data[:, first:end], own.stop - own.start)
    return Projection(matrix, one.bias if has_bias else one.bias[:0])


def _matrix(whole: Matrix, data: Any, columns: int) -> Matrix:
    # the matrix still has the layout of the file, because nothing has interleaved it yet
    assert isinstance(whole, QuantizedMatrix)
    kept = np.ascontiguousarray(data)
    kept.flags.writeable = False
    return replace(whole, data=kept, columns=columns)


def _bytes_of(layer: LayerWeights) -> int:
    parts = [getattr(layer, field.name) for field in fields(layer)]
    projections = sum(one.weight.size_bytes + one.bias.nbytes for one in parts if isinstance(one, Projection))
    return projections + sum(one.size_bytes for one in parts if isinstance(one, Norm))


class Exchanges:
    """The bricks of a rank's exchanges, in the order of a pass. A brick is None if the rank does not make that
    exchange.
    """

    def __init__(self, rank: Rank, backend: str, profiler: Profiler, *, names_launches: bool) -> None:
        self.recv: ComputeBrick | None = None
        self.send: ComputeBrick | None = None
        self.broadcast: ComputeBrick | None = None
        self.all_reduce: ComputeBrick | None = None
        if rank.link is None:
            return
        link, number, last = rank.link, rank.number, rank.count - 1

        def brick(spec: BrickSpec, itemsize: int, call: Callable[[Any], None], bus_factor: float = 1) -> ComputeBrick:
            kernel = _kernel(spec, call)
            made = ComputeBrick(
                spec, (BrickLaunch(kernel, KernelWork()),), backend, profiler, names_launches=names_launches
            )
            # Bus bytes count the whole array (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth").
            work = Work(bytes_per_element=bus_factor * itemsize, size_bytes_per_element=itemsize)
            made.definition = replace(made.definition, work=work, label=f"{rank.count} ranks")
            return made

        if rank.split == "heads":
            self.all_reduce = brick(ALL_REDUCE, FLOAT_BYTES, link.all_reduce, 2 * last / rank.count)
            return
        if not rank.embeds:
            self.recv = brick(RECV, FLOAT_BYTES, lambda x: link.recv(x, number - 1))
        if not rank.chooses:
            self.send = brick(SEND, FLOAT_BYTES, lambda x: link.send(x, number + 1))
        self.broadcast = brick(BROADCAST, TOKEN_BYTES, lambda token: link.broadcast(token, last))


def _kernel(spec: BrickSpec, call: Callable[[Any], None]) -> Kernel:
    """Return the kernel that makes an exchange. On a GPU it is a call of NCCL, which runs in order with the
    launches.
    """
    name = f"nccl{spec.name}"

    def launches(x: Any) -> tuple[LibraryCall, ...]:
        return (LibraryCall(name, partial(call, x)),)

    return Kernel(
        name=name,
        reference=lambda x: None,
        implementation=call,
        work=lambda x: KernelWork(),
        outputs=(0,),
        contract=Contract(name, "what one rank has another has then", ("x",), 0.0, (), (), (), (), UNBOUND),
        examples=lambda rng, size: (np.zeros((1, size), np.float32),),
        cuda=CudaKernel((), launches),
    )
