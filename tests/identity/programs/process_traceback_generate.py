"""`generate` gets wrong arguments, then a logits processor that raises. The last error ends the program.

A traceback through `generate` has one frame of cbtop, so only its last frame is compared.
"""

import sys
import traceback

import torch
from small import IDS, attempt, llama, show


def refuse(ids, scores):
    raise ArithmeticError(f"refused at {ids.shape[1]}")


model = llama()
for step in range(3):
    show(step, model.generate(IDS, max_new_tokens=3, do_sample=False))
    attempt("unknown", model.generate, IDS, max_new_tokens=3, unknown=1)
    attempt("processor", model.generate, IDS, max_new_tokens=3, logits_processor=[refuse])
    attempt("index", model.generate, IDS + 100, max_new_tokens=3)
    attempt("shape", model.generate, torch.ones(1, 2, 3, 4, dtype=torch.long), max_new_tokens=3)
try:
    model.generate(IDS, max_new_tokens=3, unknown=1)
except ValueError as error:
    sys.exit(repr((error, traceback.extract_tb(error.__traceback__)[-1])))
