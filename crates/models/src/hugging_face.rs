//! Sizes of models as Hugging Face's `config.json` has them.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::llama::EPSILON;
use crate::{LlamaConfig, ModelError};

/// Largest `config.json` that is read.
const MAX_BYTES: u64 = 1 << 20;

/// What `config.json` says of a Llama, as far as the mathematics depends on it.
#[derive(Deserialize)]
struct ConfigJson {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    #[serde(flatten)]
    kind: KindJson,
    #[serde(flatten)]
    rope: RopeJson,
}

/// The choices of the mathematics that are no sizes.
#[derive(Deserialize)]
struct KindJson {
    model_type: String,
    #[serde(default = "default_hidden_act")]
    hidden_act: String,
    #[serde(default = "default_rms_norm_eps")]
    rms_norm_eps: f64,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
}

/// The rotary positions.
#[derive(Deserialize)]
struct RopeJson {
    rope_theta: Option<f64>,
    /// From transformers 5 on in place of the others.
    rope_parameters: Option<RopeParameters>,
    rope_scaling: Option<Value>,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
}

/// Transformers' value where a file says nothing.
fn default_rms_norm_eps() -> f64 {
    1e-6
}

/// Transformers' value where a file says nothing.
fn default_hidden_act() -> String {
    "silu".to_owned()
}

impl LlamaConfig {
    /// Reads the sizes of a Llama from the `config.json` of a folder in Hugging Face's form. What the file asks for
    /// and [`Llama`](crate::Llama) does not compute is refused, by the name of the setting.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is of another model, or asks for what this Llama has not: tied or biased matrices, scaled
    /// rotary positions, another activation, another epsilon of the norms than 1e-5; and if such a model cannot exist.
    pub fn from_hugging_face(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = folder.as_ref().join("config.json");
        let malformed = |problem: String| ModelError::MalformedWeights {
            path: path.clone(),
            problem,
        };
        let file_error = |source| ModelError::File {
            path: path.clone(),
            source,
        };
        let metadata = path.metadata().map_err(file_error)?;
        if !metadata.is_file() || metadata.len() > MAX_BYTES {
            let problem = format!("it is no regular file of at most {MAX_BYTES} bytes");
            return Err(malformed(problem));
        }
        let text = std::fs::read(&path).map_err(file_error)?;
        let json: ConfigJson =
            serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
        let config = json.sizes().map_err(malformed)?;
        config.validate()?;
        Ok(config)
    }
}

impl ConfigJson {
    fn sizes(&self) -> Result<LlamaConfig, String> {
        let (kind, rope) = (&self.kind, &self.rope);
        let parameters = rope.rope_parameters.as_ref();
        let theta = parameters.and_then(|rope| rope.rope_theta);
        let theta = theta.or(rope.rope_theta).unwrap_or(10_000.0);
        let rope_type = parameters.and_then(|rope| rope.rope_type.as_deref());
        let heads = self.num_attention_heads;
        let head_dim = self.hidden_size.checked_div(heads).unwrap_or(0);
        let is_whole = theta.fract() == 0.0 && (1.0..1e15).contains(&theta);
        let has_scaling = rope
            .rope_scaling
            .as_ref()
            .is_some_and(|value| !value.is_null());
        let asked = [
            ("model_type", kind.model_type != "llama", "\"llama\""),
            ("hidden_act", kind.hidden_act != "silu", "\"silu\""),
            ("tie_word_embeddings", kind.tie_word_embeddings, "false"),
            ("attention_bias", kind.attention_bias, "false"),
            ("mlp_bias", kind.mlp_bias, "false"),
            ("rope_scaling", has_scaling, "null"),
            (
                "rope_parameters.rope_type",
                rope_type.is_some_and(|name| name != "default"),
                "\"default\"",
            ),
            ("rope_theta", !is_whole, "a whole number"),
            ("rms_norm_eps", kind.rms_norm_eps != EPSILON, "1e-5"),
            (
                "head_dim",
                self.head_dim.is_some_and(|given| given != head_dim),
                "hidden_size / num_attention_heads",
            ),
        ];
        if let Some((setting, _, expected)) = asked.into_iter().find(|(_, differs, _)| *differs) {
            return Err(format!(
                "`{setting}` is not {expected}, which is all that this Llama computes; load a checkpoint that has it, \
                 or write the model as a Burn module of your own"
            ));
        }
        Ok(LlamaConfig {
            layers: self.num_hidden_layers,
            dim: self.hidden_size,
            heads,
            kv_heads: self.num_key_value_heads.unwrap_or(heads),
            hidden: self.intermediate_size,
            vocab: self.vocab_size,
            seq: self.max_position_embeddings,
            // Checked above to be a whole number within range.
            rope_base: theta as usize,
        })
    }
}
