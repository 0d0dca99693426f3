"""torch's own tables of functions must contain `scaled_dot_product_attention`. A function mode must see its calls."""

import torch
import torch.nn.functional as F
from small import IDS, Net, show
from torch.overrides import TorchFunctionMode, get_testing_overrides, resolve_name


class Logs(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        calls.append(resolve_name(function) or getattr(function, "__name__", str(type(function))))
        return function(*args, **kwargs or {})


calls, model, builtin = [], Net().eval(), F.scaled_dot_product_attention
with torch.no_grad():
    for step in range(6):
        show(step, model(IDS))
        function = F.scaled_dot_product_attention
        print(function is builtin, function is torch._C._nn.scaled_dot_product_attention, resolve_name(function))
        print(function in get_testing_overrides(), function.__name__, type(function).__name__, function.__doc__[:30])
        with Logs():
            show(model(IDS))
print(calls)
