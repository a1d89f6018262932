"""Logits of transformers for documents that share sequences, for documents.rs. It finds the documents by `position_ids`.

    packed_logits.py CASES    a list in JSON: each a folder, rows of tokens, and rows of positions
"""
import json
import sys

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def logits(folder, tokens, positions):
    model = AutoModelForCausalLM.from_pretrained(folder, generation_config=GenerationConfig())
    model = model.float().eval()
    with torch.no_grad():
        output = model(torch.tensor(tokens), position_ids=torch.tensor(positions), use_cache=False)
    return output.logits.flatten().tolist()


if __name__ == "__main__":
    print(json.dumps([logits(*case) for case in json.loads(sys.argv[1])]))
