"""Signal handlers of the program run a model, raise in a step, and are restored."""

import os
import signal
import time

import torch
from small import Simple, Stack, show, vectors


class StepError(Exception):
    pass


def call_model(number, frame):
    show("handler", number, other(vectors()))


def interrupt(number, frame):
    raise StepError(signal.Signals(number).name)


class Signals(Simple):
    number = None

    def forward(self, x):
        if self.number is not None:
            os.kill(os.getpid(), self.number)
            time.sleep(0.01)
        return super().forward(x)


other, model = Stack().eval(), Stack(Signals).eval()
print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1))
signal.signal(signal.SIGUSR1, call_model)
signal.signal(signal.SIGTERM, interrupt)
with torch.no_grad():
    for step in range(8):
        model.layers[1].number = (None, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)[step % 4]
        try:
            show(step, model(vectors()))
        except (StepError, KeyboardInterrupt) as error:
            print(step, type(error).__name__, error)
signal.setitimer(signal.ITIMER_REAL, 0)
print(
    signal.getsignal(signal.SIGUSR1) is call_model,
    signal.getitimer(signal.ITIMER_REAL),
    signal.pthread_sigmask(0, []),
)
model.layers[1].number = signal.SIGTERM
signal.signal(signal.SIGTERM, signal.SIG_DFL)
model(vectors())
