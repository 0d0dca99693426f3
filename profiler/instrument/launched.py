"""What a process under `cbtop run` does before its first call of a module of torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from cbtop.profiler import instrument as instrumentation
from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.instrument.warm_up import WarmUps
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.codec import EncodedNode
from cbtop.protocol.messages import CatalogMessage
from cbtop.protocol.signals import let_through, suppressed
from cbtop.protocol.vocabulary import NodeKind

_log = logging.getLogger("cbtop")
EVERY_STEP_PERCENT = 100  # allowed: every step is recorded


class LaunchedRecorder(RingRecorder):
    """Removes the file that says of a run that it has recorded nothing, once it has a step, or has said why not."""

    def __init__(self, nothing_yet: str) -> None:
        super().__init__()
        self._nothing_yet = nothing_yet

    def announce(self, message: CatalogMessage) -> None:
        super().announce(message)
        self._look_at(())

    def announce_nodes(self, nodes: Sequence[EncodedNode]) -> None:
        super().announce_nodes(nodes)
        self._look_at(nodes)

    def _look_at(self, nodes: Sequence[EncodedNode]) -> None:
        if self._nothing_yet and (self.failures or any([node.kind is NodeKind.STEP for node, _ in nodes])):
            with suppressed(OSError):  # another process of the run was first
                os.unlink(self._nothing_yet)
            self._nothing_yet = ""


def instrument(overhead_percent: float, nothing_yet: str) -> None:
    """Let every model of this process that is called be instrumented, for `overhead_percent` of its time."""
    recorder = LaunchedRecorder(nothing_yet)
    is_governed = overhead_percent < EVERY_STEP_PERCENT
    profiler = (
        GovernedProfiler(overhead_percent, recorder=recorder) if is_governed else BrickProfiler(recorder=recorder)
    )
    profiler._steps.warm_ups = WarmUps()
    profiler.by_kernels = is_governed
    instrumentation.install(profiler)
    once_imported("sglang", _await_sglang)


def _await_sglang() -> None:
    """SGLang has been imported: its model runner will be."""
    try:
        from cbtop.profiler.instrument import sglang_runner

        sglang_runner.await_import()
    except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
        let_through(error)
        _log.warning("cbtop: SGLang is not shown: %s", error)
