"""Run a step for some seconds and print how often it ran. All programs in this folder use this loop.

    python PROGRAM.py [SECONDS]
    python PROGRAM.py turns

Warm-up is not counted. It takes a quarter of the time, and at least three calls. With `turns`, the program reads
seconds from its standard input, one number a line. It runs for that time after each line, and otherwise waits.
"""

import sys
import time

import torch

IN_TURNS = sys.argv[1:2] == ["turns"]
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 and not IN_TURNS else 10.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
WARM_UP_CALLS = 3

torch.manual_seed(0)
torch.set_num_threads(1)  # Use one thread, because two threads would wait for each other on a shared machine.


def run(call, steps_a_call=1):
    """Call `call` for SECONDS after a warm-up, and print `steps N seconds S processor P`.

    P is the processor time of these calls. On a busy machine, it varies less than S.
    """
    repeat(call, SECONDS / 4, WARM_UP_CALLS)
    for turn in sys.stdin if IN_TURNS else [SECONDS]:
        begun = time.process_time()
        calls, seconds = repeat(call, float(turn), 1)
        took = time.process_time() - begun
        print(f"steps {calls * steps_a_call} seconds {seconds:.4f} processor {took:.4f}", flush=True)


def repeat(call, seconds, at_least):
    calls, begun = 0, time.perf_counter()
    while calls < at_least or time.perf_counter() - begun < seconds:
        call()
        calls += 1
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return calls, time.perf_counter() - begun
