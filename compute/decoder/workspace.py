"""Every buffer that a forward pass writes into: made once, for the most tokens that pass together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.decoder.base import Model

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers for a pass over some tokens. Only the last token's logits are computed."""

    tokens: NDArray[np.int64]  # (tokens,)
    x: Floats  # (tokens, hidden), the residual stream
    last: Floats  # (1, hidden), a view of its last row
    normed: Floats  # (tokens, hidden)
    q: Floats  # (tokens, heads * head_dim)
    k: Floats  # (tokens, kv_heads * head_dim)
    v: Floats
    q_product: Floats  # as q and k, and the same where these are not normalised
    k_product: Floats
    attended: Floats  # (tokens, heads * head_dim)
    delta: Floats  # (tokens, hidden), what a half layer adds
    delta_product: Floats  # as delta, and the same where that is not normalised
    gate: Floats  # (tokens, feed_forward)
    up: Floats
    activated: Floats
    last_normed: Floats  # (1, hidden)
    logits: Floats  # (1, vocabulary)
    logits_product: Floats  # as logits, and the same where these have no soft cap
    choice: NDArray[np.int64]  # (1,)

    @classmethod
    def of(cls, model: Model, tokens: int, zeros: Callable[[Any, Any], Any] = np.zeros) -> Workspace:
        """`zeros(shape, dtype)` makes them."""

        def floats(*shape: int) -> Any:
            return zeros(shape, np.float32)

        x = floats(tokens, model.hidden)
        query_rows, kv_rows = model.heads * model.head_dim, model.kv_heads * model.head_dim
        q, k = floats(tokens, query_rows), floats(tokens, kv_rows)
        delta, logits = floats(tokens, model.hidden), floats(1, model.vocabulary)
        is_normed = model.layers[0].q_norm is not None
        is_delta_normed = model.layers[0].attention_post_norm is not None
        return cls(
            tokens=zeros(tokens, np.int64),
            x=x,
            last=x[-1:],
            normed=floats(tokens, model.hidden),
            q=q,
            k=k,
            v=floats(tokens, kv_rows),
            q_product=floats(*q.shape) if is_normed else q,
            k_product=floats(*k.shape) if is_normed else k,
            attended=floats(tokens, query_rows),
            delta=delta,
            delta_product=floats(*delta.shape) if is_delta_normed else delta,
            gate=floats(tokens, model.feed_forward),
            up=floats(tokens, model.feed_forward),
            activated=floats(tokens, model.feed_forward),
            last_normed=floats(1, model.hidden),
            logits=logits,
            logits_product=floats(*logits.shape) if model.logit_cap else logits,
            choice=zeros(1, np.int64),
        )

    def first(self, tokens: int) -> Workspace:
        """The same buffers for a pass over fewer tokens."""
        whole = ("last", "last_normed", "logits", "logits_product", "choice")
        of_tokens = [field.name for field in fields(self) if field.name not in whole]
        rows = {name: getattr(self, name)[:tokens] for name in of_tokens}
        return replace(self, last=self.x[tokens - 1 : tokens], **rows)
