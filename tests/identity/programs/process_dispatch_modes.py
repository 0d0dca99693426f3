"""Counts the operations of a model with torch's dispatch, function and flop modes.

Global hooks and hooks on saved tensors also count operations.
"""

import collections

from small import IDS, Net, show
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


def pack(tensor):
    packed.append(tuple(tensor.shape))
    return tensor.double() if tensor.is_floating_point() else tensor


def unpack(tensor):
    return tensor.float() if tensor.is_floating_point() else tensor


net, packed, hooked = Net(), [], []
for step in range(5):
    show(step, net(IDS))
    for mode in (Operations(), Functions()):
        with mode:
            scores = net(IDS)
            scores.sum().backward()
        show(scores, mode.seen, sorted(collections.Counter(mode.seen).items()))
    with Operations() as outer, Functions() as inner:
        net(IDS)
    show(len(outer.seen), len(inner.seen))
    with FlopCounterMode(display=False) as flops:
        net(IDS).sum().backward()
    counts = flops.get_flop_counts()
    show(flops.get_total_flops(), [(name, sum(counts[name].values())) for name in sorted(counts)])
    handle = module.register_module_forward_hook(lambda module, args, output: hooked.append(type(module).__name__))
    with saved_tensors_hooks(pack, unpack):
        scores = net(IDS)
    handle.remove()
    scores.sum().backward()
    show(hooked, packed, net.lm_head.weight.grad)
