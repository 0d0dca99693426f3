"""A program that drops the last reference to a model. The model is freed at once, and weak references call back."""

import gc
import weakref

import torch
from small import Net, Simple, Stack, show, vectors


class Dies(Simple):
    def __del__(self):
        print("deleted", self.number)


def one(number):
    model = Stack(Dies)
    for index, layer in enumerate(model.layers):
        layer.number = number, index
    weakref.finalize(model, print, "finalized", number)
    reference = weakref.ref(model, lambda _: print("gone", number))
    for step in range(6):
        show(number, step, model(vectors()))
    return reference


gc.disable()
with torch.no_grad():
    for number in range(3):
        reference = one(number)
        print("after", reference() is None)
        gc.collect()
        print("collected", reference() is None)
    kept = weakref.WeakKeyDictionary({Stack(): 1})
    holder = weakref.WeakValueDictionary(model=Net())
    gc.collect()
    print(len(kept), len(holder), gc.garbage)
