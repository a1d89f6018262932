//! Sizes of models as Hugging Face's `config.json` has them, read and written.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::norm::EPSILON;
use crate::{
    Gpt2, Gpt2Config, Llama, LlamaConfig, LlamaVariant, ModelConfig, ModelError, RopeScaling,
};

const MODEL_TYPE: &str = "llama";
const GPT2_MODEL_TYPE: &str = "gpt2";
/// Hugging Face's name of the activation.
const HIDDEN_ACT: &str = "silu";

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
    /// Weights in another form than floats.
    quantization_config: Option<Value>,
}

/// The rotary positions.
#[derive(Deserialize)]
struct RopeJson {
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    /// From transformers 5 on in place of the others.
    rope_parameters: Option<RopeParameters>,
    rope_scaling: Option<RopeParameters>,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
}

impl RopeParameters {
    /// Returns the scaling, or the setting at fault and what is expected of it.
    fn scaling(&self) -> Result<RopeScaling, (&'static str, &'static str)> {
        let number = |value: Option<f64>, name| value.ok_or((name, "there"));
        let factor = || number(self.factor, "factor");
        match self.rope_type.as_deref() {
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: factor()? }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: number(self.low_freq_factor, "low_freq_factor")?,
                high_freq_factor: number(self.high_freq_factor, "high_freq_factor")?,
                original_max_position_embeddings: self
                    .original_max_position_embeddings
                    .ok_or(("original_max_position_embeddings", "there"))?,
            }),
            Some(_) => Err(("rope_type", "\"default\", \"linear\" or \"llama3\"")),
        }
    }
}

/// Transformers' value where a file says nothing.
fn default_rms_norm_eps() -> f64 {
    1e-6
}

/// Transformers' value where a file says nothing.
fn default_hidden_act() -> String {
    HIDDEN_ACT.to_owned()
}

/// Reads `config.json` of a folder, and the sizes of the model in it.
fn read_sizes<T: DeserializeOwned, C>(
    folder: &Path,
    sizes: impl FnOnce(&T) -> Result<C, String>,
) -> Result<C, ModelError> {
    let path = folder.join("config.json");
    let json: T = read_json(&path)?;
    sizes(&json).map_err(|problem| ModelError::MalformedConfig { path, problem })
}

/// Reads a small file of JSON.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let malformed = |problem: String| ModelError::MalformedConfig {
        path: path.to_owned(),
        problem,
    };
    let file_error = |source| ModelError::File {
        path: path.to_owned(),
        source,
    };
    let metadata = path.metadata().map_err(file_error)?;
    if !metadata.is_file() || metadata.len() > MAX_BYTES {
        let problem = format!("it is no regular file of at most {MAX_BYTES} bytes");
        return Err(malformed(problem));
    }
    let text = std::fs::read(path).map_err(file_error)?;
    serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))
}

/// Returns the first setting that is not what the model computes, as a problem of the file.
fn refuse(model: &str, asked: &[(&str, bool, &str)]) -> Result<(), String> {
    match asked.iter().find(|(_, differs, _)| *differs) {
        None => Ok(()),
        Some((setting, _, expected)) => Err(format!(
            "`{setting}` is not {expected}, which is all that this {model} computes; load a checkpoint that has it, or \
             write the model as a Burn module of your own"
        )),
    }
}

/// Writes `config.json` into a folder.
fn write(folder: &Path, json: &Value) -> Result<(), ModelError> {
    let path = folder.join("config.json");
    std::fs::write(&path, format!("{json:#}\n")).map_err(|source| ModelError::File { path, source })
}

/// What `config.json` says of any model.
#[derive(Deserialize)]
#[serde(expecting = "an object with a model_type")]
struct AnyJson {
    model_type: String,
}

impl ModelConfig {
    /// Reads the sizes of a model from the `config.json` of a folder in Hugging Face's form, of whichever kind the file names.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or is of a model that this crate has not, and as [`LlamaConfig::from_hugging_face`] and
    /// [`Gpt2Config::from_hugging_face`].
    pub fn from_hugging_face(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        let folder = folder.as_ref();
        let kind = |json: &AnyJson| match json.model_type.as_str() {
            known @ (MODEL_TYPE | GPT2_MODEL_TYPE) => Ok(known == GPT2_MODEL_TYPE),
            other => Err(format!(
                "it is of a {other:?}, and no \"{MODEL_TYPE}\" or \"{GPT2_MODEL_TYPE}\"; write the model as a Burn module of \
                 your own"
            )),
        };
        Ok(match read_sizes(folder, kind)? {
            false => Self::Llama(LlamaConfig::from_hugging_face(folder)?),
            true => Self::Gpt2(Gpt2Config::from_hugging_face(folder)?),
        })
    }

    /// Returns what `config.json` says of such a model in a folder in Hugging Face's form, with weights of 32 bits; `None` of
    /// one that transformers has not.
    #[must_use]
    pub fn to_hugging_face(&self) -> Option<Value> {
        match self {
            Self::Gpt(_) => None,
            Self::Llama(config) => Some(config.to_hugging_face()),
            Self::Gpt2(config) => Some(config.to_hugging_face()),
        }
    }
}

impl LlamaConfig {
    /// Reads the sizes of a Llama from the `config.json` of a folder in Hugging Face's form. What the file asks for
    /// and [`Llama`](crate::Llama) does not compute is refused, by the name of the setting.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is of another model, or asks for what this Llama has not: biases, another activation,
    /// rotary positions scaled in another way than by `linear` or `llama3`; and if such a model cannot exist.
    pub fn from_hugging_face(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        let config = read_sizes::<ConfigJson, _>(folder.as_ref(), ConfigJson::sizes)?;
        config.validate()?;
        Ok(config)
    }

    /// Returns what `config.json` says of such a model in a folder in Hugging Face's form, with weights of 32 bits.
    #[must_use]
    pub fn to_hugging_face(&self) -> Value {
        let scaling = match self.variant.rope_scaling {
            RopeScaling::None => Value::Null,
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }),
        };
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": MODEL_TYPE,
            "hidden_act": HIDDEN_ACT,
            "hidden_size": self.dim,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim(),
            "vocab_size": self.vocab,
            "max_position_embeddings": self.seq,
            "rms_norm_eps": self.variant.norm_epsilon,
            "rope_theta": self.rope_base as f64,
            "rope_scaling": scaling,
            "tie_word_embeddings": self.variant.has_tied_head,
            "attention_bias": false,
            "mlp_bias": false,
            "torch_dtype": "float32",
        })
    }
}

impl Llama {
    /// Writes `config.json` and `model.safetensors` into a folder, from which transformers' `from_pretrained` and
    /// [`WeightsFile`](crate::WeightsFile) read the model.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, or if the model's parameters are not those of its table.
    pub fn save_hugging_face(&self, folder: impl AsRef<Path>) -> Result<(), ModelError> {
        let folder = folder.as_ref();
        write(folder, &self.config().to_hugging_face())?;
        self.save(folder.join("model.safetensors"))
    }
}

impl ConfigJson {
    fn sizes(&self) -> Result<LlamaConfig, String> {
        let (kind, rope) = (&self.kind, &self.rope);
        let newer = rope.rope_parameters.as_ref();
        let theta = newer.and_then(|rope| rope.rope_theta);
        let theta = theta.or(rope.rope_theta).unwrap_or(10_000.0);
        let scaling = newer.or(rope.rope_scaling.as_ref());
        let factors = [
            rope.partial_rotary_factor,
            scaling.and_then(|rope| rope.partial_rotary_factor),
        ];
        let is_partial = factors.into_iter().flatten().any(|factor| factor != 1.0);
        let scaling = scaling.map_or(Ok(RopeScaling::None), RopeParameters::scaling);
        let (rope_scaling, fault) = match scaling {
            Ok(scaling) => (scaling, ("", "")),
            Err(fault) => (RopeScaling::None, fault),
        };
        let heads = self.num_attention_heads;
        let head_dim = self.hidden_size.checked_div(heads).unwrap_or(0);
        let is_whole = theta.fract() == 0.0 && (1.0..1e15).contains(&theta);
        let asked = [
            ("model_type", kind.model_type != MODEL_TYPE, "\"llama\""),
            ("hidden_act", kind.hidden_act != HIDDEN_ACT, "\"silu\""),
            ("attention_bias", kind.attention_bias, "false"),
            ("mlp_bias", kind.mlp_bias, "false"),
            (fault.0, !fault.0.is_empty(), fault.1),
            ("rope_theta", !is_whole, "a whole number of 1 or more"),
            ("partial_rotary_factor", is_partial, "1"),
            (
                "quantization_config",
                kind.quantization_config.is_some(),
                "null",
            ),
            (
                "head_dim",
                self.head_dim.is_some_and(|given| given != head_dim),
                "hidden_size / num_attention_heads",
            ),
        ];
        refuse("Llama", &asked)?;
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
            variant: LlamaVariant {
                has_tied_head: kind.tie_word_embeddings,
                norm_epsilon: kind.rms_norm_eps,
                rope_scaling,
            },
        })
    }
}

/// What `config.json` says of a GPT-2, as far as the mathematics depends on it.
#[derive(Deserialize)]
struct Gpt2Json {
    n_embd: usize,
    n_head: usize,
    n_inner: Option<usize>,
    n_layer: usize,
    n_positions: usize,
    vocab_size: usize,
    #[serde(flatten)]
    kind: Gpt2Kind,
}

/// The choices of the mathematics that are no sizes.
#[derive(Deserialize)]
struct Gpt2Kind {
    model_type: String,
    #[serde(default = "default_activation")]
    activation_function: String,
    #[serde(default = "default_layer_norm_epsilon")]
    layer_norm_epsilon: f64,
    #[serde(default = "yes")]
    tie_word_embeddings: bool,
    #[serde(default = "yes")]
    scale_attn_weights: bool,
    #[serde(default)]
    scale_attn_by_inverse_layer_idx: bool,
    #[serde(default)]
    add_cross_attention: bool,
}

/// Hugging Face's name of GPT-2's activation, its value where a file says nothing.
const GPT2_ACTIVATION: &str = "gelu_new";

fn default_activation() -> String {
    GPT2_ACTIVATION.to_owned()
}

/// Transformers' value where a file says nothing.
fn default_layer_norm_epsilon() -> f64 {
    EPSILON
}

/// Transformers' value where a file says nothing.
fn yes() -> bool {
    true
}

impl Gpt2Config {
    /// Reads the sizes of a GPT-2 from the `config.json` of a folder in Hugging Face's form. What the file asks for and
    /// [`Gpt2`] does not compute is refused, by the name of the setting, but for dropout, which is left out.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is of another model, or asks for what this GPT-2 has not; and if such a model cannot exist.
    pub fn from_hugging_face(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        let config = read_sizes(folder.as_ref(), Gpt2Json::sizes)?;
        config.validate()?;
        Ok(config)
    }

    /// Returns what `config.json` says of such a model in a folder in Hugging Face's form, with weights of 32 bits.
    #[must_use]
    pub fn to_hugging_face(&self) -> Value {
        json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": GPT2_MODEL_TYPE,
            "activation_function": GPT2_ACTIVATION,
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

impl Gpt2 {
    /// Writes `config.json` and `model.safetensors` into a folder, from which transformers' `from_pretrained` and
    /// [`WeightsFile`](crate::WeightsFile) read the model.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, or if the model's parameters are not those of its table.
    pub fn save_hugging_face(&self, folder: impl AsRef<Path>) -> Result<(), ModelError> {
        let folder = folder.as_ref();
        write(folder, &self.config().to_hugging_face())?;
        self.save(folder.join("model.safetensors"))
    }
}

impl Gpt2Json {
    fn sizes(&self) -> Result<Gpt2Config, String> {
        let kind = &self.kind;
        let asked = [
            ("model_type", kind.model_type != GPT2_MODEL_TYPE, "\"gpt2\""),
            (
                "activation_function",
                kind.activation_function != GPT2_ACTIVATION,
                "\"gelu_new\"",
            ),
            (
                "layer_norm_epsilon",
                kind.layer_norm_epsilon != EPSILON,
                "1e-5",
            ),
            ("tie_word_embeddings", !kind.tie_word_embeddings, "true"),
            ("scale_attn_weights", !kind.scale_attn_weights, "true"),
            (
                "scale_attn_by_inverse_layer_idx",
                kind.scale_attn_by_inverse_layer_idx,
                "false",
            ),
            ("add_cross_attention", kind.add_cross_attention, "false"),
        ];
        refuse("GPT-2", &asked)?;
        Ok(Gpt2Config {
            layers: self.n_layer,
            dim: self.n_embd,
            heads: self.n_head,
            hidden: self.n_inner.unwrap_or(4 * self.n_embd),
            vocab: self.vocab_size,
            seq: self.n_positions,
        })
    }
}
