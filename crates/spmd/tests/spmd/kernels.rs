//! Kernels in place of operations that Burn composes, in models that are unaware of them.

mod attention;
mod gates;
mod likelihood;
mod lookalikes;
mod norms;
mod placed;

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::log_softmax;
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

/// Returns rows of two sequences of vectors.
fn pairs(step: usize, first: usize, rows: usize, device: &Device) -> (Tensor<3>, Tensor<3>) {
    let make = |shift: usize| {
        let values: Vec<f32> = (first * TIME * DIM..(first + rows) * TIME * DIM)
            .map(|index| ((index * 29 + step * 7 + shift) % 97) as f32 / 48.0 - 1.0)
            .collect();
        Tensor::<1>::from_floats(values.as_slice(), device).reshape([rows, TIME, DIM])
    };
    (make(0), make(31))
}

/// Trains on several numbers of ranks, compared with Burn on the joined batch.
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
    check_on(&[1, 2, 3], what, init, loss, part)
}

/// Trains on these numbers of ranks, in different modes, compared with Burn on the joined batch. Returns the number of
/// times that each operation is in the step of one rank.
fn check_on<M, B>(
    ranks: &[usize],
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
        if !ranks.contains(&num_ranks) {
            continue;
        }
        Device::flex().seed(1);
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let device = Device::flex();
            let (rank, rows) = (world.rank(), ROWS / world.size());
            let mode = Mode::data_parallel(world, strategy).options(options.clone());
            let mut step = compile(init, loss, sgd().build(), mode.verified())?;
            // Seeded like the oracle: dropout is the same on one rank.
            device.seed(2);
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
    // Two layers of the encoder with one attention each, one layer of the decoder with two, and the loss.
    assert_count(&names, "Custom.models.attention", 4);
    assert_count(&names, "Custom.models.attention_backward", 4);
    assert_count(&names, "Custom.models.softmax", 0);
    assert_count(&names, "Custom.models.log_softmax_backward", 1);
    // The first norm is applied to the batch, which has no gradient, so that norm stays unchanged.
    assert_count(&names, "Custom.models.layer_norm_backward", 6);
    assert_count(&names, "Custom.models.gelu_backward", 3);
    for composed in ["Float.Exp", "Activation.Gelu"] {
        assert_count(&names, composed, 0);
    }
    let gpt = check("a GPT", Gpt::new, Gpt::loss, tokens);
    assert_count(&gpt, "Custom.models.attention_backward", 3);
    assert_count(&gpt, "Custom.models.layer_norm_backward", 7);
    assert_count(&gpt, "Custom.models.log_likelihood_backward", 1);
}

#[test]
fn recurrent_and_convolutional_models_match_burn() {
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
