//! Compiled steps of modules whose fields share a parameter (clones of it, with one id), compared with Burn's loop over
//! an equal module that reads one field for every use.

#[allow(
    dead_code,
    reason = "shared with the tests of compiled steps, which use other parts"
)]
#[path = "../spmd/eager.rs"]
mod eager;

mod refused;
mod steps;

use burn::module::{Initializer, Module, Param, ParamId};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Shape, Tensor, TensorData};

/// 11 words, not divisible by 2, 3 or 4 ranks.
pub(crate) const WORDS: usize = 11;
const WIDTH: usize = 6;

/// One field for the table, which every use reads.
#[derive(Module, Debug)]
pub(crate) struct Once {
    pub(crate) embed: Embedding,
    pub(crate) layer: Linear,
}

/// The same module with a field for each use.
#[derive(Module, Debug)]
pub(crate) struct Tied {
    pub(crate) embed: Embedding,
    pub(crate) middle: Table,
    pub(crate) layer: Linear,
    pub(crate) head: Table,
}

/// A table of words, `[words, width]`.
#[derive(Module, Debug)]
pub(crate) struct Table {
    pub(crate) weight: Param<Tensor<2>>,
}

/// Values that are lazy, as in Burn's layers, and equal in every call.
pub(crate) fn numbers<const D: usize>(
    shape: [usize; D],
    seed: usize,
    device: &Device,
) -> Param<Tensor<D>> {
    let len: usize = shape.iter().product();
    let make = move |device: &Device, is_trained: bool| {
        let values = (0..len).map(|i| ((i * 37 + seed * 101 + 13) % 211) as f32 / 422.0 - 0.25);
        let data = TensorData::new(values.collect::<Vec<_>>(), shape);
        Tensor::from_data(data, device).set_require_grad(is_trained)
    };
    Param::uninitialized(
        ParamId::new(),
        make,
        device.clone(),
        true,
        Shape::from(shape),
    )
}

impl Once {
    pub(crate) fn new(device: &Device) -> Self {
        let zeros = Initializer::Zeros;
        let config = EmbeddingConfig::new(WORDS, WIDTH).with_initializer(zeros);
        let mut embed = config.init(device);
        embed.weight = numbers([WORDS, WIDTH], 1, device);
        let mut layer = LinearConfig::new(WIDTH, WIDTH)
            .with_bias(false)
            .init(device);
        layer.weight = numbers([WIDTH, WIDTH], 2, device);
        Self { embed, layer }
    }

    pub(crate) fn loss(&self, words: Tensor<2, Int>) -> Tensor<1> {
        let table = || self.embed.weight.val();
        of_logits(logits(&self.embed, &self.layer, (table(), table()), words))
    }
}

impl Tied {
    pub(crate) fn new(device: &Device) -> Self {
        let Once { embed, layer } = Once::new(device);
        let table = || Table {
            weight: embed.weight.clone(),
        };
        Self {
            middle: table(),
            head: table(),
            embed,
            layer,
        }
    }

    pub(crate) fn logits(&self, words: Tensor<2, Int>) -> Tensor<3> {
        let tables = (self.middle.weight.val(), self.head.weight.val());
        logits(&self.embed, &self.layer, tables, words)
    }

    pub(crate) fn loss(&self, words: Tensor<2, Int>) -> Tensor<1> {
        of_logits(self.logits(words))
    }
}

fn logits(
    embed: &Embedding,
    layer: &Linear,
    (middle, head): (Tensor<2>, Tensor<2>),
    words: Tensor<2, Int>,
) -> Tensor<3> {
    let x = layer.forward(embed.forward(words)).tanh();
    let scores: Tensor<3> = x.clone().matmul(middle.clone().transpose().unsqueeze());
    let x = x + scores.matmul(middle.unsqueeze());
    x.matmul(head.transpose().unsqueeze())
}

fn of_logits(logits: Tensor<3>) -> Tensor<1> {
    logits.sub_scalar(0.3).square().mean()
}

/// Number of rows of a step's joined batch.
pub(crate) const ROWS: usize = 12;

/// The words of the given rows in a step.
pub(crate) fn words(step: usize, rows: std::ops::Range<usize>, device: &Device) -> Tensor<2, Int> {
    let values = (0..ROWS * 3).map(|i| ((i * 7 + i / 5 + step * 3) % WORDS) as i64);
    let data = TensorData::new(values.collect::<Vec<_>>(), [ROWS, 3]);
    Tensor::from_data(data, device).slice([rows])
}
