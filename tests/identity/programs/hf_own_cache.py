"""Uses caches that are not from transformers: one class overrides `update`, another wraps a cache.

The model's class also overrides generation methods.
"""

import torch
from small import IDS, llama, show
from transformers import DynamicCache, LlamaForCausalLM


class Counting(DynamicCache):
    updates = 0

    def update(self, keys, values, layer, *args, **options):
        type(self).updates += 1
        return super().update(keys, values, layer, *args, **options)


class Own(LlamaForCausalLM):
    calls = ()

    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        self.calls += ("prepare",)
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        self.calls += (sorted(model_kwargs)[0],)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)


model = Own(llama().config).eval()
for step in range(3):
    cache = Counting()
    show(step, model.generate(IDS, max_new_tokens=5, do_sample=False, past_key_values=cache), Counting.updates)
    print(cache.get_seq_length(), type(cache).__name__, len(model.calls), model.calls[:3])
with torch.no_grad():
    out = model(IDS, use_cache=True)
    for step in range(6):
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)
        show(step, out.logits, out.past_key_values.get_seq_length(), out.past_key_values.layers[0].keys)
