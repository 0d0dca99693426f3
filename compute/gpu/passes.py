"""The launches of a pass on a GPU, in order. Each launch has its brick, its layer and the address of its stamps (the
times of its begin and end).

Our own kernels write their stamps (cuda/prelude.py). A library call or a copy cannot. So a launch of `mark` before it
and one after it write the stamps. The measured time includes both marks, about 1 us each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.cuda.launches import CudaLaunch, CudaModule, LibraryCall
from cbtop.compute.gpu.device import BACKEND, BrickLaunches, Gpu
from cbtop.compute.kernels.base import Arguments
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.profiler.analysis.graph.nodes import Transfer
from cbtop.profiler.definitions import KernelDefinition
from cbtop.profiler.step_parts import AlikeParts
from cbtop.protocol.vocabulary import NodeKind, TransferDirection

STAMPS = 2  # number of stamps of a launch: the times of its begin and its end, in ns of %globaltimer
MARK = CudaModule("mark", 'extern "C" __global__ void mark(uint64_t* at) { *at = now(); }')

# The largest difference between the clocks of multiprocessors. This is a static value. On an H100, each of 76,440
# launches began at least 416 ns after the end of the previous launch.
APART_NS = 1_000

Times = NDArray[np.uint64]  # the stamps are an array of shape (launches, STAMPS)


def have_run(stamps: Times, after_ns: int) -> bool:
    """Return whether every launch of the pass has written its stamps.

    Each launch must end after its begin, and begin after the end of the previous launch. The first must begin after
    `after_ns`. Stamps of an earlier pass fail this test. So do stamps if the clock was set back meanwhile.
    """
    # Signed numbers are enough, because nanoseconds since 1970 need only 61 bits.
    times = stamps.reshape(-1).astype(np.int64)
    passed = np.diff(times, prepend=np.int64(after_ns))
    return bool((passed[::2] >= -APART_NS).all() and (passed[1::2] >= 0).all())


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch of a pass, with its brick and layer. `brick` is None for a copy between bricks."""

    brick: ComputeBrick | None
    layer: int | None  # index of the layer; None outside the layers
    elements: int  # number of elements of the brick
    what: KernelDefinition | Transfer
    # Number of bricks before this one in the pass. It distinguishes two consecutive runs of the same brick.
    run: int = 0


class LaunchedPass:
    """Launches the bricks of one pass, and stores the launches so that they can be repeated.

    `stamps` is uint64 (most, 2) on the device, or None. The first `most` launches write their stamps into it.
    """

    def __init__(
        self, gpu: Gpu, stamps: Any = None, space: Int8Scratch | None = None, *, is_early: bool = False
    ) -> None:
        """Create a pass without launches. See `BrickLaunches` for `space`, and `Gpu.prepared` for `is_early`."""
        self._launches = BrickLaunches(space)
        self.launched: list[Launched] = []
        self._gpu = gpu
        self._stamps = stamps
        self._is_early = is_early
        self._layer: int | None = None
        self._bricks_run = 0
        self._is_behind_library = False
        self._calls: list[Callable[[], object]] = []

    def again(self) -> None:
        """Launch everything in the pass once more. The launches write stamps to the same addresses."""
        for call in self._calls:
            call()

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Enter this context to record launches under layer `index`."""
        self._layer = index
        yield
        self._layer = None

    def run(self, brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
        """Launch the kernels of a brick."""
        for _, one in self._launches.of(brick.kernels, calls):
            if isinstance(one, CudaLaunch):
                what = self._gpu.definition(one)
                # A library call may end with a launch that is not a kernel. So the launch after a library call is not
                # scheduled early.
                is_early = self._is_early and not self._is_behind_library
                self._do(self._gpu.prepared(one, self._slot, is_early=is_early))
            else:
                what = KernelDefinition(one.name, BACKEND)
                self._between_marks(one)
            self._is_behind_library = not isinstance(one, CudaLaunch)
            self.launched.append(Launched(brick, self._layer, elements, what, self._bricks_run))
        self._bricks_run += 1

    def copy(self, target: Any, source: Any, direction: TransferDirection) -> None:
        """Copy an array to the device or to pinned host memory. The copy runs after all earlier launches."""
        self._between_marks(self._copying(target, source, direction))
        ends = ("host", "device") if direction is TransferDirection.H2D else ("device", "host")
        self.launched.append(Launched(None, None, 1, Transfer(*ends, int(source.nbytes), direction)))

    def tell(self, target: Any, stamps: Any) -> None:
        """Copy the stamps to pinned host memory. This copy is not a part of the pass."""
        self._do(self._copying(target, stamps, TransferDirection.D2H).call)

    def _copying(self, target: Any, source: Any, direction: TransferDirection) -> LibraryCall:
        gpu, runtime = self._gpu, self._gpu.cupy.cuda.runtime
        kind = runtime.memcpyDeviceToHost if direction is TransferDirection.D2H else runtime.memcpyHostToDevice
        return LibraryCall("copy", lambda: gpu.copy(target, source, kind))

    @property
    def _slot(self) -> int | None:
        """Return the address for the stamps of the next launch, or None if the launch does not write stamps."""
        at = len(self.launched)
        if self._stamps is None or at >= len(self._stamps):
            return None
        return int(self._stamps.data.ptr) + at * STAMPS * 8

    def _between_marks(self, one: LibraryCall) -> None:
        slot = self._slot
        if slot is None:
            self._do(one.call)
            return
        self._do(self._gpu.mark(MARK, slot))
        self._do(one.call)
        self._do(self._gpu.mark(MARK, slot + 8))

    def _do(self, call: Callable[[], object]) -> None:
        call()
        self._calls.append(call)


class PassParts:
    """The parts of a pass that are recorded: launches, bricks and layers.

    They are in order: a brick follows its launches, and a layer follows its bricks.

    A brick lasts from the start of its first launch to the end of its last launch. A layer lasts from the start of
    its first brick to the end of its last brick.
    """

    def __init__(self, launched: Sequence[Launched]) -> None:
        keys: list[tuple[Hashable, ...]] = []
        ends: list[tuple[int, int]] = []  # part -> (index of its first launch, index after its last launch)
        self.bricks: list[ComputeBrick | None] = []  # part -> its brick, or None for launches and layers
        self._elements: list[int] = []

        def add(key: tuple[Hashable, ...], first: int, end: int, brick: ComputeBrick | None, elements: int) -> None:
            keys.append(key)
            ends.append((first, end))
            self.bricks.append(brick)
            self._elements.append(elements)

        at = 0
        for layer, in_layer in groupby(launched, key=lambda one: one.layer):
            outside = () if layer is None else ((NodeKind.LAYER, layer),)
            first = at
            for (brick, _), same in groupby(in_layer, key=lambda one: (one.brick, one.run)):
                inside = outside if brick is None else (*outside, brick.definition)
                begun = at
                for one in same:
                    add((*inside, one.what), at, at + 1, None, 1)
                    at += 1
                if brick is not None:
                    add(inside, begun, at, brick, one.elements)
            if layer is not None:
                add(outside, first, at, None, 1)
        self.alike = AlikeParts(keys)
        self._ends = np.array(ends, np.int64).reshape(-1, 2)

    def times(self, stamps: Times, offset_ns: int) -> tuple[list[int], list[int]]:
        """Return the begin and the end of each part, in ns of the host's clock.

        `stamps` are the times of the launches on the device's clock. `offset_ns` is the host's clock minus the
        device's clock.
        """
        begun, ended = (stamps.astype(np.int64) + offset_ns).T
        behind = np.append(ended, 0)  # append one more element, because the last part ends after the last launch
        return begun[self._ends[:, 0]].tolist(), np.maximum.reduceat(behind, self._ends.ravel())[::2].tolist()

    def elements(self, others: Mapping[ComputeBrick, int]) -> list[int]:
        """Return the elements of each part.

        `others` has the elements of bricks that changed after the launches were recorded.
        """
        if not others:
            return self._elements
        return [
            noted if brick is None else others.get(brick, noted)
            for brick, noted in zip(self.bricks, self._elements, strict=True)
        ]
