//! The `config.json` of a Llama in Hugging Face's format: reading and writing.

use std::path::Path;

use serde_json::{Value, json};

use crate::settings::{Settings, contradiction, is_same, read_config, refusal, refuse};
use crate::{LlamaConfig, LlamaVariant, ModelError, RopeScaling};

/// Hugging Face's name of the model.
pub(crate) const MODEL_TYPE: &str = "llama";

/// Hugging Face's names of the activation. The first is the one that is written.
const ACTIVATIONS: [&str; 2] = ["silu", "swish"];

/// The names of the scaling setting, up to transformers 4 and from version 5.
const ROPE: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// The names of the kind of scaling. Transformers writes both if it read a file with the older one.
const ROPE_TYPE: [&str; 2] = ["rope_type", "type"];

impl LlamaConfig {
    /// Reads the configuration of a Llama from the `config.json` of a folder in Hugging Face's format.
    ///
    /// Settings that [`Llama`](crate::Llama) does not support are errors. Settings have the names of transformers 4 or
    /// 5, or both. Absent settings have transformers' defaults.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, describes another model, or needs an unsupported computation: biases, another
    /// activation, or a scaling of rotary positions other than `linear` and `llama3`. If two names of one setting
    /// contradict each other. If the configuration is not valid.
    pub fn from_hugging_face(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        read_config(folder.as_ref(), sizes, Self::validate)
    }

    /// Returns the `config.json` of this model for a folder in Hugging Face's format, with 32-bit weights.
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
            "hidden_act": ACTIVATIONS[0],
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

/// Returns the sizes from the settings. Absent numbers have the defaults of transformers' `LlamaConfig`.
fn sizes(settings: Settings<'_>) -> Result<LlamaConfig, String> {
    let (dim, heads) = (
        settings.size(&["hidden_size"], 4096)?,
        settings.size(&["num_attention_heads"], 32)?,
    );
    let seq = settings.size(&["max_position_embeddings"], 2048)?;
    let head_dim = settings.optional_size("head_dim")?;
    let activation = settings.word(&["hidden_act"], ACTIVATIONS[0])?;
    let rope = Rope::of(settings, seq)?;
    let is_whole = rope.theta.fract() == 0.0 && (1.0..1e15).contains(&rope.theta);
    let asked = [
        (
            "model_type",
            settings.word(&["model_type"], MODEL_TYPE)? != MODEL_TYPE,
            "\"llama\"",
        ),
        (
            "hidden_act",
            !ACTIVATIONS.contains(&activation),
            "\"silu\" or \"swish\"",
        ),
        (
            "attention_bias",
            settings.flag("attention_bias", false)?,
            "false",
        ),
        ("mlp_bias", settings.flag("mlp_bias", false)?, "false"),
        ("rope_theta", !is_whole, "a whole number of 1 or more"),
        (
            "quantization_config",
            settings.given("quantization_config").is_some(),
            "null",
        ),
        (
            "head_dim",
            head_dim.is_some_and(|given| Some(given) != dim.checked_div(heads)),
            "hidden_size / num_attention_heads",
        ),
    ];
    refuse("Llama", &asked)?;
    Ok(LlamaConfig {
        layers: settings.size(&["num_hidden_layers"], 32)?,
        dim,
        heads,
        kv_heads: settings
            .optional_size("num_key_value_heads")?
            .unwrap_or(heads),
        hidden: settings.size(&["intermediate_size"], 11_008)?,
        vocab: settings.size(&["vocab_size"], 32_000)?,
        seq,
        // Checked above to be a whole number within range.
        rope_base: rope.theta as usize,
        variant: LlamaVariant {
            has_tied_head: settings.flag("tie_word_embeddings", false)?,
            norm_epsilon: settings.number("rms_norm_eps")?.unwrap_or(1e-6),
            rope_scaling: rope.scaling,
        },
    })
}

/// The settings of the rotary positions.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rope {
    theta: f64,
    scaling: RopeScaling,
}

impl Rope {
    /// Reads the settings of a model with this maximum sequence length.
    fn of(settings: Settings<'_>, longest: usize) -> Result<Self, String> {
        let [older, newer] = ROPE;
        let read = |name| -> Result<Option<Self>, String> {
            let nested = settings.nested(name)?;
            nested
                .map(|nested| Self::of_nested(settings, nested, longest))
                .transpose()
        };
        match (read(older)?, read(newer)?) {
            (Some(one), Some(other)) if one != other => Err(format!(
                "`{older}` and `{newer}` differ, but both set the rotary positions, and versions of transformers \
                 disagree on which one applies; remove the wrong one"
            )),
            (Some(rope), _) | (None, Some(rope)) => Ok(rope),
            (None, None) => {
                check_factor(settings)?;
                Ok(Self {
                    theta: settings.number("rope_theta")?.unwrap_or(THETA),
                    scaling: RopeScaling::None,
                })
            }
        }
    }

    /// Reads the settings from a nested object. Some settings that it lacks are taken from the outer object.
    fn of_nested(
        settings: Settings<'_>,
        nested: Settings<'_>,
        longest: usize,
    ) -> Result<Self, String> {
        check_factor(settings)?;
        check_factor(nested)?;
        if nested.has_objects() {
            return Err(format!(
                "`{}` or `{}` has an object for each kind of layer, but a Llama has only one kind",
                ROPE[0], ROPE[1]
            ));
        }
        let factor = |name| {
            let number = nested.number(name)?;
            number.ok_or_else(|| format!("`{name}` of the rotary positions is missing"))
        };
        let kind = nested.word(&ROPE_TYPE, "default")?;
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear {
                factor: factor("factor")?,
            },
            "llama3" => RopeScaling::Llama3 {
                factor: factor("factor")?,
                low_freq_factor: factor("low_freq_factor")?,
                high_freq_factor: factor("high_freq_factor")?,
                original_max_position_embeddings: {
                    let name = "original_max_position_embeddings";
                    inner_or_outer(settings, nested, name)?.size(&[name], longest)?
                },
            },
            _ => {
                let known = "\"default\", \"linear\" or \"llama3\"";
                return Err(refusal("Llama", "rope_type", known));
            }
        };
        let name = "rope_theta";
        let theta = inner_or_outer(settings, nested, name)?.number(name)?;
        Ok(Self {
            theta: theta.unwrap_or(THETA),
            scaling,
        })
    }
}

/// Transformers' default base of the rotary positions.
const THETA: f64 = 10_000.0;

/// Returns the settings that have a name: the nested ones if they have it, or otherwise the outer ones.
fn inner_or_outer<'a>(
    settings: Settings<'a>,
    nested: Settings<'a>,
    name: &'a str,
) -> Result<Settings<'a>, String> {
    match (nested.given(name), settings.given(name)) {
        (Some(inner), Some(outer)) if !is_same(inner, outer) => {
            let inner_name = format!("{name} of the rotary positions");
            Err(contradiction((name, outer), (&inner_name, inner)))
        }
        (Some(_), _) => Ok(nested),
        (None, _) => Ok(settings),
    }
}

/// Checks that all elements of a head are rotated.
fn check_factor(settings: Settings<'_>) -> Result<(), String> {
    let name = "partial_rotary_factor";
    let is_partial = settings.given(name).is_some() && settings.number(name)? != Some(1.0);
    refuse("Llama", &[(name, is_partial, "1")])
}
