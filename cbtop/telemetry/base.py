"""The interface of a telemetry service, which exports the data of `cbtop daemon` to a monitoring system."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cbtop.telemetry.subscription import Subscription


class Service(Protocol):
    """The interface of a service module: an option of `cbtop daemon`, such as `--metrics`, and the service itself."""

    METAVAR: str
    HELP: str

    def address(self, text: str) -> str:
        """Parse `text` as the address of this service. Raises argparse.ArgumentTypeError if it is invalid."""

    def serving(self, address: str, subscription: Subscription) -> AbstractContextManager[str]:
        """Export data to or from `address` while the context is open.

        Yields a line with the address. Raises CbtopError if the service cannot run. It has its own threads, and never
        delays the daemon's loop or end.
        """
