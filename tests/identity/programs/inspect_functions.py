"""Between steps, a program inspects functions that cbtop watches: signatures, sources, code objects and hints."""

import inspect
import pickle
import typing

import small
import torch
from small import IDS, Attention, Net, attempt, llama, show
from transformers.generation.utils import GenerationMixin
from transformers.models.llama import modeling_llama


def describe(function):
    print(function.__module__, function.__qualname__, type(function).__name__, inspect.signature(function))
    code = function.__code__
    print(code.co_varnames[: code.co_argcount], code.co_flags, function.__defaults__, sorted(vars(function)))
    show(inspect.getsource(function).encode(), pickle.dumps(function))
    attempt("hints", typing.get_type_hints, function)
    print(inspect.getsourcelines(function)[1], inspect.unwrap(function) is function, inspect.isfunction(function))


model, net = llama(), Net().eval()
with torch.no_grad():
    for step in range(4):
        show(step, model.generate(IDS, max_new_tokens=3, do_sample=False), net(IDS))
        for function in (
            small.apply_rotary_pos_emb,
            Attention._split_heads,
            Attention._merge_heads,
            modeling_llama.apply_rotary_pos_emb,
            modeling_llama.eager_attention_forward,
            modeling_llama.create_causal_mask,
            GenerationMixin.generate,
            GenerationMixin.prepare_inputs_for_generation,
            GenerationMixin._update_model_kwargs_for_generation,
        ):
            describe(function)
