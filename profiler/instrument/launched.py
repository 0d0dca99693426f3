"""What a process under `cbtop run` does as soon as torch has been imported."""

from __future__ import annotations

import os
from contextlib import suppress

from cbtop.profiler import instrument as instrumentation
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import CatalogMessage, Node
from cbtop.protocol.vocabulary import NodeKind

EVERY_STEP_PERCENT = 100  # allowed: every step is recorded


class LaunchedRecorder(RingRecorder):
    """Removes the file that says of a run that it has recorded nothing, as soon as it has a step."""

    def __init__(self, nothing_yet: str) -> None:
        super().__init__()
        self._nothing_yet = nothing_yet

    def announce(self, message: CatalogMessage) -> None:
        super().announce(message)
        if self._nothing_yet and isinstance(message, Node) and message.kind is NodeKind.STEP:
            with suppress(OSError):  # another process of the run was first
                os.unlink(self._nothing_yet)
            self._nothing_yet = ""


def instrument(overhead_percent: float, nothing_yet: str) -> None:
    """Let every model of this process that is called be instrumented, for `overhead_percent` of its time."""
    recorder = LaunchedRecorder(nothing_yet)
    if overhead_percent < EVERY_STEP_PERCENT:
        instrumentation.install(GovernedProfiler(overhead_percent, recorder=recorder))
    else:
        instrumentation.install(BrickProfiler(recorder=recorder))
