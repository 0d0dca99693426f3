"""Run a GPT that replays captured CUDA graphs of several batch sizes in turn. The graphs share a memory pool."""

from itertools import cycle

import torch
from blocks import GPT
from steady import DTYPE, run

LENGTH, SIZES, WARM_UP = 512, (8, 6, 4, 2), 3
model = GPT(1024, 24).eval().to("cuda", DTYPE)
words = torch.randint(0, 2000, (max(SIZES), LENGTH), device="cuda")
pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
captured = []
with torch.no_grad():
    for size in SIZES:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                model(words[:size])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            scores = model(words[:size])
        captured.append((graph, scores))
turns = cycle(captured)


def replay():
    graph, scores = next(turns)
    graph.replay()
    return scores[:, -1].argmax(-1).tolist()


run(replay)
