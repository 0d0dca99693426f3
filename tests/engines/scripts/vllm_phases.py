"""Serve requests with every phase of a step by vLLM: `python vllm_phases.py FILE`. Writes vLLM's own counts.

The steps are chunks of a long prompt, a cached prefix, several prompts at a time, and a request with an adapter.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_llama import HIDDEN, LAYERS, engine_in
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

RANK, BLOCK = 8, 32
STEP_TOKENS, LONG, SHORT, TOKENS = 64, 200, 40, 8  # two short prompts do not fit in a step


def write_adapter(folder):
    """Write an adapter for the query and value projections."""
    weights = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            of = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{of}.lora_A.weight"] = torch.randn(RANK, HIDDEN).bfloat16()
            weights[f"{of}.lora_B.weight"] = torch.randn(HIDDEN, RANK).bfloat16()
    folder.mkdir()
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none", "task_type": "CAUSAL_LM"}))


def main(file):
    folder = Path(tempfile.mkdtemp())
    write_adapter(folder / "adapter")
    engine = engine_in(
        folder,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=16,
        block_size=BLOCK,
        enable_lora=True,
        max_lora_rank=RANK,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    rows = []

    def serve(*prompts, **more):
        for output in engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False, **more
        ):
            tokens = len(output.outputs[0].token_ids)
            rows.append([len(output.prompt_token_ids), output.num_cached_tokens, tokens])

    for round in range(4):  # the first steps of a process are its warm-up
        long = [7 + round] * LONG
        serve(long)
        serve(long)
        serve(*([100 + 10 * round + at] * SHORT for at in range(4)))
        serve([900 + round] * SHORT, lora_request=LoRARequest("coding", 1, str(folder / "adapter")))
    Path(file).write_text(json.dumps(rows))


if __name__ == "__main__":  # required because the engine starts processes that import this file
    main(*sys.argv[1:])
