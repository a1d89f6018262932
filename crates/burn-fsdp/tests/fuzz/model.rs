//! Models of random layers of Burn, in random order, shared, skipped, frozen and tied.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::attention::{
    CrossAttention, CrossAttentionConfig, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig,
    generate_autoregressive_mask,
};
use burn::nn::conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1d, ConvTranspose1dConfig,
};
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerDecoder,
    TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BiLstm, BiLstmConfig, Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, InstanceNorm,
    InstanceNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PRelu,
    PReluConfig, PaddingConfig1d, PaddingConfig2d, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig,
};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp::recompute;
use proptest::prelude::*;
use proptest::sample::select;

use super::case::Ranks;

/// The length of the vectors between layers.
const DIM: usize = 6;
/// The number of tokens.
const VOCAB: usize = 11;

/// Tokens and what follows each, of shape `[batch, sequence]`.
pub(crate) type Batch = (Tensor<2, Int>, Tensor<2, Int>);

/// The description of a model.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) layers: Vec<Kind>,
    /// By layer.
    frozen: Vec<bool>,
    /// Layers that were frozen or trained after the model was made.
    switched: Vec<usize>,
    /// The way through the layers: some are taken twice, others never.
    route: Vec<Hop>,
    head: Head,
    loss: Loss,
    /// The batch of one rank.
    rows: usize,
    length: usize,
    /// Chooses parameters and tokens.
    seed: u64,
}

#[derive(Debug, Clone, Copy)]
struct Hop {
    layer: usize,
    is_residual: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Head {
    Linear,
    /// The table of the embedding.
    Tied,
    /// A frozen embedding in front of a trained head.
    BehindFrozen,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Loss {
    Squares,
    CrossEntropy,
    Smoothed,
    /// Some targets do not count.
    Padded,
}

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

const KINDS: [Kind; 24] = [
    Kind::Linear,
    Kind::Unbiased,
    Kind::Gated,
    Kind::Feed,
    Kind::LayerNorm,
    Kind::RmsNorm,
    Kind::GroupNorm,
    Kind::InstanceNorm,
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

pub(crate) fn plans() -> impl Strategy<Value = Plan> {
    let layers = prop::collection::vec((select(&KINDS[..]), prop::bool::weighted(0.2)), 1..5);
    let route = prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 1..6);
    let heads = select(&[Head::Linear, Head::Tied, Head::BehindFrozen][..]);
    let losses = [
        Loss::Squares,
        Loss::CrossEntropy,
        Loss::Smoothed,
        Loss::Padded,
    ];
    let batch = (1..4_usize, 2..5_usize);
    (
        layers,
        route,
        heads,
        select(losses.to_vec()),
        batch,
        0..1000_u64,
    )
        .prop_map(|(layers, route, head, loss, (rows, length), seed)| {
            let (layers, frozen): (Vec<_>, Vec<_>) = layers.into_iter().unzip();
            let hop = |(layer, is_residual): (prop::sample::Index, bool)| Hop {
                layer: layer.index(layers.len()),
                is_residual,
            };
            // An instance norm of normed values of a few tokens has gradients of rounding alone, on which no two
            // orders of summation agree.
            let mut has_norm = false;
            let mut is_first = |hop: &Hop| match layers[hop.layer] {
                Kind::InstanceNorm => !std::mem::replace(&mut has_norm, true),
                _ => true,
            };
            Plan {
                route: route
                    .into_iter()
                    .map(hop)
                    .filter(|hop| is_first(hop))
                    .collect(),
                layers,
                frozen,
                switched: Vec::new(),
                head,
                loss,
                rows,
                length,
                seed,
            }
        })
}

#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "layers of few elements")]
enum Layer {
    Linear(Linear),
    Gated(SwiGlu),
    Feed(PositionWiseFeedForward),
    LayerNorm(LayerNorm),
    RmsNorm(RmsNorm),
    GroupNorm(GroupNorm),
    InstanceNorm(InstanceNorm),
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

/// A vector of the user's own.
#[derive(Module, Debug)]
struct Scaled {
    scale: Param<Tensor<1>>,
}

/// A parameter of three dims, of which a slice is used.
#[derive(Module, Debug)]
struct Mixed {
    mixes: Param<Tensor<3>>,
}

impl Kind {
    fn init(self, device: &Device) -> Layer {
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
    fn forward(&self, x: Tensor<3>, tokens: &Tensor<2, Int>) -> Tensor<3> {
        let [rows, length, dim] = x.dims();
        match self {
            Self::Linear(layer) => gelu(layer.forward(x)),
            Self::Gated(layer) => layer.forward(x),
            Self::Feed(layer) => layer.forward(x),
            Self::LayerNorm(layer) => layer.forward(x),
            Self::RmsNorm(layer) => layer.forward(x),
            Self::GroupNorm(layer) => layer.forward(x.swap_dims(1, 2)).swap_dims(1, 2),
            Self::InstanceNorm(layer) => layer.forward(x.swap_dims(1, 2)).swap_dims(1, 2),
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

#[derive(Module, Debug)]
pub(crate) struct Net {
    embed: Embedding,
    layers: Vec<Layer>,
    head: Option<Linear>,
}

impl Plan {
    /// Builds the model: the same values wherever it is called.
    pub(crate) fn init(&self, device: &Device) -> Net {
        self.init_nudged(device, 0)
    }

    /// Builds the model with elements that differ in their last bits, each number of a nudge by other ones; as they are
    /// with 0.
    pub(crate) fn init_nudged(&self, device: &Device, nudge: u64) -> Net {
        let layers = self.layers.iter().zip(&self.frozen);
        let layers = layers.map(|(kind, is_frozen)| match is_frozen {
            true => kind.init(device).freeze(),
            false => kind.init(device),
        });
        let embed = EmbeddingConfig::new(VOCAB, DIM).init(device);
        let net = Net {
            embed: match self.head {
                Head::BehindFrozen => embed.freeze(),
                _ => embed,
            },
            layers: layers.collect(),
            head: match self.head {
                Head::Tied => None,
                _ => Some(LinearConfig::new(DIM, VOCAB).init(device)),
            },
        };
        self.switched(net.map(&mut Values {
            seed: self.seed,
            nudge,
        }))
    }

    /// Returns parameters to cut, each with the axis of a grid of ranks and a dim: some of those that can be cut evenly.
    pub(crate) fn cuts(&self, ranks: Ranks, salt: u64) -> Vec<(String, &'static str, usize)> {
        struct Shapes(Vec<String>, Vec<(String, Vec<usize>)>);
        impl ModuleVisitor for Shapes {
            fn enter_module(&mut self, name: &str, _container: &str) {
                self.0.push(name.to_owned());
            }
            fn exit_module(&mut self, _name: &str, _container: &str) {
                self.0.pop();
            }
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.1.push((self.0.join("."), param.dims().to_vec()));
            }
        }
        let Ranks::Grid(data, model, depth) = ranks else {
            return Vec::new();
        };
        let mut shapes = Shapes(Vec::new(), Vec::new());
        self.init(&Device::flex()).visit(&mut shapes);
        let choices = shapes.1.into_iter().enumerate();
        let cut = |(index, (path, shape)): (usize, (String, Vec<usize>))| {
            let drawn = mixed(salt * 1000 + index as u64);
            let (axis, parts) = match drawn % 5 {
                0..3 => ("model", model),
                3 => ("data", data),
                _ => return Vec::new(),
            };
            let dim = |drawn: u64| drawn as usize % shape.len();
            let (first, second) = (dim(drawn >> 8), dim(drawn >> 16));
            let is_even = shape[first].is_multiple_of(parts);
            let mut cuts = match is_even {
                true => vec![(path.clone(), axis, first)],
                false => Vec::new(),
            };
            // Two axes that cut one dim are refused by name.
            let is_free = (first != second || !is_even) && shape[second].is_multiple_of(depth);
            if depth > 1 && drawn >> 24 & 1 == 0 && is_free {
                cuts.push((path, "depth", second));
            }
            cuts
        };
        choices.flat_map(cut).collect()
    }

    /// Freezes a layer that is trained, and trains one that is frozen.
    pub(crate) fn switch(&mut self, layer: usize) {
        let layer = layer % self.layers.len();
        self.frozen[layer] = !self.frozen[layer];
        self.switched.push(layer);
    }

    /// Returns `net` with what was switched as it is now.
    pub(crate) fn switched(&self, mut net: Net) -> Net {
        for &index in &self.switched {
            let layer = net.layers.remove(index);
            let layer = match self.frozen[index] {
                true => layer.freeze(),
                false => layer.unfreeze(),
            };
            net.layers.insert(index, layer);
        }
        net
    }

    pub(crate) fn has_head(&self) -> bool {
        self.head != Head::Tied
    }

    /// Returns the mean loss of a batch.
    pub(crate) fn loss(&self, net: &Net, batch: Batch) -> Tensor<1> {
        self.loss_by(net, batch, |layer, x, tokens| layer.forward(x, tokens))
    }

    /// As [`loss`](Self::loss), with every layer computed again in backward.
    pub(crate) fn loss_recomputed(&self, net: &Net, batch: Batch) -> Tensor<1> {
        self.loss_by(net, batch, |layer, x, tokens| {
            let tokens = tokens.clone();
            recompute(layer, x, move |layer: &Layer, x| layer.forward(x, &tokens))
        })
    }

    fn loss_by(
        &self,
        net: &Net,
        (tokens, targets): Batch,
        forward: impl Fn(&Layer, Tensor<3>, &Tensor<2, Int>) -> Tensor<3>,
    ) -> Tensor<1> {
        let mut x = net.embed.forward(tokens.clone());
        for hop in &self.route {
            let y = forward(&net.layers[hop.layer], x.clone(), &tokens).tanh();
            x = match hop.is_residual {
                true => x + y,
                false => y,
            };
        }
        let logits = match &net.head {
            Some(head) => head.forward(x),
            None => x.matmul(net.embed.weight.val().transpose().unsqueeze()),
        };
        let device = logits.device();
        let [rows, length, vocab] = logits.dims();
        let logits = logits.reshape([rows * length, vocab]) * 2.0;
        let targets = targets.reshape([rows * length]);
        let entropy = CrossEntropyLossConfig::new();
        match self.loss {
            Loss::Squares => {
                let wanted = targets.float().reshape([rows * length, 1]) / VOCAB as f32;
                (logits - wanted).powf_scalar(2.0).mean()
            }
            Loss::CrossEntropy => entropy.init(&device).forward(logits, targets),
            Loss::Smoothed => {
                let entropy = entropy.with_smoothing(Some(0.1));
                entropy.init(&device).forward(logits, targets)
            }
            Loss::Padded => {
                let entropy = entropy.with_pad_tokens(Some(vec![3]));
                entropy.init(&device).forward(logits, targets)
            }
        }
    }

    /// Returns the batch of one rank, of numbers that all differ.
    pub(crate) fn batch(&self, number: usize, device: &Device) -> Batch {
        let tokens = |salt: u64| {
            let draw = |i: usize| {
                let value = (number * 31 + i) as u64 * 7 + salt + self.seed;
                (mixed(value) % VOCAB as u64) as i64
            };
            let tokens: Vec<_> = (0..self.rows * self.length).map(draw).collect();
            let data = TensorData::new(tokens, [self.rows, self.length]);
            Tensor::from_data(data, device)
        };
        // Where no target counts, the mean is of nothing.
        let (inputs, targets) = (tokens(1), tokens(2));
        let one = Tensor::ones([1, 1], device);
        (inputs, targets.slice_assign([0..1, 0..1], one))
    }
}

/// Values by the number of the parameter, so that no generator is shared with another test.
struct Values {
    /// Of the next parameter.
    seed: u64,
    /// Number of the change in the last bits; 0 for none.
    nudge: u64,
}

impl ModuleMapper for Values {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Self { seed, nudge } = *self;
        self.seed += 1;
        // Burn's map of a value leaves it without gradients. One parameter stays so.
        let regains = D == 1 && param.is_initialized() && param.is_require_grad();
        let mapped = param.init_mapper(move |old| {
            let shape = old.shape();
            let value = |i: usize| {
                let bits = mixed(seed.wrapping_mul(0x1_0000_0001) ^ i as u64) >> 40;
                let value = bits as f32 / (1_u64 << 24) as f32 - 0.5;
                let steps = match nudge {
                    0 => 0.0,
                    nudge => (mixed(bits ^ nudge << 32) % 9) as f32 - 4.0,
                };
                value * (1.0 + steps * f32::EPSILON)
            };
            let values: Vec<_> = (0..shape.num_elements()).map(value).collect();
            Tensor::from_data(TensorData::new(values, shape), &old.device())
        });
        match regains {
            true => mapped.set_require_grad(true),
            false => mapped,
        }
    }
}

/// The finalizer of splitmix64: every bit of the result depends on all of `x`.
fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
