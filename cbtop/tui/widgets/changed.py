"""What a terminal is sent of a screen that has changed in places: those cells, and none beside them."""

from __future__ import annotations

from rich.console import Console
from textual._compositor import ChopsUpdate


class ChangedCells(ChopsUpdate):
    """Textual's own sends with them all that lies to the left of them in their widget: half of all bytes."""

    @classmethod
    def of(cls, update: ChopsUpdate) -> ChangedCells:
        """The same update, sent without what has not changed."""
        return cls(update.chops, update.spans, update.chop_ends)

    def render_segments(self, console: Console) -> str:
        sequences: list[str] = []
        for y, begin, end in self.spans:
            for stop, (start, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                first, last = max(start, begin), min(stop, end)
                if strip is not None and first < last:
                    there = strip.crop(first - start, last - start)
                    sequences.append(f"\x1b[{y + 1};{first + 1}H{there.render(console)}")
        return "".join(sequences)
