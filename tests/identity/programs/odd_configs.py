"""A program with unusual configs of models: a mapping, text, a class with values of wrong types, a module."""

import torch
from small import Stack, show, vectors


class Mapped(Stack):
    config = {"model_type": "x", "hidden_size": None}  # noqa: RUF012


class Text(Stack):
    config = "llama"


class Wrong(Stack):
    class config:  # noqa: N801
        model_type = 3
        hidden_size = "8"
        num_hidden_layers = -1
        num_attention_heads = 0
        max_position_embeddings = float("nan")
        _name_or_path = b"x"
        quantization_config = {"quant_method": "gptq"}  # noqa: RUF012
        vocab_size = 10**30


class Module(Stack):
    config = torch


class Refuses(Stack):
    class config:  # noqa: N801
        def __getattr__(self, name):
            raise OSError(name)

    config = config()


with torch.no_grad():
    for make in (Mapped, Text, Wrong, Module, Refuses):
        model = make()
        for step in range(6):
            show(make.__name__, step, model(vectors()), model(vectors()[:, :1]))
