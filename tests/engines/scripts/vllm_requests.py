"""Serve some requests of a tiny llama with random weights by vLLM, and print vLLM's own times as JSON."""

import json
import sys
import tempfile
from pathlib import Path

from tiny_llama import engine_in
from vllm import SamplingParams

ROUNDS, BATCH, TOKENS = 3, 4, 24


def main():
    folder = Path(tempfile.mkdtemp())
    engine = engine_in(folder)
    prompts = [{"prompt_token_ids": [at + 1] * 32} for at in range(BATCH)]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    rows = []
    for _ in range(ROUNDS):
        for output in engine.generate(prompts, sampling, use_tqdm=False):
            times = output.metrics
            decode_s = times.last_token_ts - times.first_token_ts
            rows.append([times.first_token_latency, decode_s, times.num_generation_tokens])
    Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":  # required because the engine starts processes that import this file
    main()
