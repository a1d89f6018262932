//! Models of Burn's layers as their authors write them: nothing in them is cast.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::transformer::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerDecoder,
    TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, BiLstm, BiLstmConfig, GroupNorm, GroupNormConfig, InstanceNorm,
    InstanceNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig,
    PaddingConfig2d, RmsNorm, RmsNormConfig, Rnn, RnnConfig, SwiGlu, SwiGluConfig,
};
use burn::tensor::activation::{gelu, tanh};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::by_hand;

/// The length of the vectors between layers, and their number in a row.
const DIM: usize = 6;
const LENGTH: usize = 5;
/// Rows of the batch of one rank.
pub(crate) const ROWS: usize = 2;

/// A layer between two linear ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    LayerNorm,
    Unbiased,
    RmsNorm,
    GroupNorm,
    PlainGroupNorm,
    InstanceNorm,
    Image,
    Attention,
    Encoder,
    NormFirst,
    Decoder,
    Feed,
    Gated,
    /// These keep states, or make tensors, of the device's type.
    BatchNorm,
    Lstm,
    BiLstm,
    Gru,
    Rnn,
}

/// Models that train in 16 bits in both engines.
pub(crate) const STATELESS: [Kind; 13] = [
    Kind::LayerNorm,
    Kind::Unbiased,
    Kind::RmsNorm,
    Kind::GroupNorm,
    Kind::PlainGroupNorm,
    Kind::InstanceNorm,
    Kind::Image,
    Kind::Attention,
    Kind::Encoder,
    Kind::NormFirst,
    Kind::Decoder,
    Kind::Feed,
    Kind::Gated,
];

/// Models that train in 16 bits in compiled steps.
pub(crate) const STATEFUL: [Kind; 5] = [
    Kind::BatchNorm,
    Kind::Lstm,
    Kind::BiLstm,
    Kind::Gru,
    Kind::Rnn,
];

#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "layers of few elements")]
enum Layer {
    LayerNorm(LayerNorm),
    RmsNorm(RmsNorm),
    GroupNorm(GroupNorm),
    InstanceNorm(InstanceNorm),
    Image(Images),
    Attention(MultiHeadAttention),
    Encoder(TransformerEncoder),
    Decoder(TransformerDecoder),
    Feed(PositionWiseFeedForward),
    Gated(SwiGlu),
    BatchNorm(BatchNorm),
    Lstm(Lstm),
    BiLstm(BiLstm),
    Gru(Gru),
    Rnn(Rnn),
}

#[derive(Module, Debug)]
struct Images {
    conv: Conv2d,
    norm: GroupNorm,
}

#[derive(Module, Debug)]
pub(crate) struct Net {
    first: Linear,
    layer: Layer,
    last: Linear,
}

/// The implementation of the layers with states.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum By {
    /// Burn's own forward.
    Burn,
    /// The same arithmetic, written out in the intended types.
    Hand,
}

fn layer(kind: Kind, device: &Device) -> Layer {
    let encoder = |norm_first| {
        let config = TransformerEncoderConfig::new(DIM, 7, 3, 1);
        let config = config.with_dropout(0.0).with_norm_first(norm_first);
        Layer::Encoder(config.init(device))
    };
    match kind {
        Kind::LayerNorm => Layer::LayerNorm(LayerNormConfig::new(DIM).init(device)),
        Kind::Unbiased => Layer::LayerNorm(LayerNormConfig::new(DIM).with_bias(false).init(device)),
        Kind::RmsNorm => Layer::RmsNorm(RmsNormConfig::new(DIM).init(device)),
        Kind::GroupNorm => Layer::GroupNorm(GroupNormConfig::new(2, DIM).init(device)),
        Kind::PlainGroupNorm => {
            let config = GroupNormConfig::new(3, DIM).with_affine(false);
            Layer::GroupNorm(config.init(device))
        }
        Kind::InstanceNorm => Layer::InstanceNorm(InstanceNormConfig::new(DIM).init(device)),
        Kind::Image => Layer::Image(Images {
            conv: Conv2dConfig::new([1, 4], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            norm: GroupNormConfig::new(2, 4).init(device),
        }),
        Kind::Attention => {
            let config = MultiHeadAttentionConfig::new(DIM, 2).with_dropout(0.0);
            Layer::Attention(config.init(device))
        }
        Kind::Encoder => encoder(false),
        Kind::NormFirst => encoder(true),
        Kind::Decoder => {
            let config = TransformerDecoderConfig::new(DIM, 7, 2, 1).with_dropout(0.0);
            Layer::Decoder(config.init(device))
        }
        Kind::Feed => {
            let config = PositionWiseFeedForwardConfig::new(DIM, 7).with_dropout(0.0);
            Layer::Feed(config.init(device))
        }
        Kind::Gated => Layer::Gated(SwiGluConfig::new(DIM, DIM).with_bias(true).init(device)),
        Kind::BatchNorm => Layer::BatchNorm(BatchNormConfig::new(DIM).init(device)),
        Kind::Lstm => Layer::Lstm(LstmConfig::new(DIM, DIM, true).init(device)),
        Kind::BiLstm => Layer::BiLstm(BiLstmConfig::new(DIM, DIM / 2, true).init(device)),
        Kind::Gru => Layer::Gru(GruConfig::new(DIM, DIM, true).init(device)),
        Kind::Rnn => Layer::Rnn(RnnConfig::new(DIM, DIM, true).init(device)),
    }
}

impl Net {
    /// Builds a model, with the same values for every call.
    pub(crate) fn new(kind: Kind, device: &Device) -> Self {
        let linear = |to| LinearConfig::new(DIM, to).init(device);
        let net = Self {
            first: linear(DIM),
            layer: layer(kind, device),
            last: linear(3),
        };
        net.map(&mut Values::default())
    }

    pub(crate) fn forward(&self, x: Tensor<3>, by: By) -> Tensor<3> {
        let x = gelu(self.first.forward(x));
        let y = x.clone();
        let y = match &self.layer {
            Layer::LayerNorm(layer) => layer.forward(y),
            Layer::RmsNorm(layer) => layer.forward(y),
            Layer::GroupNorm(layer) => layer.forward(y.swap_dims(1, 2)).swap_dims(1, 2),
            Layer::InstanceNorm(layer) => layer.forward(y.swap_dims(1, 2)).swap_dims(1, 2),
            Layer::Image(Images { conv, norm }) => {
                let y = norm.forward(conv.forward(y.unsqueeze_dim::<4>(1)));
                y.mean_dim(1).squeeze_dim(1)
            }
            Layer::Attention(layer) => layer.forward(MhaInput::self_attn(y)).context,
            Layer::Encoder(layer) => layer.forward(TransformerEncoderInput::new(y)),
            Layer::Decoder(layer) => {
                let memory = y.clone().tanh();
                layer.forward(TransformerDecoderInput::new(y, memory))
            }
            Layer::Feed(layer) => layer.forward(y),
            Layer::Gated(layer) => layer.forward(y),
            Layer::BatchNorm(layer) => {
                let y = y.swap_dims(1, 2);
                let y = match by {
                    By::Burn => layer.forward(y),
                    By::Hand => by_hand::batch_norm(layer, y),
                };
                y.swap_dims(1, 2)
            }
            Layer::Lstm(layer) => match by {
                By::Burn => layer.forward(y, None).0,
                By::Hand => by_hand::lstm(layer, y),
            },
            Layer::BiLstm(layer) => match by {
                By::Burn => layer.forward(y, None).0,
                By::Hand => by_hand::bi_lstm(layer, y),
            },
            Layer::Gru(layer) => match by {
                By::Burn => layer.forward(y, None),
                By::Hand => by_hand::gru(layer, y),
            },
            Layer::Rnn(layer) => match by {
                By::Burn => layer.forward(y, None).0,
                By::Hand => rnn(layer, y),
            },
        };
        self.last.forward(x + y)
    }

    /// Returns the loss of a batch that is in the type of the parameters.
    pub(crate) fn loss(&self, x: Tensor<3>, by: By) -> Tensor<1> {
        self.forward(x, by).cast(DType::F32).square().mean()
    }

    /// Returns the type in which the model computes.
    pub(crate) fn dtype(&self) -> DType {
        self.first.weight.val().dtype()
    }
}

fn rnn(layer: &Rnn, x: Tensor<3>) -> Tensor<3> {
    let (steps, mut hidden) = by_hand::steps(x, layer.d_hidden);
    let outputs = steps.into_iter().map(|x| {
        hidden = tanh(layer.gate.gate_product(x, hidden.clone()));
        hidden.clone()
    });
    Tensor::stack(outputs.collect(), 1)
}

/// Returns one rank's part of the batch of a step.
pub(crate) fn batch(step: usize, rank: usize, device: &Device) -> Tensor<3> {
    let value = |i: usize| ((i * 37 + step * 11 + rank * 29) % 17) as f32 / 8.5 - 1.0;
    let values: Vec<_> = (0..ROWS * LENGTH * DIM).map(value).collect();
    Tensor::from_data(TensorData::new(values, [ROWS, LENGTH, DIM]), device)
}

/// Values by the number of the parameter. They share no generator with other tests.
#[derive(Default)]
struct Values {
    number: usize,
    field: String,
}

impl ModuleMapper for Values {
    fn enter_module(&mut self, name: &str, _container: &str) {
        name.clone_into(&mut self.field);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.field.starts_with("running_") {
            return param;
        }
        self.number += 1;
        let (number, base) = (self.number, f32::from(u8::from(self.field == "gamma")));
        param.init_mapper(move |old| {
            let value = |i: usize| ((i * 53 + number * 31) % 101) as f32 / 101.0 - 0.5;
            let values: Vec<_> = (0..old.shape().num_elements()).map(value).collect();
            Tensor::from_data(TensorData::new(values, old.shape()), &old.device()) + base
        })
    }
}
