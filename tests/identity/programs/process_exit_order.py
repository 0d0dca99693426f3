"""Exit handlers, finalizers, late threads and a model call at exit must run in their usual order.

Each prints a line.
"""

import atexit
import sys
import threading
import weakref

import torch
from small import IDS, Net, show

model = Net().eval()


def last_call():
    with torch.no_grad():
        show("at exit", model(IDS))


class Late:
    def __del__(self):
        print("deleted late", flush=True)


atexit.register(print, "registered first")
atexit.register(last_call)
finalizer = weakref.finalize(model, print, "finalized")
with torch.no_grad():
    for step in range(6):
        show(step, model(IDS))
atexit.register(print, "registered last")
late = Late()
thread = threading.Timer(0.1, lambda: show("thread", model(IDS)))
thread.start()
sys.stderr.write("on stderr\n")
print(finalizer.alive, atexit._ncallbacks() > 0, sys.flags.dev_mode, sys.argv[1:], __name__, __package__)
sys.exit("ended by a message")
