"""A tiny llama with random weights in vLLM, for the scripts in this folder."""

import json
from pathlib import Path

from vllm import LLM

HIDDEN, LAYERS = 256, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": HIDDEN,
    "intermediate_size": 768,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def engine_in(folder, **settings):
    """Write the model's configuration into `folder`, and return an engine for it, with more `settings` of vLLM."""
    (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        **settings,
    )
