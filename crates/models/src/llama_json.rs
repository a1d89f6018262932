//! Reading the `config.json` of a decoder in Hugging Face's format.

use std::path::Path;

use serde_json::Value;

use crate::family::Family;
use crate::llama_variant::{Activation, AttentionScores, Biases, SlidingWindow};
use crate::rope_json::{Rope, RopeContext};
use crate::settings::{Settings, read_config, refusal, refuse};
use crate::{LlamaConfig, LlamaVariant, ModelError, known_settings};

impl LlamaConfig {
    /// Reads the configuration of a decoder from the `config.json` of a folder in Hugging Face's format. The file
    /// specifies the [family](Family).
    ///
    /// Settings that [`Llama`](crate::Llama) does not support are errors, and so are unknown ones. Settings may have
    /// the names of transformers 4, those of transformers 5, or both. Absent settings have transformers' defaults.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, describes another model, or needs an unsupported computation; if two names of one
    /// setting contradict each other; or if the configuration is not valid.
    pub fn from_hugging_face(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        read_config(folder.as_ref(), sizes, Self::validate)
    }
}

/// Returns the family that `model_type` names, or else the class, as in older files. Returns `None` for other models.
pub(crate) fn family_of(settings: Settings<'_>) -> Result<Option<Family>, String> {
    let named = settings.word(&["model_type"], "")?;
    let mut all = Family::ALL.into_iter();
    if !named.is_empty() {
        return Ok(all.find(|family| family.model_type() == named));
    }
    let classes = settings.given("architectures").and_then(Value::as_array);
    let mut classes = classes.into_iter().flatten().filter_map(Value::as_str);
    Ok(classes.find_map(|class| {
        // The first Llama files spell the class differently.
        let class = class.replacen("LLaMA", "Llama", 1);
        Family::ALL
            .into_iter()
            .find(|family| class.starts_with(&format!("{}For", family.class())))
    }))
}

/// Lists the `model_type` of all families, for error messages.
pub(crate) fn model_types() -> String {
    Family::ALL
        .map(|family| format!("{:?}", family.model_type()))
        .join(", ")
}

/// Settings that are read for all families.
const COMMON: [&str; 20] = [
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

/// Returns the other settings that are read for a family.
fn more_settings(family: Family) -> &'static [&'static str] {
    match family {
        Family::Llama => &[],
        Family::Mistral => &["sliding_window", "layer_types"],
        Family::Qwen2 | Family::Qwen3 => &[
            "layer_types",
            "max_window_layers",
            "sliding_window",
            "use_sliding_window",
        ],
        Family::Phi3 => &["sliding_window"],
        Family::Gemma2 => &[
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "hidden_activation",
            "layer_types",
            "query_pre_attn_scalar",
            "sliding_window",
            "sliding_window_size",
        ],
        Family::Gemma3 => &[
            "_sliding_window_pattern",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "hidden_activation",
            "layer_types",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window",
            "sliding_window_pattern",
        ],
        Family::GptNeox => &[
            "layer_norm_eps",
            "rotary_emb_base",
            "rotary_pct",
            "use_parallel_residual",
        ],
    }
}

/// Transformers' defaults of a family's sizes.
struct Defaults {
    dim: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    /// `None` for the number of query heads.
    kv_heads: Option<usize>,
    /// `None` for the width divided by the number of heads.
    head_dim: Option<usize>,
    vocab: usize,
    seq: usize,
}

impl Defaults {
    fn of(family: Family) -> Self {
        let llama = Self {
            dim: 4096,
            hidden: 11_008,
            layers: 32,
            heads: 32,
            kv_heads: None,
            head_dim: None,
            vocab: 32_000,
            seq: 2048,
        };
        let qwen2 = Self {
            hidden: 22_016,
            kv_heads: Some(32),
            vocab: 151_936,
            seq: 32_768,
            ..llama
        };
        let gemma2 = Self {
            dim: 2304,
            hidden: 9216,
            layers: 26,
            heads: 8,
            kv_heads: Some(4),
            head_dim: Some(256),
            vocab: 256_000,
            seq: 8192,
        };
        match family {
            Family::Llama => llama,
            Family::Mistral => Self {
                hidden: 14_336,
                kv_heads: Some(8),
                seq: 131_072,
                ..llama
            },
            Family::Qwen2 => qwen2,
            Family::Qwen3 => Self {
                head_dim: Some(128),
                ..qwen2
            },
            Family::Phi3 => Self {
                dim: 3072,
                hidden: 8192,
                vocab: 32_064,
                seq: 4096,
                ..llama
            },
            Family::Gemma2 => gemma2,
            Family::Gemma3 => Self {
                vocab: 262_208,
                seq: 131_072,
                ..gemma2
            },
            Family::GptNeox => Self {
                dim: 6144,
                hidden: 24_576,
                layers: 44,
                heads: 64,
                vocab: 50_432,
                ..llama
            },
        }
    }
}

/// Returns the sizes from the settings.
fn sizes(settings: Settings<'_>) -> Result<LlamaConfig, String> {
    let family = match family_of(settings)? {
        Some(family) => family,
        None if settings.given("model_type").is_none() => Family::Llama,
        None => {
            let found = settings.shown("model_type");
            return Err(refusal("decoder", ("model_type", &found), &model_types()));
        }
    };
    let read: Vec<_> = COMMON
        .iter()
        .chain(more_settings(family))
        .copied()
        .collect();
    let defaults = Defaults::of(family);
    let seq = settings.size(&["max_position_embeddings"], defaults.seq)?;
    let (dim, heads) = (
        settings.size(&["hidden_size"], defaults.dim)?,
        settings.size(&["num_attention_heads"], defaults.heads)?,
    );
    let context = RopeContext {
        family,
        longest: seq,
    };
    let rope = Rope::of(settings, context)?;
    let biases = biases(settings, family)?;
    refuse_unsupported(settings, family)?;
    known_settings::check(family.name(), settings, &read)?;
    let equal = dim.checked_div(heads);
    let head_dim = settings.nullable_size("head_dim", defaults.head_dim)?;
    let head_dim = head_dim.filter(|head_dim| Some(*head_dim) != equal);
    // As in transformers: the product is rounded down.
    let rotated = head_dim.or(equal).unwrap_or(0) as f64 * rope.share;
    let kv_heads = settings.nullable_size("num_key_value_heads", defaults.kv_heads)?;
    let layers = settings.size(&["num_hidden_layers"], defaults.layers)?;
    let epsilon = match family {
        Family::GptNeox => settings.number("layer_norm_eps")?.unwrap_or(1e-5),
        Family::Phi3 => settings.number("rms_norm_eps")?.unwrap_or(1e-5),
        _ => settings.number("rms_norm_eps")?.unwrap_or(1e-6),
    };
    let is_gemma = family.has_post_norms();
    let scores = scores(settings, family, layers)?;
    // A setting that equals the default, the number of elements of a head, is omitted.
    let own_scalar = head_dim.or(equal).map(|head_dim| head_dim as f64);
    Ok(LlamaConfig {
        layers,
        dim,
        heads,
        kv_heads: kv_heads.unwrap_or(heads),
        hidden: settings.size(&["intermediate_size"], defaults.hidden)?,
        vocab: settings.size(&["vocab_size"], defaults.vocab)?,
        seq,
        rope_base: rope.theta,
        variant: LlamaVariant {
            family,
            has_tied_head: settings.flag("tie_word_embeddings", is_gemma)?,
            norm_epsilon: epsilon,
            rope_scaling: rope.scaling,
            head_dim,
            rotated_dim: (rope.share != 1.0).then_some(rotated as usize),
            local_rope_base: rope.local_theta,
            biases,
            activation: activation(settings, family)?,
            scores: AttentionScores {
                query_scalar: scores.query_scalar.filter(|own| Some(*own) != own_scalar),
                ..scores
            },
            logit_softcap: if is_gemma {
                cap(settings, family, "final_logit_softcapping", 30.0)?
            } else {
                None
            },
            is_parallel: match family {
                Family::GptNeox => settings.flag("use_parallel_residual", true)?,
                _ => false,
            },
        },
    })
}

/// Refuses settings that a family's class in transformers does not have, or that no model of this crate supports.
fn refuse_unsupported(settings: Settings<'_>, family: Family) -> Result<(), String> {
    let is_neox = family == Family::GptNeox;
    let heads = settings.given("num_key_value_heads");
    let caps_scores = settings.given("attn_logit_softcapping").is_some();
    let asked = [
        (
            "quantization_config",
            settings.given("quantization_config").is_some(),
            "null",
        ),
        (
            "head_dim",
            is_neox && settings.given("head_dim").is_some(),
            "hidden_size / num_attention_heads",
        ),
        (
            "num_key_value_heads",
            is_neox && heads.is_some() && heads != settings.given("num_attention_heads"),
            "num_attention_heads",
        ),
        // Transformers reads this setting of a Gemma 3, but does not use it.
        (
            "attn_logit_softcapping",
            family == Family::Gemma3 && caps_scores,
            "null",
        ),
    ];
    refuse(family.name(), settings, &asked)
}

fn biases(settings: Settings<'_>, family: Family) -> Result<Biases, String> {
    let attention = settings.flag("attention_bias", family == Family::GptNeox)?;
    let mlp = settings.flag("mlp_bias", family == Family::GptNeox)?;
    let has_attention = matches!(
        family,
        Family::Llama | Family::Qwen3 | Family::Gemma2 | Family::Gemma3 | Family::GptNeox
    );
    let has_mlp = family == Family::Llama;
    let asked = [
        ("attention_bias", attention && !has_attention, "false"),
        (
            "mlp_bias",
            mlp && !has_mlp && family != Family::GptNeox,
            "false",
        ),
        ("mlp_bias", !mlp && family == Family::GptNeox, "true"),
    ];
    refuse(family.name(), settings, &asked)?;
    Ok(Biases { attention, mlp })
}

fn activation(settings: Settings<'_>, family: Family) -> Result<Activation, String> {
    let (name, default) = match family {
        Family::Gemma2 | Family::Gemma3 => ("hidden_activation", "gelu_pytorch_tanh"),
        Family::GptNeox => ("hidden_act", "gelu"),
        _ => ("hidden_act", "silu"),
    };
    let named = |name, default| {
        let word = settings.word(&[name], default)?;
        let known = Activation::NAMES.iter().find(|(known, _)| *known == word);
        known.map(|(_, activation)| *activation).ok_or_else(|| {
            let known = Activation::NAMES.map(|(name, _)| format!("{name:?}"));
            refusal(
                family.name(),
                (name, &format!("{word:?}")),
                &known.join(", "),
            )
        })
    };
    let activation = named(name, default)?;
    // Files of Gemma have both settings, of which transformers uses the newer one.
    if name != "hidden_act"
        && settings.given("hidden_act").is_some()
        && named("hidden_act", default)? != activation
    {
        return Err(format!(
            "`{name}` is {}, but `hidden_act` is {}; transformers ignores the second one, so remove it if it is wrong",
            settings.shown(name),
            settings.shown("hidden_act")
        ));
    }
    Ok(activation)
}

fn cap(
    settings: Settings<'_>,
    family: Family,
    name: &'static str,
    default: f64,
) -> Result<Option<f64>, String> {
    match (settings.has(name), family) {
        (false, Family::Gemma2) => Ok(Some(default)),
        _ => settings.optional_number(name),
    }
}

fn scores(
    settings: Settings<'_>,
    family: Family,
    layers: usize,
) -> Result<AttentionScores, String> {
    let window = window(settings, family, layers)?;
    if !family.has_post_norms() {
        return Ok(AttentionScores {
            window,
            ..AttentionScores::default()
        });
    }
    let scalar = settings.number("query_pre_attn_scalar")?;
    Ok(AttentionScores {
        query_scalar: Some(scalar.unwrap_or(256.0)),
        softcap: match family {
            Family::Gemma2 => cap(settings, family, "attn_logit_softcapping", 50.0)?,
            _ => None,
        },
        window,
    })
}

/// Returns the sliding windows of the layers.
fn window(settings: Settings<'_>, family: Family, layers: usize) -> Result<SlidingWindow, String> {
    let default = match family {
        Family::Llama | Family::GptNeox => return Ok(SlidingWindow::None),
        Family::Phi3 => None,
        _ => Some(4096),
    };
    let mut size = settings.nullable_size("sliding_window", default)?;
    // Some files of Gemma 2 have both settings, of which transformers uses the first one.
    let other = settings.optional_size("sliding_window_size")?;
    let asked = [(
        "sliding_window_size",
        other.is_some() && other != size,
        "the value of `sliding_window`",
    )];
    refuse(family.name(), settings, &asked)?;
    let is_qwen = matches!(family, Family::Qwen2 | Family::Qwen3);
    if is_qwen && !settings.flag("use_sliding_window", false)? {
        size = None;
    }
    let usual = match (family, size) {
        (_, None) => SlidingWindow::None,
        (Family::Mistral | Family::Phi3, Some(size)) => SlidingWindow::All { size },
        (Family::Gemma2, Some(size)) => SlidingWindow::AllBut { size, period: 2 },
        (Family::Gemma3, Some(size)) => {
            let period = settings.size(&["sliding_window_pattern"], 6)?;
            match period {
                1 => SlidingWindow::None,
                period => SlidingWindow::AllBut { size, period },
            }
        }
        (_, Some(size)) => match settings.size(&["max_window_layers"], 28)? {
            0 => SlidingWindow::All { size },
            first if first >= layers => SlidingWindow::None,
            first => SlidingWindow::From { size, first },
        },
    };
    let Some(kinds) = settings.words("layer_types")? else {
        let is_lost = family.has_post_norms() && size.is_none();
        let asked = [("sliding_window", is_lost, "a number of tokens")];
        refuse(family.name(), settings, &asked)?;
        return Ok(usual);
    };
    let found = settings.shown("layer_types");
    let wrong = |expected: &str| refusal(family.name(), ("layer_types", &found), expected);
    let mut is_sliding = Vec::new();
    for kind in &kinds {
        is_sliding.push(match *kind {
            "sliding_attention" => true,
            "full_attention" => false,
            _ => return Err(wrong("\"full_attention\" and \"sliding_attention\"")),
        });
    }
    if is_sliding.len() != layers {
        return Err(wrong(&format!("one kind for each of its {layers} layers")));
    }
    if usual.is_in(&is_sliding) {
        return Ok(usual);
    }
    match size {
        // Transformers ignores the setting here.
        _ if family == Family::Mistral => Err(wrong("what `sliding_window` implies")),
        None => Err(wrong(
            "\"full_attention\" without a `sliding_window` in use",
        )),
        Some(size) => SlidingWindow::of_layers(size, &is_sliding).ok_or_else(|| {
            wrong("a kind for all layers, from one layer on, or at equal distances")
        }),
    }
}
