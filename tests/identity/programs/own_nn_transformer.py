"""Runs and trains modules of torch: its transformer, its recurrent layers, and attention that returns its weights."""

import torch
from small import show
from torch import nn

model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True, dropout=0.1)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
recurrent, attention = nn.LSTM(16, 16, 2, batch_first=True), nn.MultiheadAttention(16, 2, batch_first=True)
source, target = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
mask = nn.Transformer.generate_square_subsequent_mask(4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    loss = model(source, target, tgt_mask=mask, tgt_is_causal=True).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
    with torch.no_grad():
        show(encoder(source), encoder(source, src_key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)))
        show(recurrent(source)[0], attention(target, source, source, average_attn_weights=False))
