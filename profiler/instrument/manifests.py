"""Makes the manifest of a model: its name, architecture, sizes and number formats, from its config and weights."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch

from cbtop.profiler.instrument.module_tree import attribute_of, parameters_and_buffers
from cbtop.profiler.instrument.torch_internals import child_named
from cbtop.profiler.instrument.work import backend_of, stored_bytes_of
from cbtop.protocol.messages import Manifest

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.eager_stamps import Timing
    from cbtop.profiler.instrument.planning import Plan


# : Name of torch's wrapper class -> the attribute with the wrapped model.
WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def manifest_of(model: nn.Module, plan: Plan, engine: str, timing: Timing, steps_of: str) -> Manifest:
    """Return the manifest of `model`, without its roofs."""
    modules = (model, *plan.trunk)
    configs = [config for config in map(_config_of, modules) if config is not None]
    config = configs[0] if configs else None
    parameters, buffers = parameters_and_buffers(model)
    dtype = str(parameters[0].dtype).removeprefix("torch.") if parameters else ""
    return Manifest(
        model=_text(attribute_of(config, "_name_or_path")) or _class_of(model),
        architecture=_text(attribute_of(config, "model_type")) or _class_of(model),
        backend=engine + backend_of(model, is_timed_there=timing.is_there).removeprefix("torch"),
        quantization=_text(attribute_of(attribute_of(config, "quantization_config"), "quant_method")) or dtype,
        threads=torch.get_num_threads(),
        layers=sum(plan.stacks.values()),
        hidden_size=_whole(_setting(config, "hidden_size")),
        context_length=_whole(_setting(config, "max_position_embeddings")),
        parameters=sum(parameter.numel() for parameter in parameters),
        weights_bytes=stored_bytes_of(parameters + buffers),
        steps_of=steps_of,
    )


def _class_of(model: nn.Module) -> str:
    """Return the name of the model's class, inside of torch's wrappers for compiled and distributed models."""
    inside = child_named(model, WRAPPERS.get(type(model).__name__, ""))
    return type(model if inside is None else inside).__name__


def _config_of(module: nn.Module) -> Any:
    """Return the attribute `config` of `module`. None if it is missing, a property or a function."""
    config = attribute_of(module, "config")
    return None if hasattr(type(config), "__get__") else config


def _setting(config: Any, name: str) -> Any:
    """Return a config's setting `name`. The config may store it under a different name (see `attribute_map`)."""
    names = attribute_of(config, "attribute_map")
    return attribute_of(config, names.get(name, name) if type(names) is dict else name)


def _text(value: Any) -> str:
    value = value.value if issubclass(type(value), enum.Enum) else value
    return str(value) if issubclass(type(value), str) else ""


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
