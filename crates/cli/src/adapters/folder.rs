//! Reading a folder of Hugging Face's `peft`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use burn::tensor::{DType, TensorData};
use burn_fsdp_models::{ModelConfig, ParameterSpec};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};

use super::error::AdapterError;
use super::factors::{Factors, Values};
use super::names::{is_end, module_of};
use super::sizes::{AdapterSizes, MatrixSizes, Method, Scaling, matrices_of};
use crate::error::InputError;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Maximum size of a configuration in bytes.
const LONGEST: u64 = 1 << 24;

/// The start of the names of peft's tensors.
const PREFIX: &str = "base_model.model.";

/// Keys that do not affect how adapters are applied or trained here.
const WITHOUT_EFFECT: [&str; 19] = [
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    // It follows from the kind of the model's layers.
    "fan_in_fan_out",
    // Settings of methods that other keys select.
    "megatron_core",
    "qalora_group_size",
    "layers_pattern",
];

/// The purpose for which a folder is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Training,
    /// Merging into the weights, where dropout has no effect.
    Merging,
}

/// The adapters of a folder.
#[derive(Debug)]
pub(crate) struct PeftFolder {
    pub(crate) sizes: AdapterSizes,
    pub(crate) factors: Factors,
}

/// A configuration, with its path for errors.
struct Config<'a> {
    folder: &'a Path,
    keys: Map<String, Value>,
}

impl PeftFolder {
    /// Returns true if a folder has adapters in peft's format.
    pub(crate) fn is_at(path: &Path) -> bool {
        path.join(CONFIG).is_file()
    }

    /// Reads the adapters of a model. The tensors decide which matrices have adapters, and the configuration must agree
    /// with them.
    pub(crate) fn read(path: &Path, model: &ModelConfig, purpose: Use) -> Result<Self, InputError> {
        let config = Config::read(path)?;
        config.check(purpose)?;
        let all = matrices_of(model)?;
        let (scaling, method) = (config.scaling(), config.method());
        let factors = read_factors(path, &all, method)?;
        let usual = MatrixSizes {
            rank: config.number("r", 8)?,
            alpha: config.alpha()?,
        };
        let ranks = config.pattern("rank_pattern")?;
        let alphas = config.pattern("alpha_pattern")?;
        let mut matrices = BTreeMap::new();
        for spec in &all {
            let Some(Values { a, b, magnitude }) = factors.0.get(&spec.path) else {
                config.check_without(spec)?;
                continue;
            };
            config.check_with(spec)?;
            let number = |pattern: &[(String, f64)]| {
                let mut pattern = pattern.iter();
                let found = pattern.find(|(end, _)| is_end(end, module_of(spec)));
                found.map(|(_, number)| *number)
            };
            let sizes = MatrixSizes {
                rank: number(&ranks).map_or(usual.rank, |rank| rank as usize),
                alpha: number(&alphas).unwrap_or(usual.alpha),
            };
            let [rows, columns] = [spec.module_shape()[0], spec.module_shape()[1]];
            for (factor, expected) in [(a, [rows, sizes.rank]), (b, [sizes.rank, columns])] {
                if factor.shape()[..] != expected {
                    return Err(config.folder(format!(
                        "a factor of {} has shape {:?}, but rank {} of {CONFIG} and the model need {expected:?}, both \
                         transposed in the file; use the files of one adapter of this model",
                        module_of(spec),
                        &factor.shape()[..],
                        sizes.rank
                    )));
                }
            }
            if let Some(found) = magnitude.as_ref().map(|data| &data.shape()[..])
                && found != [columns]
            {
                return Err(config.folder(format!(
                    "the magnitudes of {} have shape {found:?}, but the model needs [{columns}]; use an adapter of this \
                     model",
                    module_of(spec)
                )));
            }
            matrices.insert(spec.path.clone(), sizes);
        }
        let sizes = AdapterSizes::new(usual, (scaling, method), matrices, &all);
        if !sizes.is_valid(model) {
            return Err(config.folder(format!(
                "it must have at least one adapter, ranks from 1 to {}, the hidden size of the model, and alphas above 0",
                model.dim()
            )));
        }
        Ok(Self { sizes, factors })
    }
}

impl<'a> Config<'a> {
    fn read(folder: &'a Path) -> Result<Self, InputError> {
        let path = folder.join(CONFIG);
        let failed = |problem: String| AdapterError::Folder {
            path: path.clone(),
            problem,
        };
        let metadata = path.metadata().map_err(|error| failed(error.to_string()))?;
        if !metadata.is_file() || metadata.len() > LONGEST {
            return Err(failed(format!("not a file of at most {LONGEST} bytes")).into());
        }
        let text = fs::read(&path).map_err(|error| failed(error.to_string()))?;
        let keys = serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))?;
        Ok(Self { folder, keys })
    }

    /// Checks that no key asks for something that this command does not do.
    fn check(&self, purpose: Use) -> Result<(), InputError> {
        if self.keys.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return Err(self.setting("peft_type", "only \"LORA\" is supported"));
        }
        let task = self.keys.get("task_type").unwrap_or(&Value::Null);
        if !task.is_null() && task != "CAUSAL_LM" {
            return Err(self.setting(
                "task_type",
                "the models here are language models; use an adapter of CAUSAL_LM",
            ));
        }
        let begun = self.keys.get("init_lora_weights").unwrap_or(&Value::Null);
        if !(begun.is_null() || begun.is_boolean() || begun == "gaussian") {
            let problem = "peft then changes the base weights; convert the adapter to plain LoRA, for example with \
                           `path_initial_model_for_weight_conversion` of peft's `save_pretrained`";
            return Err(self.setting("init_lora_weights", problem));
        }
        for key in ["use_rslora", "use_dora"] {
            if !matches!(
                self.keys.get(key),
                None | Some(Value::Null | Value::Bool(_))
            ) {
                return Err(self.setting(key, "it must be true or false"));
            }
        }
        for (key, value) in &self.keys {
            let is_dropout = key == "lora_dropout";
            let is_known = WITHOUT_EFFECT.contains(&key.as_str());
            if is_known || is_off(value) || is_dropout && purpose == Use::Merging {
                continue;
            }
            return Err(self.setting(
                key,
                if is_dropout {
                    "adapters are trained without dropout, because the product of the factors is added to the weight; \
                     set it to 0"
                } else {
                    "only adapters without it are supported"
                },
            ));
        }
        Ok(())
    }

    fn scaling(&self) -> Scaling {
        match self.keys.get("use_rslora") {
            Some(Value::Bool(true)) => Scaling::ByRootOfRank,
            _ => Scaling::ByRank,
        }
    }

    fn method(&self) -> Method {
        match self.keys.get("use_dora") {
            Some(Value::Bool(true)) => Method::Dora,
            _ => Method::Lora,
        }
    }

    fn number(&self, key: &str, default: usize) -> Result<usize, InputError> {
        let number = match self.keys.get(key) {
            None | Some(Value::Null) => Some(default),
            Some(value) => value
                .as_u64()
                .and_then(|number| usize::try_from(number).ok()),
        };
        number.ok_or_else(|| self.setting(key, "it must be a whole number"))
    }

    fn alpha(&self) -> Result<f64, InputError> {
        match self.keys.get("lora_alpha") {
            None | Some(Value::Null) => Ok(8.0),
            Some(value) => value
                .as_f64()
                .ok_or_else(|| self.setting("lora_alpha", "it must be a number")),
        }
    }

    /// Returns the ends of modules' names in a pattern, with their numbers. In peft, they are regular expressions.
    fn pattern(&self, key: &str) -> Result<Vec<(String, f64)>, InputError> {
        let pattern = match self.keys.get(key) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Object(pattern)) => pattern,
            Some(_) => return Err(self.setting(key, "it must map names of modules to numbers")),
        };
        let entries = pattern.iter().map(|(end, number)| {
            let name = end.replace("\\.", ".");
            let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.' || c == '-';
            if !name.chars().all(is_plain) {
                let problem =
                    "only ends of modules' names are supported in it, not regular expressions";
                return Err(self.setting(key, problem));
            }
            match number.as_f64() {
                Some(number) => Ok((name, number)),
                None => Err(self.setting(key, "it must map names of modules to numbers")),
            }
        });
        let mut entries = entries.collect::<Result<Vec<_>, _>>()?;
        // Peft takes the first that matches, in the file's order, which is lost here.
        entries.sort_by_key(|(end, _)| std::cmp::Reverse(end.len()));
        let ambiguous = |(index, (end, number)): (usize, &(String, f64))| {
            let mut before = entries[..index].iter();
            before.any(|(longer, other)| is_end(end, longer) && other != number)
        };
        if entries.iter().enumerate().any(ambiguous) {
            let problem = "two of its names match one module with different numbers; write each number for other modules";
            return Err(self.setting(key, problem));
        }
        Ok(entries)
    }

    /// Returns true if the configuration's list of targets selects a matrix; `None` if it is not a list.
    fn targets(&self, spec: &ParameterSpec) -> Option<bool> {
        let targets = self.keys.get("target_modules")?.as_array()?;
        let mut targets = targets.iter().filter_map(Value::as_str);
        Some(targets.any(|target| is_end(target, module_of(spec))))
    }

    fn check_with(&self, spec: &ParameterSpec) -> Result<(), InputError> {
        if self.targets(spec) == Some(false) {
            return Err(self.folder(format!(
                "{WEIGHTS} has an adapter of {}, which `target_modules` of {CONFIG} does not select; use the files of one \
                 adapter",
                module_of(spec)
            )));
        }
        Ok(())
    }

    fn check_without(&self, spec: &ParameterSpec) -> Result<(), InputError> {
        if self.targets(spec) == Some(true) {
            return Err(self.folder(format!(
                "`target_modules` of {CONFIG} selects {}, but {WEIGHTS} has no adapter of it; use the files of one \
                 adapter of this model",
                module_of(spec)
            )));
        }
        Ok(())
    }

    fn setting(&self, key: &str, problem: &'static str) -> InputError {
        let value = self.keys.get(key).unwrap_or(&Value::Null).to_string();
        let shortened = |text: &str| text.chars().take(100).collect();
        let error = AdapterError::Setting {
            path: self.folder.join(CONFIG),
            key: shortened(key),
            value: shortened(&value),
            problem,
        };
        error.into()
    }

    fn folder(&self, problem: String) -> InputError {
        let path = self.folder.to_owned();
        AdapterError::Folder { path, problem }.into()
    }
}

/// Returns true for a value that switches a setting off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is_on) => !is_on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || text == "none",
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
    }
}

/// Reads the factors of the model's matrices. Any other tensor is an error.
fn read_factors(
    folder: &Path,
    all: &[ParameterSpec],
    method: Method,
) -> Result<Factors, InputError> {
    let path = folder.join(WEIGHTS);
    let failed = |problem: String| {
        let path = path.clone();
        InputError::from(AdapterError::Folder { path, problem })
    };
    let bytes = fs::read(&path).map_err(|error| {
        let other = folder.join("adapter_model.bin").exists();
        let remedy = if other {
            "; adapter_model.bin is in PyTorch's format: load it with peft, and save it again"
        } else {
            ""
        };
        failed(format!("{error}{remedy}"))
    })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|error| failed(format!("not a safetensors file: {error}")))?;
    let mut left: BTreeSet<&str> = file.names().into_iter().collect();
    let mut of_matrices = BTreeMap::new();
    for spec in all {
        let names = ["A", "B"].map(|letter| {
            let module = module_of(spec);
            format!("{PREFIX}{module}.lora_{letter}.weight")
        });
        if !names.iter().any(|name| left.contains(name.as_str())) {
            continue;
        }
        let factor = |name: &str| {
            let tensor = file.tensor(name);
            let tensor = tensor.map_err(|_| failed(format!("it lacks tensor {name}")))?;
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            let read = match shape {
                [_] => in_32_bits(tensor.data(), dtype, shape),
                _ => turned(tensor.data(), dtype, shape),
            };
            read.ok_or_else(|| {
                let problem =
                    "only matrices of F32, F16 and BF16 are supported, and vectors of magnitudes";
                failed(format!(
                    "tensor {name} has shape {shape:?} and type {dtype:?}; {problem}"
                ))
            })
        };
        let magnitude = format!("{PREFIX}{}.lora_magnitude_vector", module_of(spec));
        let has_magnitude = method == Method::Dora;
        let values = Values {
            a: factor(&names[0])?,
            b: factor(&names[1])?,
            magnitude: has_magnitude.then(|| factor(&magnitude)).transpose()?,
        };
        names.iter().for_each(|name| _ = left.remove(name.as_str()));
        if has_magnitude {
            left.remove(magnitude.as_str());
        }
        of_matrices.insert(spec.path.clone(), values);
    }
    match left.first() {
        None => Ok(Factors(of_matrices)),
        Some(name) => {
            let name: String = name.chars().take(200).collect();
            Err(failed(format!(
                "tensor {name} is no factor of a matrix in the model's blocks; use an adapter of this model, of its blocks \
                 only"
            )))
        }
    }
}

/// Returns a tensor in 32 bits; `None` for other types.
fn in_32_bits(bytes: &[u8], dtype: Dtype, shape: &[usize]) -> Option<TensorData> {
    let dtype = match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        _ => return None,
    };
    let data = TensorData::from_bytes_vec(bytes.to_vec(), shape.to_vec(), dtype);
    Some(data.convert::<f32>())
}

/// Returns a matrix in 32 bits and transposed; `None` for other types and shapes.
fn turned(bytes: &[u8], dtype: Dtype, shape: &[usize]) -> Option<TensorData> {
    let &[rows, columns] = shape else {
        return None;
    };
    let values = in_32_bits(bytes, dtype, shape)?;
    let values = values.as_slice::<f32>().ok()?;
    let turned = (0..columns).flat_map(|column| {
        let down = values.iter().skip(column).step_by(columns);
        down.copied()
    });
    Some(TensorData::new(
        turned.collect::<Vec<f32>>(),
        [columns, rows],
    ))
}
