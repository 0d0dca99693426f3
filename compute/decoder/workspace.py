"""The buffers that a forward pass writes into. They are made once for the largest number of tokens in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.decoder.base import Model
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.kernels.quantize_rows import empty_codes

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers for a pass over some tokens. Logits are computed for the last token only."""

    tokens: NDArray[np.int64]  # (tokens,)
    x: Floats  # the residual stream, (tokens, hidden)
    last: Floats  # the last row of `x` as a view, (1, hidden)
    normed: Floats  # (tokens, hidden)
    normed_codes: Int8Scratch | None  # int8 codes of `normed`; None if norms make no codes
    q: Floats  # the queries before their norm, (tokens, heads * head_dim)
    k: Floats  # the keys before their norm, (tokens, kv_heads * head_dim)
    v: Floats
    # The queries after their product, with the shape of q; the same array as q if queries are not normalised.
    q_product: Floats
    k_product: Floats
    attended: Floats  # the output of attention, (tokens, heads * head_dim)
    delta: Floats  # the output of half a layer, which is added to x, (tokens, hidden)
    # The output of half a layer before its norm; the same array as delta if the model does not normalise these
    # outputs.
    delta_product: Floats
    gate: Floats  # (tokens, feed_forward)
    up: Floats
    activated: Floats
    last_normed: Floats  # (1, hidden)
    last_codes: Int8Scratch | None
    logits: Floats  # (1, vocabulary)
    logits_product: Floats  # the logits before their soft cap; the same array as logits if there is no soft cap
    choice: NDArray[np.int64]  # (1,)

    @classmethod
    def of(
        cls,
        model: Model,
        tokens: int,
        zeros: Callable[[Any, Any], Any] = np.zeros,
        int8_scratch: Int8Scratch | None = None,
    ) -> Workspace:
        """Make the buffers with `zeros(shape, dtype)`.

        `int8_scratch` is the products' scratch memory if norms make int8 codes, otherwise None. The norms of the
        layers and the final norm write their codes into separate buffers.
        """

        def floats(*shape: int) -> Any:
            return zeros(shape, np.float32)

        def codes(rows: int) -> Int8Scratch | None:
            if int8_scratch is None:
                return None
            made, factors = empty_codes(rows, model.hidden)
            return replace(int8_scratch, codes=made, factors=factors, holds_codes=True)

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
            normed_codes=codes(tokens),
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
            last_codes=codes(1),
            logits=logits,
            logits_product=floats(*logits.shape) if model.logit_cap else logits,
            choice=zeros(1, np.int64),
        )

    def first(self, tokens: int) -> Workspace:
        """Return views of these buffers that fit a pass over fewer tokens."""
        whole = ("last", "last_normed", "last_codes", "logits", "logits_product", "choice", "normed_codes")
        of_tokens = [field.name for field in fields(self) if field.name not in whole]
        rows = {name: getattr(self, name)[:tokens] for name in of_tokens}
        codes = None if self.normed_codes is None else self.normed_codes.first(tokens)
        return replace(self, last=self.x[tokens - 1 : tokens], normed_codes=codes, **rows)
