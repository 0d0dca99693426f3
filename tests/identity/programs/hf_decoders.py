"""Small decoders of many families run forward and generate."""

import torch
import transformers
from small import IDS, show

COMMON = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "GPTJ": {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "n_positions": 64},
    "Bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "Falcon": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "Qwen2": SIZES,
    "Mistral": SIZES | {"sliding_window": 4},
    "Mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma": SIZES | {"head_dim": 8},
    "GPTNeoX": SIZES,
    "OPT": {
        "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 16,
    },
    "Mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip
for family, sizes in FAMILIES.items():
    torch.manual_seed(0)
    name = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**COMMON | sizes)).eval()
    with torch.no_grad():
        for step in range(3):
            show(family, step, model(IDS).logits)
        show(model.generate(IDS, max_new_tokens=4, do_sample=False).tolist())
        show(model.generate(IDS, max_new_tokens=3, num_beams=2).tolist())
    torch.save(model.state_dict(), f"{family}.pt")
