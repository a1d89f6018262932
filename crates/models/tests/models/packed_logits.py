"""Logits of transformers for documents that share sequences, for documents.rs. It finds the documents by `position_ids`.

    packed_logits.py FOLDER TOKENS POSITIONS    with lists of rows in JSON
"""
import json
import sys

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main():
    folder, tokens, positions = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, generation_config=GenerationConfig())
    model = model.float().eval()
    tokens, positions = (torch.tensor(json.loads(rows)) for rows in (tokens, positions))
    with torch.no_grad():
        logits = model(tokens, position_ids=positions, use_cache=False).logits
    print(json.dumps(logits.flatten().tolist()))


if __name__ == "__main__":
    main()
