"""A LoRA adapter is trained, switched off, merged and saved."""

import torch
from peft import LoraConfig, get_peft_model
from small import IDS, llama, show

torch.manual_seed(0)
model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
model.train()
for step in range(6):
    loss = model(input_ids=IDS, labels=IDS).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
model.eval()
show(model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False))
with torch.no_grad(), model.disable_adapter():
    show(model(input_ids=IDS).logits)
model.save_pretrained("adapter")
merged = model.merge_and_unload()
with torch.no_grad():
    for step in range(4):
        show(step, merged(IDS).logits, merged.generate(IDS, max_new_tokens=3, do_sample=False))
torch.save(merged, "merged.pt")
