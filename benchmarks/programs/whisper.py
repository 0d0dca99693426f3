"""Transcribe speech with a Whisper. Its encoder runs once, and its decoder once per token."""

import torch
from steady import DEVICE, DTYPE, run
from transformers import WhisperConfig, WhisperForConditionalGeneration

TOKENS = 32
WIDTH, LAYERS = (1024, 16) if DEVICE == "cuda" else (256, 4)
config = WhisperConfig(
    vocab_size=4000,
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_attention_heads=WIDTH // 64,
    decoder_attention_heads=WIDTH // 64,
    encoder_ffn_dim=4 * WIDTH,
    decoder_ffn_dim=4 * WIDTH,
    max_source_positions=100,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=3,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
model = WhisperForConditionalGeneration(config).eval().to(DEVICE, DTYPE)
sound = torch.randn(1, 80, 200, device=DEVICE, dtype=DTYPE)


def transcribe():
    return model.generate(sound, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False).tolist()


run(transcribe, TOKENS)
