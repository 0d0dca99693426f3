"""Run the device samplers while viewers listen, each in its own thread and at its own interval.

A driver may be slow or hang, so the daemon's loop never waits for it. Meanwhile, viewers get the last sample and its
time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable

from cbtop.daemon.devices.base import NO_ANSWER_YET, Sampler
from cbtop.protocol.device_messages import DeviceSample

INTERVAL_S = 1.0
# At its end, the daemon waits this many seconds for a driver's thread. A slower one ends with the process.
LEAVE_S = 1.0

_log = logging.getLogger("cbtop.daemon")


class NewestSamples:
    """Samples devices in threads, and keeps the newest sample of every sampler."""

    def __init__(self, samplers: Iterable[type[Sampler]], interval_s: float = INTERVAL_S) -> None:
        self._runs = [_Run(sampler(), interval_s) for sampler in samplers]

    def listen(self, pids: Collection[int]) -> None:
        """Start or continue sampling devices.

        The samples have the processes `pids`, and all others that use a device.
        """
        for run in self._runs:
            run.listen(frozenset(pids).union(*(other.pids_found for other in self._runs if other is not run)))

    def rest(self) -> None:
        """Pause sampling devices until the next call of `listen`."""
        for run in self._runs:
            run.rest()

    def fresh(self) -> list[DeviceSample]:
        """Return the samples since the last call."""
        return [sample for run in self._runs if (sample := run.fresh()) is not None]

    def latest(self) -> list[DeviceSample]:
        """Return the newest sample of each device sampler."""
        return [run.latest for run in self._runs if run.latest is not None]

    def close(self) -> None:
        """Stop sampling devices. Each thread closes its sampler."""
        for run in self._runs:
            run.stop()
        deadline_s = time.monotonic() + LEAVE_S
        for run in self._runs:
            run.join(max(0.0, deadline_s - time.monotonic()))


class _Run:
    """A device sampler and its thread, which starts when the first viewer listens."""

    def __init__(self, sampler: Sampler, interval_s: float) -> None:
        self.latest: DeviceSample | None = None
        self.pids_found: frozenset[int] = frozenset()
        self._sampler = sampler
        self._interval_s = interval_s
        self._pids: frozenset[int] = frozenset()
        self._given: DeviceSample | None = None
        self._is_heard = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self, pids: Collection[int]) -> None:
        self._pids = frozenset(pids)
        if self._is_heard.is_set():
            return
        # Viewers get this empty sample until the sampler has answered.
        self.latest = DeviceSample(self._sampler.name, time.perf_counter_ns(), trouble=NO_ANSWER_YET)
        self._is_heard.set()
        if self._thread is None:
            name = f"cbtop-{self._sampler.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def rest(self) -> None:
        self._is_heard.clear()
        self.latest = None

    def fresh(self) -> DeviceSample | None:
        sample = self.latest
        if sample is self._given:
            return None
        self._given = sample
        return sample

    def stop(self) -> None:
        self._stop.set()
        self._is_heard.set()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            begun_s = time.monotonic()
            sample = self._sample()
            if self._is_heard.is_set():
                self.latest = sample
                self.pids_found = frozenset(found.pid for device in sample.devices for found in device.processes)
            self._stop.wait(max(0.0, self._interval_s - (time.monotonic() - begun_s)))
            if not self._is_heard.is_set():
                # Without viewers, close the sampler, so that the driver may power down an unused GPU.
                self._sampler.close()
                self._is_heard.wait()
        self._sampler.close()

    def _sample(self) -> DeviceSample:
        begun_ns = time.perf_counter_ns()
        try:
            return self._sampler.sample(self._pids)
        except Exception as error:  # noqa: BLE001 - a failing sampler must not affect the others or the daemon
            _log.debug("%s", self._sampler.name, exc_info=error)
            return DeviceSample(self._sampler.name, begun_ns, trouble=f"it failed: {error or type(error).__name__}")
