//! Unusual forms of attention, and attention with dropout.

use burn::module::Module;
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Distribution, Tensor};

use super::{DIM, assert_count, check, check_on, pairs};
use crate::compiled::seeded;

/// Unusual forms of attention, and lookalikes.
#[derive(Module, Debug)]
struct Attentions {
    queries: Linear,
    keys: Linear,
    values: Linear,
    last: Linear,
}

impl Attentions {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(DIM, DIM).init(device);
        Self {
            queries: linear(),
            keys: linear(),
            values: linear(),
            last: linear(),
        }
    }

    fn loss(&self, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let [rows, time, _] = x.dims();
        let device = x.device();
        let heads = |x: Tensor<3>| -> Tensor<4> {
            let time = x.dims()[1];
            x.reshape([rows, time, 3, DIM / 3]).swap_dims(1, 2)
        };
        let (q, k) = (self.queries.forward(x), self.keys.forward(y.clone()));
        let (q, k, v) = (heads(q), heads(k), heads(self.values.forward(y.clone())));
        // Fewer queries than keys, scaled before the product; no mask.
        let few = q.clone().slice([0..rows, 0..3, 0..3]) * 0.5;
        let few = softmax(few.matmul(k.clone().transpose()), 3).matmul(v.clone());
        // Keys that do not depend on parameters, one mask for all sequences and one for each.
        let fixed = heads(y.clone());
        let mask =
            Tensor::<2, Bool>::tril_mask([time, time], 1, &device).reshape([1, 1, time, time]);
        let pad = y.slice([0..rows, 0..time, 0..1]).greater_elem(0.7);
        let pad = pad.reshape([rows, 1, 1, time]);
        let scores = q.clone().matmul(fixed.clone().transpose()).div_scalar(2.0);
        let scores = scores
            .mask_fill(mask, -1e4)
            .mask_fill(pad, f32::NEG_INFINITY);
        let masked = softmax(scores, 3).matmul(v.clone());
        // The weights are also read; one head of keys serves all queries; a mask comes before the scale.
        let weights = softmax(q.clone().matmul(k.clone().transpose()), 3);
        let seen = weights.clone().matmul(v.clone()) + weights.mean_dim(3) * 0.1;
        let one = k.clone().slice([0..rows, 0..1]);
        let one = softmax(q.clone().matmul(one.transpose()), 3).matmul(v.clone());
        let ahead =
            Tensor::<2, Bool>::tril_mask([time, time], 0, &device).reshape([1, 1, time, time]);
        let early = q.matmul(k.transpose()).mask_fill(ahead, -30.0) * 0.25;
        let early = softmax(early, 3).matmul(v);
        // Only from the batch, with probabilities that are also values.
        let own = softmax(fixed.clone().matmul(fixed.clone().transpose()), 3);
        let own = own.clone().matmul(own).matmul(fixed);
        let all = masked + seen + one + early + own;
        let all = all.swap_dims(1, 2).reshape([rows, time, DIM]);
        self.last.forward(all).square().mean() + few.square().mean()
    }
}

#[test]
fn attention_is_fused_unless_its_intermediates_are_read() {
    let _guard = seeded();
    let names = check("attentions", Attentions::new, Attentions::loss, pairs);
    assert_count(&names, "Custom.models.attention", 2);
    assert_count(&names, "Custom.models.attention_backward", 2);
    assert_count(&names, "Custom.models.softmax_backward", 3);
}

/// Burn's encoder and decoder with dropout, as in their configurations, and an attention of grouped heads.
#[derive(Module, Debug)]
struct Dropped {
    encoder: TransformerEncoder,
    decoder: TransformerDecoder,
    keys: Linear,
    queries: Linear,
    dropout: Dropout,
}

impl Dropped {
    fn new(device: &Device) -> Self {
        Self {
            encoder: TransformerEncoderConfig::new(DIM, 20, 3, 2).init(device),
            decoder: TransformerDecoderConfig::new(DIM, 16, 2, 1).init(device),
            keys: LinearConfig::new(DIM, 4).init(device),
            queries: LinearConfig::new(DIM, DIM).init(device),
            dropout: DropoutConfig::new(0.4).init(),
        }
    }

    fn loss(&self, (source, target): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let [rows, time, _] = source.dims();
        let mask = Tensor::<2, Bool>::tril_mask([time, time], 0, &source.device());
        let mask = mask.unsqueeze::<3>().expand([rows, time, time]);
        let memory = TransformerEncoderInput::new(source).mask_attn(mask.clone());
        let memory = self.encoder.forward(memory);
        let input = TransformerDecoderInput::new(target, memory.clone());
        let x = self.decoder.forward(input.target_mask_attn(mask));
        // Three heads of queries for one head of keys and values, and a dropout that does not scale.
        let queries = self.queries.forward(x).reshape([rows, time, 3, 4]);
        let keys = self.keys.forward(memory).reshape([rows, time, 1, 4]);
        let keys = keys.repeat_dim(2, 3).swap_dims(1, 2);
        let scores = queries.swap_dims(1, 2).matmul(keys.clone().transpose()) * 0.5;
        let weights = softmax(scores, 3);
        let kept = weights.random_like(Distribution::Bernoulli(0.7));
        let mixed = (weights * kept).matmul(keys);
        // Dropout of another value, which stays unchanged.
        self.dropout.forward(mixed).square().mean()
    }
}

#[test]
fn attention_with_dropout_runs_kernels() {
    let _guard = seeded();
    // Several ranks draw other numbers than Burn does on the joined batch.
    let names = check_on(&[1], "dropout", Dropped::new, Dropped::loss, pairs);
    assert_count(&names, "Custom.models.attention", 5);
    assert_count(&names, "Custom.models.attention_backward", 5);
    assert_count(&names, "Custom.models.softmax", 0);
}
