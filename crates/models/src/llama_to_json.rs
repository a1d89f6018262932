//! Writing the `config.json` of a decoder in Hugging Face's format.

use serde_json::{Map, Value, json};

use crate::family::Family;
use crate::llama_variant::{Activation, SlidingWindow};
use crate::{LlamaConfig, rope_json};

impl LlamaConfig {
    /// Returns the `config.json` of this model for a folder in Hugging Face's format, with 32-bit weights.
    #[must_use]
    pub fn to_hugging_face(&self) -> Value {
        let variant = &self.variant;
        let family = variant.family;
        let names = Activation::NAMES.iter();
        let mut names = names.filter(|(_, activation)| *activation == variant.activation);
        let activation = names.next().map_or("", |(name, _)| name);
        let mut all = json!({
            "architectures": [format!("{}ForCausalLM", family.class())],
            "model_type": family.model_type(),
            "hidden_act": activation,
            "hidden_size": self.dim,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim(),
            "vocab_size": self.vocab,
            "max_position_embeddings": self.seq,
            "rms_norm_eps": variant.norm_epsilon,
            "rope_theta": self.rope_base as f64,
            "rope_scaling": rope_json::to_json(variant.rope_scaling),
            "tie_word_embeddings": variant.has_tied_head,
            "attention_bias": variant.biases.attention,
            "mlp_bias": variant.biases.mlp,
            "torch_dtype": "float32",
        });
        if let Some(map) = all.as_object_mut() {
            for name in without(family) {
                map.remove(*name);
            }
            if let Value::Object(more) = self.more_settings(activation) {
                map.extend(more);
            }
            map.extend(self.windows());
        }
        all
    }

    /// Returns the additional settings of the family.
    fn more_settings(&self, activation: &str) -> Value {
        let variant = &self.variant;
        let scalar = variant.scores.query_scalar;
        let scalar = whole(scalar.unwrap_or(self.head_dim() as f64));
        match variant.family {
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => json!({}),
            Family::Phi3 => json!({
                "partial_rotary_factor": self.rotated_share(),
                "original_max_position_embeddings":
                    rope_json::original_of(variant.rope_scaling).unwrap_or(self.seq),
                // The default token may not be in a small vocabulary.
                "pad_token_id": null,
            }),
            Family::Gemma2 => json!({
                "hidden_activation": activation,
                "query_pre_attn_scalar": scalar,
                "attn_logit_softcapping": variant.scores.softcap,
                "final_logit_softcapping": variant.logit_softcap,
            }),
            Family::Gemma3 => json!({
                "hidden_activation": activation,
                "query_pre_attn_scalar": scalar,
                "final_logit_softcapping": variant.logit_softcap,
                "rope_local_base_freq": variant.local_rope_base.unwrap_or(self.rope_base) as f64,
            }),
            Family::GptNeox => json!({
                "layer_norm_eps": variant.norm_epsilon,
                "rotary_emb_base": self.rope_base,
                "rotary_pct": self.rotated_share(),
                "use_parallel_residual": variant.is_parallel,
            }),
        }
    }

    /// Returns the settings of sliding windows.
    fn windows(&self) -> Map<String, Value> {
        let window = self.variant.scores.window;
        let size = window.size();
        let kinds = (0..self.layers).map(|layer| match window.of_layer(layer) {
            Some(_) => "sliding_attention",
            None => "full_attention",
        });
        let kinds: Vec<_> = kinds.collect();
        let settings = match self.variant.family {
            Family::Llama | Family::GptNeox => json!({}),
            Family::Mistral | Family::Phi3 => json!({"sliding_window": size}),
            Family::Qwen2 | Family::Qwen3 => json!({
                "use_sliding_window": size.is_some(),
                "sliding_window": size,
                "max_window_layers": match window {
                    SlidingWindow::All { .. } => 0,
                    SlidingWindow::From { first, .. } => first,
                    SlidingWindow::None | SlidingWindow::AllBut { .. } => self.layers,
                },
                "layer_types": kinds,
            }),
            Family::Gemma2 | Family::Gemma3 => json!({
                "sliding_window": size.unwrap_or(self.seq),
                "layer_types": kinds,
            }),
        };
        match settings {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }

    /// Returns the rotated share of each head, such that transformers computes the same number of rotated elements.
    fn rotated_share(&self) -> f64 {
        let (rotated, head_dim) = (self.rotated_dim(), self.head_dim() as f64);
        let share = rotated as f64 / head_dim;
        if (head_dim * share) as usize == rotated {
            share
        } else {
            share.next_up()
        }
    }
}

/// Returns the common settings that a family's class does not have.
fn without(family: Family) -> &'static [&'static str] {
    match family {
        Family::Llama => &[],
        Family::Mistral => &["attention_bias", "mlp_bias"],
        Family::Qwen2 => &["attention_bias", "mlp_bias"],
        Family::Qwen3 => &["mlp_bias"],
        Family::Phi3 => &["attention_bias", "mlp_bias"],
        Family::Gemma2 | Family::Gemma3 => &["hidden_act", "mlp_bias"],
        Family::GptNeox => &[
            "head_dim",
            "mlp_bias",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_theta",
        ],
    }
}

/// Returns a JSON number. Whole numbers have no decimal point, because transformers requires integers.
fn whole(number: f64) -> Value {
    if number.fract() == 0.0 && number.abs() < 1e15 {
        json!(number as u64)
    } else {
        json!(number)
    }
}
