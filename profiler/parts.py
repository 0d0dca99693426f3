"""The parts of a profiler that the instrumentation of models uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cbtop.profiler.clocks import DeviceClock
    from cbtop.profiler.guard_setting import GuardSetting
    from cbtop.profiler.paths import Paths
    from cbtop.profiler.recorder import Recorder
    from cbtop.profiler.scopes import Scopes
    from cbtop.profiler.steps import Steps
    from cbtop.protocol.ring import Record, RingWriter


@dataclass(slots=True)
class Parts:
    """The parts of one profiler.

    `by_kernels` says that eager models on a CUDA device are recorded by their kernels (see `instrument`). `guard` is
    the guard of models that are attached at their first call.
    """

    recorder: Recorder
    clock: DeviceClock
    now_ns: Callable[[], int]
    scopes: Scopes
    paths: Paths
    steps: Steps
    by_kernels: bool = False
    guard: GuardSetting | None = None


class ProfilerListener(NamedTuple):
    """The functions of a profiler that its recorder calls after a ring opens, and before it closes."""

    implementation: str
    sample_every: int
    attach: Callable[[RingWriter | None], Record]
    finish: Callable[[], None]
    ended: Callable[[str], None]
