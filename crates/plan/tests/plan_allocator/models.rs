//! Models of Burn's own layers, large enough for tensors to outweigh the bookkeeping.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, Lstm, LstmConfig,
    PaddingConfig2d,
};
use burn::tensor::activation::{relu, silu};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_models::{GptConfig, LlamaConfig, LlamaVariant};

pub(crate) const GPT: GptConfig = GptConfig {
    layers: 4,
    dim: 256,
    heads: 4,
    vocab: 512,
    seq: 128,
};

pub(crate) const LLAMA: LlamaConfig = LlamaConfig {
    layers: 4,
    dim: 256,
    heads: 4,
    kv_heads: 2,
    hidden: 688,
    vocab: 512,
    seq: 128,
    rope_base: 10_000,
    variant: LlamaVariant::PLAIN,
};

pub(crate) type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

pub(crate) fn tokens(rows: usize, seq: usize, device: &Device) -> Tokens {
    let zeros = || Tensor::<2, Int>::zeros([rows, seq], device);
    (zeros(), zeros())
}

/// Convolutions, batch norm, dropout and pooling.
#[derive(Module, Debug)]
pub(crate) struct Cnn {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    max: MaxPool2d,
    average: AdaptiveAvgPool2d,
    dropout: Dropout,
    head: Linear,
}

pub(crate) type Images = (Tensor<4>, Tensor<1, Int>);

impl Cnn {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([3, 32], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            norm1: BatchNormConfig::new(32).init(device),
            conv2: Conv2dConfig::new([32, 64], [3, 3])
                .with_stride([2, 2])
                .init(device),
            norm2: BatchNormConfig::new(64).init(device),
            max: MaxPool2dConfig::new([2, 2]).init(),
            average: AdaptiveAvgPool2dConfig::new([2, 2]).init(),
            dropout: DropoutConfig::new(0.25).init(),
            head: LinearConfig::new(256, 10).init(device),
        }
    }

    pub(crate) fn loss(&self, (images, labels): Images) -> Tensor<1> {
        let x = relu(self.norm1.forward(self.conv1.forward(images)));
        let x = self.max.forward(x);
        let x = silu(self.norm2.forward(self.conv2.forward(x)));
        let x = self.average.forward(x).flatten(1, 3);
        let logits = self.head.forward(self.dropout.forward(x));
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits, labels)
    }
}

pub(crate) fn images(device: &Device) -> Images {
    let images = Tensor::<4>::ones([16, 3, 32, 32], device);
    (images, Tensor::<1, Int>::zeros([16], device))
}

/// Convolutions and a head that reads every pixel. Most parameters are in one matrix.
#[derive(Module, Debug)]
pub(crate) struct WideHead {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    head: Linear,
}

impl WideHead {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([3, 32], [3, 3]).init(device),
            norm1: BatchNormConfig::new(32).init(device),
            conv2: Conv2dConfig::new([32, 64], [3, 3])
                .with_stride([2, 2])
                .init(device),
            norm2: BatchNormConfig::new(64).init(device),
            head: LinearConfig::new(64 * 14 * 14, 10).init(device),
        }
    }

    pub(crate) fn loss(&self, (images, labels): Images) -> Tensor<1> {
        let x = relu(self.norm1.forward(self.conv1.forward(images)));
        let x = relu(self.norm2.forward(self.conv2.forward(x)));
        let logits = self.head.forward(x.flatten(1, 3));
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits, labels)
    }
}

#[derive(Module, Debug)]
pub(crate) struct Recurrent {
    lstm: Lstm,
    head: Linear,
}

impl Recurrent {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            lstm: LstmConfig::new(128, 256, true).init(device),
            head: LinearConfig::new(256, 64).init(device),
        }
    }

    pub(crate) fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let (y, _) = self.lstm.forward(x, None);
        self.head.forward(y).square().mean()
    }
}

pub(crate) fn sequences(device: &Device) -> Tensor<3> {
    Tensor::<3>::ones([32, 24, 128], device)
}
