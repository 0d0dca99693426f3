"""What an exporter is to `cbtop daemon`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from cbtop.telemetry.link import Link


class Exporter(Protocol):
    """A module with an option of the daemon's (`--metrics`) and what runs when it is given."""

    METAVAR: str
    HELP: str

    def address(self, text: str) -> str:
        """`text` as an address of this exporter; raises argparse.ArgumentTypeError where it is none."""

    def exporting(self, address: str, link: Link) -> AbstractContextManager[str]:
        """Export while the context is open; gives lines that say where. Raises CbtopError where it can't.

        Runs on threads of its own, and never holds up the daemon: neither its loop nor its end.
        """
