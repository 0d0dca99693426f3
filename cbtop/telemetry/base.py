"""What a telemetry service is to `cbtop daemon`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cbtop.telemetry.subscription import Subscription


class Service(Protocol):
    """A module with an option of the daemon's (`--metrics`) and what runs when it is given."""

    METAVAR: str
    HELP: str

    def address(self, text: str) -> str:
        """`text` as an address of this service; raises argparse.ArgumentTypeError where it is none."""

    def serving(self, address: str, subscription: Subscription) -> AbstractContextManager[str]:
        """Export while the context is open; gives lines that say where. Raises CbtopError where it can't.

        Runs on threads of its own, and never holds up the daemon: neither its loop nor its end.
        """
