"""The program of the recording `imperfect.cbtop`: a process that has run for a while and has several problems.

    python tests/cbtop/imperfect.py 3 &          # another process, which ends
    python tests/cbtop/imperfect.py 75 &
    sleep 40; cbtop record -o tests/cbtop/imperfect.cbtop --duration 24

In one of twelve layers, NumPy copies the weights before each product. The process pauses after each token and reads
a prompt before each answer. The sampling of every hundredth step waits. One brick stalls in the middle of the
recording.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from cbtop import BrickDefinition, BrickId, BrickProfiler, Manifest, Work, measure_ceilings

LAYERS, SLOW_LAYER, WIDTH = 12, 8, 384
NEW_TOKENS, PROMPT_TOKENS = 60, 64
PAUSE_S, WAIT_S, STALL_AFTER_S, STALL_S = 0.05, 0.4, 55.0, 6.0

random = np.random.default_rng(7)
profiler = BrickProfiler()
square, up, down = (
    [random.standard_normal((WIDTH * inputs, WIDTH * outputs), np.float32) for _ in range(LAYERS)]
    for inputs, outputs in ((1, 1), (1, 3), (3, 1))
)
# The weights of this layer are not contiguous, so NumPy copies them before each product.
down[SLOW_LAYER] = np.repeat(down[SLOW_LAYER], 4, axis=1)[:, ::4]
head = random.standard_normal((WIDTH, WIDTH * 8), np.float32)


def product(brick: BrickId, weights: np.ndarray, times: int = 1) -> BrickDefinition:
    """Return the definition of a brick that multiplies with `weights` `times` times. Its elements are the outputs."""
    work = Work(0, 2 * weights.shape[0], times * weights.nbytes, 4)
    return BrickDefinition.of(brick, backend="numpy", work=work)


QKV, UP = product(BrickId.QKV_PROJECTION, square[0], 3), product(BrickId.UP_PROJECTION, up[0])
DOWN, HEAD = product(BrickId.DOWN_PROJECTION, down[0]), product(BrickId.LM_HEAD, head)
parameters = sum(weights.size for weights in (*square, *up, *down, head))
profiler.announce(Manifest("imperfect", "numpy", "numpy", "F32", 1, LAYERS, WIDTH, 256, parameters, parameters * 4))
for ceiling in measure_ceilings(threads=1):
    profiler.announce(ceiling)


def scaled(x: np.ndarray) -> np.ndarray:
    return x / (np.abs(x).max() + 1)


def forward(name: str, tokens: int, cached: int, *, stands_still: bool = False, waits: bool = False) -> None:
    with profiler.step(name, tokens=tokens) as step:
        step.sequences, step.cached = 1, cached
        with profiler.brick(BrickId.EMBEDDING, tokens * WIDTH):
            x = np.ones((tokens, WIDTH), np.float32)
        for layer in range(LAYERS):
            with profiler.layer(layer):
                with profiler.brick(BrickId.RMS_NORM, x.size):
                    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
                with profiler.brick(QKV, 3 * x.size):
                    query, key, _ = (normed @ square[layer] for _ in range(3))
                with profiler.brick(BrickId.ATTENTION_SCORE, tokens * (tokens + cached)):
                    scores = scaled(query @ np.resize(key, (tokens + cached, WIDTH)).T)
                with profiler.brick(BrickId.ATTENTION_OUTPUT, x.size):
                    x = scaled(x + scores @ np.resize(key, (tokens + cached, WIDTH)))
                with profiler.brick(UP, 3 * x.size):
                    wide = scaled(x @ up[layer])
                with profiler.brick(DOWN, x.size):
                    if stands_still and layer == SLOW_LAYER:
                        time.sleep(STALL_S)
                    x = scaled(x + wide @ down[layer])
        with profiler.brick(HEAD, tokens * WIDTH * 8):
            logits = x @ head
        with profiler.brick("Sampling", tokens):
            if waits:
                time.sleep(WAIT_S)
            logits.argmax(-1)


begin_s = time.monotonic()
stood_still = False
steps = 0
while (passed_s := time.monotonic() - begin_s) < float(sys.argv[1]):
    with profiler.brick("Tokenize"):
        time.sleep(0.02)
    forward("prefill", PROMPT_TOKENS, 0)
    for position in range(NEW_TOKENS):
        steps += 1
        stands_still = not stood_still and time.monotonic() - begin_s > STALL_AFTER_S
        stood_still |= stands_still
        forward("decode", 1, PROMPT_TOKENS + position, stands_still=stands_still, waits=steps % 100 == 0)
        time.sleep(PAUSE_S)
