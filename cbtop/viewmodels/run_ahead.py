"""Find steps with times of the host only, because the host runs ahead of the GPU.

A host that launches kernels and does not wait for them ends a step before the GPU does. The times of its steps are
then the times of the launches, including waits for space in the queue of launches.
"""

from __future__ import annotations

from cbtop.protocol.vocabulary import BY_KERNELS, IDLE_BEFORE
from cbtop.viewmodels.source import SourceView

MARGIN = 1.05  # Kernels take at least this many times as long as the mean step of the host.


def kernels_us_if_ahead(view: SourceView) -> float | None:
    """Return the time of a step's kernels in µs if it is longer than the mean step of the host. Otherwise None."""
    books, steps = view.books, view.steps
    if not _is_by_kernels(view) or books is None or steps is None or not steps.recorded or not steps.mean_us:
        return None
    kernels_us = books.bricks_us / steps.recorded
    return kernels_us if kernels_us >= MARGIN * steps.mean_us else None


def may_run_ahead(view: SourceView) -> bool:
    """Return whether the host may run ahead: the GPU was busy as steps began, or kernels take longer than steps."""
    if not _is_by_kernels(view):
        return False
    return IDLE_BEFORE not in (view.backend or "") or kernels_us_if_ahead(view) is not None


def _is_by_kernels(view: SourceView) -> bool:
    # A training step lasts from one optimizer's step to the next, so its time is not the host's only.
    return view.training is None and BY_KERNELS in (view.backend or "")
