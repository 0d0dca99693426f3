"""Run two GPTs at the same time in two threads. On a GPU, each has its own stream."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from blocks import GPT
from steady import DEVICE, DTYPE, run

(WIDTH, LAYERS), (BATCH, LENGTH) = ((1024, 16), (4, 512)) if DEVICE == "cuda" else ((192, 4), (1, 32))
models = [GPT(WIDTH, LAYERS).eval().to(DEVICE, DTYPE), GPT(WIDTH // 2, LAYERS).eval().to(DEVICE, DTYPE)]
words = torch.randint(0, 2000, (BATCH, LENGTH), device=DEVICE)
streams = [torch.cuda.Stream() for _ in models] if DEVICE == "cuda" else [None, None]
if DEVICE == "cuda":
    # Wait until the models have been made. The new CUDA streams do not wait for that by themselves.
    torch.cuda.synchronize()
threads = ThreadPoolExecutor(len(models))


@torch.no_grad()
def score(model, stream):
    with torch.cuda.stream(stream) if stream else nullcontext():
        return model(words)[:, -1].argmax(-1).tolist()


run(lambda: list(threads.map(score, models, streams)))
