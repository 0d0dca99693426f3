"""Serve requests to a tiny llama by vLLM, in one way: `python vllm_cases.py CASE FILE`. Writes what vLLM measured.

All cases have the same model and requests. Only a setting of the engine differs.
"""

import json
import sys
import tempfile
from pathlib import Path

from tiny_llama import engine_in
from vllm import SamplingParams

CASES = {
    "healthy": {},
    "few sequences": {"max_num_seqs": 4},
    "one sequence": {"max_num_seqs": 1},
    "small cache": {"num_gpu_blocks_override": 20, "block_size": 32},
}
ROUNDS, BATCH, PROMPT, TOKENS = 2, 32, 32, 64


def main(case, file):
    folder = Path(tempfile.mkdtemp())
    engine = engine_in(folder, **CASES[case])
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for round in range(ROUNDS):
        prompts = [{"prompt_token_ids": [round * BATCH + at + 1] * PROMPT} for at in range(BATCH)]
        engine.generate(prompts, sampling, use_tqdm=False)
    (preemptions,) = [metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions"]
    limit = engine.llm_engine.vllm_config.scheduler_config.max_num_seqs
    Path(file).write_text(json.dumps({"max_num_seqs": limit, "preemptions": preemptions}))


if __name__ == "__main__":  # required because the engine starts processes that import this file
    main(*sys.argv[1:])
