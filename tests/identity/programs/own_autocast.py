"""A model runs under autocast, inference mode, anomaly detection, another dtype and deterministic algorithms."""

import torch
from small import IDS, Net, show

model = Net().eval()
for step in range(5):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        show(step, model(IDS), torch.is_autocast_enabled("cpu"))
    with torch.inference_mode():
        out = model(IDS)
        show(out, out.is_inference(), torch.is_grad_enabled())
    with torch.autograd.set_detect_anomaly(True):
        loss = model(IDS).sum()
        loss.backward()
        show(loss, model.embed.weight.grad)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        show(model(IDS))
    with torch.random.fork_rng():
        show(torch.nn.functional.dropout(model(IDS), 0.5), torch.get_rng_state().sum())
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
wide = Net().double()
for step in range(5):
    show(step, wide(IDS), torch.get_rng_state().sum(), torch.get_default_dtype())
