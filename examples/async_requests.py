"""Several requests at once in asyncio. Each task has its own steps: python examples/async_requests.py"""

import asyncio
import sys

from cbtop import BrickProfiler

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
profiler = BrickProfiler()


async def request(milliseconds):
    for _ in range(steps):
        with profiler.step("decode", tokens=1), profiler.brick("RemoteCall"):
            await asyncio.sleep(milliseconds / 1000)


async def main():
    await asyncio.gather(*(request(milliseconds) for milliseconds in (1, 2, 3)))


asyncio.run(main())
print(profiler.report())
