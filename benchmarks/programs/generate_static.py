"""Generate text with a llama that has a static cache and a compiled decode step."""

import torch
from llama import VOCABULARY, llama
from steady import DEVICE, run
from transformers import CompileConfig

TOKENS = 32
model = llama()
words = torch.randint(0, VOCABULARY, (1, 32), device=DEVICE)
compiled = CompileConfig()
# Without this setting, generation is compiled on GPUs only. Let it be compiled on a CPU, too.
compiled._compile_all_devices = True


def generate():
    return model.generate(
        words, max_new_tokens=TOKENS, do_sample=False, cache_implementation="static", compile_config=compiled
    ).tolist()


run(generate, TOKENS)
