"""Traces measure a model's results in each forward pass. Each kind of trace has a file."""

# NumPy is not imported here, because code that needs only the names of traces should not load it.

from __future__ import annotations

TRACED_EVERY_STEPS = 16
TRACES: dict[str, str] = {
    "activations": "MLT-01",
    "attention": "MLT-02",
    "logits": "MLT-03",
    "quant": "MLT-04",
    "kv": "MLT-05",
}
