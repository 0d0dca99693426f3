"""Count the records of a source: how many arrived, and how many were lost."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.client.source_record import SourceRecord


@dataclass(frozen=True, slots=True)
class LossView:
    """Counts of the records of a source. The equation produced == received + dropped always holds.

    `dropped` includes three other counts. `before_attach` records were overwritten before the daemon first read the
    ring. `rejected` records had an unknown node. `on_the_wire` records will come with the next update. `unread`
    records have been written but not read yet. `left_out` does not count records, but announcements beyond a limit.
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
        """Number of records that the process has written since the daemon found it."""
        return self.produced - self.before_attach

    @property
    def lost(self) -> int:
        """Number of records lost since the daemon found the process.

        Records on the wire are not lost, because the next update brings them.
        """
        return self.dropped - self.before_attach - self.on_the_wire

    @property
    def lost_percent(self) -> float:
        """Percentage of the records that were lost since the daemon found the process."""
        return 100 * self.lost / self.seen if self.seen else 0.0


def loss_view(record: SourceRecord) -> LossView:
    """Count the records of the source that have arrived here, and the records that have not arrived."""
    received, state = record.stats.received, record.state
    if state is None:
        return LossView(received, received, 0, 0, 0, 0, 0)
    # The totals may come in several messages. The last message has the source's state. Until it arrives, `state` is
    # older than the totals.
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
