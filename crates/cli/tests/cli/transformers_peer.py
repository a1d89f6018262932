"""Small models in Hugging Face's transformers, for hugging_face.rs.

    transformers_peer.py make llama|gpt2 FOLDER    saves one with random weights, in bf16 and several files
    transformers_peer.py loss FOLDER [ADAPTERS]    prints its loss on the first batch of `train --synthetic --batch 4 --seq 6`, with
                                                   adapters that peft loads
    transformers_peer.py adapt FOLDER OUT JSON     saves adapters of peft with random factors; JSON is the settings of LoraConfig
    transformers_peer.py merge FOLDER ADAPTERS OURS prints the largest difference of a weight that peft merges from the one in OURS
    transformers_peer.py generate FOLDER IDS N     prints IDS, of commas, and the N likeliest tokens after them
"""
import json
import sys

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, LlamaConfig

BATCH, SEQ, STRIDE = 4, 6, 7919


def make(kind, folder):
    torch.manual_seed(3)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=300, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1,
        )
    else:
        config = GPT2Config(
            vocab_size=300, n_embd=24, n_layer=2, n_head=3, n_positions=16, bos_token_id=0, eos_token_id=1,
        )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")


def load(folder, adapters=None):
    # Without a generation config of ours, some versions insist on a file of that name.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, generation_config=GenerationConfig()
    )
    if adapters is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapters)
    return model.float().eval()


def loss(folder, adapters=None):
    model = load(folder, adapters)
    vocab = model.config.vocab_size
    tokens = torch.tensor([i % vocab * STRIDE % vocab for i in range(BATCH * SEQ + 1)])
    with torch.no_grad():
        logits = model(tokens[:-1].reshape(BATCH, SEQ)).logits
    print(json.dumps(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()))


def adapt(folder, out, settings):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model = get_peft_model(load(folder), LoraConfig(task_type="CAUSAL_LM", **json.loads(settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(out)


def merge(folder, adapters, ours):
    theirs, ours = load(folder, adapters).merge_and_unload().state_dict(), load(ours).state_dict()
    print(max((theirs[name] - ours[name]).abs().max().item() for name in ours))


def generate(folder, ids, number):
    model = load(folder)
    tokens = [int(token) for token in ids.split(",")]
    for _ in range(int(number)):
        with torch.no_grad():
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    print(json.dumps(tokens))


if __name__ == "__main__":
    {"make": make, "loss": loss, "adapt": adapt, "merge": merge, "generate": generate}[sys.argv[1]](*sys.argv[2:])
