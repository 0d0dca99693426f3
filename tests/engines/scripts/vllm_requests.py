"""Serve some requests of a tiny llama with random weights by vLLM, and print vLLM's own times as JSON."""

import json
import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
ROUNDS, BATCH, TOKENS = 3, 4, 24


def main():
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    engine = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
    )
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
