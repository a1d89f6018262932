"""Small models of each family in Hugging Face's transformers, and what it computes from them, for families.rs.

    families.py make FOLDER       writes the folders, with random weights, and their expected.safetensors
    families.py check FOLDER      computes the numbers in each expected.safetensors again, and compares them
    families.py logits FOLDER...  prints the logits of the models in these folders, as `from_pretrained` reads them

The folders are what `save_pretrained` of transformers 5.24 writes. Weights have 16 bits, and all numbers are computed in 32.
"""
import json
import os
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 40
# Row 1 has every token of row 0 at another place, so windows and positions matter.
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [30, 12, 3, 11, 3, 9, 2, 2, 39, 1, 30, 0]])
TARGETS = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [12, 3, 11, 3, 9, 2, 2, 39, 1, 30, 0, 7]])
SHORT = 5

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}
# Heads of eight elements.
FEW = {"num_attention_heads": 2, "num_key_value_heads": 1}
FACTORS = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.5, 3.0, 6.5, 12.0]}

# The name of a folder, the type of its model, and its settings.
FAMILIES = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "hidden_act": "gelu"}),
    "llama-dynamic": ("llama", {"max_position_embeddings": 6, "head_dim": 8,
                                "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0}}),
    "llama-yarn": ("llama", {"head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 50.0, "beta_fast": 1.5, "beta_slow": 0.3}}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "rope_theta": 100000}),
    "qwen2": ("qwen2", {"rope_theta": 1000000.0}),
    "qwen2-window": ("qwen2", {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
                               "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 4, "head_dim": 8}),
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "rope_theta": 1000000.0}),
    "phi3": ("phi3", {**FEW, "partial_rotary_factor": 0.5, "sliding_window": 6}),
    "phi3-longrope": ("phi3", {**FEW, "original_max_position_embeddings": 8,
                               "rope_parameters": {"rope_type": "longrope", "rope_theta": 100.0, **FACTORS}}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 12,
                               "sliding_window_pattern": 3, "rope_theta": 1000.0, "rope_local_base_freq": 50.0,
                               "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gpt-neox": ("gpt_neox", {**FEW, "rotary_pct": 0.5}),
    "gpt-neox-sequential": ("gpt_neox", {**FEW, "rotary_pct": 0.25, "use_parallel_residual": False,
                                         "tie_word_embeddings": True}),
}


def random_model(name, number):
    kind, settings = FAMILIES[name]
    settings = {**SIZES, **settings}
    if kind == "gpt_neox":
        del settings["num_key_value_heads"]
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            value = 0.25 * torch.randn(parameter.shape, generator=generator)
            is_vector = parameter.dim() == 1
            # Scales are near their initial values.
            parameter.copy_(parameter + value if is_vector else value)
    return model.to(torch.bfloat16)


def loaded(folder):
    # Without a generation config of ours, some versions insist on a file of that name.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", generation_config=transformers.GenerationConfig())
    return model.float().eval()


def name_in_file(name, folder):
    """GPT-NeoX's head has another name in files than in the class."""
    names = load_file(os.path.join(folder, "model.safetensors")).keys()
    return name if name in names else name.replace("lm_head", "embed_out")


def expected(folder):
    model = loaded(folder)
    logits = model(TOKENS).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    loss.backward()
    numbers = {f"grad.{name_in_file(name, folder)}": parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        # Each model is fresh: some keep the rotations of the longest sequence so far.
        short = loaded(folder)(TOKENS[:, :SHORT]).logits
        greedy = TOKENS[:1, :4].clone()
        while greedy.shape[1] < 12:
            following = loaded(folder)(greedy).logits[:, -1].argmax(-1, keepdim=True)
            greedy = torch.cat([greedy, following], 1)
    numbers.update({"logits": logits.detach(), "short": short, "loss": loss.detach().reshape(1), "greedy": greedy.float()})
    return {name: value.contiguous() for name, value in numbers.items()}


def make(root):
    for number, name in enumerate(FAMILIES):
        folder = os.path.join(root, name)
        random_model(name, number).save_pretrained(folder)
        generation = os.path.join(folder, "generation_config.json")
        if os.path.exists(generation):
            os.remove(generation)
        save_file(expected(folder), os.path.join(folder, "expected.safetensors"))
        print(f"{name}: {sum(os.path.getsize(os.path.join(folder, file)) for file in os.listdir(folder))} bytes")


def check(root):
    for name in FAMILIES:
        folder = os.path.join(root, name)
        committed, again = load_file(os.path.join(folder, "expected.safetensors")), expected(folder)
        assert committed.keys() == again.keys(), (name, sorted(committed.keys() ^ again.keys()))
        worst = max((committed[key] - again[key]).abs().max().item() for key in committed)
        print(f"{name}: at most {worst:.1e} apart")
        assert worst < 1e-5, name


def logits(*folders):
    with torch.no_grad():
        print(json.dumps([loaded(folder)(TOKENS).logits.flatten().tolist() for folder in folders]))


if __name__ == "__main__":
    {"make": make, "check": check, "logits": logits}[sys.argv[1]](*sys.argv[2:])
