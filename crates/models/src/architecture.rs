//! The trait of model configurations, and the configuration of any model of this crate.

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::error::HEAD;
use crate::initial::InitialValues;
use crate::llama_table::Names;
use crate::rope_scaling::RopeScaling;
use crate::{
    Gpt, Gpt2, Gpt2Config, GptConfig, LanguageModel, Llama, LlamaConfig, ModelError, ParameterSpec,
};

/// The configuration of a model: everything that is needed to build it and to interpret its files.
pub trait Architecture: Copy + Send + Sync + 'static {
    /// The Burn module.
    type Model: LanguageModel;

    /// Pattern of the paths of the model's blocks.
    const BLOCKS: &'static str;

    /// Builds the model on a device, with the initial weights of a seed.
    ///
    /// # Errors
    ///
    /// If the configuration is not valid.
    fn init(&self, device: &Device, seed: u64) -> Result<Self::Model, ModelError>;

    /// Builds the model on a device, with matrices of zeros, for weights that are read later.
    ///
    /// # Errors
    ///
    /// If the configuration is not valid.
    fn blank(&self, device: &Device) -> Result<Self::Model, ModelError>;

    /// Checks that the configuration is valid.
    ///
    /// # Errors
    ///
    /// If a size or another setting is not valid.
    fn validate(&self) -> Result<(), ModelError>;

    /// Returns the table of the model's parameters.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// Returns the same configuration for sequences of `seq` tokens.
    #[must_use]
    fn for_sequences_of(self, seq: usize) -> Self;

    /// Returns the configuration of a model that does the same operations with narrower tensors.
    ///
    /// The numbers of blocks and heads stay the same. Head widths, other widths and the vocabulary size become as small
    /// as possible, but keep their remainders modulo `ranks` and modulo two. They are at least `least`, unless the
    /// original is smaller; for heads, this is the width of all heads together. Heads keep their width if it is set
    /// (`head_dim`), or if settings of the rotary positions depend on it.
    #[must_use]
    fn narrowed(self, ranks: usize, least: usize) -> Self;

    /// Returns the names of the matrices of which each rank holds some columns, if products are divided among ranks. Of
    /// the other matrices, each rank holds some rows, so a product is a sum over ranks.
    ///
    /// A matrix that fuses several is not among them, because the columns of one rank would not belong to its heads.
    fn cut_by_columns(&self) -> Vec<&'static str>;

    /// Returns the table's name for the tensor `name` of a file. Returns `None` for a tensor that files may contain in
    /// addition to the parameters and that the model does not need.
    fn name_of(&self, name: String) -> Option<String> {
        Some(name)
    }

    /// For a model with a tied head, returns the head's name in files and the table's name of the parameter that it
    /// shares.
    fn tied_head(&self) -> Option<[&'static str; 2]> {
        None
    }
}

/// Returns the smallest size of at least `least` that leaves the same remainders as `size` modulo `ranks` and modulo
/// two. Returns `size` if it is below `least`.
fn narrow(size: usize, ranks: usize, least: usize) -> usize {
    let step = if ranks.is_multiple_of(2) {
        ranks
    } else {
        2 * ranks
    };
    match size.checked_sub(least) {
        Some(more) => size - more / step * step,
        None => size,
    }
}

/// Narrows each of the `heads` heads of width `dim / heads`, and returns their total width.
fn narrow_heads(dim: usize, heads: usize, ranks: usize, least: usize) -> usize {
    let least = least.div_ceil(heads).max(2);
    heads * narrow(dim / heads, ranks, least)
}

/// Prefixes of the names of heads that transformers and TRL add to a decoder for other tasks. No part of the decoder
/// depends on them.
const OTHER_HEADS: [&str; 5] = [
    "score.",
    "classifier.",
    "qa_outputs.",
    "v_head.",
    "multiple_choice_head.",
];

/// Returns true for a tensor of a head for another task.
fn is_of_other_head(name: &str) -> bool {
    OTHER_HEADS.iter().any(|start| name.starts_with(start))
}

/// Adds the prefix `top`, which files of a model without a head omit, if the name begins with one of `starts`.
fn with_top(name: String, top: &str, starts: &[&str]) -> String {
    if starts.iter().any(|start| name.starts_with(start)) {
        format!("{top}.{name}")
    } else {
        name
    }
}

impl Architecture for GptConfig {
    type Model = Gpt;

    const BLOCKS: &'static str = "blocks.*";

    fn cut_by_columns(&self) -> Vec<&'static str> {
        vec!["wte", "wpe", "head", "fc"]
    }

    fn for_sequences_of(self, seq: usize) -> Self {
        Self { seq, ..self }
    }

    fn narrowed(self, ranks: usize, least: usize) -> Self {
        Self {
            dim: narrow_heads(self.dim, self.heads, ranks, least),
            vocab: narrow(self.vocab, ranks, least),
            ..self
        }
    }

    fn init(&self, device: &Device, seed: u64) -> Result<Gpt, ModelError> {
        Self::init(self, device, seed)
    }

    fn blank(&self, device: &Device) -> Result<Gpt, ModelError> {
        self.built(InitialValues::zeros(device))
    }

    fn validate(&self) -> Result<(), ModelError> {
        Self::validate(self)
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Self::parameters(self)
    }
}

impl Architecture for Gpt2Config {
    type Model = Gpt2;

    const BLOCKS: &'static str = "h.*";

    fn cut_by_columns(&self) -> Vec<&'static str> {
        vec!["wte", "wpe", "c_fc"]
    }

    fn for_sequences_of(self, seq: usize) -> Self {
        Self { seq, ..self }
    }

    fn narrowed(self, ranks: usize, least: usize) -> Self {
        Self {
            dim: narrow_heads(self.dim, self.heads, ranks, least),
            hidden: narrow(self.hidden, ranks, least),
            vocab: narrow(self.vocab, ranks, least),
            ..self
        }
    }

    fn init(&self, device: &Device, seed: u64) -> Result<Gpt2, ModelError> {
        Self::init(self, device, seed)
    }

    fn blank(&self, device: &Device) -> Result<Gpt2, ModelError> {
        self.built(InitialValues::zeros(device))
    }

    fn validate(&self) -> Result<(), ModelError> {
        Self::validate(self)
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Self::parameters(self)
    }

    /// The first published files use the names of the bare model and contain the attention masks.
    fn name_of(&self, name: String) -> Option<String> {
        let is_mask = [".attn.bias", ".attn.masked_bias"]
            .iter()
            .any(|end| name.ends_with(end));
        if is_mask || is_of_other_head(&name) {
            return None;
        }
        let starts = ["wte.", "wpe.", "h.", "ln_f."];
        Some(with_top(name, "transformer", &starts))
    }

    fn tied_head(&self) -> Option<[&'static str; 2]> {
        Some([HEAD, "transformer.wte.weight"])
    }
}

impl Architecture for LlamaConfig {
    type Model = Llama;

    const BLOCKS: &'static str = "layers.*";

    fn cut_by_columns(&self) -> Vec<&'static str> {
        let family = self.variant.family;
        let mut names = vec!["tok_embeddings", "output"];
        if family.fused().is_none() {
            names.extend(["wq", "wk", "wv"]);
        }
        if !family.has_fused_gate() {
            names.extend(["w1", "w3"]);
        }
        names
    }

    fn for_sequences_of(self, seq: usize) -> Self {
        Self { seq, ..self }
    }

    fn narrowed(self, ranks: usize, least: usize) -> Self {
        let mut variant = self.variant;
        let has_lists = matches!(variant.rope_scaling, RopeScaling::LongRope { .. });
        if variant.rotated_dim.is_some() || has_lists {
            // Settings of the rotary positions depend on the width of a head.
            variant.head_dim = Some(self.head_dim());
        }
        Self {
            dim: match variant.head_dim {
                Some(_) => narrow(self.dim, ranks, least),
                None => narrow_heads(self.dim, self.heads, ranks, least),
            },
            hidden: narrow(self.hidden, ranks, least),
            vocab: narrow(self.vocab, ranks, least),
            variant,
            ..self
        }
    }

    fn init(&self, device: &Device, seed: u64) -> Result<Llama, ModelError> {
        Self::init(self, device, seed)
    }

    fn blank(&self, device: &Device) -> Result<Llama, ModelError> {
        self.built(InitialValues::zeros(device))
    }

    fn validate(&self) -> Result<(), ModelError> {
        Self::validate(self)
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Self::parameters(self)
    }

    /// Files of a bare model have shorter names. Files of older versions contain the speeds of the rotary positions,
    /// which follow from the configuration.
    fn name_of(&self, name: String) -> Option<String> {
        let ends = ["inv_freq", "cos_cached", "sin_cached"];
        let is_rotary = name.contains("rotary_emb.") && ends.iter().any(|end| name.ends_with(end));
        if is_rotary || is_of_other_head(&name) {
            return None;
        }
        let names = Names::of(self.variant.family);
        if name == HEAD {
            return Some(names.head_name.to_owned());
        }
        let starts = [names.table, "layers", names.norm].map(|module| format!("{module}."));
        let starts: Vec<&str> = starts.iter().map(String::as_str).collect();
        Some(with_top(name, names.top, &starts))
    }

    fn tied_head(&self) -> Option<[&'static str; 2]> {
        let names = Names::of(self.variant.family);
        let is_tied = self.variant.has_tied_head;
        is_tied.then_some([names.head_name, names.table_name])
    }
}

/// The configuration of any model of this crate, as saved in checkpoints. The names of the sizes identify the kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant, reason = "configurations are `Copy`")]
pub enum ModelConfig {
    /// A GPT.
    Gpt(GptConfig),
    /// A model of any [`Family`](crate::Family), such as Llama.
    Llama(LlamaConfig),
    /// A GPT-2.
    Gpt2(Gpt2Config),
}

/// Evaluates an expression with the configuration of any kind.
macro_rules! of_any {
    ($config:expr, $sizes:ident => $body:expr) => {
        match $config {
            Self::Gpt($sizes) => $body,
            Self::Llama($sizes) => $body,
            Self::Gpt2($sizes) => $body,
        }
    };
}

impl ModelConfig {
    /// Returns the common name of the model's kind.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Gpt(_) => "GPT",
            Self::Llama(sizes) => sizes.variant.family.name(),
            Self::Gpt2(_) => "GPT-2",
        }
    }

    /// Returns the number of transformer blocks.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        of_any!(self, sizes => sizes.layers)
    }

    /// Returns the width of the residual stream.
    #[must_use]
    pub fn dim(&self) -> usize {
        of_any!(self, sizes => sizes.dim)
    }

    /// Returns the number of attention heads of a block.
    #[must_use]
    pub fn heads(&self) -> usize {
        of_any!(self, sizes => sizes.heads)
    }

    /// Returns the number of heads of a block that have keys and values.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        match self {
            Self::Llama(sizes) => sizes.kv_heads,
            Self::Gpt(_) | Self::Gpt2(_) => self.heads(),
        }
    }

    /// Returns the width of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        match self {
            Self::Llama(sizes) => sizes.head_dim(),
            Self::Gpt(_) | Self::Gpt2(_) => self.dim() / self.heads(),
        }
    }

    /// Returns the number of tokens that a query sees in layers with a sliding window, including its own. Returns `None`
    /// if there are no such layers.
    #[must_use]
    pub fn window(&self) -> Option<usize> {
        match self {
            Self::Llama(sizes) => {
                let window = sizes.variant.scores.window;
                (0..sizes.layers).find_map(|layer| window.of_layer(layer))
            }
            Self::Gpt(_) | Self::Gpt2(_) => None,
        }
    }

    /// Returns the vocabulary size.
    #[must_use]
    pub fn vocab(&self) -> usize {
        of_any!(self, sizes => sizes.vocab)
    }

    /// Returns true if rotations depend on the length of a sequence, for lengths of at most `seq` tokens.
    #[must_use]
    pub fn depends_on_length(&self, seq: usize) -> bool {
        match self {
            Self::Llama(sizes) => {
                let scaling = sizes.variant.rope_scaling;
                scaling.epoch([1, sizes.seq]) != scaling.epoch([seq, sizes.seq])
            }
            Self::Gpt(_) | Self::Gpt2(_) => false,
        }
    }

    /// Returns the maximum sequence length in tokens.
    #[must_use]
    pub fn seq(&self) -> usize {
        of_any!(self, sizes => sizes.seq)
    }

    /// Checks that the configuration is valid.
    ///
    /// # Errors
    ///
    /// If a size or another setting is not valid.
    pub fn validate(&self) -> Result<(), ModelError> {
        of_any!(self, sizes => sizes.validate())
    }

    /// Returns the number of parameters of the whole model.
    ///
    /// # Panics
    ///
    /// If the number overflows, which [`validate`](Self::validate) reports as an error.
    #[must_use]
    pub fn num_params(&self) -> usize {
        of_any!(self, sizes => sizes.num_params())
    }

    /// Returns the table of the model's parameters.
    ///
    /// # Errors
    ///
    /// If the configuration is not valid.
    pub fn parameters(&self) -> Result<Vec<ParameterSpec>, ModelError> {
        of_any!(self, sizes => sizes.validate().map(|()| sizes.parameters()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrower_models_keep_their_divisibility() {
        for size in 1..200 {
            for ranks in 1..9 {
                for least in [1, 5, 16] {
                    let small = narrow(size, ranks, least);
                    assert_eq!(small % ranks, size % ranks);
                    assert_eq!(small % 2, size % 2);
                    let most = least + 2 * ranks;
                    assert!(
                        small == size || (least..most).contains(&small),
                        "{small} of {size}"
                    );
                }
            }
        }
        let llama = LlamaConfig::preset("7b").expect("a preset").narrowed(4, 5);
        assert_eq!((llama.dim, llama.hidden, llama.vocab), (128, 8, 8));
        llama.validate().expect("there is such a model");
    }

    #[test]
    fn a_configuration_is_known_by_its_fields() {
        let gpt = GptConfig::gpt_7b();
        let llama = LlamaConfig::preset("7b").expect("a preset");
        let gpt2 = Gpt2Config {
            layers: 12,
            dim: 768,
            heads: 12,
            hidden: 3072,
            vocab: 50_257,
            seq: 1024,
        };
        for (json, want) in [
            (serde_json::json!(gpt), Some(ModelConfig::Gpt(gpt))),
            (serde_json::json!(llama), Some(ModelConfig::Llama(llama))),
            (serde_json::json!(gpt2), Some(ModelConfig::Gpt2(gpt2))),
            (serde_json::json!({"layers": 3}), None),
            (serde_json::Value::Null, None),
        ] {
            assert_eq!(serde_json::from_value(json).ok(), want);
        }
    }
}
