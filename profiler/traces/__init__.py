"""Traces: what a model computed, measured forward pass by forward pass; one file for each kind of trace."""

# No numpy in here: who only wants the names should not load it.

from __future__ import annotations

TRACED_EVERY_STEPS = 16
TRACES: dict[str, str] = {
    "activations": "MLT-01",
    "attention": "MLT-02",
    "logits": "MLT-03",
    "quant": "MLT-04",
    "kv": "MLT-05",
}
