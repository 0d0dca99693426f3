"""`cbtop.diff`: two runs compared by brick and layer, as `cbtop diff` does."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported for types only, because numpy and zmq load slowly
    from cbtop.comparison.run_diff import RunDiff


def diff(
    base: str | PathLike[str],
    new: str | PathLike[str],
    *,
    phase: str | None = None,
    source: str | None = None,
    anyway: bool = False,
) -> ComparedRuns:
    """Compare the run `new` with the run `base`. Each is a recording or a file of runs (`cbtop diff --save`).

    `phase` limits the steps. If a recording has several processes, `source` names one by its pid, rank or key. With
    `anyway`, runs of different machines are compared, too.

    Raises UsageError for a file that is neither, NoDataError if no process has recorded two steps, and UntrustedError
    if a file is damaged.
    """
    # Imported here, because numpy and zmq load slowly.
    from cbtop.comparison.run_diff import diff_of
    from cbtop.feeds.run_reader import saved_runs

    bases, news = saved_runs(Path(base), source), saved_runs(Path(new), source)
    return ComparedRuns(diff_of(bases, news, phase, anyway=anyway))


class ComparedRuns:
    """The changes from one run to another. `print` shows them as text, and a notebook as a table."""

    def __init__(self, found: RunDiff) -> None:
        self._found = found

    @property
    def why_not(self) -> str:
        """The reason why the runs are not comparable, or "" if they are."""
        return self._found.why_not

    @property
    def slower(self) -> list[str]:
        """The names of the bricks and layers that are slower beyond noise, such as `DownProjection in Layer 5`."""
        return list(dict.fromkeys(place.name for part in self._found.parts for place in part.slower))

    def fields(self) -> dict[str, object]:
        """Return all figures, as `cbtop diff --format json` prints them."""
        from cbtop.reports.run_diff import diff_fields

        return diff_fields(self._found)

    def __str__(self) -> str:
        """Return the changes as text, as `cbtop diff` prints them."""
        from cbtop.reports.run_diff import diff_text

        return diff_text(self._found)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the changes as text. IPython calls this method in a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Return the changes as HTML. Notebooks call this method to show them."""
        from cbtop.reports.run_diff import diff_html

        return diff_html(self._found)
