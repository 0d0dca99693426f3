"""A viewer that receives the daemon's data for the telemetry services. Only its own thread uses the socket and the
store.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Self

from cbtop.client.collector import SILENT_AFTER_S, Collector
from cbtop.client.store import Store
from cbtop.errors import NoDataError
from cbtop.protocol.keys import ViewerKeys
from cbtop.telemetry.counters import Counters
from cbtop.telemetry.metrics import Snapshot
from cbtop.telemetry.snapshot import snapshot

POLL_MS = 50
ANSWER_S = 2.0


class Subscription:
    """Receives the data of the daemon at `endpoint`. Any thread may request a snapshot.

    The daemon never waits for a subscriber. Raises EndpointError if too few files can be opened.
    """

    def __init__(self, endpoint: str, keys: ViewerKeys | None = None) -> None:
        self.endpoint = endpoint
        self.keys = keys
        self._stop = threading.Event()
        self._asked: SimpleQueue[Future[Snapshot]] = SimpleQueue()
        # From here on, only the new thread may use the collector.
        self._collector = Collector(endpoint, Store(), keys=keys)
        self._thread = threading.Thread(target=self._run, name="cbtop-telemetry", daemon=True)
        self._thread.start()

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the daemon's current data. Raises NoDataError if the daemon is silent."""
        asked: Future[Snapshot] = Future()
        self._asked.put(asked)
        try:
            return asked.result(ANSWER_S)
        except TimeoutError as error:
            asked.cancel()
            raise NoDataError("the daemon has not answered yet") from error

    def close(self) -> None:
        """Close the link to the daemon. Pending requests are not answered."""
        self._stop.set()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        collector, counters = self._collector, Counters()
        try:
            while not self._stop.is_set():
                collector.poll(POLL_MS)
                if collector.store.daemon or collector.refused:
                    self._answer(collector, counters)
        finally:
            collector.close()

    def _answer(self, collector: Collector, counters: Counters) -> None:
        """Answer all pending requests with one snapshot. Later requests wait for the next one, because new data must
        arrive first.
        """
        waiting = [self._asked.get() for _ in range(self._asked.qsize())]
        waiting = [asked for asked in waiting if asked.set_running_or_notify_cancel()]
        if not waiting:
            return
        try:
            found = _read(collector, counters)
        except Exception as error:  # noqa: BLE001 - raised again in the requesting thread
            for asked in waiting:
                asked.set_exception(error)
        else:
            for asked in waiting:
                asked.set_result(found)


def _read(collector: Collector, counters: Counters) -> Snapshot:
    if collector.refused:
        raise NoDataError(collector.refused)
    if collector.silent_s > SILENT_AFTER_S:
        raise NoDataError(f"nothing heard from the daemon for {collector.silent_s:.0f} s")
    return counters.held(snapshot(collector.store, time.time_ns()), collector.store)
