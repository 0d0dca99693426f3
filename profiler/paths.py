"""The paths of one profiler: of the host, of its device, and of models on devices. A path times calls on one
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbtop.profiler.path import Path, host_path
from cbtop.protocol.vocabulary import SyncMode

if TYPE_CHECKING:
    from cbtop.profiler.clocks import DeviceClock
    from cbtop.profiler.device_path import DevicePath
    from cbtop.profiler.hot_path import Callbacks
    from cbtop.profiler.pending import Pending
    from cbtop.profiler.scopes import Scopes


class Paths:
    """Makes and ends the paths of a profiler.

    `own` times the profiler's own bricks: it is the `device` path, or without one the `host` path. Each function in
    `settlers` records work that a device has reported. If its argument is True, it waits for the device first.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        clock_ns: Callable[[], int],
        device_clock: DeviceClock | None,
        sync_mode: SyncMode,
        pending: Pending,
        scopes: Scopes,
        flush: Callable[[], None],
    ) -> None:
        self.sync_mode = sync_mode
        self._is_recording = True
        self.settlers: list[Callable[[bool], None]] = []
        self.of_models: list[DevicePath] = []
        self._callbacks = callbacks
        self._pending = pending
        self._scopes = scopes
        self._flush = flush
        self.host = host_path(callbacks, clock_ns)
        self.device: DevicePath | None = None if device_clock is None else self._on(device_clock, callbacks)
        self.own: Path = self.host if self.device is None else self.device

    def __iter__(self) -> Iterator[Path]:
        return iter([self.host, *self.on_devices])

    @property
    def on_devices(self) -> list[DevicePath]:
        """The paths that time calls on a device's clock."""
        return [*self.of_models, *([] if self.device is None else [self.device])]

    def set_recording(self, on: bool) -> None:
        """Turn recording on or off."""
        self._is_recording = on
        for path in self:
            path.set_recording(on)

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Choose when the device path of the profiler waits for the device. The paths for models never wait."""
        self.sync_mode = mode
        if self.device is not None:
            self.device.mode = mode

    def begin_for_models(self, clock: DeviceClock, give_up: Callable[[Exception], None]) -> DevicePath:
        """Return a path for models on the device of `clock`, valid until `end`. `give_up` is called if it fails."""
        path = self._on(clock, replace(self._callbacks, give_up=give_up))
        path.mode = SyncMode.DEFERRED
        self.of_models.append(path)
        path.set_recording(self._is_recording)
        return path

    def end(self, path: DevicePath) -> None:
        """Stop timing on `path`, which `for_models` has returned."""
        if path in self.of_models:
            self.of_models.remove(path)
        path.is_over = True
        path.set_recording(False)
        if path.kept is not None and path.kept.settle in self.settlers:
            self.settlers.remove(path.kept.settle)

    def settle(self, may_wait: bool = False) -> None:
        """Record what the devices have reported. If `may_wait`, first wait until they have reported everything."""
        for settle in list(self.settlers):
            settle(may_wait)

    def discard_kept(self) -> None:
        """Drop the ended steps that wait for times of a device."""
        for path in self.on_devices:
            if path.kept is not None:
                path.kept.discard()

    def _on(self, clock: DeviceClock, callbacks: Callbacks) -> DevicePath:
        """Return a path on a device's clock.

        If the clock's marks can be read without waiting, the path keeps ended steps until their times are known.
        """
        from cbtop.profiler.device_path import DevicePath
        from cbtop.profiler.held_steps import HeldSteps

        kept = None
        if hasattr(clock, "is_reached"):
            stamping: Any = clock
            kept = HeldSteps(stamping, callbacks, self._scopes, self._flush)
            self.settlers.append(kept.settle)
        return DevicePath(clock, self.host, self.sync_mode, callbacks, self._pending, kept)
