"""Traces: measurements of a model's results, forward pass by forward pass; one file per kind of trace."""

# No numpy here: code that only needs the names should not load it.

from __future__ import annotations

TRACED_EVERY_STEPS = 16
TRACES: dict[str, str] = {
    "activations": "MLT-01",
    "attention": "MLT-02",
    "logits": "MLT-03",
    "quant": "MLT-04",
    "kv": "MLT-05",
}
