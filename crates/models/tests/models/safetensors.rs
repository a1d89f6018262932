//! Handwritten safetensors files, valid and invalid.

use std::fs;
use std::path::Path;

use burn_fsdp_models::{GptConfig, ParameterSpec};
use serde_json::{Map, Value, json};

/// A header and data that are written unchanged, even if they are wrong.
#[derive(Clone)]
pub(crate) struct Container {
    pub(crate) header: Map<String, Value>,
    pub(crate) data: Vec<u8>,
}

impl Container {
    /// Returns the weights of a model. Each value is a formula of the parameter's number and the value's index.
    pub(crate) fn of_model(config: &GptConfig) -> Self {
        Self::of_parameters(config.parameters())
    }

    /// Returns the same for a table.
    pub(crate) fn of_parameters(parameters: Vec<ParameterSpec>) -> Self {
        let mut container = Self {
            header: Map::new(),
            data: Vec::new(),
        };
        for (number, spec) in parameters.into_iter().enumerate() {
            let values = formula_values(number, &spec);
            container.push(&spec.name, &spec.shape, &values);
        }
        container
    }

    /// Returns a container without tensors.
    pub(crate) fn empty() -> Self {
        Self {
            header: Map::new(),
            data: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.push_stored(name, "F32", shape, &bytes);
    }

    /// Adds a tensor of any type.
    pub(crate) fn push_stored(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) {
        let start = self.data.len();
        self.data.extend(bytes);
        let entry = json!({
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [start, self.data.len()],
        });
        self.header.insert(name.to_owned(), entry);
    }

    /// Returns the entry of a tensor, which a test may corrupt.
    pub(crate) fn entry(&mut self, name: &str) -> &mut Map<String, Value> {
        self.header[name]
            .as_object_mut()
            .expect("entries are objects")
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let header = serde_json::to_vec(&self.header).expect("a header can be written");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend(&self.data);
        bytes
    }

    pub(crate) fn write(&self, path: &Path) {
        fs::write(path, self.to_bytes()).expect("the test folder is writable");
    }
}

/// Returns values that a program in any language can recompute: a sine of the value's index, around one for the scale
/// of a layer norm and around zero otherwise.
pub(crate) fn formula_values(number: usize, spec: &ParameterSpec) -> Vec<f32> {
    let is_norm = spec.name.contains("ln") || spec.name.contains("norm");
    let is_scale = is_norm && spec.name.ends_with("weight");
    let center = if is_scale { 1.0 } else { 0.0 };
    (0..spec.shape.iter().product())
        .map(|index: usize| {
            let angle = index as f64 * 0.7 + number as f64;
            (center + 0.2 * angle.sin()) as f32
        })
        .collect()
}
