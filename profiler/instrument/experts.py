"""Computes the FLOP of grouped experts: modules of transformers that hold all experts of a layer in a few tensors.

A router chooses `top_k` experts for each token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.nn import Parameter

from cbtop.profiler.instrument.module_tree import attribute_of, home_of_class
from cbtop.profiler.instrument.torch_internals import own_parameters

if TYPE_CHECKING:
    from torch import nn

_LIBRARY = "transformers."
MARK_OF_EXPERTS = "has_gate"  # an attribute that every module of grouped experts has
# The attributes that the decorator of transformers sets.
_LAYOUT = (MARK_OF_EXPERTS, "is_transposed", "_is_expert_parallel")
_TOP_K = ("top_k", "num_experts_per_tok")


def chosen_experts(experts: nn.Module, around: nn.Module, beside: Iterable[nn.Module]) -> int | None:
    """Return how many experts each token runs through (`top_k`), or None if unknown.

    `around` is the block that contains `experts`. `beside` are the other modules of the block, including the router.
    The number is unknown if modules have different values of `top_k`. It is also unknown if the router chooses among
    more experts than there are, because in some models the additional ones do nothing.
    """
    held = _matrices(experts)
    if held is None:
        return None
    count = next(iter(held.values())).shape[0]
    told: set[Any] = {attribute_of(around, name) for name in _TOP_K}
    routed: set[int] = set()  # how many experts each router chooses from
    for module in beside:
        of_router = {attribute_of(module, name) for name in _TOP_K} - {None}
        weight = own_parameters(module).get("weight")
        if weight is not None and (of_router or weight.shape[0] == count):
            routed.add(weight.shape[0])
        told |= of_router
    told.discard(None)
    if len(told) != 1 or routed != {count}:
        return None
    (top_k,) = told
    return top_k if type(top_k) is int and 0 < top_k <= count else None


def flops_per_element(experts: nn.Module, top_k: int | None) -> float | None:
    """Return the FLOP of grouped experts for each element of the input tokens, or None if they are unknown."""
    held = None if top_k is None else _matrices(experts)
    if held is None or top_k is None:
        return None
    first = held.get("gate_up_proj", held.get("up_proj"))
    if first is None:
        return None
    columns = first.shape[1] if attribute_of(experts, "is_transposed") else first.shape[2]
    per_expert = sum(matrix.shape[1] * matrix.shape[2] for matrix in held.values())
    return float(2 * top_k * per_expert / columns)


def _matrices(experts: nn.Module) -> dict[str, Parameter] | None:
    """Return the matrices of grouped experts by name, with shape (experts, rows, columns). None for other modules."""
    own = experts.__dict__
    if not home_of_class(type(experts)).startswith(_LIBRARY) or not all([name in own for name in _LAYOUT]):
        return None
    expected = {"gate_up_proj" if own["has_gate"] else "up_proj", "down_proj"}
    held = {name: weights for name, weights in own_parameters(experts).items() if weights is not None}
    plain = {name: weights for name, weights in held.items() if type(weights) is Parameter and weights.ndim == 3}
    others = [name for name in held if name not in plain and not name.endswith("_bias")]
    if own["_is_expert_parallel"] or set(plain) != expected or others:
        return None
    return plain if len({weights.shape[0] for weights in plain.values()}) == 1 else None
