"""The telemetry services for Prometheus and OpenTelemetry, one file each, in the order of `--help`."""

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
    """Export the data of the daemon at `endpoint` by each service that has an address in `addresses`.

    `keys` are the keys of the daemon. Yields a line about each service. Raises CbtopError if a service cannot run.
    """
    with ExitStack() as stack:
        wanted = {name: address for name, address in addresses.items() if address is not None}
        if not wanted:
            yield []
            return
        # The service is imported here, so that a daemon without exports does not load the store and the views.
        from cbtop.telemetry.subscription import Subscription

        subscription = stack.enter_context(Subscription(from_here(endpoint), keys.as_viewer if keys else None))
        yield [stack.enter_context(SERVICES[name].serving(address, subscription)) for name, address in wanted.items()]
