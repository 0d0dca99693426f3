"""The counts of a source's records: those that arrived, and those that did not."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.client.source_record import SourceRecord


@dataclass(frozen=True, slots=True)
class LossView:
    """Counts of records; produced == received + dropped, always.

    `before_attach` is the part of `dropped` that was overwritten before the daemon first read the ring, `rejected`
    the part that named an unknown node, `on_the_wire` the part that this viewer missed and the next update brings.
    `unread` records are written but not read yet. `left_out` counts announcements (not records) beyond the limits.
    """

    produced: int
    received: int
    dropped: int
    before_attach: int
    rejected: int
    on_the_wire: int = 0
    unread: int = 0
    left_out: int = 0

    @property
    def seen(self) -> int:
        """Records written since the daemon attached."""
        return self.produced - self.before_attach

    @property
    def lost(self) -> int:
        """Those of them that are lost. Records on the wire arrive with the next update."""
        return self.dropped - self.before_attach - self.on_the_wire

    @property
    def lost_percent(self) -> float:
        """Percentage of records lost since the daemon attached."""
        return 100 * self.lost / self.seen if self.seen else 0.0


def loss_view(record: SourceRecord) -> LossView:
    """Return how many of its records arrived here and how many did not."""
    received, state = record.stats.received, record.state
    if state is None:
        return LossView(received, received, 0, 0, 0, 0, 0)
    # If totals come in several messages, the state follows the last of them and is old until then.
    ahead = max(0, received - state.received)
    on_the_wire = max(0, state.received - received)
    return LossView(
        produced=state.produced + ahead,
        received=received,
        dropped=state.overwritten + state.rejected + on_the_wire,
        before_attach=state.before_attach,
        rejected=state.rejected,
        on_the_wire=on_the_wire,
        unread=max(0, state.unread - ahead),
        left_out=state.left_out,
    )
