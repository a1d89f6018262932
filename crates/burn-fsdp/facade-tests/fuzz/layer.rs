//! Layers of Burn, and some custom ones.

use burn::module::{Module, Param};
use burn::nn::attention::{
    CrossAttention, CrossAttentionConfig, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig,
    generate_autoregressive_mask,
};
use burn::nn::conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1d, ConvTranspose1dConfig,
};
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::transformer::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerDecoder,
    TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, BiLstm, BiLstmConfig, Dropout, DropoutConfig, Embedding,
    EmbeddingConfig, GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PRelu, PReluConfig, PaddingConfig1d,
    PaddingConfig2d, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig,
};
use burn::tensor::activation::gelu;
use burn::tensor::{DType, Device, Int, Tensor};

use super::by_hand;

/// The length of the vectors between layers.
pub(crate) const DIM: usize = 6;
/// The number of tokens.
pub(crate) const VOCAB: usize = 11;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Linear,
    Unbiased,
    Gated,
    Feed,
    LayerNorm,
    RmsNorm,
    GroupNorm,
    InstanceNorm,
    BatchNorm,
    Dropout,
    Conv,
    Transposed,
    Image,
    Lstm,
    BiLstm,
    Gru,
    Attention,
    Causal,
    Grouped,
    Encoder,
    NormFirst,
    Decoder,
    PRelu,
    Scaled,
    Mixed,
    Looked,
}

pub(crate) const KINDS: [Kind; 26] = [
    Kind::Linear,
    Kind::Unbiased,
    Kind::Gated,
    Kind::Feed,
    Kind::LayerNorm,
    Kind::RmsNorm,
    Kind::GroupNorm,
    Kind::InstanceNorm,
    Kind::BatchNorm,
    Kind::Dropout,
    Kind::Conv,
    Kind::Transposed,
    Kind::Image,
    Kind::Lstm,
    Kind::BiLstm,
    Kind::Gru,
    Kind::Attention,
    Kind::Causal,
    Kind::Grouped,
    Kind::Encoder,
    Kind::NormFirst,
    Kind::Decoder,
    Kind::PRelu,
    Kind::Scaled,
    Kind::Mixed,
    Kind::Looked,
];

#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "layers of few elements")]
pub(crate) enum Layer {
    Linear(Linear),
    Gated(SwiGlu),
    Feed(PositionWiseFeedForward),
    LayerNorm(LayerNorm),
    RmsNorm(RmsNorm),
    GroupNorm(GroupNorm),
    InstanceNorm(InstanceNorm),
    BatchNorm(BatchNorm),
    /// Without effect in training, because its random numbers could not be repeated.
    Dropout(Dropout),
    Conv(Conv1d),
    Transposed(ConvTranspose1d),
    Image(Conv2d),
    Lstm(Lstm),
    BiLstm(BiLstm),
    Gru(Gru),
    Attention(MultiHeadAttention),
    Causal(MultiHeadAttention),
    Grouped(CrossAttention),
    Encoder(TransformerEncoder),
    Decoder(TransformerDecoder),
    PRelu(PRelu),
    Scaled(Scaled),
    Mixed(Mixed),
    Looked(Embedding),
}

/// A custom vector.
#[derive(Module, Debug)]
pub(crate) struct Scaled {
    scale: Param<Tensor<1>>,
}

/// A parameter of three dims; a slice of it is used.
#[derive(Module, Debug)]
pub(crate) struct Mixed {
    mixes: Param<Tensor<3>>,
}

impl Kind {
    /// Returns true for layers that normalize over few values. If two such layers follow each other, the gradients of
    /// one are only rounding errors, and no two orders of summation agree on them.
    pub(crate) fn norms_few(self) -> bool {
        matches!(self, Self::InstanceNorm | Self::BatchNorm)
    }

    /// Returns true if it keeps or collects states of the device's type. It then does not compute in halves in the
    /// eager engine.
    pub(crate) fn computes_in_full(self) -> bool {
        matches!(
            self,
            Self::BatchNorm | Self::Lstm | Self::BiLstm | Self::Gru
        )
    }

    /// Returns true if it begins with states of the device's type.
    pub(crate) fn is_recurrent(self) -> bool {
        matches!(self, Self::Lstm | Self::BiLstm | Self::Gru)
    }

    pub(crate) fn init(self, device: &Device) -> Layer {
        let linear = |bias| LinearConfig::new(DIM, DIM).with_bias(bias).init(device);
        let attention = || {
            MultiHeadAttentionConfig::new(DIM, 2)
                .with_dropout(0.0)
                .init(device)
        };
        let encoder = |norm_first| {
            TransformerEncoderConfig::new(DIM, 5, 3, 1)
                .with_dropout(0.0)
                .with_norm_first(norm_first)
                .init(device)
        };
        match self {
            Self::Linear => Layer::Linear(linear(true)),
            Self::Unbiased => Layer::Linear(linear(false)),
            Self::Gated => Layer::Gated(SwiGluConfig::new(DIM, DIM).with_bias(true).init(device)),
            Self::Feed => Layer::Feed(
                PositionWiseFeedForwardConfig::new(DIM, 7)
                    .with_dropout(0.0)
                    .init(device),
            ),
            Self::LayerNorm => Layer::LayerNorm(LayerNormConfig::new(DIM).init(device)),
            Self::RmsNorm => Layer::RmsNorm(RmsNormConfig::new(DIM).init(device)),
            Self::GroupNorm => Layer::GroupNorm(GroupNormConfig::new(2, DIM).init(device)),
            Self::InstanceNorm => Layer::InstanceNorm(InstanceNormConfig::new(DIM).init(device)),
            Self::BatchNorm => Layer::BatchNorm(BatchNormConfig::new(DIM).init(device)),
            Self::Dropout => Layer::Dropout(DropoutConfig::new(0.0).init()),
            Self::Conv => Layer::Conv(
                Conv1dConfig::new(DIM, DIM, 3)
                    .with_padding(PaddingConfig1d::Same)
                    .with_groups(2)
                    .init(device),
            ),
            Self::Transposed => Layer::Transposed(
                ConvTranspose1dConfig::new([DIM, DIM], 3)
                    .with_padding(1)
                    .init(device),
            ),
            Self::Image => Layer::Image(
                Conv2dConfig::new([1, 3], [3, 3])
                    .with_padding(PaddingConfig2d::Same)
                    .init(device),
            ),
            Self::Lstm => Layer::Lstm(LstmConfig::new(DIM, DIM, true).init(device)),
            Self::BiLstm => Layer::BiLstm(BiLstmConfig::new(DIM, DIM / 2, true).init(device)),
            Self::Gru => Layer::Gru(GruConfig::new(DIM, DIM, true).init(device)),
            Self::Attention => Layer::Attention(attention()),
            Self::Causal => Layer::Causal(attention()),
            Self::Grouped => Layer::Grouped(
                CrossAttentionConfig::new(DIM, DIM, 2, 1, DIM / 2)
                    .with_dropout(0.0)
                    .init(device),
            ),
            Self::Encoder => Layer::Encoder(encoder(false)),
            Self::NormFirst => Layer::Encoder(encoder(true)),
            Self::Decoder => Layer::Decoder(
                TransformerDecoderConfig::new(DIM, 5, 2, 1)
                    .with_dropout(0.0)
                    .init(device),
            ),
            Self::PRelu => Layer::PRelu(PReluConfig::new().with_num_parameters(1).init(device)),
            Self::Scaled => Layer::Scaled(Scaled {
                scale: Param::from_tensor(Tensor::ones([DIM], device)),
            }),
            Self::Mixed => Layer::Mixed(Mixed {
                mixes: Param::from_tensor(Tensor::ones([3, DIM, DIM], device)),
            }),
            Self::Looked => Layer::Looked(EmbeddingConfig::new(VOCAB, DIM).init(device)),
        }
    }
}

impl Layer {
    /// As [`forward`](Self::forward), with the operations that Burn does not support in halves written out.
    pub(crate) fn forward_by_hand(&self, x: Tensor<3>, tokens: &Tensor<2, Int>) -> Tensor<3> {
        match self {
            _ if x.dtype() == DType::F32 => self.forward(x, tokens),
            Self::BatchNorm(layer) => by_hand::batch_norm(layer, x.swap_dims(1, 2)).swap_dims(1, 2),
            Self::Lstm(layer) => by_hand::lstm(layer, x),
            Self::BiLstm(layer) => by_hand::bi_lstm(layer, x),
            Self::Gru(layer) => by_hand::gru(layer, x),
            _ => self.forward(x, tokens),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<3>, tokens: &Tensor<2, Int>) -> Tensor<3> {
        let [rows, length, dim] = x.dims();
        match self {
            Self::Linear(layer) => gelu(layer.forward(x)),
            Self::Gated(layer) => layer.forward(x),
            Self::Feed(layer) => layer.forward(x),
            Self::LayerNorm(layer) => layer.forward(x),
            Self::RmsNorm(layer) => layer.forward(x),
            Self::GroupNorm(layer) => layer.forward(x.swap_dims(1, 2)).swap_dims(1, 2),
            Self::InstanceNorm(layer) => layer.forward(x.swap_dims(1, 2)).swap_dims(1, 2),
            Self::BatchNorm(layer) => layer.forward(x.swap_dims(1, 2)).swap_dims(1, 2),
            Self::Dropout(layer) => layer.forward(x),
            Self::Conv(layer) => layer.forward(x.swap_dims(1, 2)).swap_dims(1, 2),
            Self::Transposed(layer) => layer.forward(x.swap_dims(1, 2)).swap_dims(1, 2),
            Self::Image(layer) => layer
                .forward(x.reshape([rows, 1, length, dim]))
                .mean_dim(1)
                .reshape([rows, length, dim]),
            Self::Lstm(layer) => layer.forward(x, None).0,
            Self::BiLstm(layer) => layer.forward(x, None).0,
            Self::Gru(layer) => layer.forward(x, None),
            Self::Attention(layer) => layer.forward(MhaInput::self_attn(x)).context,
            Self::Causal(layer) => {
                let mask = generate_autoregressive_mask(rows, length, &x.device());
                layer
                    .forward(MhaInput::self_attn(x).mask_attn(mask))
                    .context
            }
            Self::Grouped(layer) => {
                let context = x.clone().flip([1]);
                layer.forward(x, context, None)
            }
            Self::Encoder(layer) => layer.forward(TransformerEncoderInput::new(x)),
            Self::Decoder(layer) => {
                let memory = x.clone().tanh();
                layer.forward(TransformerDecoderInput::new(x, memory))
            }
            Self::PRelu(layer) => layer.forward(x),
            Self::Scaled(layer) => x * layer.scale.val().reshape([1, 1, DIM]),
            Self::Mixed(layer) => {
                let mix = layer.mixes.val().slice([1..2, 0..DIM, 0..DIM]);
                x.matmul(mix.transpose())
            }
            Self::Looked(layer) => x + layer.forward(tokens.clone()),
        }
    }
}
