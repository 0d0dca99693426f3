"""What a pass launches on a GPU, in order: each launch with its brick and layer, and where its stamps are written.

A kernel of ours stamps itself (cuda/prelude.py). What a library launches, and a copy, stand between two launches of
`mark`, whose own time is in what they measure: about 1 us each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.cuda.launches import CudaLaunch, CudaModule, LibraryCall
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.device import BACKEND, Gpu, launches_of
from cbtop.compute.kernels.base import Arguments
from cbtop.profiler.definitions import KernelDefinition
from cbtop.profiler.graph.nodes import Transfer
from cbtop.profiler.held_steps import Part
from cbtop.protocol.vocabulary import NodeKind, TransferDirection

STAMPS = 2  # of a launch: when it began and when it ended, in ns of %globaltimer
MARK = CudaModule("mark", 'extern "C" __global__ void mark(uint64_t* at) { *at = now(); }')

Times = NDArray[np.uint64]  # (launches, STAMPS)


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch of a pass: of a brick, or (None) a copy beside them."""

    brick: ComputeBrick | None
    layer: int | None  # None: outside of layers
    elements: int  # of the brick
    what: KernelDefinition | Transfer


class LaunchedPass:
    """Launches the bricks of one pass, and remembers what it launched. With `stamps`, uint64 (most, 2) on the device,
    each launch writes its own."""

    def __init__(self, gpu: Gpu, stamps: Any = None) -> None:
        self.launched: list[Launched] = []
        self._gpu = gpu
        self._stamps = stamps
        self._layer: int | None = None

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """What is launched now belongs to that layer."""
        self._layer = index
        yield
        self._layer = None

    def run(self, brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
        """Launch the kernels of a brick."""
        for kernel, arguments in zip(brick.kernels, calls, strict=True):
            for one in launches_of(kernel, arguments):
                if isinstance(one, CudaLaunch):
                    what = self._gpu.definition(one)
                    self._launch_stamped(one) if self._stamps is not None else self._gpu.launch(one)
                else:
                    what = KernelDefinition(one.name, BACKEND)
                    self._between_marks(one)
                self.launched.append(Launched(brick, self._layer, elements, what))

    def copy(self, target: Any, source: Any, direction: TransferDirection) -> None:
        """Copy an array to the device or to pinned memory of the host, in its turn."""
        kind = self._gpu.cupy.cuda.runtime.memcpyHostToDevice
        to, of = target, source
        if direction is TransferDirection.D2H:
            kind = self._gpu.cupy.cuda.runtime.memcpyDeviceToHost
        self._between_marks(LibraryCall("copy", lambda: self._gpu.copy(to, of, kind)))
        ends = ("host", "device") if direction is TransferDirection.H2D else ("device", "host")
        self.launched.append(Launched(None, None, 1, Transfer(*ends, int(source.nbytes), direction)))

    @property
    def _slot(self) -> int:
        """The address of the next launch's stamps."""
        at = len(self.launched)
        if at >= len(self._stamps):
            raise ComputeError(f"a pass has more than {at} launches: cbtop cannot stamp them")
        return int(self._stamps.data.ptr) + at * STAMPS * 8

    def _launch_stamped(self, one: CudaLaunch) -> None:
        self._gpu.launch(one, stamp=self._slot)

    def _between_marks(self, one: LibraryCall) -> None:
        if self._stamps is None:
            one.call()
            return
        slot = self._slot
        self._gpu.mark(MARK, slot)
        one.call()
        self._gpu.mark(MARK, slot + 8)


def parts_of(
    launched: Sequence[Launched], times: Sequence[tuple[int, int]], elements: Mapping[ComputeBrick, int]
) -> Iterator[Part]:
    """What ran in a step: each launch, behind those of a brick the brick, behind its bricks the layer. A brick runs
    from its first launch's begin to its last one's end; `elements`, where they are others than those noted."""
    for layer, in_layer in groupby(zip(launched, times, strict=True), key=lambda one: one[0].layer):
        outside = () if layer is None else ((NodeKind.LAYER, layer),)
        runs = [(brick, [*same]) for brick, same in groupby(in_layer, key=lambda one: one[0].brick)]
        for brick, same in runs:
            keys = outside if brick is None else (*outside, brick.definition)
            for one, (begun_ns, ended_ns) in same:
                yield (*keys, one.what), begun_ns, ended_ns, 1
            if brick is not None:
                count = elements.get(brick, same[0][0].elements)
                yield keys, same[0][1][0], max(ended_ns for _, (_, ended_ns) in same), count
        if layer is not None:
            last = max(ended_ns for _, same in runs for _, (_, ended_ns) in same)
            yield outside, runs[0][1][0][1][0], last, 1
