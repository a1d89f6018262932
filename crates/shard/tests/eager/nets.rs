//! Modules of Burn's own layers, with deliberately uneven shapes.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, LinearLayout, Lstm, LstmConfig, PaddingConfig2d, RmsNorm, RmsNormConfig,
};
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::bench::Case;

/// Deterministic inputs that differ by rank and step.
pub(crate) fn input<const D: usize>(
    shape: [usize; D],
    rank: usize,
    step: usize,
    device: &Device,
) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let value = |i: usize| (((i * 7 + rank * 5 + step * 3) % 13) as f32) / 13.0 - 0.4;
    let values: Vec<f32> = (0..len).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Deterministic tokens.
pub(crate) fn tokens(
    shape: [usize; 2],
    vocab: usize,
    rank: usize,
    step: usize,
    device: &Device,
) -> Tensor<2, Int> {
    let len = shape[0] * shape[1];
    let value = |i: usize| ((i * 7 + rank * 3 + step) % vocab) as i64;
    let values: Vec<i64> = (0..len).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn square<const D: usize>(output: Tensor<D>) -> Tensor<1> {
    output.powf_scalar(2.0).mean()
}

/// An embedding, residual layers with norms between them, a head; 7 x 15 and the like.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    pub(crate) embed: Embedding,
    pub(crate) blocks: Vec<Block>,
    pub(crate) norm: RmsNorm,
    pub(crate) head: Linear,
}

#[derive(Module, Debug)]
pub(crate) struct Block {
    pub(crate) norm: LayerNorm,
    pub(crate) up: Linear,
    pub(crate) gate: Linear,
    pub(crate) down: Linear,
}

impl Block {
    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = self.norm.forward(x.clone());
        let y = gelu(self.up.forward(y.clone())) * self.gate.forward(y);
        x + self.down.forward(y)
    }
}

impl Mlp {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            embed: EmbeddingConfig::new(11, 15).init(device),
            blocks: (0..3).map(|_| Self::block(device)).collect(),
            norm: RmsNormConfig::new(15).init(device),
            head: LinearConfig::new(15, 7)
                .with_layout(LinearLayout::Col)
                .init(device),
        }
    }

    pub(crate) fn block(device: &Device) -> Block {
        Block {
            norm: LayerNormConfig::new(15).init(device),
            up: LinearConfig::new(15, 7).init(device),
            gate: LinearConfig::new(15, 7).with_bias(false).init(device),
            down: LinearConfig::new(7, 15).init(device),
        }
    }

    pub(crate) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let mut x = self.embed.forward(tokens);
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(self.norm.forward(x))
    }

    pub(crate) fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        square(self.forward(tokens([2, 4], 11, rank, step, device)))
    }

    /// Returns the loss of one long row. Without checkpointing, its products save the weights themselves.
    pub(crate) fn loss_of_row(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        square(self.forward(tokens([1, 32], 11, rank, step, device)))
    }
}

pub(crate) const MLP: Case<Mlp> = Case {
    build: Mlp::new,
    loss: Mlp::loss,
};

/// Convolutions with BatchNorm between them.
#[derive(Module, Debug)]
pub(crate) struct ConvNet {
    pub(crate) convs: Vec<Conv2d>,
    pub(crate) norms: Vec<BatchNorm>,
    pub(crate) head: Linear,
}

impl ConvNet {
    pub(crate) fn new(device: &Device) -> Self {
        let conv = |from, to| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device)
        };
        Self {
            convs: vec![conv(3, 5), conv(5, 5), conv(5, 7)],
            norms: [5, 5, 7]
                .map(|n| BatchNormConfig::new(n).init(device))
                .to_vec(),
            head: LinearConfig::new(7, 3).init(device),
        }
    }

    pub(crate) fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let mut x = input([2, 3, 5, 5], rank, step, device);
        for (conv, norm) in self.convs.iter().zip(&self.norms) {
            x = relu(norm.forward(conv.forward(x)));
        }
        let x: Tensor<2> = x.mean_dim(3).mean_dim(2).reshape([2, 7]);
        square(self.head.forward(x))
    }
}

pub(crate) const CONV_NET: Case<ConvNet> = Case {
    build: ConvNet::new,
    loss: ConvNet::loss,
};

/// Two recurrent layers: every weight is used at every time step.
#[derive(Module, Debug)]
pub(crate) struct Recurrent {
    pub(crate) layers: Vec<Lstm>,
    pub(crate) head: Linear,
}

impl Recurrent {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            layers: (0..2)
                .map(|_| LstmConfig::new(5, 5, true).init(device))
                .collect(),
            head: LinearConfig::new(5, 3).init(device),
        }
    }

    pub(crate) fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let mut x = input([2, 6, 5], rank, step, device);
        for layer in &self.layers {
            x = layer.forward(x, None).0;
        }
        square(self.head.forward(x))
    }
}

pub(crate) const RECURRENT: Case<Recurrent> = Case {
    build: Recurrent::new,
    loss: Recurrent::loss,
};
