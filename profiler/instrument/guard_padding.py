"""Finds the positions of a tensor that are padding. The guard, which looks for faulty values, leaves them out.

Rules
- A position is left out only if the mask belongs to the tensor without doubt, so that no fault is missed.
- In a model with an encoder and a decoder, only the encoder's mask is used.
- For convolutions and norms of channels, the second axis is channels and not tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DEVICES = "cpu", "cuda"
_CHANNELS_FIRST: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_CHANNELS_FIRST += (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)
_CHANNELS_FIRST += (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_FEATURES_LAST = nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding
_OTHER_STACK = "decoder", "tgt", "memory", "label"  # names of a decoder's arguments begin with one of these


class Hiding(Enum):
    """The tensors of a module that may contain padding."""

    NEVER = "none"
    BY_SHAPE = "those with the axes of the mask, if no other axis has the same length"
    FEATURES_LAST = "those with the axes of the mask, because the last axis is not one of tokens"


class Mask(NamedTuple):
    """A padding mask: 1 or True at a token, or at padding if `is_inverse` is True.

    Only the last `tokens` positions are in this call of the model. A cache has the others.
    """

    values: Tensor
    is_inverse: bool
    tokens: int


def mask_in(names: Iterable[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mask | None:
    """Return the padding mask among the arguments of a model, or None.

    transformers names it `attention_mask`, with 1 for a token. torch names it `..._padding_mask`, with True for
    padding.
    """
    arguments = [*zip(names, args, strict=False), *kwargs.items()]
    for name, value in arguments:
        is_inverse = name.endswith("padding_mask") and not name.startswith(_OTHER_STACK)
        if (is_inverse or name == "attention_mask") and type(value) is Tensor and value.dim() == 2:
            others = (one for other, one in arguments if one is not value and not other.startswith(_OTHER_STACK))
            return Mask(value, is_inverse, max(_tokens_among(others, *value.shape), default=value.shape[1]))
    return None


def _tokens_among(values: Iterable[Any], batch: int, tokens: int) -> Iterator[int]:
    """Yield the number of tokens in each tensor of ids (batch, token) or embeddings (batch, token, …)."""
    for value in values:
        is_tensor = type(value) is Tensor and value.dim() == 2 + value.is_floating_point()
        if is_tensor and value.shape[0] == batch and value.shape[1] <= tokens:
            yield value.shape[1]


def tokens_of(mask: Mask | None) -> Tensor | None:
    """Return a tensor (batch, token) that is True at tokens and False at padding, or None without padding.

    If there are as many tokens as sequences, the order of the axes is unknown. Only positions that are padding in
    both orders are then False.
    """
    if mask is None or mask.values.device.type not in DEVICES or mask.values.is_floating_point():
        return None  # a floating-point mask is added to scores, so it is not a padding mask
    values = mask.values[:, mask.values.shape[1] - mask.tokens :]
    kept = values == 0 if mask.is_inverse else values != 0
    if kept.shape[0] == kept.shape[1]:
        kept = kept | kept.T
    return None if kept.device.type == "cpu" and bool(kept.all()) else kept


def kept_in(values: Tensor, kept: Tensor, hiding: Hiding) -> Tensor | None:
    """Return the mask `kept` as a flat tensor, in the order of the first axes of `values`. None if it does not apply
    to them.

    The axes of `values` must be (batch, token, …), (token, batch, …) or (both, …).
    """
    batch, tokens = kept.shape
    shape, axes = values.shape, values.dim()
    if hiding is Hiding.NEVER or kept.device != values.device:
        return None
    if axes == 2:
        return kept.reshape(-1) if shape[0] == batch * tokens else None
    if axes < 3 or (hiding is Hiding.BY_SHAPE and tokens in shape[2:]):
        return None
    if shape[:2] == (batch, tokens):
        return kept.reshape(-1)
    return kept.T.reshape(-1) if shape[:2] == (tokens, batch) else None


def positions_in(values: Tensor, positions: int) -> Tensor:
    """Return the smallest and the largest value at each of the first `positions`, as (2, position)."""
    return torch.stack(torch.aminmax(values.reshape(positions, -1), dim=1))


def hidings(modules: dict[str, nn.Module]) -> dict[int, Hiding]:
    """Return, by id of the module, which of its tensors may contain padding. The keys of the argument are paths."""
    parts = {path: _part_of(path) for path in modules}
    is_encoder_decoder = {"encoder", "decoder"} <= set(parts.values())
    found = {}
    for path, module in modules.items():
        if issubclass(type(module), _CHANNELS_FIRST) or (is_encoder_decoder and parts[path] != "encoder"):
            found[id(module)] = Hiding.NEVER
        else:
            is_last = issubclass(type(module), _FEATURES_LAST)
            found[id(module)] = Hiding.FEATURES_LAST if is_last else Hiding.BY_SHAPE
    return found


def _part_of(path: str) -> str:
    """Return the side of the model that has the module at `path`: "encoder", "decoder" or ""."""
    for name in path.split(".")[:-1]:
        for part in ("encoder", "decoder"):
            if name.lower().endswith(part):
                return part
    return ""
