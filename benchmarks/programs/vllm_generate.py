"""Serve a llama with random weights by vLLM: `python vllm_generate.py [SECONDS] [eager]`."""

import json
import sys
import tempfile
from pathlib import Path

from steady import run
from vllm import LLM, SamplingParams

TOKENS, BATCH = 64, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


def main():
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    engine = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        gpu_memory_utilization=0.3,
        enforce_eager="eager" in sys.argv,
        seed=0,
    )
    prompts = [{"prompt_token_ids": [at + 1] * 32} for at in range(BATCH)]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    run(lambda: engine.generate(prompts, sampling, use_tqdm=False), TOKENS)


if __name__ == "__main__":  # This condition is required, because the engine starts processes that import this file.
    main()
