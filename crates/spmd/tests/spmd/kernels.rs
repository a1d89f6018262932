//! Kernels in place of what Burn composes, in models that know nothing of them.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{log_softmax, silu, softmax};
use burn::tensor::{Bool, Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{Batch, Error, Mode, Strategy, compile};

use crate::clipping::sgd;
use crate::compiled::seeded;
use crate::eager;
use crate::models::{Cnn, Encoder, Gpt, Recurrent, images, sequences, tokens};

const STEPS: usize = 10;
const ROWS: usize = 12;

/// Burn's encoder and decoder, with masks and norms in either place.
#[derive(Module, Debug)]
struct Translator {
    encoder: TransformerEncoder,
    decoder: TransformerDecoder,
    head: Linear,
}

const DIM: usize = 12;
const TIME: usize = 5;

impl Translator {
    fn new(device: &Device) -> Self {
        let encoder = TransformerEncoderConfig::new(DIM, 20, 3, 2);
        let decoder = TransformerDecoderConfig::new(DIM, 16, 2, 1);
        Self {
            encoder: encoder.with_dropout(0.0).with_norm_first(true).init(device),
            decoder: decoder.with_dropout(0.0).init(device),
            head: LinearConfig::new(DIM, 7).init(device),
        }
    }

    fn loss(&self, (source, target): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let [rows, time, _] = source.dims();
        let device = source.device();
        let mask = Tensor::<2, Bool>::tril_mask([time, time], 0, &device);
        let mask = mask.unsqueeze::<3>().expand([rows, time, time]);
        let first = source.clone().slice([0..rows, 0..time, 0..1]);
        let pad = first.reshape([rows, time]).greater_elem(0.5);
        let memory = TransformerEncoderInput::new(source).mask_attn(mask.clone());
        let memory = self.encoder.forward(memory);
        let input = TransformerDecoderInput::new(target, memory);
        let input = input.memory_mask_pad(pad).target_mask_attn(mask);
        log_softmax(self.head.forward(self.decoder.forward(input)), 2)
            .square()
            .mean()
    }
}

/// Rows of two sequences of vectors.
fn pairs(step: usize, first: usize, rows: usize, device: &Device) -> (Tensor<3>, Tensor<3>) {
    let make = |shift: usize| {
        let values: Vec<f32> = (first * TIME * DIM..(first + rows) * TIME * DIM)
            .map(|index| ((index * 29 + step * 7 + shift) % 97) as f32 / 48.0 - 1.0)
            .collect();
        Tensor::<1>::from_floats(values.as_slice(), device).reshape([rows, TIME, DIM])
    };
    (make(0), make(31))
}

/// Trains with kernels and without, on that many ranks, against Burn on the joined batch.
fn check<M, B>(
    what: &str,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    part: fn(usize, usize, usize, &Device) -> B,
) -> BTreeMap<String, usize>
where
    M: Module + 'static,
    B: Batch,
{
    let batch = |step: usize, device: &Device| part(step, 0, ROWS, device);
    let expected = eager::train(init, loss, batch, STEPS, |_| 1e-2, sgd().init());
    let mut names = BTreeMap::new();
    for (num_ranks, strategy, options) in [
        (1, Strategy::NoShard, Options::default()),
        (2, Strategy::FullShard, Options::default()),
        (3, Strategy::FullShard, Options::none().kernels(true)),
        (
            2,
            Strategy::NoShard,
            Options::default().optimizer(OptimizerPlace::InNextForward),
        ),
    ] {
        Device::flex().seed(1);
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let device = Device::flex();
            let (rank, rows) = (world.rank(), ROWS / world.size());
            let mode = Mode::data_parallel(world, strategy).options(options.clone());
            let mut step = compile(init, loss, sgd().build(), mode.verified())?;
            let mut losses = Vec::new();
            for index in 0..STEPS {
                losses.push(step.step(1e-2, &part(index, rank * rows, rows, &device))?);
            }
            let mut names: BTreeMap<String, usize> = BTreeMap::new();
            let graph = step.graph().expect("it has run");
            for node in graph.nodes() {
                *names
                    .entry(format!("{} {}", node.phase, node.name()))
                    .or_default() += 1;
            }
            let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
            let mut parameters = Vec::new();
            for path in paths {
                parameters.push((path.clone(), step.parameter(&path)?));
            }
            Ok((losses, parameters, names))
        };
        let mut results = launch(LaunchConfig::new(num_ranks), body).unwrap();
        let (losses, parameters, of_graph) = results.swap_remove(0);
        for (loss, expected) in losses.iter().zip(&expected.losses) {
            let expected = f64::from(*expected);
            let is_close = (loss - expected).abs() <= 2e-6 * expected.abs();
            assert!(is_close, "{what} on {num_ranks}: {loss} is not {expected}");
        }
        for (path, found) in parameters {
            let (Some(expected), Ok(found)) =
                (expected.parameters.get(&*path), found.try_to_vec::<f32>())
            else {
                continue;
            };
            let expected = expected.try_to_vec::<f32>().unwrap();
            let largest = expected.iter().fold(1e-2f32, |most, x| most.max(x.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                let is_close = (found - expected).abs() <= 1e-5 * largest;
                assert!(
                    is_close,
                    "{what} on {num_ranks}, {path}: {found} is not {expected}"
                );
            }
        }
        if num_ranks == 1 {
            names = of_graph;
        }
    }
    names
}

#[track_caller]
fn assert_count(names: &BTreeMap<String, usize>, name: &str, expected: usize) {
    let found = ["forward", "backward"].map(|phase| names.get(&format!("{phase} {name}")));
    let found: usize = found.into_iter().flatten().sum();
    assert_eq!(found, expected, "{name} in {names:#?}");
}

#[test]
fn encoders_and_decoders_of_burn_run_kernels() {
    let _guard = seeded();
    let names = check("a translator", Translator::new, Translator::loss, pairs);
    // Two layers of the encoder with one attention, one of the decoder with two, and the loss.
    assert_count(&names, "Custom.models.attention", 4);
    assert_count(&names, "Custom.models.attention_backward", 4);
    assert_count(&names, "Custom.models.softmax", 0);
    assert_count(&names, "Custom.models.log_softmax_backward", 1);
    // The first norm is of the batch, which has no gradient: that one stays as it is.
    assert_count(&names, "Custom.models.layer_norm_backward", 6);
    assert_count(&names, "Custom.models.gelu_backward", 3);
    for composed in ["Float.Exp", "Activation.Gelu"] {
        assert_count(&names, composed, 0);
    }
    let gpt = check("a GPT", Gpt::new, Gpt::loss, tokens);
    assert_count(&gpt, "Custom.models.attention_backward", 3);
    assert_count(&gpt, "Custom.models.layer_norm_backward", 7);
    assert_count(&gpt, "Custom.models.log_softmax_backward", 1);
}

/// Root-mean-square norms: of the batch, before and after what is added, one whose result is read twice, one whose rows are read
/// between its parts, and one after which all is summed.
#[derive(Module, Debug)]
struct Normed {
    norms: Vec<RmsNorm>,
    linears: Vec<Linear>,
    last: Linear,
}

impl Normed {
    fn new(device: &Device) -> Self {
        let norm = |_| RmsNormConfig::new(DIM).with_epsilon(1e-5).init(device);
        let linear = |_| LinearConfig::new(DIM, DIM).init(device);
        Self {
            norms: (0..5).map(norm).collect(),
            linears: (0..4).map(linear).collect(),
            last: LinearConfig::new(DIM, 5).init(device),
        }
    }

    fn loss(&self, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let x = self.linears[0].forward(self.norms[0].forward(x));
        // Before what is added, as in a Llama.
        let x = x.clone() + self.linears[1].forward(self.norms[1].forward(x));
        // After it.
        let x = self.norms[2].forward(x.clone() * y + x);
        // Of two dims, as in the models here.
        let x = x.flatten::<2>(0, 1);
        let wide = self.norms[3].forward(self.linears[2].forward(x.clone()));
        let x = x + silu(wide.clone()) * self.linears[3].forward(wide);
        self.last.forward(self.norms[4].forward(x)).square().mean()
    }
}

#[test]
fn root_mean_square_norms_run_kernels() {
    let _guard = seeded();
    let names = check("norms", Normed::new, Normed::loss, pairs);
    // The first is of the batch, which has no gradient.
    assert_count(&names, "Custom.models.rms_norm_backward", 4);
    assert_count(&names, "Custom.models.rms_norm", 4);
}

/// Functions that look like the kernels' and are not, or whose insides are used elsewhere.
#[derive(Module, Debug)]
struct Lookalikes {
    first: Linear,
    norm: LayerNorm,
    plain: LayerNorm,
    last: Linear,
}

impl Lookalikes {
    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(DIM, DIM).init(device),
            norm: LayerNormConfig::new(DIM).init(device),
            plain: LayerNormConfig::new(DIM).with_bias(false).init(device),
            last: LinearConfig::new(DIM, 4).with_bias(false).init(device),
        }
    }

    fn loss(&self, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let x = self.first.forward(x);
        // Along another dim, of a product with itself, and by hand with a part that is read twice.
        let across = softmax(x.clone(), 1);
        let scores = x.clone().matmul(y.transpose());
        let shifted = scores.clone() - scores.max_dim(2);
        let powers = shifted.exp();
        let total = powers.clone().sum_dim(2);
        let own = powers.clone() / total.clone();
        let twice = own.matmul(x.clone()) + (total.log() * 0.1) + powers.mean_dim(2) * 0.3;
        // A norm whose mean counts for itself, one without a shift, and one whose result is read three times.
        let mean = x.clone().mean_dim(2);
        let centered = x - mean.clone();
        let variance = (centered.clone() * centered.clone()).mean_dim(2);
        let by_hand = centered / (variance + 1e-5).sqrt();
        // A norm with a shift for each position, of which there are as many as the rows are wide.
        let square = twice.clone().transpose().matmul(twice.clone());
        let ends = square.clone() - square.mean_dim(2);
        let spread = (ends.clone() * ends.clone())
            .mean_dim(2)
            .add_scalar(1e-5)
            .sqrt();
        let gain = self.norm.gamma.val().reshape([1, 1, DIM]);
        let shift = self.norm.gamma.val().reshape([1, DIM, 1]);
        let by_position = (ends / spread * gain + shift).mean_dim(1).mean_dim(2);
        let normal = self.norm.forward(twice + across) + by_position;
        let all = normal.clone() * normal.clone() + self.plain.forward(normal) + by_hand + mean;
        let logits = self.last.forward(all);
        // Two have their insides for themselves, and two share them.
        let apart = log_softmax(logits.clone(), 2) * softmax(logits.clone() * 2.0, 2);
        let wide = logits * 0.5;
        let together = log_softmax(wide.clone(), 2) * softmax(wide, 2);
        (apart + together).square().mean()
    }
}

#[test]
fn what_only_looks_like_a_kernel_is_left_alone() {
    let _guard = seeded();
    let names = check("lookalikes", Lookalikes::new, Lookalikes::loss, pairs);
    // One log-softmax and one softmax of the logits, and the norm that has a shift.
    assert_count(&names, "Custom.models.log_softmax_backward", 1);
    assert_count(&names, "Custom.models.softmax_backward", 1);
    assert_count(&names, "Custom.models.layer_norm_backward", 1);
    assert!(names.contains_key("backward Float.Recip"), "{names:#?}");
}

/// Attentions in forms of their own, and what only looks like one.
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
        // Keys that are no function of parameters, a mask for all sequences and one for each.
        let fixed = heads(y.clone());
        let mask =
            Tensor::<2, Bool>::tril_mask([time, time], 1, &device).reshape([1, 1, time, time]);
        let pad = y.slice([0..rows, 0..time, 0..1]).greater_elem(0.7);
        let pad = pad.reshape([rows, 1, 1, time]);
        let scores = q.clone().matmul(fixed.transpose()).div_scalar(2.0);
        let scores = scores
            .mask_fill(mask, -1e4)
            .mask_fill(pad, f32::NEG_INFINITY);
        let masked = softmax(scores, 3).matmul(v.clone());
        // The weights come out, too; one head of keys is for all queries; a mask before the scale.
        let weights = softmax(q.clone().matmul(k.clone().transpose()), 3);
        let seen = weights.clone().matmul(v.clone()) + weights.mean_dim(3) * 0.1;
        let one = k.clone().slice([0..rows, 0..1]);
        let one = softmax(q.clone().matmul(one.transpose()), 3).matmul(v.clone());
        let ahead =
            Tensor::<2, Bool>::tril_mask([time, time], 0, &device).reshape([1, 1, time, time]);
        let early = q.matmul(k.transpose()).mask_fill(ahead, -30.0) * 0.25;
        let early = softmax(early, 3).matmul(v);
        let all = masked + seen + one + early;
        let all = all.swap_dims(1, 2).reshape([rows, time, DIM]);
        self.last.forward(all).square().mean() + few.square().mean()
    }
}

#[test]
fn attention_is_one_operation_in_any_form_whose_insides_nobody_reads() {
    let _guard = seeded();
    let names = check("attentions", Attentions::new, Attentions::loss, pairs);
    assert_count(&names, "Custom.models.attention", 2);
    assert_count(&names, "Custom.models.attention_backward", 2);
    assert_count(&names, "Custom.models.softmax_backward", 3);
}

#[test]
fn recurrent_and_convolutional_models_train_as_by_burn() {
    let _guard = seeded();
    let device = Device::flex();
    let close = |found: f64, expected: f32| (found - f64::from(expected)).abs() <= 1e-5;
    let batch = |step, device: &Device| sequences(step, 5, device);
    let expected = eager::train(
        Recurrent::new,
        Recurrent::loss,
        batch,
        STEPS,
        |_| 1e-2,
        sgd().init(),
    );
    device.seed(1);
    let mut step = compile(
        Recurrent::new,
        Recurrent::loss,
        sgd().build(),
        Mode::single(),
    )
    .unwrap();
    for (index, expected) in expected.losses.iter().enumerate() {
        assert!(close(
            step.step(1e-2, &batch(index, &device)).unwrap(),
            *expected
        ));
    }
    let cnn = Cnn::without_dropout;
    let expected = eager::train(cnn, Cnn::loss, images, STEPS, |_| 1e-2, sgd().init());
    device.seed(1);
    let mut step = compile(cnn, Cnn::loss, sgd().build(), Mode::single()).unwrap();
    for (index, expected) in expected.losses.iter().enumerate() {
        assert!(close(
            step.step(1e-2, &images(index, &device)).unwrap(),
            *expected
        ));
    }
    let encoder = Encoder::without_dropout;
    let batch = |step, device: &Device| sequences(step, 8, device);
    let expected = eager::train(encoder, Encoder::loss, batch, STEPS, |_| 1e-2, sgd().init());
    device.seed(1);
    let mut step = compile(encoder, Encoder::loss, sgd().build(), Mode::single()).unwrap();
    for (index, expected) in expected.losses.iter().enumerate() {
        assert!(close(
            step.step(1e-2, &batch(index, &device)).unwrap(),
            *expected
        ));
    }
}
