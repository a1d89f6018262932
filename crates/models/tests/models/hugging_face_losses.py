"""Loss and logits of the tests' tiny Llamas and GPT-2 in Hugging Face's transformers, for hugging_face.rs.

    hugging_face_losses.py FOLDER               with its weights and sizes, as `from_pretrained` reads them
    hugging_face_losses.py --formulas FOLDER    with weights that are formulas, and the sizes of its config.json
"""
import json
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig


def formula(number, name, shape):
    is_scale = ("norm" in name or "ln" in name) and name.endswith("weight")
    center = 1.0 if is_scale else 0.0
    index = np.arange(np.prod(shape), dtype=np.float64)
    values = center + 0.2 * np.sin(index * 0.7 + number)
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def main():
    folder = sys.argv[-1]
    if sys.argv[1] != "--formulas":
        # Without a generation config of ours, some versions insist on a file of that name.
        model = AutoModelForCausalLM.from_pretrained(folder, generation_config=GenerationConfig())
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        with torch.no_grad():
            for number, (name, param) in enumerate(sorted(model.named_parameters())):
                param.copy_(formula(number, name, param.shape))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [0, 12, 3, 11, 3, 9, 2, 2]])
    targets = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9], [12, 3, 11, 3, 9, 2, 2, 0]])
    with torch.no_grad():
        logits = model.float().eval()(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    print(json.dumps({"loss": loss.item(), "logits": logits.flatten().tolist()}))


if __name__ == "__main__":
    main()
