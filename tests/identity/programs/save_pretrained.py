"""A model of transformers is saved after it has generated text, and loaded again. Its config is printed."""

import torch
from small import IDS, llama, show
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
model = llama()
show(model.generate(IDS, max_new_tokens=6, do_sample=False))
model.save_pretrained("saved")
again = AutoModelForCausalLM.from_pretrained("saved").eval()
for step in range(4):
    show(step, again.generate(IDS, max_new_tokens=6, do_sample=False), model(IDS).logits)
torch.save(again, "again.pt")
print(model.config.to_json_string(use_diff=False) == again.config.to_json_string(use_diff=False))
print(model.config, model.generation_config)
