"""The clock of `elapsed_ns`. Callers read it to time deferred bricks, and pass the times back to cbtop."""

from __future__ import annotations

from collections.abc import Callable

from cbtop.profiler.graph_recorder import UsageError, checked_ns


class ElapsedClock:
    """Counts ns since `restart`, or since it was first read.

    If the host's clock fails, `failed` gets the error, and this clock stops.
    """

    __slots__ = ("_epoch_ns", "_failed", "_now_ns")

    def __init__(self, now_ns: Callable[[], int], failed: Callable[[Exception], None]) -> None:
        self._now_ns, self._failed = now_ns, failed
        self._epoch_ns: int | None = None

    def restart(self) -> None:
        self._epoch_ns = self._host_now_ns()

    def forget(self) -> None:
        """Begin at 0 when the clock is read next."""
        self._epoch_ns = None

    def now_ns(self) -> int:
        now_ns = self._host_now_ns()
        if self._epoch_ns is None:
            self._epoch_ns = now_ns
        return now_ns - self._epoch_ns

    def on_host(self, what: str, elapsed_ns: int, is_over: Callable[[], bool]) -> int:
        """Convert a time of this clock to the host's clock.

        Raises UsageError for a time before 0 or after now. Once recording `is_over`, such times are accepted, because
        the host's clock may have failed.
        """
        elapsed_ns, now_ns = checked_ns(what, elapsed_ns), self.now_ns()
        if not 0 <= elapsed_ns <= now_ns and not is_over():
            raise UsageError(
                f"{what} of {elapsed_ns} ns, but the profiler's elapsed_ns() is {now_ns} now; take the times from it"
            )
        return elapsed_ns + (self._epoch_ns or 0)

    def _host_now_ns(self) -> int:
        try:
            return self._now_ns()
        except Exception as error:  # noqa: BLE001 - the host's clock
            self._failed(error)
            return self._epoch_ns or 0
