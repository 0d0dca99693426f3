"""A Llama generates greedily, with sampling, with beams, with a static cache and with an assistant model."""

import torch
from small import IDS, llama, show

model, assistant = llama(), llama(num_hidden_layers=1)
for options in (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7, "top_k": 20},
    {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2},
    {"num_beams": 3},
    {"num_beams": 2, "do_sample": True},
    {"do_sample": False, "cache_implementation": "static"},
    {"do_sample": False, "use_cache": False},
    {"do_sample": False, "assistant_model": assistant},
    {"do_sample": False, "prompt_lookup_num_tokens": 2},
    {"do_sample": False, "repetition_penalty": 1.3, "output_scores": True, "return_dict_in_generate": True},
):
    torch.manual_seed(1)
    for step in range(2):
        result = model.generate(IDS, max_new_tokens=6, **options)
        if isinstance(result, dict):
            show(result["scores"])
            result = result["sequences"]
        show(step, sorted(options), result.tolist())
for attention in ("eager", "sdpa"):
    model.set_attn_implementation(attention)
    show(attention, model.generate(IDS, max_new_tokens=4, do_sample=False), model(IDS).logits)
