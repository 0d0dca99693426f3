"""A model runs before and after a fork, in forked and spawned workers, and returns through a queue."""

import multiprocessing
import os
import pickle
import sys

import torch
from small import IDS, Net, exact, show


def work(model, number):
    with torch.no_grad():
        return number, exact([model(IDS + number) for _ in range(4)])


def send(queue, model):
    with torch.no_grad():
        model(IDS)
    queue.put((exact(model(IDS)), exact(pickle.dumps(model))))


if __name__ == "__main__":
    model = Net().eval()
    for step in range(3):
        show(step, model(IDS))
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        show("child", work(model, 2))
        sys.stdout.flush()
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.starmap(work, [(model, number) for number in range(4)]))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=send, args=(queue, model))
    process.start()
    print(queue.get())
    process.join()
    print(process.exitcode, multiprocessing.active_children())
    show(model(IDS))
