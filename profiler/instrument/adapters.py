"""Finds the active low-rank adapters of a layer of PEFT (Hugging Face's library for fine-tuning), without calling it.

The active adapters may change between two steps. For example, a preference loss runs a model with and without its
adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cbtop.profiler.instrument.module_tree import dictionary_of, home_of_class
from cbtop.profiler.instrument.torch_internals import child_named, submodules

if TYPE_CHECKING:
    from torch import nn

_LIBRARY = "peft.tuners."
_LORA = "peft.tuners.lora."
_STATE = "_active_adapter"


def has_adapters(module: nn.Module) -> bool:
    """Return whether `module` is a layer of PEFT, which wraps another layer."""
    return _STATE in module.__dict__ and may_have_adapters(type(module))


def may_have_adapters(kind: type) -> bool:
    """Return whether this class is one of PEFT's."""
    return home_of_class(kind).startswith(_LIBRARY)


def state_of_adapters(module: nn.Module) -> tuple[Any, ...]:
    """Return the values in the PEFT layer `module` that decide which adapters run."""
    own = module.__dict__
    active = own[_STATE]
    if type(active) is list:
        active = tuple(active)
    merged = own.get("merged_adapters")
    has_merged = type(merged) is list and len(merged) > 0
    # In a mixed batch, PEFT uses a forward pre-hook to tell the layer the adapter of each sequence.
    return active, own.get("_disable_adapters") is True, has_merged, len(own["_forward_pre_hooks"])


def has_several_adapters(layers: Iterable[nn.Module]) -> bool:
    """Return whether these layers of PEFT have adapters of more than one name."""
    names: set[str] = set()
    for layer in layers:
        names.update(submodules(child_named(layer, "lora_A") or layer))
        if len(names - {"base_layer"}) > 1:
            return True
    return False


def active_adapters(module: nn.Module) -> str:
    """Return the names of the active adapters of the PEFT layer `module`, as a part of a phase's name."""
    active, is_disabled, _, hooks = state_of_adapters(module)
    if hooks:
        return "mixed adapters"
    names = (active,) if isinstance(active, str) else active
    return "no adapter" if is_disabled or not names else f"adapter {'+'.join(map(str, names))}"


def low_rank_products(module: nn.Module) -> tuple[nn.Module, list[nn.Module]] | None:
    """Return the layer that `module` wraps, and the matrix products that its active adapters add.

    Returns None for variants of LoRA, for methods other than LoRA, and for mixed batches, because their products are
    not known.
    """
    own, base = dictionary_of(module), child_named(module, "base_layer")
    kind = type(module)
    if base is None or not home_of_class(kind).startswith(_LORA) or not kind.__name__.startswith("Linear"):
        return None
    active, is_disabled, merged, hooks = state_of_adapters(module)
    if hooks:
        return None
    if is_disabled or merged:
        return base, []
    found: list[nn.Module] = []
    variants = own.get("lora_variant") or {}, {key for key, is_so in (own.get("use_dora") or {}).items() if is_so}
    for name in (active,) if isinstance(active, str) else active:
        held = [child_named(module, part) for part in ("lora_A", "lora_B")]
        pair = [None if one is None else child_named(one, name) for one in held]
        if pair == [None, None]:
            continue  # this layer does not have an adapter of that name
        if None in pair or any([name in names for names in variants]):
            return None
        found += [one for one in pair if one is not None]
    return base, found
