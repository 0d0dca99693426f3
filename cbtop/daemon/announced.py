"""Check the catalog messages of a process, and find the messages that the daemon has not published yet."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol import codec
from cbtop.protocol.announcements import Announcements, Key, comes_to_fail, key_of
from cbtop.protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, CatalogMessage, Goodbye, HostHello, Node


class Announced:
    """The valid catalog messages of one process. A message may replace an earlier one."""

    def __init__(self) -> None:
        self.hello: HostHello | None = None
        self.nodes = NodeTable()
        self.goodbye: Goodbye | None = None
        self.received = 0  # number of catalog messages from the process
        self.left_out = 0  # number of announcements beyond a limit, which were dropped
        self._others: Announcements[CatalogMessage] = Announcements()
        # the messages since the last call of `changes`
        self._changed: dict[Key, CatalogMessage] = {}

    def add(self, messages: Sequence[CatalogMessage]) -> None:
        """Add the next catalog messages of the process. Raises ValueError if a message violates the protocol."""
        self.received += len(messages)
        for message in messages:
            if (self.hello is None) != isinstance(message, HostHello):
                raise ValueError("the catalog does not begin with one hello")
            key = key_of(message)
            match message:
                case HostHello():
                    if message.protocol_major != PROTOCOL_MAJOR:
                        raise ValueError(
                            f"it records protocol {message.protocol_major}.{message.protocol_minor}, "
                            f"this cbtop reads {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
                        )
                    self.hello = message
                case Node():
                    self.nodes.add(message)
                case Goodbye():
                    self.goodbye = message
                case _:
                    last = comes_to_fail(message, self._others.get(key))
                    if not self._others.keep(key, message, len(codec.encode(message)), last=last):
                        self.left_out += 1
                        continue
                    if last:
                        self._changed.pop(key, None)
            self._changed[key] = message

    @property
    def messages(self) -> list[CatalogMessage]:
        """All stored messages of the process, in the order of a catalog."""
        first = [] if self.hello is None else [self.hello]
        last = [] if self.goodbye is None else [self.goodbye]
        return [*first, *self.nodes.nodes, *self._others, *last]

    def changes(self) -> tuple[CatalogMessage, ...]:
        """Return the messages that were announced since the last call of this method."""
        changed = tuple(self._changed.values())
        self._changed.clear()
        return changed

    def is_in_step(self, node: int) -> bool:
        """Whether the node with this id is a step or inside a step."""
        return node <= len(self.nodes) and self.nodes.step_of[node] > 0
