"""Statistics and graph of this process, read from its own records without a daemon."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cbtop.profiler.graph_recorder import Brick
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.vocabulary import BrickCategory, BrickId

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbtop.profiler.analysis.brick_stats import BrickStats, CategoryStats
    from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
    from cbtop.profiler.graph_recorder import GraphRecorder
    from cbtop.profiler.hot_path import Position
    from cbtop.profiler.paths import Paths
    from cbtop.profiler.recorder import Recorder
    from cbtop.profiler.scopes import Scopes
    from cbtop.profiler.session import Report, Session, StepSums


class _Unrecorded:
    """Stops recording the caller's thread or task during a block, because cbtop itself calls NumPy there."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._was_recording = position.recording

    def __enter__(self) -> None:
        self._position.recording = False

    def __exit__(self, *_: object) -> None:
        self._position.recording = self._was_recording


class ReadBack:
    """Reads this process's own ring. Users call it as `profiler.stats`. The first call imports NumPy.

    Raises TypeError if the recorder cannot be read back.
    """

    def __init__(
        self,
        recorder: Recorder,
        graph: GraphRecorder,
        scopes: Scopes,
        now_ns: Callable[[], int],
        sample_every: int,
        ended_why: Callable[[], str],
        paths: Paths,
    ) -> None:
        self._recorder = recorder
        self._graph = graph
        self._scopes = scopes
        self._now_ns = now_ns
        self._sample_every = sample_every
        self._ended_why = ended_why
        self._paths = paths
        self._session: Session | None = None

    def report(self, window_s: float | None = None) -> Report:
        """Return a report on all records of this process, or of its last `window_s` seconds. `print` shows it as
        text.

        The ring holds 260,000 records by default. Call this before unread records are overwritten. A report cannot
        begin before the ring does: its `window_s` is the time that it covers.
        """
        with self._unrecorded():
            session = self._opened()
            report = session.report() if window_s is None else session.window(window_s, self._now_ns())
        return replace(report, ended_why=self._ended_why())

    def phases(self) -> dict[str, StepSums]:
        """Return the sums of each phase with an ended step, since the beginning. Each call reads only new records."""
        with self._unrecorded():
            return self._opened().phases()

    def stats_for(self, brick: Brick) -> BrickStats | None:
        """Return the statistics of one brick over all layers, or None if the brick did not run."""
        name = brick.display_name if isinstance(brick, BrickId) else getattr(brick, "name", brick)
        with self._unrecorded():
            return self._opened().stats_for(str(name))

    def category_stats(self) -> dict[BrickCategory, CategoryStats]:
        """Return the statistics of each category. If a category did not run, its statistics are zeros."""
        with self._unrecorded():
            return self._opened().category_stats()

    @property
    def total_ns(self) -> int:
        """The time in ns spent in bricks. No nanosecond counts twice."""
        return self.report().total_ns

    @property
    def total_tokens(self) -> int:
        """The number of tokens of all steps."""
        return self.report().tokens

    @property
    def tokens_per_sec(self) -> float | None:
        """Tokens per wall-clock second from the first step's start to the last step's end. None without steps."""
        return self.report().tokens_per_sec

    def execution_graph(self) -> ExecutionGraph:
        """Return the graph of this process, with the mean time of each node and with the dependencies.

        `dropped` counts calls and dependencies beyond the limits.
        """
        with self._unrecorded():
            graph = self._opened().graph(self._graph.dependencies())
        graph.dropped += self._scopes.dropped
        return graph

    def reset(self) -> None:
        """Forget all counts."""
        if isinstance(self._recorder, RingRecorder):
            with self._unrecorded():
                self._opened().reset()

    def _unrecorded(self) -> _Unrecorded:
        self._paths.settle()
        return _Unrecorded(self._paths.own.position)

    def _opened(self) -> Session:
        # Imported here, because a process that only records does not need NumPy.
        from cbtop.profiler.session import Session

        if self._session is None:
            if not isinstance(self._recorder, RingRecorder):
                raise TypeError(f"a {type(self._recorder).__name__} cannot be read back")
            self._session = Session(self._recorder, self._sample_every)
        return self._session
