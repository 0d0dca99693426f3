"""Services for engines that exist (Prometheus, OpenTelemetry), one file each, in the order `--help` lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from cbtop.protocol.endpoint import from_here
from cbtop.protocol.keys import DaemonKeys
from cbtop.telemetry import openmetrics, otlp
from cbtop.telemetry.base import Service

SERVICES: dict[str, Service] = {"metrics": openmetrics, "otlp": otlp}


@contextmanager
def serving(endpoint: str, keys: DaemonKeys | None, addresses: Mapping[str, str | None]) -> Iterator[list[str]]:
    """Export what the daemon at `endpoint` publishes to the address of each service that has one.

    `keys` are those it serves with. Gives lines that say so. Raises CbtopError for a service that cannot run.
    """
    with ExitStack() as stack:
        wanted = {name: address for name, address in addresses.items() if address is not None}
        if not wanted:
            yield []
            return
        # The store and the views, which a daemon that exports nothing neither waits for nor keeps in memory.
        from cbtop.telemetry.subscription import Subscription

        subscription = stack.enter_context(Subscription(from_here(endpoint), keys.as_viewer if keys else None))
        yield [stack.enter_context(SERVICES[name].serving(address, subscription)) for name, address in wanted.items()]
