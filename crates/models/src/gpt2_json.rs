//! The `config.json` of a GPT-2 in Hugging Face's format: reading and writing.

use std::path::Path;

use serde_json::{Value, json};

use crate::known_settings;
use crate::norm::EPSILON;
use crate::settings::{Settings, read_config, refuse};
use crate::{Gpt2Config, ModelError};

/// Hugging Face's name of the model.
pub(crate) const MODEL_TYPE: &str = "gpt2";

/// Hugging Face's names of the `tanh` approximation of GELU. The first one is written. Only the implementations differ.
const ACTIVATIONS: [&str; 5] = [
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "gelu_python_tanh",
    "gelu_accurate",
];

/// The settings that are read here.
const READ: [&str; 18] = [
    "activation_function",
    "hidden_size",
    "layer_norm_epsilon",
    "max_position_embeddings",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "n_positions",
    "num_attention_heads",
    "num_hidden_layers",
    "quantization_config",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "tie_word_embeddings",
    "vocab_size",
    "add_cross_attention",
    "model_type",
];

impl Gpt2Config {
    /// Reads the configuration of a GPT-2 from the `config.json` of a folder in Hugging Face's format.
    ///
    /// Settings that [`Gpt2`](crate::Gpt2) does not support are errors. Dropout is an exception: it is ignored. Sizes
    /// have GPT-2's names or the names that transformers uses for all models. Absent settings have transformers'
    /// defaults.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, describes another model, or needs an unsupported computation; if two names of one
    /// setting contradict each other; or if the configuration is not valid.
    pub fn from_hugging_face(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        read_config(folder.as_ref(), sizes, Self::validate)
    }

    /// Returns the `config.json` of this model for a folder in Hugging Face's format, with 32-bit weights.
    #[must_use]
    pub fn to_hugging_face(&self) -> Value {
        json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": MODEL_TYPE,
            "activation_function": ACTIVATIONS[0],
            "layer_norm_epsilon": EPSILON,
            "n_embd": self.dim,
            "n_head": self.heads,
            "n_inner": self.hidden,
            "n_layer": self.layers,
            "n_positions": self.seq,
            "vocab_size": self.vocab,
            "tie_word_embeddings": true,
            "torch_dtype": "float32",
        })
    }
}

/// Returns the sizes from the settings. Absent numbers have the defaults of transformers' `GPT2Config`.
fn sizes(settings: Settings<'_>) -> Result<Gpt2Config, String> {
    let activation = settings.word(&["activation_function"], ACTIVATIONS[0])?;
    let epsilon = settings.number("layer_norm_epsilon")?.unwrap_or(EPSILON);
    let asked = [
        (
            "model_type",
            settings.word(&["model_type"], MODEL_TYPE)? != MODEL_TYPE,
            "\"gpt2\"",
        ),
        (
            "activation_function",
            !ACTIVATIONS.contains(&activation),
            "GELU approximated with tanh (\"gelu_new\", \"gelu_fast\", \"gelu_pytorch_tanh\")",
        ),
        ("layer_norm_epsilon", epsilon != EPSILON, "1e-5"),
        (
            "tie_word_embeddings",
            !settings.flag("tie_word_embeddings", true)?,
            "true",
        ),
        (
            "scale_attn_weights",
            !settings.flag("scale_attn_weights", true)?,
            "true",
        ),
        (
            "scale_attn_by_inverse_layer_idx",
            settings.flag("scale_attn_by_inverse_layer_idx", false)?,
            "false",
        ),
        (
            "add_cross_attention",
            settings.flag("add_cross_attention", false)?,
            "false",
        ),
        (
            "quantization_config",
            settings.given("quantization_config").is_some(),
            "null",
        ),
    ];
    refuse("GPT-2", settings, &asked)?;
    known_settings::check("GPT-2", settings, &READ)?;
    let dim = settings.size(&["n_embd", "hidden_size"], 768)?;
    let hidden = settings.optional_size("n_inner")?;
    Ok(Gpt2Config {
        layers: settings.size(&["n_layer", "num_hidden_layers"], 12)?,
        dim,
        heads: settings.size(&["n_head", "num_attention_heads"], 12)?,
        // Sizes that are too large are reported by `validate`.
        hidden: hidden.unwrap_or_else(|| dim.saturating_mul(4)),
        vocab: settings.size(&["vocab_size"], 50_257)?,
        seq: settings.size(&["n_positions", "max_position_embeddings"], 1024)?,
    })
}
