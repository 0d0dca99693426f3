"""Read the power limit of a GPU and its use by other processes, from NVIDIA's management library."""

from __future__ import annotations

import os
import time
from typing import Any

SETTLE_S = 1.0  # the library reports the utilisation over at most this number of seconds before the call
PER_WATT = 1000


class ManagedGpu:
    """A GPU, as nvidia-ml-py sees it. If nvidia-ml-py is not installed or fails, `missing` is the reason."""

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
        """Return the current power limit in watts, or None if it is not known."""
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        return None if limit is None else round(limit / PER_WATT)

    def used_percent(self) -> int | None:
        """Return how busy all processes together kept the GPU in the last second, in percent.

        Call this method before this process uses the GPU.
        """
        if self._handle is None:
            return None
        time.sleep(SETTLE_S)
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return None if rates is None else int(rates.gpu)

    def others_percent(self, since_s: float) -> int | None:
        """Return the highest percentage of the GPU's multiprocessors that another process used after `since_s`.

        `since_s` is wall-clock time. Returns None if the use is unknown. It is also unknown if our own process id is
        missing, because then the reported ids belong to a different namespace.
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
        except self._nvml.NVMLError:  # this GPU, its driver or a container does not report the value
            return None
