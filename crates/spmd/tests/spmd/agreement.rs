//! One model trained by Burn on one rank, and compiled on one, two and three ranks.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Batch, DataParallel, Error, Mode, Strategy, compile};

use crate::eager::{self, adamw};

/// Rows of the joined batch, divisible by two and three ranks.
pub(crate) const ROWS: usize = 6;

const STEPS: usize = 6;

/// Returns data of the given shape, different for every seed.
pub(crate) fn data<const D: usize>(seed: usize, shape: [usize; D], device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let values = (0..len).map(|i| ((i * 37 + seed * 101 + 13) % 211) as f32 / 105.0 - 1.0);
    Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), shape), device)
}

/// Returns the given rows of a step's joined batch: vectors of five.
pub(crate) fn vectors(step: usize, rows: Range<usize>, device: &Device) -> Tensor<2> {
    data(step, [ROWS, 5], device).slice([rows])
}

/// The results of training, in a form that can be compared.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<f32>,
    parameters: Vec<(String, Vec<f32>)>,
}

/// Checks that training equals Burn's bit for bit on one rank, and nearly on two and three, replicated and fully
/// sharded.
pub(crate) fn agrees<M, B>(
    what: &str,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    rows: fn(usize, Range<usize>, &Device) -> B,
) where
    M: Module + 'static,
    B: Batch,
{
    compare(what, (init, loss, rows), true);
}

/// The same check if Burn sums in a different order on one rank as well, because its tensors have another layout in
/// memory.
pub(crate) fn agrees_closely<M, B>(
    what: &str,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    rows: fn(usize, Range<usize>, &Device) -> B,
) where
    M: Module + 'static,
    B: Batch,
{
    compare(what, (init, loss, rows), false);
}

/// Module, loss and batch.
type Case<M, B> = (
    fn(&Device) -> M,
    fn(&M, B) -> Tensor<1>,
    fn(usize, Range<usize>, &Device) -> B,
);

fn compare<M, B>(what: &str, (init, loss, rows): Case<M, B>, is_exact: bool)
where
    M: Module + 'static,
    B: Batch,
{
    let whole = |step, device: &Device| rows(step, 0..ROWS, device);
    let expected = eager::train(init, loss, whole, STEPS, |_| 1e-2, adamw().init());
    let floats = expected.parameters.iter();
    let expected = Run {
        losses: expected.losses.clone(),
        parameters: floats
            .map(|(path, data)| (path.clone(), data.try_to_vec::<f32>().unwrap()))
            .collect(),
    };
    for style in [Strategy::NoShard, Strategy::FullShard] {
        for num_ranks in 1..=3 {
            Device::flex().seed(1);
            let body = move |world: ProcessGroup| trained(&world, style, init, loss, rows);
            let runs = launch(LaunchConfig::new(num_ranks), body);
            let runs = runs.unwrap_or_else(|error| panic!("{what}, {style:?}: {error}"));
            let label = format!("{what}, {style:?} on {num_ranks} ranks");
            for run in &runs {
                assert_eq!(*run, runs[0], "{label}: the ranks differ");
            }
            if is_exact && num_ranks == 1 {
                assert_eq!(runs[0], expected, "{label}")
            } else {
                assert_close(&label, &runs[0], &expected)
            }
        }
    }
}

fn trained<M, B>(
    world: &ProcessGroup,
    style: impl Into<DataParallel>,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    rows: fn(usize, Range<usize>, &Device) -> B,
) -> Result<Run, Error>
where
    M: Module + 'static,
    B: Batch,
{
    let device = Device::flex();
    // One rank has the same bits as Burn without kernels, which sum in a different order.
    let options = Options::default().kernels(world.size() > 1);
    let mode = Mode::data_parallel(world.clone(), style).options(options);
    let mode = mode.verified();
    let mut step = compile(init, loss, adamw().build(), mode)?;
    if world.rank() == 0 {
        device.seed(2);
    }
    let each = ROWS / world.size();
    let own = world.rank() * each..(world.rank() + 1) * each;
    let mut losses = Vec::new();
    for index in 0..STEPS {
        losses.push(step.step(1e-2, &rows(index, own.clone(), &device))? as f32);
    }
    let mut parameters = Vec::new();
    for spec in step.parameters().to_vec() {
        if spec.dtype.is_float() {
            let data = step.parameter(&spec.path)?;
            parameters.push((spec.path.to_string(), data.try_to_vec::<f32>().unwrap()));
        }
    }
    parameters.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(Run { losses, parameters })
}

fn assert_close(label: &str, run: &Run, expected: &Run) {
    for (step, (loss, expected)) in run.losses.iter().zip(&expected.losses).enumerate() {
        let difference = (loss - expected).abs() / expected.abs().max(1e-3);
        assert!(
            difference <= 2e-5,
            "{label}, step {step}: {loss} is not {expected}"
        );
    }
    for ((path, values), (other, expected)) in run.parameters.iter().zip(&expected.parameters) {
        assert_eq!(path, other, "{label}");
        let largest = expected
            .iter()
            .fold(0f32, |most, value| most.max(value.abs()));
        for (value, expected) in values.iter().zip(expected) {
            // AdamW divides gradients near zero by their own size.
            assert!(
                (value - expected).abs() <= 5e-3 * largest.max(0.1),
                "{label}, {path}: {value} is not {expected}"
            );
        }
    }
}
