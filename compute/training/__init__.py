"""Fine-tuning a model with LoRA: forward, loss, backward and the optimizer, on the CPU."""
