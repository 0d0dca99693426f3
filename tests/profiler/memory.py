"""A recorder for tests that stores everything."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.protocol.codec import EncodedNode
from cbtop.protocol.messages import CatalogMessage, Goodbye, Node
from cbtop.protocol.ring import FLAG_LOOSE, FLAG_PLAIN
from cbtop.protocol.vocabulary import NodeKind


def is_plain(tag: int) -> bool:
    """Return whether a record is a step that was only timed as a whole."""
    return tag & (FLAG_LOOSE | FLAG_PLAIN) == FLAG_PLAIN


class Memory:
    """A recorder that stores everything."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, int, int]] = []
        self.said: list[CatalogMessage] = []

    def record(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        self.records.append((tag, start_ns, end_ns, elements))

    def announce(self, message: CatalogMessage) -> None:
        self.said.append(message)

    def announce_nodes(self, nodes: Sequence[EncodedNode]) -> None:
        for node, _ in nodes:
            self.announce(node)

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""

    def close(self, reason: str) -> None:
        self.said.append(Goodbye(reason))

    @property
    def nodes(self) -> list[tuple[int, int | None, NodeKind, str]]:
        return [(n.id, n.parent, n.kind, n.name) for n in self.said if isinstance(n, Node)]
