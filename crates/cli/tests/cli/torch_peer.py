"""The command's GPT in PyTorch, for interchange.rs.

    torch_peer.py train OUT HEADS VOCAB   train a little from PyTorch's own initial weights, write them
    torch_peer.py losses PATH HEADS STEPS losses of training on from the weights in a file or folder

Weights are safetensors: a file, or a folder with model.safetensors.index.json. Names and shapes are those
of the modules below, all of them and no others. Training is as the command's with --synthetic, --batch 4,
--lr 0.01 and --eps 0.01; a large eps makes the losses show a wrong scale of the gradients.
"""
import json
import os
import struct
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, DIM, LAYERS, SEQ, STEPS = 4, 16, 2, 12, 5


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)

    def forward(self, x):
        rows, seq, dim = x.shape
        q, k, v = (part.view(rows, seq, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.ln1(x)).split(dim, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, seq, dim))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, layers, dim, heads, vocab, seq):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.lnf = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.lnf(x))


def read_file(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32", name
        begin, end = entry["data_offsets"]
        values = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def read(path):
    if not os.path.isdir(path):
        return read_file(path)
    with open(os.path.join(path, "model.safetensors.index.json")) as file:
        index = json.load(file)
    tensors = {}
    for name, file in index["weight_map"].items():
        tensors[name] = read_file(os.path.join(path, file))[name]
    size = sum(4 * tensor.numel() for tensor in tensors.values())
    assert size == index["metadata"]["total_size"]
    return tensors


def check_hugging_face(model, path, tensors):
    """That Hugging Face's own reader finds the same in a folder, where it is installed."""
    try:
        from huggingface_hub import load_torch_model
    except ImportError:
        return
    load_torch_model(model, path, strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, tensors[name]), name


def write(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        values = tensor.detach().contiguous().numpy().astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape),
                        "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + data)


def train(model, steps):
    vocab, seq = model.wte.num_embeddings, model.wpe.num_embeddings
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01, weight_decay=0.01)
    for step in range(steps):
        index = step * BATCH * seq + torch.arange(BATCH * seq + 1)
        tokens = index * 7919 % vocab
        logits = model(tokens[:-1].view(BATCH, seq))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:])
        yield loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    torch.manual_seed(5)
    kind, path, heads, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if kind == "train":
        model = Gpt(LAYERS, DIM, heads, number, SEQ)
        list(train(model, STEPS))
        write(path, model.state_dict())
        return
    tensors = read(path)
    (vocab, dim), (seq, _) = tensors["wte.weight"].shape, tensors["wpe.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    model = Gpt(layers, dim, heads, vocab, seq)
    if os.path.isdir(path):
        check_hugging_face(model, path, tensors)
    model.load_state_dict(tensors, strict=True)
    print(json.dumps(list(train(model, number))))


if __name__ == "__main__":
    main()
