//! The choices that distinguish decoders of the same size.

use serde::{Deserialize, Serialize};

use crate::family::Family;
use crate::rope_scaling::RopeScaling;

/// The architecture options of a [`Llama`](crate::Llama), as opposed to its main sizes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LlamaVariant {
    /// The family, which determines the form of the blocks.
    pub family: Family,
    /// True if the head is tied to the embedding. Both are then one parameter.
    pub has_tied_head: bool,
    /// The number that norms add to the mean square or variance, which prevents a division by zero.
    pub norm_epsilon: f64,
    /// The scaling of rotary positions, for sequences longer than those that the model was first trained on.
    pub rope_scaling: RopeScaling,
    /// Number of elements of a head. `None` for `dim / heads`.
    pub head_dim: Option<usize>,
    /// Number of elements of a head that are rotated. `None` for all.
    pub rotated_dim: Option<usize>,
    /// Base of the rotary positions in layers with a sliding window, which have no scaling. `None` for the same
    /// positions in all layers.
    pub local_rope_base: Option<usize>,
    /// The biases that the family does not determine.
    pub biases: Biases,
    /// The activation of the MLP, or of its gate.
    pub activation: Activation,
    /// The options of attention.
    pub scores: AttentionScores,
    /// The soft cap `c`, which changes a logit `x` to `c tanh(x / c)`. `None` for no cap.
    pub logit_softcap: Option<f64>,
    /// True if attention and MLP both read the block's input, false if the MLP follows attention.
    pub is_parallel: bool,
}

impl LlamaVariant {
    /// The options of Llama 2 and 3: an untied head, an epsilon of 1e-5, and unscaled positions.
    pub const PLAIN: Self = Self {
        family: Family::Llama,
        has_tied_head: false,
        norm_epsilon: 1e-5,
        rope_scaling: RopeScaling::None,
        head_dim: None,
        rotated_dim: None,
        local_rope_base: None,
        biases: Biases {
            attention: false,
            mlp: false,
        },
        activation: Activation::Silu,
        scores: AttentionScores {
            query_scalar: None,
            softcap: None,
            window: SlidingWindow::None,
        },
        logit_softcap: None,
        is_parallel: false,
    };

    /// Returns true if queries, keys and values have biases.
    pub(crate) fn has_qkv_bias(&self) -> bool {
        self.biases.attention || self.family == Family::Qwen2
    }
}

impl Default for LlamaVariant {
    fn default() -> Self {
        Self::PLAIN
    }
}

/// The biases of a decoder's linear layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Biases {
    /// Queries, keys, values and output. A [Qwen2](Family::Qwen2) has the first three in any case.
    pub attention: bool,
    /// All layers of the MLP.
    pub mlp: bool,
}

/// The activation of an MLP, or of its gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x` times its sigmoid.
    #[default]
    Silu,
    /// `x` times the probability that a standard normal variable is smaller.
    Gelu,
    /// [`Gelu`](Self::Gelu), approximated with `tanh`.
    GeluTanh,
    /// [`Gelu`](Self::Gelu), approximated with the sigmoid of `1.702 x`.
    QuickGelu,
    /// The positive part.
    Relu,
    /// The square of the positive part.
    Relu2,
}

impl Activation {
    /// Hugging Face's names. Of several names for an activation, the first is written.
    pub(crate) const NAMES: [(&'static str, Self); 12] = [
        ("silu", Self::Silu),
        ("swish", Self::Silu),
        ("gelu", Self::Gelu),
        ("gelu_python", Self::Gelu),
        ("gelu_pytorch_tanh", Self::GeluTanh),
        ("gelu_new", Self::GeluTanh),
        ("gelu_fast", Self::GeluTanh),
        ("gelu_python_tanh", Self::GeluTanh),
        ("gelu_accurate", Self::GeluTanh),
        ("quick_gelu", Self::QuickGelu),
        ("relu", Self::Relu),
        ("relu2", Self::Relu2),
    ];
}

/// The options of attention: how scores are computed, and which keys a query sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AttentionScores {
    /// Scores are divided by the square root of this number. `None` for the number of elements of a head.
    pub query_scalar: Option<f64>,
    /// The soft cap `c`, which changes a score `x` to `c tanh(x / c)`. `None` for no cap.
    pub softcap: Option<f64>,
    /// The layers in which a query sees only the last tokens.
    pub window: SlidingWindow,
}

/// The layers in which a query sees only the last `size` tokens, including its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlidingWindow {
    /// No layer.
    #[default]
    None,
    /// All layers.
    All {
        /// Number of tokens.
        size: usize,
    },
    /// The layers from number `first`, counted from zero.
    From {
        /// Number of tokens.
        size: usize,
        /// The first such layer.
        first: usize,
    },
    /// All layers but every `period`th one.
    AllBut {
        /// Number of tokens.
        size: usize,
        /// The distance between layers that see all tokens.
        period: usize,
    },
}

impl SlidingWindow {
    /// Returns the number of tokens that a query of a layer sees, unless it sees all.
    pub(crate) fn of_layer(self, layer: usize) -> Option<usize> {
        match self {
            Self::None => None,
            Self::All { size } => Some(size),
            Self::From { size, first } => (layer >= first).then_some(size),
            Self::AllBut { size, period } => (!(layer + 1).is_multiple_of(period)).then_some(size),
        }
    }

    /// Returns the rule that sets windows of `size` tokens in exactly the layers for which `is_sliding` is true, or
    /// `None` if this type cannot express it.
    pub(crate) fn of_layers(size: usize, is_sliding: &[bool]) -> Option<Self> {
        let num_layers = is_sliding.len();
        if is_sliding.iter().all(|is_sliding| !is_sliding) {
            return Some(Self::None);
        }
        let from = (1..num_layers).map(|first| Self::From { size, first });
        let periods = (2..=num_layers).map(|period| Self::AllBut { size, period });
        let mut known = [Self::All { size }].into_iter().chain(periods).chain(from);
        known.find(|window| window.is_in(is_sliding))
    }

    /// Returns true if the layers with windows are those for which `is_sliding` is true.
    pub(crate) fn is_in(self, is_sliding: &[bool]) -> bool {
        let mut layers = is_sliding.iter().enumerate();
        layers.all(|(layer, expected)| self.of_layer(layer).is_some() == *expected)
    }

    /// Returns the number of tokens of a window, or `None` if no layer has one.
    pub(crate) fn size(self) -> Option<usize> {
        match self {
            Self::None => None,
            Self::All { size } | Self::From { size, .. } | Self::AllBut { size, .. } => Some(size),
        }
    }

    /// Returns true if all numbers are meaningful.
    pub(crate) fn is_valid(self) -> bool {
        match self {
            Self::AllBut { size, period } => size > 0 && period > 1,
            other => other.size() != Some(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SlidingWindow;

    #[test]
    fn layers_of_windows_have_a_rule() {
        let of = |layers: &[u8]| {
            let is_sliding: Vec<_> = layers.iter().map(|layer| *layer == 1).collect();
            SlidingWindow::of_layers(4, &is_sliding)
        };
        assert_eq!(of(&[0, 0]), Some(SlidingWindow::None));
        assert_eq!(of(&[1, 1, 1]), Some(SlidingWindow::All { size: 4 }));
        let every = SlidingWindow::AllBut { size: 4, period: 2 };
        assert_eq!(of(&[1, 0, 1, 0, 1]), Some(every));
        let from = SlidingWindow::From { size: 4, first: 2 };
        assert_eq!(of(&[0, 0, 1, 1]), Some(from));
        assert_eq!(of(&[0, 1, 0, 1]), None);
        assert_eq!(of(&[1, 1, 0, 0]), None);
    }
}
