"""The measured roofs (peak rates), stored in a JSON file in the user's cache directory.

Rules
- `cbtop calibrate` measures roofs. `cbtop run` measures some itself, but only for a short time. A short measurement
  never replaces a long one, and a measurement under load never replaces a better one.
- A profiled process reads the file once, when a model is attached. It reads only this file and does not query a GPU.
- The key of a measurement is what its roofs depend on. For a processor, these are the model and the number of
  threads. For a GPU, these are the UUID, the number of multiprocessors (fewer in a MIG instance), the driver's
  version and the power limit.
"""

from __future__ import annotations

import io
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cbtop.protocol.cache import cache_dir
from cbtop.protocol.codec import plain_for, reader_for
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.kept_file import read_list, try_to_write, write_list
from cbtop.protocol.messages import Ceiling

SCHEMA = "cbtop.roofs/1"
MAX_DEVICES = 32  # most devices in the file of roofs; if there are more, the oldest measurements are dropped
MAX_CEILINGS = 16  # at most this many roofs of one device
# Compute roof that applies to torch models -> the number type that is multiplied. Older files do not contain the
# type.
TORCH_COMPUTE = {
    "fma_float32": "float32",
    "matmul_float32": "float32",
    "matmul_float64": "float64",
    "matmul_tf32": "tf32",
    "matmul_bfloat16": "bfloat16",
    "matmul_float16": "float16",
}
# Number of bytes that are read of /proc/cpuinfo. They describe the first processor; the rest is slow to read.
_FIRST_PROCESSOR_BYTES = 4096
_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\s(\d+\.\d+(?:\.\d+)?)\s")
_ARM_NAMES = ("CPU implementer", "CPU part", "CPU variant")


@dataclass(frozen=True, slots=True)
class DeviceRoofs:
    """The roofs (peak rates) of one device.

    A field is empty if its value is unknown, or if the device has no such value.
    """

    device: str
    ceilings: tuple[Ceiling, ...]
    threads: int | None = None
    uuid: str = ""
    multiprocessors: int | None = None
    driver: str = ""
    power_limit_w: int | None = None
    # The bytes of a model's weights if the roofs were measured for this model; otherwise None.
    weights_bytes: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """The values on which the measured roofs depend. Older measurements with the same key are replaced."""
        gpu = self.uuid, self.multiprocessors, self.driver, self.power_limit_w
        return self.device, self.threads, self.weights_bytes, *gpu

    @property
    def title(self) -> str:
        """The name of the device, and the conditions under which it was measured, as text."""
        if self.threads is not None:
            weights = "" if self.weights_bytes is None else f", {self.weights_bytes:,} bytes of weights"
            return f"{self.device}, {self.threads} thread{'s' if self.threads > 1 else ''}{weights}"
        limit = "n/a" if self.power_limit_w is None else f"{self.power_limit_w} W"
        return f"{self.device}, {self.uuid}, driver {self.driver or 'n/a'}, power limit {limit}"

    @property
    def measured_on(self) -> str:
        """The day of the measurement, as text."""
        return self.ceilings[0].measured_on[: len("2026-11-22")] if self.ceilings else ""


_read = reader_for(DeviceRoofs)
_plain = plain_for(DeviceRoofs)


def roofs_file() -> Path:
    """Return the path of the file that stores the roofs."""
    return cache_dir() / "roofs.json"


def known_roofs() -> tuple[DeviceRoofs, ...]:
    """Return all stored measurements, the newest last, or () without a file.

    Raises RoofsError if it cannot be read.
    """
    found = read_list(roofs_file(), SCHEMA, "devices", MAX_DEVICES, _device)
    return () if found is None else found


def keep_roofs(measured: Iterable[DeviceRoofs]) -> tuple[DeviceRoofs, ...]:
    """Store new measurements and return them as they were stored. Raises RoofsError.

    A measurement replaces an older one with the same key, except for roofs that were measured better in the older
    one.
    """
    try:
        known = known_roofs()
    except RoofsError:
        known = ()  # a file that cannot be read is replaced
    before = {one.key: one for one in known}
    new = {one.key: _merged(before.get(one.key), one) for one in measured}
    devices = [*(one for one in known if one.key not in new), *new.values()][-MAX_DEVICES:]
    write_list(roofs_file(), SCHEMA, "devices", [_plain(one) for one in devices])
    return tuple(new.values())


def _merged(old: DeviceRoofs | None, new: DeviceRoofs) -> DeviceRoofs:
    """Return the measurement `new`, but with each roof from `old` that was measured better there.

    If `new` is a short measurement, also add the roofs that only `old` has. Otherwise, add its short compute roofs of
    types that `new` lacks.
    """
    if old is None:
        return new
    before = {one.name: one for one in old.ceilings}
    ceilings = [_better(before.pop(one.name, None), one) for one in new.ceilings]
    if all(one.is_short for one in new.ceilings):
        ceilings += before.values()
    else:
        types = [one.dtype for one in new.ceilings if one.kind == "compute"]
        ceilings += [
            one for one in before.values() if one.is_short and one.kind == "compute" and one.dtype not in types
        ]
    return replace(new, ceilings=tuple(ceilings))


def _better(old: Ceiling | None, new: Ceiling) -> Ceiling:
    """Return the better of two measurements of one roof.

    `old` is better in three cases: only `new` is short, other processes disturbed only `new`, or they disturbed both
    and `old` is higher. Otherwise `new` is better.
    """
    if old is None:
        return new
    if new.is_short and not old.is_short:
        return old
    is_worse = new.is_disturbed and (not old.is_disturbed or old.value > new.value)
    return old if is_worse else new


def roofs_over_torch(ceilings: Iterable[Ceiling], compute: Mapping[str, str] = TORCH_COMPUTE) -> list[Ceiling]:
    """Return the roofs that apply to a torch model, with the number type that each roof multiplies.

    `compute` is a dict from names of compute roofs to number types.
    """
    return [
        replace(one, dtype=compute.get(one.name, ""))
        for one in ceilings
        if one.kind in ("bandwidth", "cache") or one.name in compute
    ]


def way_out_on_cpu(threads: int) -> str:
    """Return advice for the manifest, if no roofs are known for this processor and number of threads."""
    return f"run `cbtop calibrate --threads {threads}`"


def try_to_keep() -> None:
    """Raise RoofsError if `keep_roofs` could not write its file. As a test, write a temporary file."""
    try_to_write(roofs_file())


def roofs_of_cpu(known: Iterable[DeviceRoofs], threads: int, weights_bytes: int | None = None) -> DeviceRoofs | None:
    """Return the newest roofs of this processor for `threads` threads.

    The roofs were measured for weights of `weights_bytes` bytes, or without a model if that is None.
    """
    wanted = cpu_name(), threads, weights_bytes
    found = [one for one in known if (one.device, one.threads, one.weights_bytes) == wanted]
    return found[-1] if found else None


def roofs_of_gpu(known: Iterable[DeviceRoofs], uuid: str, multiprocessors: int) -> DeviceRoofs | None:
    """Return the newest roofs of a GPU with the current driver, at any power limit."""
    wanted = uuid, multiprocessors, driver_version()
    found = [one for one in known if uuid and (one.uuid, one.multiprocessors, one.driver) == wanted]
    return found[-1] if found else None


def cpu_name() -> str:
    """Return the processor's model as Linux names it. Other systems give only the kind of machine."""
    if not os.access(_CPUINFO, os.R_OK):
        return platform.machine()
    with io.open(_CPUINFO, "rb", buffering=0) as file:
        text = file.read(_FIRST_PROCESSOR_BYTES).decode("utf-8", "replace")
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    arm = " ".join(f"{name.removeprefix('CPU ')} {said[name]}" for name in _ARM_NAMES if name in said)
    return said.get("model name") or " ".join(filter(None, (platform.machine(), arm)))


def driver_version() -> str:
    """Return the version of NVIDIA's driver from the kernel module, or "" if it cannot be read."""
    if not os.access(_DRIVER, os.R_OK):
        return ""
    found = _DRIVER_VERSION.search(_DRIVER.read_text("utf-8", "replace").partition("\n")[0])
    return found[1] if found else ""


def _device(raw: dict[str, Any]) -> DeviceRoofs:
    found: DeviceRoofs = _read(raw)
    if len(found.ceilings) > MAX_CEILINGS:
        raise ValueError(f"a device of {len(found.ceilings)} roofs; at most {MAX_CEILINGS} are taken")
    return found
