"""Chooses how a model is timed. If one CUDA device has the whole model, small kernels on the device (stamps) store
the device's time.

Rules
- A device's clock is made when the first model on the device is planned, never at import. A forked child makes no
  clock.
- All models of a profiler on one device share one path and one clock. Both are removed when the last model is
  detached.
- The host times all other models: on several devices, on other devices than CUDA's, or without a working clock. Times
  of the host for work on a device are named launches.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.module_tree import devices_of
from cbtop.profiler.instrument.torch_clock import torch_clock, while_current
from cbtop.profiler.instrument.torch_internals import is_in_bad_fork
from cbtop.profiler.instrument.trouble import in_words, log_once
from cbtop.protocol.signals import reraise_host_error
from cbtop.protocol.vocabulary import LAUNCHES, BrickId

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.clocks import StampingClock
    from cbtop.profiler.device_path import DevicePath
    from cbtop.profiler.hot_path import Position
    from cbtop.profiler.path import Path
    from cbtop.profiler.profiler import BrickProfiler


@dataclass(frozen=True, slots=True)
class Timing:
    """The method of timing a model, and the meaning of its times."""

    path: Path
    backend: str = ""  # the backend in the names of the model's bricks; "" on a CPU
    is_there: bool = False  # whether the device measures the times
    # Whether CUPTI records the kernels of some steps (kernel_steps.py); otherwise stamps are used.
    by_kernels: bool = False

    @property
    def position(self) -> Position:
        """The caller's position in the graph of steps, layers and bricks."""
        return self.path.position

    def start_brick(self, brick: Any) -> Any:
        """Start timing `labelled(brick)`."""
        return self.path.start_brick(self.labelled(brick))

    def stop_brick(self, timer: Any, elements: int, failed: bool = False) -> None:
        """Stop timing the brick, and record it."""
        self.path.stop_brick(timer, elements, failed)

    def labelled(self, brick: Any) -> Any:
        """Return `brick` with the name of a backend that says what the brick's times mean."""
        return _named(brick, self.backend, self.is_there) if self.backend else brick


@functools.lru_cache(maxsize=1024)
def _named(brick: Any, backend: str, is_there: bool) -> Any:
    definition = BrickDefinition.of(brick) if isinstance(brick, BrickId) else brick
    return replace(definition, backend=backend, work=definition.work if is_there else None)


@dataclass(slots=True)
class _Stamped:
    """A device's clock, and the path that uses it for all models on this device."""

    path: DevicePath
    clock: StampingClock
    is_ours: bool


_stamped: weakref.WeakKeyDictionary[BrickProfiler, dict[int, _Stamped | None]] = weakref.WeakKeyDictionary()
_said: set[str] = set()


def timing_of(profiler: BrickProfiler, model: nn.Module) -> Timing:
    """Return the method that `profiler` uses to time `model` on its current devices."""
    kinds = _kinds_of_devices(model) - {"cpu"}
    if not kinds:
        return Timing(profiler.parts.paths.host)
    device = _only_cuda_device(model)
    if device is not None and profiler.parts.by_kernels:
        return Timing(profiler.parts.paths.host, "torch on cuda", is_there=True, by_kernels=True)
    stamped = None if device is None else _on(profiler, device)
    if stamped is not None:
        return Timing(stamped.path, "torch on cuda", is_there=True)
    given = profiler.parts.paths.device  # the host has passed a device clock to the profiler, so use its times
    is_given = given is not None and given.kept is None
    backend = f"torch on {min(kinds)}{LAUNCHES}"
    return Timing(given if given is not None and is_given else profiler.parts.paths.host, backend)


def leave(profiler: BrickProfiler, used: list[Path]) -> None:
    """Remove all device paths of `profiler` that are not in `used`, with their clocks."""
    known = _stamped.get(profiler, {})
    for device, stamped in list(known.items()):
        if stamped is not None and not any([path is stamped.path for path in used]):
            del known[device]
            _end(profiler, stamped)


def _kinds_of_devices(model: nn.Module) -> set[str]:
    return {str(device.type) for device in devices_of(model)}


def _only_cuda_device(model: nn.Module) -> int | None:
    found = devices_of(model)
    device = found.pop() if len(found) == 1 else None
    return device.index if device is not None and device.type == "cuda" and torch.version.cuda else None


def _on(profiler: BrickProfiler, device: int) -> _Stamped | None:
    known = _stamped.setdefault(profiler, {})
    if device not in known:
        if is_in_bad_fork():
            return None
        try:
            with while_current(device):
                if torch.cuda.is_current_stream_capturing():
                    return None
                known[device] = _made(profiler, device)
        except Exception as error:  # noqa: BLE001 - without a driver or memory, the host goes on untimed
            reraise_host_error(error)
            known[device] = None
            _say_once(f"what runs on cuda:{device} is timed by the host, as launches: {in_words(error)}")
    stamped = known[device]
    return None if stamped is None or stamped.path.is_over else stamped


def _made(profiler: BrickProfiler, device: int) -> _Stamped:
    given: Any = profiler.parts.clock
    is_ours = getattr(given, "index", None) != device
    clock = torch_clock() if is_ours else given

    def failed(error: Exception) -> None:
        reraise_host_error(error)
        # The host's stack is full, so only this brick is lost.
        if isinstance(error, RecursionError):
            return
        known = _stamped.get(profiler, {})
        stamped = known.get(device)
        if stamped is not None:
            known[device] = None
            profiler.parts.paths.end(stamped.path)
            _say_once(f"what runs on cuda:{device} is timed by the host again, as launches: {in_words(error)}")

    return _Stamped(profiler.parts.paths.begin_for_models(clock, failed), clock, is_ours)


def _end(profiler: BrickProfiler, stamped: _Stamped) -> None:
    try:
        if stamped.path.kept is not None:
            stamped.path.kept.settle(True)
        if stamped.is_ours:
            stamped.clock.close()
    except Exception as error:  # noqa: BLE001 - nothing can be released on a device that is lost
        reraise_host_error(error)
    finally:
        profiler.parts.paths.end(stamped.path)


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        log_once(line)
