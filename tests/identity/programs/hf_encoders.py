"""Models of transformers run forward, train and generate: encoders, an encoder with decoder, speech, vision."""

import torch
from small import IDS, show
from transformers import (
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)  # fmt: skip

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
bert = BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=32, **sizes)).eval()
vit = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes)).eval()
t5 = T5ForConditionalGeneration(
    T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
).eval()
whisper = WhisperForConditionalGeneration(
    WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=10,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )
).eval()  # fmt: skip
features, image = torch.linspace(-1, 1, 160).view(1, 8, 20), torch.linspace(0, 1, 768).view(1, 3, 16, 16)
for step in range(4):
    with torch.no_grad():
        show(step, bert(IDS).logits, bert(IDS, attention_mask=torch.tensor([[1, 1, 0, 0]])).logits, vit(image).logits)
        show(t5(input_ids=IDS, labels=IDS).loss, t5.generate(IDS, max_new_tokens=4, num_beams=1 + step % 2))
        show(whisper(input_features=features, decoder_input_ids=IDS).logits)
    loss = bert(IDS, labels=IDS).loss
    loss.backward()
    show(loss, bert.bert.embeddings.word_embeddings.weight.grad)
