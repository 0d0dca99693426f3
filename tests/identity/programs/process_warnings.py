"""Warnings in a model point to the caller's line, appear once per line, and can be turned into errors."""

import logging
import warnings

import torch
from small import IDS, Net, Simple, Stack, llama, show, vectors

logging.basicConfig(format="%(name)s %(levelname)s %(funcName)s %(message)s")
logging.captureWarnings(False)


def dropout_add(x, residual):
    warnings.warn("dropout_add is old", DeprecationWarning, stacklevel=2)
    return x + residual


class Warns(Simple):
    def forward(self, x):
        warnings.warn("called", UserWarning, stacklevel=1)
        logging.getLogger("own").warning("logged with %d rows", len(x), stacklevel=1)
        return dropout_add(super().forward(x), x)


def shown(message, category, filename, line, file=None, text=None):
    print(category.__name__, message, filename.rpartition("/")[2], line)


model = Stack(Warns).eval()
with torch.no_grad():
    for step in range(3):
        show(step, model(vectors()))
    warnings.showwarning = shown
    warnings.simplefilter("always")
    for step in range(4):
        show(step, model(vectors()))
    with warnings.catch_warnings(record=True) as caught:
        model(vectors())
        torch.nn.functional.scaled_dot_product_attention(vectors(), vectors(), vectors())
        llama().generate(IDS, max_length=2, max_new_tokens=1)
    print([(str(entry.message)[:60], entry.lineno, entry.filename.rpartition("/")[2]) for entry in caught])
    warnings.simplefilter("error")
    for step in range(4):
        show(step, Net(layers=1)(IDS))
        try:
            model(vectors())
        except UserWarning as error:
            print("raised", error)
