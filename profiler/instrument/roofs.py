"""Finds the roofs (peak rates) for a model in the stored measurements of its device.

Rules
- Nothing is measured here. One small file is read when the model is attached, and again when its weights have
  changed. Viewers add roofs that are measured later.
- A compute roof has a number type, and applies to bricks that multiply this type. The roofs of all types are
  announced: autocast may multiply a type that no weight has, and a verdict may recommend a faster type.
- If no roof was measured for the type of most weights, the manifest says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cbtop.profiler.instrument.module_tree import home_of_class, kinds_of, parameters_of
from cbtop.profiler.instrument.multiplied import PACKED
from cbtop.profiler.instrument.trouble import in_words
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.roofs import (
    TORCH_COMPUTE,
    DeviceRoofs,
    known_roofs,
    roofs_of_cpu,
    roofs_of_gpu,
    roofs_over_torch,
    way_out_on_cpu,
)
from cbtop.protocol.signals import reraise_host_error

if TYPE_CHECKING:
    from torch import nn

_INT8 = "dot_int8"  # the compute roof for torch's eager quantisation


def roofs_over(model: nn.Module) -> tuple[Sequence[Ceiling], str]:
    """Return the roofs (peak rates) for `model`, and why some roofs are unknown ("" if all are known)."""
    try:
        packed = any([home_of_class(type(module)) in PACKED for module in kinds_of(model)])
        return _roofs_over(parameters_of(model), multiplies_int8=packed)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        reraise_host_error(error)
        return (), f"{in_words(error)}; run `cbtop calibrate`"


def _roofs_over(parameters: Sequence[Any], *, multiplies_int8: bool) -> tuple[Sequence[Ceiling], str]:
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1:
        return (), f"its weights lie on {len(devices)} devices" if devices else "the model has no weights"
    roofs, way_out = _measured_of(devices.pop())
    if roofs is None:
        return (), way_out
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel()
    dtype = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    over = roofs_over_torch(roofs.ceilings, TORCH_COMPUTE | ({_INT8: "int8"} if multiplies_int8 else {}))
    if all([one.dtype != dtype for one in over]):
        is_short = any([one.is_short for one in over])
        way_out = f"; run `cbtop calibrate --threads {torch.get_num_threads()}`" if is_short else ""
        return over, f"none was measured for weights in {dtype}{way_out}"
    return over, ""


def _measured_of(device: torch.device) -> tuple[DeviceRoofs | None, str]:
    """Return the stored roofs (peak rates) of `device`. If none are stored, return None and advice for the user."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return roofs_of_cpu(known_roofs(), threads), way_out_on_cpu(threads)
    if device.type != "cuda" or torch.version.cuda is None:
        return None, f"those of {'ROCm' if device.type == 'cuda' else device.type} are not measured"
    found = torch.cuda.get_device_properties(device)
    uuid = str(getattr(found, "uuid", ""))
    roofs = roofs_of_gpu(known_roofs(), uuid, found.multi_processor_count)
    return roofs, "run `cbtop calibrate`, then start this again"
