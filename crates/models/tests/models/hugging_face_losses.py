"""Losses of the tests' tiny Llama in Hugging Face's transformers, for hugging_face.rs.

    hugging_face_losses.py           with weights that are formulas
    hugging_face_losses.py FOLDER    with those of a folder, as `from_pretrained` reads it
"""
import sys

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=24, vocab_size=13, max_position_embeddings=8, rms_norm_eps=1e-5,
    rope_theta=10000.0, tie_word_embeddings=False)


def formula(number, name, shape):
    center = 1.0 if "norm" in name else 0.0
    index = np.arange(np.prod(shape), dtype=np.float64)
    values = center + 0.2 * np.sin(index * 0.7 + number)
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def main():
    if len(sys.argv) > 1:
        # Without a generation config of ours, some versions insist on a file of that name.
        model = LlamaForCausalLM.from_pretrained(
            sys.argv[1], config=CONFIG, generation_config=GenerationConfig())
    else:
        model = LlamaForCausalLM(CONFIG)
        with torch.no_grad():
            for number, (name, param) in enumerate(sorted(model.named_parameters())):
                param.copy_(formula(number, name, param.shape))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [0, 12, 3, 11, 3, 9, 2, 2]])
    targets = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9], [12, 3, 11, 3, 9, 2, 2, 0]])
    with torch.no_grad():
        logits = model.float()(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    print(f"{loss.item():.7f}")


if __name__ == "__main__":
    main()
