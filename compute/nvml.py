"""What NVIDIA's management library says of a GPU that is measured: its power limit, and who else uses it."""

from __future__ import annotations

import os
import time
from typing import Any

SETTLE_S = 1.0  # a utilisation is that of up to a second before it is asked
PER_WATT = 1000


class ManagedGpu:
    """A GPU as nvidia-ml-py sees it. Where that is not installed, or fails, `missing` says so."""

    def __init__(self, uuid: str) -> None:
        self.missing = ""
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            self.missing = "nvidia-ml-py is not installed"
            return
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            self.missing = f"NVML: {error}"

    def power_limit_w(self) -> int | None:
        """The limit that is enforced now."""
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        return None if limit is None else round(limit / PER_WATT)

    def used_percent(self) -> int | None:
        """The share of a second in which any process ran something on it. Ask before anything of ours runs."""
        if self._handle is None:
            return None
        time.sleep(SETTLE_S)
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return None if rates is None else int(rates.gpu)

    def others_percent(self, since_s: float) -> int | None:
        """The highest share of its multiprocessors that one other process took since then (of the wall's clock).

        None where it is not known, also where process ids are those of another namespace: our own is not among them.
        """
        samples = self._ask("nvmlDeviceGetProcessUtilization", int(since_s * 1e6)) or []
        if all(sample.pid != os.getpid() for sample in samples):
            return None
        return max((int(sample.smUtil) for sample in samples if sample.pid != os.getpid()), default=0)

    def _ask(self, name: str, *arguments: object) -> Any:
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except self._nvml.NVMLError:  # this GPU, driver or container does not tell
            return None
