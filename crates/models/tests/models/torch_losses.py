"""Losses of the tests' tiny GPT in PyTorch, for pytorch.rs.

Prints the loss of each of STEPS training steps, from weights and tokens that
are formulas, so that nothing but these numbers has to be stored.
"""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, DIM, HEADS, VOCAB, SEQ, BATCH, STEPS = 2, 16, 2, 31, 80, 2, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.ln2 = nn.LayerNorm(DIM)
        self.fc = nn.Linear(DIM, 4 * DIM)
        self.out = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        q, k, v = (
            part.view(BATCH, SEQ, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(DIM, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(BATCH, SEQ, DIM))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.wpe = nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.lnf = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(SEQ))
        for block in self.blocks:
            x = block(x)
        return self.head(self.lnf(x))


def formula(number, name, shape):
    center = 1.0 if "ln" in name and name.endswith("weight") else 0.0
    index = np.arange(np.prod(shape), dtype=np.float64)
    values = center + 0.2 * np.sin(index * 0.7 + number)
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def main():
    model = Gpt()
    with torch.no_grad():
        for number, (name, param) in enumerate(model.named_parameters()):
            param.copy_(formula(number, name, param.shape))
    # A large eps makes the losses show a wrong scale of the gradients.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, eps=0.01, weight_decay=0.1)
    for step in range(STEPS):
        index = step * BATCH * SEQ + torch.arange(BATCH * SEQ + 1)
        tokens = index * 7919 % VOCAB
        logits = model(tokens[:-1].view(BATCH, SEQ))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:])
        print(f"{loss.item():.7f},")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
