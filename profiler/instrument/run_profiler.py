"""The profiler of a process under `cbtop run`. Models and libraries share it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from cbtop.profiler import counting, cpu_sampling
from cbtop.profiler.guard_setting import guard_setting
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.instrument.warm_up import WarmUps
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.codec import EncodedNode
from cbtop.protocol.messages import CatalogMessage
from cbtop.protocol.signals import suppressed
from cbtop.protocol.vocabulary import NodeKind

EVERY_STEP_PERCENT = 100  # record every step if the allowed overhead is at least this many percent
END_SUFFIX = ".end"  # suffix of a run's FIFO, the same as in `cbtop.commands.run`


class LaunchedRecorder(RingRecorder):
    """A recorder that removes the file `nothing_yet` at the first step. If recording fails, it logs the reason and
    also removes the file.

    At the first step it also writes the pid into the run's FIFO, for the summary of the run.
    """

    def __init__(self, nothing_yet: str) -> None:
        super().__init__()
        self._nothing_yet, self._run_end = nothing_yet, nothing_yet + END_SUFFIX
        self._told_pid = 0

    def announce(self, message: CatalogMessage) -> None:
        super().announce(message)
        self._look_at(())

    def announce_nodes(self, nodes: Sequence[EncodedNode]) -> None:
        super().announce_nodes(nodes)
        self._look_at(nodes)

    def _look_at(self, nodes: Sequence[EncodedNode]) -> None:
        has_step = any([node.kind is NodeKind.STEP for node, _ in nodes])
        if has_step:
            self._tell()
        if self._nothing_yet and (self.failures or has_step):
            with suppressed(OSError):  # another process of the run may have removed the file already
                os.unlink(self._nothing_yet)
            self._nothing_yet = ""

    def _open_files(self) -> None:
        super()._open_files()
        if any([node.kind is NodeKind.STEP for node in self.nodes()]):
            self._tell()  # a forked child needs this, because it does not announce its nodes again

    def _tell(self) -> None:
        """Write the pid of this process into the FIFO once, if there is one."""
        pid = os.getpid()
        if self._told_pid == pid or self._run_end == END_SUFFIX:
            return
        self._told_pid = pid
        with suppressed(OSError):  # with --quiet, the run has no FIFO
            fifo = os.open(self._run_end, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fifo, b"%d\n" % pid)
            finally:
                os.close(fifo)


def profiler_of(recorder: RingRecorder, overhead_percent: float) -> BrickProfiler:
    """Return a profiler that records every step, or as many steps as `overhead_percent` of their time allows."""
    is_governed = overhead_percent < EVERY_STEP_PERCENT
    profiler = (
        GovernedProfiler(overhead_percent, recorder=recorder) if is_governed else BrickProfiler(recorder=recorder)
    )
    profiler.parts.steps.warm_ups = WarmUps()
    profiler.parts.by_kernels = is_governed
    return profiler


_made: list[BrickProfiler] = []


def profiler_of_run(overhead_percent: float, nothing_yet: str) -> BrickProfiler:
    """Return the profiler of this process. The first call makes it.

    Its overhead is at most `overhead_percent` of the process's time. `nothing_yet` is the file that marks the run.
    """
    if not _made:
        recorder = LaunchedRecorder(nothing_yet)
        profiler = profiler_of(recorder, overhead_percent)
        allowed_share = overhead_percent / (100 + overhead_percent)
        sampling = cpu_sampling.begin(recorder, allowed_share)
        counting.begin(recorder, profiler.parts.paths.host.hot_path, allowed_share)
        if isinstance(profiler, GovernedProfiler):
            profiler.governor.sampling = sampling
        if guard := os.environ.get("CBTOP_GUARD"):
            profiler.parts.guard = guard_setting(guard)
        _made.append(profiler)
    return _made[0]
