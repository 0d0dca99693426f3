"""Traces measure the results of a model in each forward pass. There is one file for each kind of trace."""

# Do not import NumPy here. Code that needs only the names of traces should not load it.

from __future__ import annotations

TRACED_EVERY_STEPS = 16
TRACES: dict[str, str] = {
    "activations": "MLT-01",
    "attention": "MLT-02",
    "logits": "MLT-03",
    "quant": "MLT-04",
    "kv": "MLT-05",
}
