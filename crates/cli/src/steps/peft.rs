//! The adapter format of Hugging Face's `peft`.

use std::collections::BTreeMap;

use burn_fsdp::internals::checkpoint::{PlainTensor, Step};
use burn_fsdp_models::{ModelConfig, ParameterSpec};
use serde_json::{Map, Value, json};

use crate::adapters::{AdapterSizes, Method, Scaling, ends_of, matrices_of, module_of, numbered};

/// Returns the name and orientation of each factor of a step's adapters, by path. The model's table provides the names
/// of the adapted matrices.
///
/// The product of Burn's factors, `[in, rank]` and `[rank, out]`, is added to a matrix of `[in, out]`. Both factors of
/// peft are transposed. Magnitudes, one for each output, are the same in both.
pub(crate) fn table(step: &Step, parameters: &[ParameterSpec]) -> BTreeMap<String, PlainTensor> {
    let names: BTreeMap<_, _> = parameters
        .iter()
        .map(|spec| (spec.path.as_str(), spec.name.as_str()))
        .collect();
    let tensors = step.index().tensors.iter();
    let factors = tensors.filter_map(|tensor| {
        let (path, factor) = tensor.name.split_once(".lora.")?;
        let matrix = names.get(path)?.strip_suffix(".weight")?;
        let (name, is_transposed) = match factor {
            "a" => ("lora_A.weight", true),
            "b" => ("lora_B.weight", true),
            "magnitude" => ("lora_magnitude_vector", false),
            _ => return None,
        };
        let plain = PlainTensor {
            name: format!("base_model.model.{matrix}.{name}"),
            is_transposed,
        };
        Some((tensor.name.clone(), plain))
    });
    factors.collect()
}

/// Returns the `adapter_config.json` for adapters of a model with these parameters.
///
/// Modules are named by the shortest ends of their names that select exactly these. The keys of the patterns are regular
/// expressions, which peft compares with the ends of names.
pub(crate) fn config(
    model: &ModelConfig,
    parameters: &[ParameterSpec],
    adapters: &AdapterSizes,
) -> Value {
    let matrices = matrices_of(model).unwrap_or_default();
    let adapted = matrices.iter().filter_map(|spec| {
        let sizes = adapters.of(&spec.path)?;
        Some((module_of(spec), sizes))
    });
    let adapted: BTreeMap<_, _> = adapted.collect();
    let all: Vec<_> = parameters.iter().map(module_of).collect();
    let modules = ends_of(&adapted.keys().copied().collect(), &all);
    let sizes = adapted.iter();
    let ranks = sizes.clone().map(|(module, sizes)| (*module, sizes.rank));
    let alphas = sizes.map(|(module, sizes)| (*module, sizes.alpha));
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": null,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "rank_pattern": pattern(numbered(&ranks.collect(), adapters.rank)),
        "alpha_pattern": pattern(numbered(&alphas.collect(), adapters.alpha)),
        "use_rslora": adapters.scaling == Scaling::ByRootOfRank,
        "use_dora": adapters.method == Method::Dora,
        "fan_in_fan_out": matches!(model, ModelConfig::Gpt2(_)),
        "inference_mode": true,
    })
}

/// Returns numbers by regular expressions of modules.
fn pattern<T: Into<Value>>(numbers: Vec<(&str, T)>) -> Map<String, Value> {
    let escaped = numbers
        .into_iter()
        .map(|(end, number)| (end.replace('.', "\\."), number.into()));
    escaped.collect()
}
