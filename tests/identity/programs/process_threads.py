"""Models are called in threads, in pools and with thread-local and context variables."""

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from small import IDS, Net, llama, show

models = [Net().eval() for _ in range(3)]
context, local = contextvars.ContextVar("number", default=-1), threading.local()


@torch.no_grad()
def work(number):
    context.set(number)
    local.number = number
    total = sum(float(models[number % 3](IDS + number % 40).sum()) for _ in range(5))
    assert (context.get(), local.number) == (number, number)
    return total


with ThreadPoolExecutor(3) as pool:
    show(list(pool.map(work, range(24))))
results = {}
threads = [threading.Thread(target=lambda n=n: results.update({n: work(n)}), name=f"own-{n}") for n in range(4)]
for thread in threads:
    thread.start()
    thread.join()
show(results, [thread.name for thread in threads], threading.active_count(), context.get())
model = llama()
with ThreadPoolExecutor(2) as pool:
    rows = list(pool.map(lambda n: model.generate(IDS + n, max_new_tokens=4, do_sample=False).tolist(), range(6)))
show(rows, [type(thread).__name__ for thread in threading.enumerate()])
