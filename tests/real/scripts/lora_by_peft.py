"""A llama with LoRA adapters of peft, which are active with the argument `faulty` and disabled with `healthy`."""

import contextlib
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
)  # fmt: skip
adapters = LoraConfig(r=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config), adapters).eval()
words = torch.randint(0, 256, (1, 64))
with torch.no_grad(), model.disable_adapter() if sys.argv[1] == "healthy" else contextlib.nullcontext():
    for _ in range(400):
        model(input_ids=words, use_cache=False)
