"""Makes cards.json: folders of public models with their sizes cut down, and what transformers computes from them.

    cards.py > cards.json

Each card has the keys of a public config.json in its own words; `cut` makes sizes small and leaves everything else. Weights are
formulas, which cards.rs writes again. A card is refused where transformers computes what the models of this crate do not.
Losses and logits are of transformers 5.24 in 32 bits.
"""
import json
import os
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

TOKENS = [[1, 2, 3, 4, 5, 6, 7, 8], [0, 12, 3, 11, 3, 9, 2, 2]]
TARGETS = [[2, 3, 4, 5, 6, 7, 8, 9], [12, 3, 11, 3, 9, 2, 2, 0]]
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "initializer_range": 0.02, "model_type": "llama", "use_cache": True}
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
}
GENERATION = {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}


def sizes(hidden, inner, layers, heads, vocab, seq, kv=None, **more):
    out = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": vocab, "max_position_embeddings": seq, **more,
    }
    if kv is not None:
        out["num_key_value_heads"] = kv
    return out


def llama1(name, *of, **more):
    return name, {**LLAMA, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
                  "torch_dtype": "float16", "transformers_version": "4.28.1", **sizes(*of), **more}


def llama2(name, *of, **more):
    return name, {**LLAMA, "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
                  "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", **sizes(*of), **more}


def llama3(name, *of, **more):
    return name, {**LLAMA, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
                  "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
                  "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", **sizes(*of), **more}


def longer(factor, **more):
    return {"factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3", **more}


def gpt2(name, dim, layers, heads, seq=1024, **more):
    return name, {**GPT2, "n_ctx": seq, "n_embd": dim, "n_head": heads, "n_layer": layers, "n_positions": seq, **more}


def qwen2(name, *of, **more):
    return name, {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
                  "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen2", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
                  "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
                  "transformers_version": "4.40.1", "use_cache": True, "use_sliding_window": False, **sizes(*of), **more}


def qwen3(name, *of, **more):
    _, config = qwen2(name, *of, **more)
    return name, {**config, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "model_type": "qwen3",
                  "rope_scaling": None, "sliding_window": None, "transformers_version": "4.51.0", **more}


def mistral(name, *of, **more):
    return name, {"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
                  "initializer_range": 0.02, "model_type": "mistral", "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
                  "torch_dtype": "bfloat16", "use_cache": True, **sizes(*of), **more}


def phi3(name, *of, **more):
    return name, {"architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
                  "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
                  "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "initializer_range": 0.02, "model_type": "phi3",
                  "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
                  "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
                  "use_cache": True, **sizes(*of), **more}


def gemma2(name, *of, **more):
    return name, {"architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
                  "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
                  "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
                  "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "model_type": "gemma2", "pad_token_id": 0,
                  "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
                  "torch_dtype": "float32", "transformers_version": "4.42.4", "use_cache": True, **sizes(*of), **more}


def gemma3(name, *of, **more):
    return name, {"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
                  "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
                  "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
                  "initializer_range": 0.02, "model_type": "gemma3_text", "pad_token_id": 0, "query_pre_attn_scalar": 256,
                  "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
                  "sliding_window": 512, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True,
                  **sizes(*of), **more}


def neox(name, *of, **more):
    return name, {"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
                  "initializer_range": 0.02, "layer_norm_eps": 1e-05, "model_type": "gpt_neox", "rotary_emb_base": 10000,
                  "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.24.0",
                  "use_cache": True, "use_parallel_residual": True, **sizes(*of), **more}


SHORT, LONG = [1.0, 1.02, 1.06, 1.1, 1.3, 2.1] * 8, [1.08, 1.24, 5.7, 12.4, 31.9, 64.3] * 8
LAYERS = ["sliding_attention"] * 5 + ["full_attention"]

INV_FREQ = [[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq", "F32", [4]] for layer in range(2)]
MASKS = [[f"h.{layer}.attn.bias", "F32", [1, 1, 16, 16]] for layer in range(2)]
OLD_MASKS = [[f"transformer.h.{layer}.attn.{name}", dtype, shape] for layer in range(2)
             for name, dtype, shape in [("bias", "BOOL", [1, 1, 16, 16]), ("masked_bias", "F32", [])]]
BF16, F16 = {"dtype": "BF16"}, {"dtype": "F16"}

# Name and config.json; how the files differ from one file of the usual names; the word of a refusal.
CARDS = [
    # Llama 1
    (llama1("huggyllama/llama-7b", 4096, 11008, 32, 32, 32000, 2048, max_sequence_length=2048, pad_token_id=0,
            transformers_version="4.28.0.dev0"), {**F16, "extras": INV_FREQ, "files": 2}),
    (llama1("huggyllama/llama-13b", 5120, 13824, 40, 40, 32000, 2048, max_sequence_length=2048, pad_token_id=0), {"extras": INV_FREQ}),
    (("decapoda-research/llama-7b-hf", {
        "architectures": ["LLaMAForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "initializer_range": 0.02, "max_sequence_length": 2048, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": -1, "rms_norm_eps": 1e-06, "torch_dtype": "float16",
        "transformers_version": "4.27.0.dev0", "use_cache": True, "vocab_size": 32000}), {**F16, "extras": INV_FREQ}),
    (llama1("lmsys/vicuna-7b-v1.3", 4096, 11008, 32, 32, 32000, 2048, _name_or_path="vicuna-7b-v1.3", pad_token_id=0), F16),
    (llama1("openlm-research/open_llama_3b", 3200, 8640, 26, 32, 32000, 2048, pad_token_id=0, transformers_version="4.30.0.dev0"), F16),
    (llama1("openlm-research/open_llama_7b_v2", 4096, 11008, 32, 32, 32000, 2048, transformers_version="4.31.0.dev0"), BF16),
    (llama1("JackFram/llama-160m", 768, 3072, 12, 12, 32000, 2048, bos_token_id=0, pad_token_id=1), {}),
    # Llama 2
    (llama2("meta-llama/Llama-2-7b-hf", 4096, 11008, 32, 32, 32000, 4096, 32, _name_or_path="meta-llama/Llama-2-7b-hf"),
     {**F16, "extras": INV_FREQ, "files": 2}),
    (llama2("meta-llama/Llama-2-13b-chat-hf", 5120, 13824, 40, 40, 32000, 4096, 40, _name_or_path="meta-llama/Llama-2-13b-hf",
            pad_token_id=0, pretraining_tp=2, transformers_version="4.32.0.dev0"), {**F16, "extras": INV_FREQ}),
    (llama2("meta-llama/Llama-2-70b-hf", 8192, 28672, 80, 64, 32000, 4096, 8), {**F16, "files": 2, "index_only": [INV_FREQ[0][0]]}),
    (llama2("lmsys/vicuna-7b-v1.5", 4096, 11008, 32, 32, 32000, 4096, 32, _name_or_path="vicuna-7b-v1.5", pad_token_id=0,
            transformers_version="4.31.0"), F16),
    (llama2("lmsys/vicuna-13b-v1.5-16k", 5120, 13824, 40, 40, 32000, 4096, 40, _name_or_path="vicuna-13b-v1.5-16k",
            max_sequence_length=16384, pad_token_id=0, rope_scaling={"factor": 4.0, "type": "linear"}), F16),
    (llama2("lmsys/longchat-7b-v1.5-32k", 4096, 11008, 32, 32, 32000, 4096, 32, max_sequence_length=32768,
            rope_scaling={"factor": 8.0, "type": "linear"}), F16),
    (llama2("togethercomputer/LLaMA-2-7B-32K", 4096, 11008, 32, 32, 32000, 32768, 32,
            auto_map={"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"},
            rope_scaling={"factor": 8.0, "type": "linear"}), BF16),
    (llama2("NousResearch/Nous-Hermes-Llama2-13b", 5120, 13824, 40, 40, 32032, 4096, 40, pad_token_id=0, use_cache=False), BF16),
    (llama2("princeton-nlp/Sheared-LLaMA-1.3B", 2048, 5504, 24, 16, 32000, 4096, 16, pad_token_id=0,
            transformers_version="4.28.1"), {"extras": INV_FREQ}),
    (llama2("codellama/CodeLlama-7b-hf", 4096, 11008, 32, 32, 32016, 16384, 32, rope_theta=1000000,
            torch_dtype="bfloat16", transformers_version="4.33.0.dev0"), BF16),
    (llama2("codellama/CodeLlama-34b-Instruct-hf", 8192, 22016, 48, 64, 32000, 16384, 8, rope_theta=1000000), {**BF16, "files": 2}),
    (llama2("TinyLlama/TinyLlama-1.1B-intermediate-step-50K-105b", 2048, 5632, 22, 32, 32000, 2048, 4, torch_dtype="float32"), {}),
    (llama2("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 2048, 5632, 22, 32, 32000, 2048, 4, attention_bias=False, rope_theta=10000.0,
            torch_dtype="bfloat16", transformers_version="4.35.0"), BF16),
    (llama2("01-ai/Yi-6B", 4096, 11008, 32, 32, 64000, 4096, 4, pad_token_id=0, rope_theta=5000000.0, torch_dtype="bfloat16",
            transformers_version="4.34.0"), BF16),
    (llama2("01-ai/Yi-34B-200K", 7168, 20480, 60, 56, 64000, 200000, 8, pad_token_id=0, rope_theta=10000000.0), BF16),
    (llama2("01-ai/Yi-1.5-9B-Chat", 4096, 11008, 48, 32, 64000, 4096, 4, attention_bias=False, attention_dropout=0.0, eos_token_id=7,
            rms_norm_eps=1e-06, rope_theta=5000000.0, use_cache=False), BF16),
    (llama2("deepseek-ai/deepseek-llm-7b-base", 4096, 11008, 30, 32, 102400, 4096, 32, bos_token_id=100000, eos_token_id=100001,
            attention_bias=False, rms_norm_eps=1e-06, rope_theta=10000.0, transformers_version="4.33.1"), BF16),
    (llama2("deepseek-ai/deepseek-coder-1.3b-instruct", 2048, 5504, 24, 16, 32256, 16384, 16, bos_token_id=32013, eos_token_id=32021,
            rms_norm_eps=1e-06, rope_scaling={"factor": 4.0, "type": "linear"}, rope_theta=100000), BF16),
    (llama2("deepseek-ai/deepseek-coder-6.7b-base", 4096, 11008, 32, 32, 32256, 16384, 32, bos_token_id=32013, eos_token_id=32014,
            rms_norm_eps=1e-06, rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=100000), {**BF16, "files": 2}),
    # Llama 3
    (llama3("meta-llama/Meta-Llama-3-8B", 4096, 14336, 32, 32, 128256, 8192, 8), {**BF16, "files": 2}),
    (llama3("meta-llama/Meta-Llama-3-70B-Instruct", 8192, 28672, 80, 64, 128256, 8192, 8,
            _name_or_path="meta-llama/Meta-Llama-3-70B-Instruct"), BF16),
    (llama3("gradientai/Llama-3-8B-Instruct-262k", 4096, 14336, 32, 32, 128256, 262144, 8, rope_theta=283461213.0), BF16),
    (llama3("meta-llama/Llama-3.1-8B", 4096, 14336, 32, 32, 128256, 131072, 8, mlp_bias=False, rope_scaling=longer(8.0),
            transformers_version="4.43.0.dev0"), BF16),
    (llama3("meta-llama/Llama-3.1-8B-Instruct", 4096, 14336, 32, 32, 128256, 131072, 8, mlp_bias=False, rope_scaling=longer(8.0),
            eos_token_id=[128001, 128008, 128009]), BF16),
    (llama3("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 4096, 14336, 32, 32, 128256, 131072, 8, mlp_bias=False,
            rope_scaling=longer(8.0)), BF16),
    (llama3("NousResearch/Hermes-3-Llama-3.1-8B", 4096, 14336, 32, 32, 128256, 131072, 8, mlp_bias=False, eos_token_id=128040,
            rope_scaling=longer(8.0, type="llama3")), BF16),
    (llama3("meta-llama/Llama-3.2-1B", 2048, 8192, 16, 32, 128256, 131072, 8, head_dim=64, mlp_bias=False,
            rope_scaling=longer(32.0), tie_word_embeddings=True, transformers_version="4.45.0.dev0"), {**BF16, "head": "none"}),
    (llama3("meta-llama/Llama-3.2-3B-Instruct", 3072, 8192, 28, 24, 128256, 131072, 8, head_dim=128, mlp_bias=False,
            eos_token_id=[128001, 128008, 128009], rope_scaling=longer(32.0), tie_word_embeddings=True), {**BF16, "head": "equal"}),
    (llama3("meta-llama/Llama-3.3-70B-Instruct", 8192, 28672, 80, 64, 128256, 131072, 8, head_dim=128, mlp_bias=False,
            eos_token_id=[128001, 128008, 128009], rope_scaling=longer(8.0)), BF16),
    # SmolLM, and what newer programs write
    (llama3("HuggingFaceTB/SmolLM-135M", 576, 1536, 30, 9, 49152, 2048, 3, bos_token_id=0, eos_token_id=0, rope_theta=10000.0,
            tie_word_embeddings=True, transformers_version="4.42.3"), {"head": "none"}),
    (llama3("HuggingFaceTB/SmolLM2-135M", 576, 1536, 30, 9, 49152, 2048, 3, bos_token_id=0, eos_token_id=0, head_dim=64,
            initializer_range=0.041666666666666664, is_llama_config=True, mlp_bias=False, rope_interleaved=False, rope_theta=100000,
            tie_word_embeddings=True, _name_or_path="HuggingFaceTB/SmolLM2-135M"), {**BF16, "head": "only"}),
    (llama3("HuggingFaceTB/SmolLM2-1.7B-Instruct", 2048, 8192, 24, 32, 49152, 8192, 32, bos_token_id=1, eos_token_id=2, pad_token_id=2,
            rope_theta=130000, tie_word_embeddings=True, **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
     {**BF16, "head": "none"}),
    (("meta-llama/Llama-3.2-1B, saved by transformers 5", {
        **LLAMA, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "dtype": "bfloat16", "eos_token_id": 128001,
        "head_dim": 64, "mlp_bias": False, "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_parameters": {**longer(32.0), "rope_theta": 500000.0}, "tie_word_embeddings": True, "transformers_version": "5.24.0",
        **sizes(2048, 8192, 16, 32, 128256, 131072, 8)}), {**BF16, "head": "none"}),
    (("lmsys/vicuna-13b-v1.5-16k, saved by transformers 4.57", {
        **LLAMA, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "float16", "eos_token_id": 2,
        "head_dim": 128, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 4.0, "rope_type": "linear", "type": "linear"}, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "transformers_version": "4.57.1", **sizes(5120, 13824, 40, 40, 32000, 4096, 40)}), F16),
    (("LlamaModel, without a head", {
        **LLAMA, "architectures": ["LlamaModel"], "rms_norm_eps": 1e-05, "tie_word_embeddings": True,
        **sizes(2048, 8192, 16, 32, 128256, 131072, 8)}), {"head": "none", "bare": True}),
    # GPT-2
    (gpt2("openai-community/gpt2", 768, 12, 12, **GENERATION), {"bare": True, "extras": MASKS}),
    (gpt2("openai-community/gpt2-medium", 1024, 24, 16, n_special=0, predict_special_tokens=True, **GENERATION),
     {"bare": True, "extras": MASKS}),
    (gpt2("openai-community/gpt2-large", 1280, 36, 20, **GENERATION), {"bare": True, "extras": MASKS}),
    (gpt2("openai-community/gpt2-xl", 1600, 48, 25, output_past=True, **GENERATION), {"bare": True, "extras": MASKS, "files": 2}),
    (gpt2("distilbert/distilgpt2", 768, 6, 12, _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, **GENERATION),
     {"extras": OLD_MASKS, "head": "equal"}),
    (gpt2("microsoft/DialoGPT-medium", 1024, 24, 16, task_specific_params={"conversational": {"max_length": 1000}}),
     {"extras": OLD_MASKS, "head": "equal"}),
    (gpt2("ai-forever/rugpt3large_based_on_gpt2", 1536, 24, 16, 2048, _name_or_path="sberbank-ai/rugpt3large_based_on_gpt2",
          bos_token_id=1, eos_token_id=2, pad_token_id=0, n_inner=None, n_special=0, output_past=True, predict_special_tokens=True,
          reorder_and_upcast_attn=False, scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True, torch_dtype="float32",
          transformers_version="4.55.4", use_cache=True, **GENERATION), {"head": "none"}),
    (gpt2("rinna/japanese-gpt2-small", 768, 12, 12, bos_token_id=1, eos_token_id=2, gradient_checkpointing=False, n_inner=3072,
          scale_attn_weights=True, use_cache=True, vocab_size=32000), {"head": "equal", "extras": OLD_MASKS}),
    (gpt2("uer/gpt2-chinese-cluecorpussmall", 768, 12, 12, gradient_checkpointing=False, output_past=True, tokenizer_class="BertTokenizer",
          vocab_size=21128, task_specific_params={"text-generation": {"do_sample": True, "max_length": 320}}), {"head": "equal"}),
    (gpt2("skt/kogpt2-base-v2", 768, 12, 12, _num_labels=1, author="Heewon Jeon", bos_token_id=0, created_date="2021-04-28",
          eos_token_id=1, gradient_checkpointing=False, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, license="CC-BY-NC-SA 4.0",
          n_inner=None, pad_token_id=3, scale_attn_weights=True, vocab_size=51200), {"head": "equal", "extras": OLD_MASKS}),
    (gpt2("ResembleAI/chatterbox-turbo", 1024, 24, 16, 8196, hidden_size=1024, n_special=0, predict_special_tokens=True,
          vocab_size=50276), {"head": "none"}),
    (gpt2("lvwerra/gpt2-imdb-pos-v2", 768, 12, 12, _name_or_path="lvwerra/gpt2-imdb", _num_labels=1),
     {"head": "equal", "extras": OLD_MASKS + [["v_head.summary.weight", "F32", [1, 24]], ["v_head.summary.bias", "F32", [1]]]}),
    (gpt2("microsoft/DialogRPT-updown", 1024, 24, 16, architectures=["GPT2ForSequenceClassification"], num_labels=1),
     {"extras": [["score.weight", "F32", [1, 24]]], "head": "none"}),
    (gpt2("a GPT-2 of JAX by its synonym", 768, 12, 12, activation_function="gelu_pytorch_tanh"), {"head": "none"}),
    (gpt2("a GPT-2 by another synonym", 768, 12, 12, activation_function="gelu_fast"), {"head": "only"}),
    # Spellings, one at a time
    (llama2("both names of the positions", 4096, 11008, 32, 32, 32000, 4096, 32, rope_scaling={"rope_type": "linear", "factor": 2.0},
            rope_parameters={"type": "linear", "factor": 2, "rope_theta": 5000.0}, rope_theta=5000), {}),
    (llama2("an empty scaling", 4096, 11008, 32, 32, 32000, 4096, 32, rope_scaling={}, head_dim=None, pretraining_tp=None), {}),
    (llama1("the base beside the newer positions", 4096, 11008, 32, 32, 32000, 4096, rope_theta=20000.0, num_key_value_heads=None,
            rope_parameters={"rope_type": "linear", "factor": 2.0}), {}),
    (llama1("the base in the older positions", 4096, 11008, 32, 32, 32000, 4096,
            rope_scaling={"type": "linear", "factor": 2.0, "rope_theta": 700.0}), {}),
    (llama3("llama3 without the first context", 4096, 14336, 32, 32, 128256, 131072, 8,
            rope_scaling={"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}), {}),
    (llama3("llama3 with the first context beside it", 4096, 14336, 32, 32, 128256, 131072, 8, original_max_position_embeddings=16,
            rope_scaling={"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "type": "llama3"}), {}),
    (llama2("swish", 4096, 11008, 32, 32, 32000, 4096, 32, hidden_act="swish"), {"dtype": "F16"}),
    (llama2("buffers of the whole model", 4096, 11008, 32, 32, 32000, 4096, 32),
     {"files": 2, "extras": [["model.rotary_emb.inv_freq", "F32", [4]], ["model.layers.1.self_attn.rotary_emb.cos_cached", "F32", [1, 1, 32, 8]]]}),
    (llama2("a Llama with a value head", 4096, 11008, 32, 32, 32000, 4096, 32), {"extras": [["v_head.summary.weight", "F32", [1, 32]]]}),
    (llama3("an index with the tied head", 2048, 8192, 16, 32, 128256, 131072, 8, tie_word_embeddings=True),
     {"head": "none", "files": 2, "index_only": ["lm_head.weight"]}),
    (llama3("the head in the place of the table", 2048, 8192, 16, 32, 128256, 131072, 8, tie_word_embeddings=True),
     {"head": "only", "files": 2, "index_only": ["model.embed_tokens.weight"]}),
    (("sizes of a GPT-2 by the names of all models", {
        "model_type": "gpt2", "vocab_size": 50257, "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
        "max_position_embeddings": 1024}), {"head": "none"}),
    (gpt2("gelu_python_tanh", 768, 12, 12, activation_function="gelu_python_tanh"), {"head": "none"}),
    (gpt2("gelu_accurate", 768, 12, 12, activation_function="gelu_accurate"), {"head": "none"}),
    # Llamas of other forms
    (llama2("NousResearch/Yarn-Llama-2-7b-64k", 4096, 11008, 32, 32, 32000, 65536, 32,
            rope_scaling={"factor": 16.0, "finetuned": True, "original_max_position_embeddings": 4096, "type": "yarn"}),
     {}),
    (llama2("a Llama 2 of dynamic positions", 4096, 11008, 32, 32, 32000, 4096, 32, rope_scaling={"factor": 2.0, "type": "dynamic"}),
     {}),
    (llama2("ibm-granite/granite-3b-code-base-2k", 2560, 10240, 32, 32, 49152, 2048, 32, attention_bias=True, mlp_bias=True,
            rope_theta=10000, tie_word_embeddings=True), {}),
    (llama3("nvidia/Llama-3.1-Minitron-4B-Width-Base", 3072, 9216, 32, 32, 128256, 131072, 8, head_dim=128, mlp_bias=False,
            rope_scaling=longer(8.0)), {}),
    # Qwen 2 and 2.5
    (qwen2("Qwen/Qwen2-0.5B", 896, 4864, 24, 14, 151936, 131072, 2, max_window_layers=24, tie_word_embeddings=True),
     {**BF16, "head": "none"}),
    (qwen2("Qwen/Qwen2.5-1.5B", 1536, 8960, 28, 12, 151936, 131072, 2, max_window_layers=28, tie_word_embeddings=True,
           use_mrope=False), {**BF16, "head": "none"}),
    (qwen2("Qwen/Qwen2.5-7B-Instruct", 3584, 18944, 28, 28, 152064, 32768, 4, eos_token_id=151645, max_window_layers=28,
           transformers_version="4.43.1"), {**BF16, "files": 2}),
    (qwen2("Qwen/Qwen2.5-7B-Instruct, for long texts", 3584, 18944, 28, 28, 152064, 32768, 4, max_window_layers=28,
           rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}), BF16),
    (qwen2("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1536, 8960, 28, 12, 151936, 131072, 2, max_window_layers=21,
           rope_theta=10000, sliding_window=4096, use_mrope=False), BF16),
    # Mistral
    (mistral("mistralai/Mistral-7B-v0.1", 4096, 14336, 32, 32, 32000, 32768, 8, rope_theta=10000.0, sliding_window=4096,
             transformers_version="4.34.0.dev0"), {**BF16, "files": 2}),
    (mistral("mistralai/Mistral-7B-Instruct-v0.3", 4096, 14336, 32, 32, 32768, 32768, 8, attention_dropout=0.0, rope_theta=1000000.0,
             sliding_window=None, transformers_version="4.42.0.dev0"), BF16),
    (mistral("mistralai/Mistral-Nemo-Base-2407", 5120, 14336, 40, 32, 131072, 1024000, 8, attention_dropout=0.0, head_dim=128,
             rope_theta=1000000.0, sliding_window=None), BF16),
    (mistral("HuggingFaceH4/zephyr-7b-beta", 4096, 14336, 32, 32, 32000, 32768, 8, pad_token_id=2, rope_theta=10000.0,
             sliding_window=4096, _name_or_path="mistralai/Mistral-7B-v0.1"), BF16),
    # Qwen 3
    (qwen3("Qwen/Qwen3-0.6B", 1024, 3072, 28, 16, 151936, 40960, 8, max_window_layers=28, rope_theta=1000000,
           tie_word_embeddings=True), {**BF16, "head": "equal"}),
    (qwen3("Qwen/Qwen3-8B", 4096, 12288, 36, 32, 151936, 40960, 8, max_window_layers=36), {**BF16, "files": 2}),
    (qwen3("Qwen/Qwen3-4B-Instruct-2507", 2560, 9728, 36, 32, 151936, 262144, 8, eos_token_id=151645, max_window_layers=36,
           rope_theta=5000000, tie_word_embeddings=True), {**BF16, "head": "none"}),
    # Phi-3 and Phi-4
    (phi3("microsoft/Phi-3-mini-4k-instruct", 3072, 8192, 32, 32, 32064, 4096, 32, sliding_window=2047,
          transformers_version="4.40.2"), BF16),
    (phi3("microsoft/Phi-3-mini-128k-instruct", 3072, 8192, 32, 32, 32064, 131072, 32, sliding_window=262144,
          rope_scaling={"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}), {**BF16, "files": 2}),
    (phi3("microsoft/Phi-4-mini-instruct", 3072, 8192, 32, 24, 200064, 131072, 8, full_attn_mod=1, interpolate_factor=1,
          lm_head_bias=False, mlp_bias=False, partial_rotary_factor=0.75, sliding_window=262144, tie_word_embeddings=True,
          rope_scaling={"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}), {**BF16, "head": "none"}),
    (phi3("microsoft/phi-4", 5120, 17920, 40, 40, 100352, 16384, 10, original_max_position_embeddings=16384, rope_theta=250000,
          sliding_window=None, bos_token_id=100257, eos_token_id=100265, pad_token_id=100349), BF16),
    # Gemma 2
    (gemma2("google/gemma-2-2b", 2304, 9216, 26, 8, 256000, 8192, 4), {"head": "none"}),
    (gemma2("google/gemma-2-9b-it", 3584, 14336, 42, 16, 256000, 8192, 8, sliding_window_size=4096), {**BF16, "head": "none"}),
    (gemma2("google/gemma-2-9b", 3584, 14336, 42, 16, 256000, 8192, 8), {**BF16, "head": "none"}),
    (gemma2("a Gemma 2 of two windows", 3584, 14336, 42, 16, 256000, 8192, 8, sliding_window_size=5),
     {"refused": "sliding_window_size"}),
    (gemma2("google/gemma-2-27b", 4608, 36864, 46, 32, 256000, 8192, 16, head_dim=128, query_pre_attn_scalar=144, torch_dtype="bfloat16",
            _attn_implementation="eager"), {**BF16, "head": "none", "files": 2}),
    # Gemma 3, text
    (gemma3("google/gemma-3-1b-it", 1152, 6912, 26, 4, 262144, 32768, 1, sliding_window_pattern=6), {**BF16, "head": "none"}),
    (gemma3("google/gemma-3-270m", 640, 2048, 18, 4, 262144, 32768, 1, _sliding_window_pattern=6, layer_types=LAYERS * 3,
            rope_local_base_freq=10000.0, rope_theta=1000000.0, use_bidirectional_attention=False), {**BF16, "head": "none"}),
    (gemma3("google/gemma-3-4b-it, its text model", 2560, 10240, 34, 8, 262208, 131072, 4, sliding_window=1024, sliding_window_pattern=6,
            rope_scaling={"factor": 8.0, "rope_type": "linear"}), {**BF16, "head": "none"}),
    (gemma3("google/gemma-3-1b-it, saved by transformers 5", 1152, 6912, 26, 4, 262144, 32768, 1, layer_types=LAYERS * 4 + LAYERS[:2],
            _sliding_window_pattern=6, rope_parameters={"full_attention": {"rope_theta": 1000000, "rope_type": "default"},
                                                        "sliding_attention": {"rope_theta": 10000, "rope_type": "default"}}),
     {**BF16, "head": "none"}),
    # GPT-NeoX
    (neox("EleutherAI/pythia-70m-deduped", 512, 2048, 6, 8, 50304, 2048), F16),
    (neox("EleutherAI/pythia-1.4b", 2048, 8192, 24, 16, 50304, 2048, attention_dropout=0.0, classifier_dropout=0.1, hidden_dropout=0.0),
     F16),
    (neox("EleutherAI/gpt-neox-20b", 6144, 24576, 44, 64, 50432, 2048, attention_probs_dropout_prob=0, hidden_act="gelu_fast",
          hidden_dropout_prob=0, eos_token_id=2), {**F16, "files": 2}),
    (neox("togethercomputer/RedPajama-INCITE-Base-3B-v1", 2560, 10240, 32, 32, 50432, 2048, rotary_pct=1.0,
          use_parallel_residual=False), F16),
    # What another model would be for
    (llama2("TheBloke/Llama-2-7B-GPTQ", 4096, 11008, 32, 32, 32000, 4096, 32,
            quantization_config={"bits": 4, "group_size": 128, "quant_method": "gptq"}), {"refused": "quantization_config"}),
    (gpt2("cerebras/Cerebras-GPT-111M", 768, 10, 12, 2048, activation_function="gelu", attn_pdrop=0.0, embd_pdrop=0.0, n_inner=3072,
          reorder_and_upcast_attn=False, resid_pdrop=0.0, scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True),
     {"refused": "activation_function"}),
    (gpt2("stanford-crfm/alias-gpt2-small-x21", 768, 12, 12, n_inner=None, reorder_and_upcast_attn=True,
          scale_attn_by_inverse_layer_idx=True, scale_attn_weights=True), {"refused": "scale_attn_by_inverse_layer_idx"}),
    (("HuggingFaceTB/SmolLM3-3B", {"model_type": "smollm3", "no_rope_layer_interval": 4, "hidden_size": 2048,
                                   "num_attention_heads": 16, "num_hidden_layers": 36, "vocab_size": 128256}), {"refused": "no_rope_layers"}),
    (("google/gemma-3-4b-it", {"model_type": "gemma3", "num_attention_heads": 8, "text_config": {}, "vocab_size": 1}),
     {"refused": "text_config"}),
    (mistral("a Mistral with biases", 4096, 14336, 32, 32, 32000, 32768, 8, attention_bias=True), {"refused": "attention_bias"}),
    (gemma3("a Gemma 3 with capped scores", 1152, 6912, 26, 4, 262144, 32768, 1, attn_logit_softcapping=50.0),
     {"refused": "attn_logit_softcapping"}),
    (gemma2("a Gemma 2 that sees both ways", 2304, 9216, 26, 8, 256000, 8192, 4, use_bidirectional_attention=True),
     {"refused": "use_bidirectional_attention"}),
    (phi3("a Phi-3 of another scaling", 3072, 8192, 32, 32, 32064, 4096, 32, rope_scaling={"rope_type": "linear", "factor": 2.0}),
     {"refused": "rope_type"}),
    (llama2("a partial rotation", 4096, 11008, 32, 32, 32000, 4096, 32, partial_rotary_factor=0.5), {"refused": "partial_rotary_factor"}),
    (llama2("a Llama with a multiplier of Granite", 4096, 11008, 32, 32, 32000, 4096, 32, residual_multiplier=0.22),
     {"refused": "residual_multiplier"}),
    (llama3("scaling of another program", 4096, 14336, 32, 32, 128256, 131072, 8, rope_scaling={
        "rope_type": "default", "mrope_section": [1, 1, 2]}), {"refused": "mrope_section"}),
    (llama2("another activation", 4096, 11008, 32, 32, 32000, 4096, 32, hidden_act="mish"), {"refused": "mish"}),
    (("microsoft/biogpt", {"architectures": ["BioGptForCausalLM"], "hidden_act": "gelu", "hidden_size": 1024, "model_type": "biogpt",
                           "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 42384}), {"refused": "biogpt"}),
    (("thu-coai/CDial-GPT_LCCC-large", {"afn": "gelu", "n_ctx": 512, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 513,
                                        "vocab_size": 13088}), {"refused": "model_type"}),
]


def is_gpt2(config):
    return "n_embd" in config or config["model_type"] == "gpt2"


def cut(config, number):
    """Returns the same with small sizes, in the same relations to each other."""
    config = json.loads(json.dumps(config))
    vocab = 17 + number % 5
    config["vocab_size"] = vocab
    if (config.get("pad_token_id") or 0) >= vocab:
        config["pad_token_id"] = vocab - 1
    if is_gpt2(config):
        if config.get("n_inner") is not None:
            config["n_inner"] = 4 * 24
        small = {"n_embd": 24, "hidden_size": 24, "n_head": 3, "n_layer": 2, "n_positions": 16, "n_ctx": 16,
                 "num_attention_heads": 3, "num_hidden_layers": 2, "max_position_embeddings": 16}
        return {**config, **{key: value for key, value in small.items() if key in config}}
    heads, kv = config["num_attention_heads"], config.get("num_key_value_heads")
    few = 3 if heads % 3 == 0 else 4
    small = {"num_attention_heads": few, "num_hidden_layers": 2, "intermediate_size": 40, "max_position_embeddings": 32}
    if kv is not None:
        small["num_key_value_heads"] = few if kv == heads else 1 if few == 3 or heads // kv > 4 else 2
    if config.get("head_dim") is not None:
        small["head_dim"] = 8 if config["head_dim"] == config["hidden_size"] // heads else 16
    small["hidden_size"] = 8 * few
    if config["model_type"] == "gemma3_text":
        small["num_hidden_layers"] = 7
    layers = small["num_hidden_layers"]
    # Windows are narrower than the sequences, and the longer factors of Phi-3 apply to them.
    if config.get("sliding_window") is not None:
        small["sliding_window"] = 4
        if config.get("sliding_window_size") == config["sliding_window"]:
            small["sliding_window_size"] = 4
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    if config["model_type"] == "phi3":
        is_longer = config["max_position_embeddings"] > config["original_max_position_embeddings"]
        small["original_max_position_embeddings"] = 6 if is_longer else 32
    for factors in ["short_factor", "long_factor"]:
        if factors in (config.get("rope_scaling") or {}):
            config["rope_scaling"][factors] = config["rope_scaling"][factors][: 3 if "partial_rotary_factor" in config else 4]
    for name in ["rope_scaling", "rope_parameters"]:
        if (config.get(name) or {}).get("original_max_position_embeddings"):
            config[name]["original_max_position_embeddings"] = 16
    return {**config, **{key: value for key, value in small.items() if key in config}}


def formula(number, name, shape):
    is_scale = ("norm" in name or "ln" in name) and name.endswith("weight")
    index = np.arange(np.prod(shape), dtype=np.float64)
    values = (1.0 if is_scale else 0.0) + 0.2 * np.sin(index * 0.7 + number)
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def tensors(config, layout):
    """Returns the tensors of the files, as cards.rs makes them."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    dtype = DTYPES[layout.get("dtype", "F32")]
    # A tied head is no parameter of its own.
    # The head of GPT-NeoX has another name in files.
    is_neox = config["model_type"] == "gpt_neox"
    rename = (lambda name: name.replace("lm_head", "embed_out")) if is_neox else (lambda name: name)
    named = sorted(((rename(name), param) for name, param in model.named_parameters()), key=lambda named: named[0])
    made = {name: formula(number, name, param.shape).to(dtype) for number, (name, param) in enumerate(named)}
    top, table = ("transformer.", "transformer.wte.weight") if is_gpt2(config) else ("model.", "model.embed_tokens.weight")
    head = layout.get("head", "own")
    if head in ["equal", "only"]:
        made["lm_head.weight"] = made[table].clone()
    if head == "only":
        del made[table]
    if layout.get("bare"):
        made = {name.removeprefix(top): tensor for name, tensor in made.items()}
    for name, kind, shape in layout.get("extras", []):
        made[name] = torch.ones(shape, dtype=torch.bool) if kind == "BOOL" else torch.full(shape, 0.5)
    return made


def write(folder, config, layout):
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    made = dict(sorted(tensors(config, layout).items()))
    if layout.get("files", 1) == 1:
        save_file(made, os.path.join(folder, "model.safetensors"), {"format": "pt"})
        return
    names, index = list(made), {}
    for number, part in enumerate([names[: len(names) // 2], names[len(names) // 2 :]]):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: made[name] for name in part}, os.path.join(folder, file), {"format": "pt"})
        index.update({name: file for name in part + layout.get("index_only", [])})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {}, "weight_map": index}, file)


def card(number, name, config, layout):
    config = cut(config, number)
    card = {"name": name, "config": config, "layout": layout}
    if "refused" in layout:
        return card
    with tempfile.TemporaryDirectory() as folder:
        write(folder, config, layout)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"], (name, info)
    with torch.no_grad():
        logits = model.eval()(torch.tensor(TOKENS)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(TARGETS).flatten())
    card["loss"] = loss.item()
    card["last"] = logits[1, -1].tolist()
    print(f"{name}: {loss.item():.6f}, left out: {sorted(info['unexpected_keys'])[:2]}", file=sys.stderr)
    return card


def main():
    lines = [json.dumps(card(number, *named, layout)) for number, (named, layout) in enumerate(CARDS)]
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    main()
