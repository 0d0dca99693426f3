"""Finds traits of a model that decide the phase and the tokens of its calls, from its signature, names and flags."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from cbtop.profiler.instrument import phases
from cbtop.profiler.instrument.module_tree import attributes_of, children_of, holders_of, modules_of
from cbtop.profiler.instrument.torch_internals import own_parameters, submodules

if TYPE_CHECKING:
    from torch import nn

_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state", "past_key_value", "layer_past", *phases.POSITIONS)


def takes_a_cache(module: nn.Module) -> bool:
    """Return whether `module`, or the only child that it wraps, takes a key-value cache as an argument."""
    known = set(_CACHE_ARGUMENTS)
    if not type(module).__module__.startswith("transformers."):
        known.remove("state")  # hand-written recurrent networks call their cache `state`
    return any([not known.isdisjoint(parameters) for parameters in _parameters(module)])


def has_words(module: nn.Module) -> bool:
    """Return whether `module` has an embedding, or a part named like one. If so, integer inputs may be token ids."""
    if any([isinstance(rows, int) for rows in attributes_of(holders_of(module, "num_embeddings"), "num_embeddings")]):
        return True
    names: set[str] = set()
    for one in modules_of(module):
        if held := submodules(one):
            names.update(held.keys())  # a scripted module has no dict here, but an object with a method `keys`
        if weights := own_parameters(one):
            names.update(weights.keys())
    return any([part in name.lower() for name in names for part in ("emb", "wte", "vocab", "tok")])


def looks_both_ways(module: nn.Module) -> bool:
    """Return whether no attention in `module` is causal, by the flags of its modules."""
    modules = holders_of(module, "is_causal") + holders_of(module, "is_decoder")
    pairs = zip(attributes_of(modules, "is_causal"), attributes_of(modules, "is_decoder"), strict=True)
    flags = [is_decoder if is_causal is None else is_causal for is_causal, is_decoder in pairs]
    known = [flag for flag in flags if isinstance(flag, bool)]
    return bool(known) and not any(known)


def is_called_encoder(module: nn.Module) -> bool:
    """Return whether the class of `module`, or of the only child that it wraps, is named like an encoder."""
    inner: nn.Module | None = module
    while inner is not None:
        if "Encoder" in type(inner).__name__ and "Decoder" not in type(inner).__name__:
            return True
        children = children_of(inner)
        inner = children[0][1] if len(children) == 1 else None
    return False


def axis_of_sequences(module: nn.Module) -> int | None:
    """Return which axis of the input has the sequences, by the attribute `batch_first`. None if it is unknown.

    For torch's own encoders, the modules inside them have this attribute. Other models may transpose their input
    before such a module. So it is the first axis, as everywhere else in torch, unless a module inside takes
    another one.
    """
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    own = _axes(modules_of(module) if is_of_torch else [module])
    if len(own) == 1:
        return own.pop()
    return None if own or 1 in _axes(modules_of(module)) else 0


def _axes(modules: list[nn.Module]) -> set[int]:
    return {int(not flag) for flag in attributes_of(modules, "batch_first") if isinstance(flag, bool)}


def positional_arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the positional arguments of `module`, or of the only child that it wraps."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [
        tuple(name for name, parameter in parameters.items() if parameter.kind in by_position)
        for parameters in _parameters(module)
    ]
    return ([names for names in named if names] or [()])[0]


def _parameters(module: nn.Module) -> list[dict[str, inspect.Parameter]]:
    """Return the parameters of `forward` of `module`, then those for its only child, and so on.

    A wrapper passes its arguments on, so the children matter.
    """
    found = []
    inner: nn.Module | None = module
    while inner is not None:
        forward = getattr(type(inner), "forward", None)  # the class of a scripted module has no `forward`
        if forward is not None:
            _, *parameters = inspect.signature(forward).parameters.items()  # without `self`
            found.append(dict(parameters))
        children = children_of(inner)
        inner = children[0][1] if len(children) == 1 else None
    return found
