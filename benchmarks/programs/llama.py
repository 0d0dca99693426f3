"""Build the llama with random weights that several programs of this folder run."""

from steady import DEVICE, DTYPE
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4000
ON_CUDA, ON_CPU = (2048, 16), (512, 6)  # Width and number of layers of the model. A token takes 3 to 30 ms with them.


def llama(width=None, layers=None):
    usual_width, usual_layers = ON_CUDA if DEVICE == "cuda" else ON_CPU
    width = width or usual_width
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers or usual_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().to(DEVICE, DTYPE)
