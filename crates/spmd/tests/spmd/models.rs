//! Models of Burn's own layers, their losses and batches.
#![allow(dead_code, reason = "two test programs share them")]

use std::ops::Range;

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PaddingConfig2d,
};
use burn::tensor::activation::{gelu, relu, silu};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_spmd::named_activation;

/// A GPT block and model of Burn's layers.
#[derive(Module, Debug)]
pub(crate) struct Block {
    ln1: LayerNorm,
    attention: MultiHeadAttention,
    ln2: LayerNorm,
    fc: Linear,
    out: Linear,
}

#[derive(Module, Debug)]
pub(crate) struct Gpt {
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Block>,
    lnf: LayerNorm,
    head: Linear,
}

pub(crate) const VOCAB: usize = 31;
pub(crate) const TIME: usize = 6;
const DIM: usize = 12;

impl Gpt {
    pub(crate) fn new(device: &Device) -> Self {
        let block = || Block {
            ln1: LayerNormConfig::new(DIM).init(device),
            attention: MultiHeadAttentionConfig::new(DIM, 3)
                .with_dropout(0.0)
                .init(device),
            ln2: LayerNormConfig::new(DIM).init(device),
            fc: LinearConfig::new(DIM, 4 * DIM).init(device),
            out: LinearConfig::new(4 * DIM, DIM).init(device),
        };
        Self {
            wte: EmbeddingConfig::new(VOCAB, DIM).init(device),
            wpe: EmbeddingConfig::new(TIME, DIM).init(device),
            blocks: (0..3).map(|_| block()).collect(),
            lnf: LayerNormConfig::new(DIM).init(device),
            head: LinearConfig::new(DIM, VOCAB).with_bias(false).init(device),
        }
    }

    pub(crate) fn loss(&self, (tokens, targets): TokenBatch) -> Tensor<1> {
        let logits = self.logits(tokens);
        let elements = logits.dims().iter().product::<usize>() / VOCAB;
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(
                logits.reshape([elements, VOCAB]),
                targets.reshape([elements]),
            )
    }

    pub(crate) fn head_weight(&self) -> Tensor<2> {
        self.head.weight.val()
    }

    pub(crate) fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, time] = tokens.dims();
        let device = tokens.device();
        let positions = Tensor::<1, Int>::arange(0..time as i64, &device).unsqueeze();
        let x = self.wte.forward(tokens) + self.wpe.forward(positions);
        let mut x = named_activation("residual", x);
        for block in &self.blocks {
            let mask = burn::nn::attention::generate_autoregressive_mask(batch, time, &device);
            let input = MhaInput::self_attn(block.ln1.forward(x.clone())).mask_attn(mask);
            x = named_activation("residual", x + block.attention.forward(input).context);
            let wide = gelu(block.fc.forward(block.ln2.forward(x.clone())));
            x = named_activation("residual", x + block.out.forward(wide));
        }
        self.head.forward(self.lnf.forward(x))
    }
}

pub(crate) type TokenBatch = (Tensor<2, Int>, Tensor<2, Int>);

/// Tokens of that step, `rows` rows from row `first` on.
pub(crate) fn tokens(step: usize, first: usize, rows: usize, device: &Device) -> TokenBatch {
    let at = |row: usize, column: usize| ((step * 131 + row * 17 + column * 7919) % VOCAB) as i64;
    let make = |shift: usize| {
        let values: Vec<i64> = (first..first + rows)
            .flat_map(|row| (0..TIME).map(move |column| at(row, column + shift)))
            .collect();
        Tensor::<2, Int>::from_data(TensorData::new(values, [rows, TIME]), device)
    };
    (make(0), make(1))
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

impl Cnn {
    pub(crate) fn new(device: &Device) -> Self {
        Self::with_dropout(device, 0.25)
    }

    pub(crate) fn without_dropout(device: &Device) -> Self {
        Self::with_dropout(device, 0.0)
    }

    fn with_dropout(device: &Device, dropout: f64) -> Self {
        Self {
            conv1: Conv2dConfig::new([3, 4], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            norm1: BatchNormConfig::new(4).init(device),
            conv2: Conv2dConfig::new([4, 8], [3, 3])
                .with_stride([2, 2])
                .init(device),
            norm2: BatchNormConfig::new(8).init(device),
            max: MaxPool2dConfig::new([2, 2]).init(),
            average: AdaptiveAvgPool2dConfig::new([2, 2]).init(),
            dropout: DropoutConfig::new(dropout).init(),
            head: LinearConfig::new(32, 5).init(device),
        }
    }

    pub(crate) fn loss(&self, (images, labels): ImageBatch) -> Tensor<1> {
        let x = self
            .max
            .forward(relu(self.norm1.forward(self.conv1.forward(images))));
        let x = self
            .average
            .forward(silu(self.norm2.forward(self.conv2.forward(x))));
        let [batch, ..] = x.dims();
        let logits = self
            .head
            .forward(self.dropout.forward(x.reshape([batch, 32])));
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, labels)
    }
}

pub(crate) type ImageBatch = (Tensor<4>, Tensor<1, Int>);

pub(crate) fn images(step: usize, device: &Device) -> ImageBatch {
    let (rows, len) = (4, 4 * 3 * 12 * 12);
    let values: Vec<f32> = (0..len)
        .map(|i| ((i * 37 + step * 11) % 101) as f32 / 50.0 - 1.0)
        .collect();
    let labels: Vec<i64> = (0..rows).map(|row| ((row + step) % 5) as i64).collect();
    (
        Tensor::from_data(TensorData::new(values, [rows, 3, 12, 12]), device),
        Tensor::from_data(TensorData::new(labels, [rows]), device),
    )
}

/// An LSTM over a sequence of vectors.
#[derive(Module, Debug)]
pub(crate) struct Recurrent {
    lstm: Lstm,
    head: Linear,
}

impl Recurrent {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            lstm: LstmConfig::new(5, 8, true).init(device),
            head: LinearConfig::new(8, 3).init(device),
        }
    }

    pub(crate) fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let (y, _) = self.lstm.forward(x, None);
        self.head.forward(y).square().mean()
    }
}

/// Burn's transformer encoder.
#[derive(Module, Debug)]
pub(crate) struct Encoder {
    encoder: TransformerEncoder,
    head: Linear,
}

impl Encoder {
    pub(crate) fn new(device: &Device) -> Self {
        Self::with_dropout(device, 0.1)
    }

    pub(crate) fn without_dropout(device: &Device) -> Self {
        Self::with_dropout(device, 0.0)
    }

    fn with_dropout(device: &Device, dropout: f64) -> Self {
        Self {
            encoder: TransformerEncoderConfig::new(8, 16, 2, 2)
                .with_dropout(dropout)
                .init(device),
            head: LinearConfig::new(8, 3).init(device),
        }
    }

    pub(crate) fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let y = self.encoder.forward(TransformerEncoderInput::new(x));
        self.head.forward(y).square().mean()
    }
}

/// Sequences of vectors: `[4, TIME, width]`.
pub(crate) fn sequences(step: usize, width: usize, device: &Device) -> Tensor<3> {
    rows_of_sequences(step, width, 0..4, device)
}

/// Those rows of a batch of sequences: `[rows, TIME, width]`.
pub(crate) fn rows_of_sequences(
    step: usize,
    width: usize,
    rows: Range<usize>,
    device: &Device,
) -> Tensor<3> {
    let row_len = TIME * width;
    let values: Vec<f32> = (rows.start * row_len..rows.end * row_len)
        .map(|i| ((i * 29 + step * 7) % 97) as f32 / 48.0 - 1.0)
        .collect();
    Tensor::from_data(TensorData::new(values, [rows.len(), TIME, width]), device)
}
