"""The device samplers, one file each, in the order that views show them."""

from __future__ import annotations

from cbtop.daemon.devices.base import Sampler
from cbtop.daemon.devices.cpu import Cpu
from cbtop.daemon.devices.nvml import Nvml

SAMPLERS: tuple[type[Sampler], ...] = (Nvml, Cpu)
