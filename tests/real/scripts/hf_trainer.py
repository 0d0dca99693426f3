"""The Trainer of transformers trains a llama with two micro-batches per step and one evaluation."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.set_num_threads(1)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, at):
        words = torch.arange(at, at + 48) % 500
        return {"input_ids": words, "labels": words}


config = LlamaConfig(
    vocab_size=500,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=60,
    report_to=[],
    use_cpu=True,
    eval_strategy="steps",
    eval_steps=25,
    save_strategy="no",
    disable_tqdm=True,
)
evaluated = torch.utils.data.Subset(Samples(), range(20))
Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Samples(), eval_dataset=evaluated).train()
