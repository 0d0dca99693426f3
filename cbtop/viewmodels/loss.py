"""Count the records of a source: how many arrived, and how many were lost."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.client.source_record import SourceRecord


@dataclass(frozen=True, slots=True)
class LossView:
    """Counts of the records of a source. Always: produced == received + dropped.

    `dropped` includes `rejected` records (with an unknown node), `on_the_wire` records (which come with the next
    update), and overwritten records. `before_attach` are the records that were overwritten before the daemon first
    read the ring. `unread` records were written but not read yet. `left_out` counts announcements beyond a limit, not
    records. The `rejected` records include those `without_node`: calls too deep inside themselves, whose time belongs
    to the call around them. They are not lost.
    """

    produced: int
    received: int
    dropped: int
    before_attach: int
    rejected: int
    on_the_wire: int = 0
    unread: int = 0
    left_out: int = 0
    without_node: int = 0

    @property
    def seen(self) -> int:
        """Number of records that the process has written since the daemon found it."""
        return self.produced - self.before_attach

    @property
    def lost(self) -> int:
        """Number of records that were lost since the daemon found the process.

        Records on the wire are not lost. They come with the next update.
        """
        return self.dropped - self.before_attach - self.on_the_wire - self.without_node

    @property
    def lost_percent(self) -> float:
        """Percentage of the records that were lost since the daemon found the process."""
        return 100 * self.lost / self.seen if self.seen else 0.0


def loss_view(record: SourceRecord) -> LossView:
    """Count the source's records that have arrived here, and the records that have not."""
    received, state = record.stats.received, record.state
    if state is None:
        return LossView(received, received, 0, 0, 0, 0, 0)
    # Totals may come in several messages, and the source's state in the last one. Until then, `state` is older than
    # the totals.
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
        without_node=state.without_node,
    )
