"""Coroutines call a model, cancel each other, and stream tokens from an executor."""

import asyncio

import torch
from small import IDS, Net, show

model = Net().eval()


async def tokens(start, count):
    ids = IDS + start
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
        yield int(ids[0, -1])
        await asyncio.sleep(0)


async def collect(start):
    return [token async for token in tokens(start, 6)]


async def main():
    show(await asyncio.gather(*(collect(start) for start in range(4))))
    task = asyncio.create_task(collect(5))
    await asyncio.sleep(0)
    task.cancel()
    show(await asyncio.gather(task, return_exceptions=True))
    loop = asyncio.get_running_loop()
    for step in range(4):
        show(step, await loop.run_in_executor(None, model, IDS), await asyncio.to_thread(model, IDS + step))
    stream = tokens(1, 9)
    show(await anext(stream), await anext(stream))
    await stream.aclose()
    print(len(asyncio.all_tasks()), type(loop).__name__)


asyncio.run(main())
