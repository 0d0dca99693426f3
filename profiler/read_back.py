"""The records of this process: statistics and graph, without a daemon."""

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
    from cbtop.profiler.recorder import Recorder
    from cbtop.profiler.scopes import Scopes
    from cbtop.profiler.session import Report, Session


class ReadBack:
    """Reads the process's own ring: `profiler.stats`. NumPy is loaded at the first call only.

    Every method raises TypeError if the recorder cannot be read back.
    """

    def __init__(
        self,
        recorder: Recorder,
        graph: GraphRecorder,
        scopes: Scopes,
        now_ns: Callable[[], int],
        sample_every: int,
        ended_why: Callable[[], str],
        settle: Callable[[], None],
    ) -> None:
        self._recorder = recorder
        self._graph = graph
        self._scopes = scopes
        self._now_ns = now_ns
        self._sample_every = sample_every
        self._ended_why = ended_why
        self._settle = settle
        self._session: Session | None = None

    def report(self, window_s: float | None = None) -> Report:
        """Return the records of this process, or those of its last `window_s` seconds; `print` shows it as text.

        Call it often enough that the ring does not overwrite unread records: 260,000 by default. A window reaches
        back no further than the ring does; `Report.window_s` is what it covers.
        """
        session = self._opened()
        report = session.report() if window_s is None else session.window(window_s, self._now_ns())
        return replace(report, ended_why=self._ended_why())

    def stats_for(self, brick: Brick) -> BrickStats | None:
        """Return the statistics of one brick over all layers, or None if it did not run."""
        name = brick.display_name if isinstance(brick, BrickId) else getattr(brick, "name", brick)
        return self._opened().stats_for(str(name))

    def category_stats(self) -> dict[BrickCategory, CategoryStats]:
        """Return the statistics of the categories that ran."""
        return self._opened().category_stats()

    @property
    def total_ns(self) -> int:
        """The time spent in bricks, none of it counted twice."""
        return self.report().total_ns

    @property
    def total_tokens(self) -> int:
        """The tokens of all steps."""
        return self.report().tokens

    @property
    def tokens_per_sec(self) -> float | None:
        """Tokens per second of wall-clock time, from the first step to the end of the last; None without steps."""
        return self.report().tokens_per_sec

    def execution_graph(self) -> ExecutionGraph:
        """Return the graph of this process: each node with the time of its mean call, and its dependencies.

        `dropped` counts calls and dependencies past the bounds on nodes, depth and dependencies.
        """
        graph = self._opened().graph(self._graph.dependencies())
        graph.dropped += self._scopes.dropped
        return graph

    def reset(self) -> None:
        """Forget all counts."""
        if isinstance(self._recorder, RingRecorder):
            self._opened().reset()

    def _opened(self) -> Session:
        # This imports NumPy, which a process that only records does not need.
        from cbtop.profiler.session import Session

        if self._session is None:
            if not isinstance(self._recorder, RingRecorder):
                raise TypeError(f"a {type(self._recorder).__name__} cannot be read back")
            self._session = Session(self._recorder, self._sample_every)
        self._settle()
        return self._session
