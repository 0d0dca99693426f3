"""The conditions that may change the times of a process with a torch model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cbtop.profiler.conditions import conditions
from cbtop.profiler.instrument.module_tree import parameters_of
from cbtop.protocol.structure_messages import Conditions

if TYPE_CHECKING:
    from torch import nn

# Libraries that may change times, with their modules. A library is reported only if the process has imported its
# module.
_LIBRARIES = {
    "torch": "torch",
    "transformers": "transformers",
    "triton": "Triton",
    "flash_attn": "flash-attn",
    "bitsandbytes": "bitsandbytes",
    "vllm": "vLLM",
    "sglang": "SGLang",
}


def conditions_of(model: nn.Module) -> Conditions:
    """Return the conditions that may change the times of this process, which runs `model`."""
    devices = {weight.device.type for weight in parameters_of(model)}
    known = {}
    if "cpu" in devices:
        known["instructions"] = torch.backends.cpu.get_cpu_capability()
    if "cuda" in devices:
        known["CUDA"] = torch.version.cuda or ""
        known["cuDNN"] = str(torch.backends.cudnn.version() or "")
    return conditions(known, _LIBRARIES)
