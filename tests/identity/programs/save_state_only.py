"""Weights are saved with hooks, safetensors and numpy, and compared with those of a plain state dict."""

import numpy as np
import torch
from safetensors.torch import save_file
from small import IDS, Net, show
from torch import nn


class WithExtra(Net):
    def get_extra_state(self):
        return {"count": len(list(self.modules()))}

    def set_extra_state(self, state):
        print(state)


model = WithExtra()
model.register_state_dict_pre_hook(lambda module, prefix, keep: print("pre", prefix, keep))
model._register_state_dict_hook(lambda module, state, prefix, local: print("post", len(state), sorted(local)))
for step in range(6):
    show(step, model(IDS))
    state = model.state_dict()
    show({name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
    torch.save(state, f"state-{step}.pt")
    extra = state.pop("_extra_state")
    save_file({name: value.contiguous() for name, value in state.items()}, f"state-{step}.safetensors")
    np.savez(f"state-{step}.npz", vector=nn.utils.parameters_to_vector(model.parameters()).detach().numpy())
    print(model.load_state_dict(state | {"_extra_state": extra}), extra["count"])
