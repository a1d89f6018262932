//! The published families of decoders, and the parts that all models of a family have in common.

use serde::{Deserialize, Serialize};

/// The family of a [`Llama`](crate::Llama). It determines the names in files, and the parts of a block that no
/// setting of `config.json` changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Family {
    /// Llama 1 to 3, and the models of the same form, such as SmolLM 1 and 2.
    #[default]
    Llama,
    /// Mistral: a Llama with sliding windows.
    Mistral,
    /// Qwen 2 and 2.5: a Llama with biases for queries, keys and values.
    Qwen2,
    /// Qwen 3: a Llama with norms of the queries and keys.
    Qwen3,
    /// Phi-3 and Phi-4: a Llama with fused matrices.
    Phi3,
    /// Gemma 2: norms before and after attention and MLP, and soft caps.
    Gemma2,
    /// The text model of Gemma 3: a Gemma 2 with norms of the queries and keys, and without soft caps.
    Gemma3,
    /// GPT-NeoX and Pythia: layer norms, biases, and an MLP without a gate.
    GptNeox,
}

/// The order of queries, keys and values in one fused matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FusedOrder {
    /// All queries, then all keys, then all values.
    Parts,
    /// For each head, its query, key and value.
    Heads,
}

/// The form of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormForm {
    /// Divides by the root mean square, and multiplies by the scale.
    RootMeanSquare,
    /// Divides by the root mean square, and multiplies by one plus the scale.
    OnePlusScale,
    /// A layer norm, with a scale and an offset.
    Layer,
}

impl Family {
    /// All families.
    pub(crate) const ALL: [Self; 8] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Phi3,
        Self::Gemma2,
        Self::Gemma3,
        Self::GptNeox,
    ];

    /// Returns the family's common name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "Llama",
            Self::Mistral => "Mistral",
            Self::Qwen2 => "Qwen2",
            Self::Qwen3 => "Qwen3",
            Self::Phi3 => "Phi-3",
            Self::Gemma2 => "Gemma 2",
            Self::Gemma3 => "Gemma 3",
            Self::GptNeox => "GPT-NeoX",
        }
    }

    /// Returns Hugging Face's name of the family: `model_type` in `config.json`.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Phi3 => "phi3",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3_text",
            Self::GptNeox => "gpt_neox",
        }
    }

    /// Returns the name of the family's class in transformers, without its ending `ForCausalLM`.
    pub(crate) fn class(self) -> &'static str {
        match self {
            Self::Llama => "Llama",
            Self::Mistral => "Mistral",
            Self::Qwen2 => "Qwen2",
            Self::Qwen3 => "Qwen3",
            Self::Phi3 => "Phi3",
            Self::Gemma2 => "Gemma2",
            Self::Gemma3 => "Gemma3",
            Self::GptNeox => "GPTNeoX",
        }
    }

    /// Returns the form of the family's norms.
    pub(crate) fn norm(self) -> NormForm {
        match self {
            Self::Gemma2 | Self::Gemma3 => NormForm::OnePlusScale,
            Self::GptNeox => NormForm::Layer,
            _ => NormForm::RootMeanSquare,
        }
    }

    /// Returns the order in the fused matrix of queries, keys and values, if the family has one.
    pub(crate) fn fused(self) -> Option<FusedOrder> {
        match self {
            Self::Phi3 => Some(FusedOrder::Parts),
            Self::GptNeox => Some(FusedOrder::Heads),
            _ => None,
        }
    }

    /// Returns true if the MLP has a gate.
    pub(crate) fn is_gated(self) -> bool {
        self != Self::GptNeox
    }

    /// Returns true if the gate and the matrix that it multiplies are one parameter.
    pub(crate) fn has_fused_gate(self) -> bool {
        self == Self::Phi3
    }

    /// Returns true if queries and keys are normalized head by head.
    pub(crate) fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Gemma3)
    }

    /// Returns true if the results of attention and MLP are normalized.
    pub(crate) fn has_post_norms(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Returns true if embeddings are multiplied by the square root of the width.
    pub(crate) fn scales_embeddings(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Returns true if part of a head may be left without rotation.
    pub(crate) fn may_rotate_partly(self) -> bool {
        matches!(self, Self::Phi3 | Self::GptNeox)
    }
}
