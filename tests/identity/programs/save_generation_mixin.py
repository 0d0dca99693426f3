"""A causal model of `__main__` with GenerationMixin is pickled by value, as trackers do, and loaded elsewhere."""

import cloudpickle
import torch
from small import read_without_cbtop, show
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class Config(PretrainedConfig):
    model_type = "own"

    def __init__(self, **options):
        super().__init__(**options)
        self.vocab_size, self.num_hidden_layers, self.hidden_size = 50, 3, 16


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Own(PreTrainedModel, GenerationMixin):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.lm_head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList(Block(16) for _ in range(3))
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids, **options):
        return {"input_ids": input_ids}

    def forward(self, input_ids, **options):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(x))


READER = """
import pickle, torch
torch.set_num_threads(1)
model = pickle.load(sys.stdin.buffer)
with torch.no_grad():
    print(float(model(torch.tensor([[1, 2, 3]])).logits.sum()).hex())
"""
model = Own(Config(bos_token_id=1, eos_token_id=None, pad_token_id=0, use_cache=False)).eval()
ids = torch.tensor([[1, 2, 3]])
with torch.no_grad():
    for step in range(4):
        show(step, float(model(ids).logits.sum()))
        if step == 3:
            show(model.generate(ids, max_new_tokens=5, do_sample=False))
            data = cloudpickle.dumps(model)
            print(b"cbtop" in data, read_without_cbtop(data, READER))
