"""What a pass launches on a GPU, in order: each launch with its brick and layer, and where its stamps are written.

A kernel of ours stamps itself (cuda/prelude.py). What a library launches, and a copy, stand between two launches of
`mark`, whose own time is in what they measure: about 1 us each.
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
from cbtop.profiler.definitions import KernelDefinition
from cbtop.profiler.graph.nodes import Transfer
from cbtop.profiler.steps import AlikeParts
from cbtop.protocol.vocabulary import NodeKind, TransferDirection

STAMPS = 2  # of a launch: when it began and when it ended, in ns of %globaltimer
MARK = CudaModule("mark", 'extern "C" __global__ void mark(uint64_t* at) { *at = now(); }')

# By so much at most the clocks of multiprocessors differ; static. Of 76,440 launches of an H100 none began less than
# 416 ns behind the end of the one before.
APART_NS = 1_000

Times = NDArray[np.uint64]  # (launches, STAMPS)


def have_run(stamps: Times, after_ns: int) -> bool:
    """Whether every launch has written its stamps now: each ends behind its begin, and begins behind the end of the
    one before, the first behind `after_ns`. What an earlier pass wrote does not, nor do times of a clock that was
    set."""
    times = stamps.reshape(-1).astype(np.int64)  # nanoseconds since 1970 take 61 bits
    passed = np.diff(times, prepend=np.int64(after_ns))
    return bool((passed[::2] >= -APART_NS).all() and (passed[1::2] >= 0).all())


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch of a pass: of a brick, or (None) a copy beside them."""

    brick: ComputeBrick | None
    layer: int | None  # None: outside of layers
    elements: int  # of the brick
    what: KernelDefinition | Transfer
    run: int = 0  # how many bricks had run before: one that runs twice in a row is two


class LaunchedPass:
    """Launches the bricks of one pass, and remembers what it launched. With `stamps`, uint64 (most, 2) on the device,
    each of the first `most` launches writes its own."""

    def __init__(
        self, gpu: Gpu, stamps: Any = None, space: Int8Scratch | None = None, *, is_early: bool = False
    ) -> None:
        """`space`: as BrickLaunches has it; `is_early`: as Gpu.launch."""
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
        """Launch the same once more, with its stamps."""
        for call in self._calls:
            call()

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """What is launched now belongs to that layer."""
        self._layer = index
        yield
        self._layer = None

    def run(self, brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
        """Launch the kernels of a brick."""
        for _, one in self._launches.of(brick.kernels, calls):
            if isinstance(one, CudaLaunch):
                what = self._gpu.definition(one)
                # What a library launches may end with something else than a kernel, before which nothing can begin.
                is_early = self._is_early and not self._is_behind_library
                self._do(self._gpu.prepared(one, self._slot, is_early=is_early))
            else:
                what = KernelDefinition(one.name, BACKEND)
                self._between_marks(one)
            self._is_behind_library = not isinstance(one, CudaLaunch)
            self.launched.append(Launched(brick, self._layer, elements, what, self._bricks_run))
        self._bricks_run += 1

    def copy(self, target: Any, source: Any, direction: TransferDirection) -> None:
        """Copy an array to the device or to pinned memory of the host, in its turn."""
        self._between_marks(self._copying(target, source, direction))
        ends = ("host", "device") if direction is TransferDirection.H2D else ("device", "host")
        self.launched.append(Launched(None, None, 1, Transfer(*ends, int(source.nbytes), direction)))

    def tell(self, target: Any, stamps: Any) -> None:
        """Copy what was stamped so far to pinned memory of the host: no part of the pass."""
        self._do(self._copying(target, stamps, TransferDirection.D2H).call)

    def _copying(self, target: Any, source: Any, direction: TransferDirection) -> LibraryCall:
        gpu, runtime = self._gpu, self._gpu.cupy.cuda.runtime
        kind = runtime.memcpyDeviceToHost if direction is TransferDirection.D2H else runtime.memcpyHostToDevice
        return LibraryCall("copy", lambda: gpu.copy(target, source, kind))

    @property
    def _slot(self) -> int | None:
        """The address of the next launch's stamps; None where it writes none."""
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
    """What of a pass is recorded, in order: each launch, behind those of a brick the brick, behind its bricks the
    layer. A brick runs from its first launch's begin to its last one's end, a layer from its first brick's to its
    last one's."""

    def __init__(self, launched: Sequence[Launched]) -> None:
        keys: list[tuple[Hashable, ...]] = []
        ends: list[tuple[int, int]] = []  # of each part: from which to which launch it goes
        self.bricks: list[ComputeBrick | None] = []  # of each part, where it is one
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
        """When each part began, and when it ended; `stamps` of the launches, which differ from the host's clock by so
        much."""
        begun, ended = (stamps.astype(np.int64) + offset_ns).T
        behind = np.append(ended, 0)  # so that a part may end with the last launch
        return begun[self._ends[:, 0]].tolist(), np.maximum.reduceat(behind, self._ends.ravel())[::2].tolist()

    def elements(self, others: Mapping[ComputeBrick, int]) -> list[int]:
        """Of each part; `others`: of bricks that have others than were noted when they were launched."""
        if not others:
            return self._elements
        return [
            noted if brick is None else others.get(brick, noted)
            for brick, noted in zip(self.bricks, self._elements, strict=True)
        ]
