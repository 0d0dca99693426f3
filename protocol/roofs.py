"""The roofs that `cbtop calibrate` has measured, kept in one JSON file under the user's cache directory.

Rules
- A profiled process reads it once, when a model is attached. It reads only this file and asks nothing of a GPU.
- A roof is keyed by what it depends on: for a processor its model and the number of threads; for a GPU its UUID, its
  multiprocessors (fewer in a MIG instance), its driver's version and its power limit.
"""

from __future__ import annotations

import io
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbtop.protocol.cache import cache_dir
from cbtop.protocol.codec import plain_for, reader_for
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.kept_file import read_list, try_to_write, write_list
from cbtop.protocol.messages import Ceiling

SCHEMA = "cbtop.roofs/1"
MAX_DEVICES = 32  # the newest are kept
MAX_CEILINGS = 16  # of one device
_FIRST_PROCESSOR_BYTES = 4096  # of /proc/cpuinfo: the rest, about other processors, takes the kernel time
_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\s(\d+\.\d+(?:\.\d+)?)\s")
_ARM_NAMES = ("CPU implementer", "CPU part", "CPU variant")


@dataclass(frozen=True, slots=True)
class DeviceRoofs:
    """The measurements of one device. Fields that it does not have, or that are not known, are empty."""

    device: str
    ceilings: tuple[Ceiling, ...]
    threads: int | None = None
    uuid: str = ""
    multiprocessors: int | None = None
    driver: str = ""
    power_limit_w: int | None = None
    weights_bytes: int | None = None  # of the model that one of them was measured for

    @property
    def key(self) -> tuple[object, ...]:
        """A new measurement with the same key replaces the old one."""
        gpu = self.uuid, self.multiprocessors, self.driver, self.power_limit_w
        return self.device, self.threads, self.weights_bytes, *gpu

    @property
    def title(self) -> str:
        """The name of the measured device."""
        if self.threads is not None:
            weights = "" if self.weights_bytes is None else f", {self.weights_bytes:,} bytes of weights"
            return f"{self.device}, {self.threads} thread{'s' if self.threads > 1 else ''}{weights}"
        limit = "n/a" if self.power_limit_w is None else f"{self.power_limit_w} W"
        return f"{self.device}, {self.uuid}, driver {self.driver or 'n/a'}, power limit {limit}"

    @property
    def measured_on(self) -> str:
        """The day."""
        return self.ceilings[0].measured_on[: len("2026-11-22")] if self.ceilings else ""


_read = reader_for(DeviceRoofs)
_plain = plain_for(DeviceRoofs)


def roofs_file() -> Path:
    """Return the path of their file."""
    return cache_dir() / "roofs.json"


def known_roofs() -> tuple[DeviceRoofs, ...]:
    """Return all that are kept, the newest last; none if there is no file. Raises RoofsError if it cannot be read."""
    found = read_list(roofs_file(), SCHEMA, "devices", MAX_DEVICES, _device)
    return () if found is None else found


def keep_roofs(measured: Iterable[DeviceRoofs]) -> None:
    """Keep these with the others, and replace older ones with the same key. Raises RoofsError."""
    new = {one.key: one for one in measured}
    try:
        known = known_roofs()
    except RoofsError:
        known = ()  # losing an unreadable file does not matter
    devices = [*(one for one in known if one.key not in new), *new.values()][-MAX_DEVICES:]
    write_list(roofs_file(), SCHEMA, "devices", [_plain(one) for one in devices])


def try_to_keep() -> None:
    """Raise RoofsError if `keep_roofs` could not write its temporary file. Leaves no file."""
    try_to_write(roofs_file())


def roofs_of_cpu(known: Iterable[DeviceRoofs], threads: int, weights_bytes: int | None = None) -> DeviceRoofs | None:
    """Return the newest of this machine's processor with this many threads, measured for such weights or for none."""
    wanted = cpu_name(), threads, weights_bytes
    found = [one for one in known if (one.device, one.threads, one.weights_bytes) == wanted]
    return found[-1] if found else None


def roofs_of_gpu(known: Iterable[DeviceRoofs], uuid: str, multiprocessors: int) -> DeviceRoofs | None:
    """Return the newest of a GPU with the current driver; its power limit is not compared."""
    wanted = uuid, multiprocessors, driver_version()
    found = [one for one in known if uuid and (one.uuid, one.multiprocessors, one.driver) == wanted]
    return found[-1] if found else None


def cpu_name() -> str:
    """Return the processor's model, as Linux names it; on other systems the kind of machine."""
    if not os.access(_CPUINFO, os.R_OK):
        return platform.machine()
    with io.open(_CPUINFO, "rb", buffering=0) as file:
        text = file.read(_FIRST_PROCESSOR_BYTES).decode("utf-8", "replace")
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    arm = " ".join(f"{name.removeprefix('CPU ')} {said[name]}" for name in _ARM_NAMES if name in said)
    return said.get("model name") or " ".join(filter(None, (platform.machine(), arm)))


def driver_version() -> str:
    """Return the version of NVIDIA's driver, from the kernel module; "" if there is none, or it cannot be read."""
    if not os.access(_DRIVER, os.R_OK):
        return ""
    found = _DRIVER_VERSION.search(_DRIVER.read_text("utf-8", "replace").partition("\n")[0])
    return found[1] if found else ""


def _device(raw: dict[str, Any]) -> DeviceRoofs:
    found: DeviceRoofs = _read(raw)
    if len(found.ceilings) > MAX_CEILINGS:
        raise ValueError(f"a device of {len(found.ceilings)} roofs; at most {MAX_CEILINGS} are taken")
    return found
