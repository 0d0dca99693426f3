"""Run a GPT that replays one captured CUDA graph."""

import torch
from blocks import GPT
from steady import DTYPE, run

BATCH, LENGTH, WARM_UP = 8, 256, 3
model = GPT(1024, 24).eval().to("cuda", DTYPE)
words = torch.randint(0, 2000, (BATCH, LENGTH), device="cuda")
graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.no_grad():
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            model(words)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        scores = model(words)


def replay():
    words.random_(0, 2000)
    graph.replay()
    return scores[:, -1].argmax(-1).tolist()


run(replay)
