"""A model over several processes, the ranks: each has an even share of its layers, and hands on what these make.

Rules
- What a layer makes goes from a rank to the next; of the token that the last one chooses all learn. So every rank
  runs the same passes in the same order, and of each returns the same token.
- An exchange is a brick in the category Communication, called, labelled and counted as one of torch.distributed is
  (profiler/instrument/collectives.py). Nothing is asserted of it: checks look at what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from cbtop.compute.brick import ComputeBrick, Launch, Profiler
from cbtop.compute.brick_specs import BROADCAST, RECV, SEND, BrickSpec
from cbtop.compute.contracts import Contract
from cbtop.compute.cuda.launches import CudaKernel, LibraryCall
from cbtop.compute.decoder.base import LayerWeights, Model, Projection
from cbtop.compute.errors import ModelError
from cbtop.compute.kernels.base import FLOAT_BYTES, Kernel, KernelWork
from cbtop.protocol.attributes import Work

TOKEN_BYTES = 8


class Link(Protocol):
    """From a rank to the others: what one sends another receives, in the order of the calls. Arrays lie where the
    decoder has its own, row after row, float32 or int64; on a device it is done when what was launched before is."""

    def send(self, array: Any, to: int) -> None: ...

    def recv(self, array: Any, sender: int) -> None:
        """Into `array`."""

    def broadcast(self, array: Any, sender: int) -> None:
        """What the sender has in it then all have."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many a process is, with its link to the others, of which one alone has none."""

    number: int
    count: int
    link: Link | None

    @property
    def is_first(self) -> bool:
        """It begins with the tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """It chooses the next one."""
        return self.number == self.count - 1

    def layers_of(self, layers: int) -> range:
        """Its own of so many. An even share; where there is none, the last one, which has the head, has the fewest.

        ModelError where not every rank has one.
        """
        if self.count > layers:
            raise ModelError(f"a model of {layers} layers for {self.count} GPUs; give --gpus {layers} or fewer")
        first, end = (-(-number * layers // self.count) for number in (self.number, self.number + 1))
        return range(first, end)


ALONE = Rank(0, 1, None)


def part_of(model: Model, rank: Rank) -> Model:
    """What a rank runs of a model: some of its layers. ModelError where there are fewer than ranks.

    The embedding is the first rank's and the head the last one's; in the others they only say how large they are.
    """
    if rank.count == 1:
        return model
    own = rank.layers_of(len(model.layers))
    layers = model.layers[own.start : own.stop]
    size_bytes = sum(_bytes_of(layer) for layer in layers)
    if rank.is_first:
        size_bytes += model.embedding.size_bytes
    if rank.is_last:
        size_bytes += model.lm_head.size_bytes + model.final_norm.nbytes
    return replace(model, layers=layers, first_layer=own.start, weights_bytes=size_bytes)


def _bytes_of(layer: LayerWeights) -> int:
    parts = [getattr(layer, field.name) for field in fields(layer)]
    projections = sum(one.weight.size_bytes + one.bias.nbytes for one in parts if isinstance(one, Projection))
    return projections + sum(one.nbytes for one in parts if isinstance(one, np.ndarray))


class Exchanges:
    """The exchanges of a rank as bricks, in the order of a pass; None where it has none."""

    def __init__(self, rank: Rank, backend: str, profiler: Profiler, *, names_launches: bool) -> None:
        self.recv: ComputeBrick | None = None
        self.send: ComputeBrick | None = None
        self.broadcast: ComputeBrick | None = None
        if rank.link is None:
            return
        link, number, last = rank.link, rank.number, rank.count - 1

        def brick(spec: BrickSpec, itemsize: int, call: Callable[[Any], None]) -> ComputeBrick:
            kernel = _kernel(spec, call)
            made = ComputeBrick(
                spec, (Launch(kernel, KernelWork()),), backend, profiler, names_launches=names_launches
            )
            # Bus bytes are those of the whole (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth").
            work = Work(bytes_per_element=itemsize, size_bytes_per_element=itemsize)
            made.definition = replace(made.definition, work=work, label=f"{rank.count} ranks")
            return made

        if not rank.is_first:
            self.recv = brick(RECV, FLOAT_BYTES, lambda x: link.recv(x, number - 1))
        if not rank.is_last:
            self.send = brick(SEND, FLOAT_BYTES, lambda x: link.send(x, number + 1))
        self.broadcast = brick(BROADCAST, TOKEN_BYTES, lambda token: link.broadcast(token, last))


def _kernel(spec: BrickSpec, call: Callable[[Any], None]) -> Kernel:
    """What is launched of an exchange: on a GPU a call of NCCL, in its turn."""
    name = f"nccl{spec.name}"

    def launches(x: Any) -> tuple[LibraryCall, ...]:
        return (LibraryCall(name, partial(call, x)),)

    return Kernel(
        name=name,
        reference=lambda x: None,
        implementation=call,
        work=lambda x: KernelWork(),
        outputs=(0,),
        contract=Contract(name, "what one rank has another has then", ("x",), 0.0, (), (), (), (), None),
        examples=lambda rng, size: (np.zeros((1, size), np.float32),),
        cuda=CudaKernel((), launches),
    )
