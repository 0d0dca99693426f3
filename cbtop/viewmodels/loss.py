"""Counts of a source's records: how many arrived, and how many did not."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.client.source_record import SourceRecord


@dataclass(frozen=True, slots=True)
class LossView:
    """Counts of records. Always, produced == received + dropped.

    Three kinds of records count as `dropped`. `before_attach` records were overwritten before the daemon first read
    the ring. `rejected` records named an unknown node. `on_the_wire` records come with the next update. `unread`
    records are written but not read yet. `left_out` counts announcements (not records) beyond the limits.
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
        """Records lost since the daemon attached.

        Records on the wire are not lost, because the next update brings them.
        """
        return self.dropped - self.before_attach - self.on_the_wire

    @property
    def lost_percent(self) -> float:
        """Lost records, in percent of all records since the daemon attached."""
        return 100 * self.lost / self.seen if self.seen else 0.0


def loss_view(record: SourceRecord) -> LossView:
    """Return how many records of `record` have arrived here, and how many have not."""
    received, state = record.stats.received, record.state
    if state is None:
        return LossView(received, received, 0, 0, 0, 0, 0)
    # If totals come in several messages, the state comes after the last of them. Until then, the state is old.
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
