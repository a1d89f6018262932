//! The adapter format of Hugging Face's `peft`.

use std::collections::{BTreeMap, BTreeSet};

use burn_fsdp::internals::checkpoint::{PlainTensor, Step};
use burn_fsdp_models::{Architecture, LlamaConfig, ModelConfig, ParameterSpec};
use serde_json::{Value, json};

use crate::adapters::AdapterSizes;

/// Returns the name and orientation of each factor of a step's adapters, by path. The model's table provides the names
/// of the adapted matrices.
///
/// The product of Burn's factors, `[in, rank]` and `[rank, out]`, is added to a matrix of `[in, out]`. Both factors of
/// peft are transposed.
pub(crate) fn table(step: &Step, parameters: &[ParameterSpec]) -> BTreeMap<String, PlainTensor> {
    let names: BTreeMap<_, _> = parameters
        .iter()
        .map(|spec| (spec.path.as_str(), spec.name.as_str()))
        .collect();
    let tensors = step.index().tensors.iter();
    let factors = tensors.filter_map(|tensor| {
        let (path, factor) = tensor.name.split_once(".lora.")?;
        let matrix = names.get(path)?.strip_suffix(".weight")?;
        let factor = match factor {
            "a" => "lora_A",
            "b" => "lora_B",
            _ => return None,
        };
        let plain = PlainTensor {
            name: format!("base_model.model.{matrix}.{factor}.weight"),
            is_transposed: true,
        };
        Some((tensor.name.clone(), plain))
    });
    factors.collect()
}

/// Returns the `adapter_config.json` for adapters of all matrices in the blocks of a model.
pub(crate) fn config(model: &ModelConfig, adapters: AdapterSizes) -> Value {
    let modules = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let (modules, is_of_conv): (BTreeSet<String>, bool) = match model {
        ModelConfig::Gpt(_) => (modules(&["qkv", "proj", "fc", "out"]), false),
        ModelConfig::Llama(sizes) => (matrices(&sizes.parameters()), false),
        ModelConfig::Gpt2(_) => (modules(&["c_attn", "c_proj", "c_fc"]), true),
    };
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": null,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "fan_in_fan_out": is_of_conv,
        "inference_mode": true,
    })
}

/// Returns the names of the modules in the blocks of a decoder that have a matrix, which depend on its family.
fn matrices(parameters: &[ParameterSpec]) -> BTreeSet<String> {
    let blocks = LlamaConfig::BLOCKS.trim_end_matches('*');
    let adapted = parameters
        .iter()
        .filter(|spec| spec.path.starts_with(blocks) && spec.shape.len() == 2);
    let modules = adapted.filter_map(|spec| spec.name.strip_suffix(".weight")?.rsplit('.').next());
    modules.map(str::to_owned).collect()
}
