//! Host computations are frozen while a step is traced: they are named, passed as tensors, or noticed.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_spmd::{Batch, BatchMapper, Error, Mode, Strategy, compile};

use crate::agreement::data;
use crate::compiled::seeded;
use crate::eager;

fn layer(device: &Device) -> Linear {
    LinearConfig::new(4, 4).with_bias(false).init(device)
}

/// A batch with values that are not tensors.
#[derive(Clone)]
struct Padded<const NAMED: bool> {
    x: Tensor<2>,
    lengths: Vec<usize>,
    weight: f32,
}

impl<const NAMED: bool> Padded<NAMED> {
    fn new(step: usize, device: &Device) -> Self {
        Self {
            x: data(step, [6, 4], device),
            lengths: vec![6 - step % 3],
            weight: 1.0 + (step % 2) as f32,
        }
    }

    fn loss(model: &Linear, batch: Self) -> Tensor<1> {
        let rows = batch.x.narrow(0, 0, batch.lengths[0]);
        model.forward(rows).square().mean() * batch.weight
    }
}

impl<const NAMED: bool> Batch for Padded<NAMED> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        if NAMED {
            mapper.fixed("lengths", &self.lengths);
            mapper.fixed("weight", &self.weight.to_bits());
        }
        Self {
            x: mapper.float("x", self.x),
            ..self
        }
    }
}

#[test]
fn named_values_of_a_batch_have_a_graph_each() {
    let _guard = seeded();
    let optimizer = SgdConfig::new();
    let expected = eager::train(
        layer,
        Padded::<true>::loss,
        Padded::<true>::new,
        14,
        |_| 1e-1,
        optimizer.init(),
    );
    let device = Device::flex();
    device.seed(1);
    let loss = Padded::<true>::loss;
    let mut step = compile(layer, loss, optimizer.build(), Mode::single().verified()).unwrap();
    for (index, expected) in expected.losses.iter().enumerate() {
        let loss = step.step(1e-1, &Padded::new(index, &device)).unwrap();
        assert_eq!(loss as f32, *expected, "loss of step {index}");
    }
    // Three lengths and two weights.
    assert_eq!(step.num_traces(), 6);
}

#[test]
fn values_of_a_batch_without_a_name_are_noticed() {
    let _guard = seeded();
    let device = Device::flex();
    let loss = Padded::<false>::loss;
    let mut step = compile(layer, loss, SgdConfig::new().build(), Mode::single()).unwrap();
    step.step(1e-1, &Padded::new(0, &device)).unwrap();
    let before = step.parameter("weight").unwrap();
    for _ in 0..2 {
        let error = step.step(1e-1, &Padded::new(1, &device)).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::NotRepeatable { .. }), "{text}");
        assert!(text.contains("BatchMapper::fixed"), "{text}");
    }
    assert_eq!(step.parameter("weight").unwrap(), before);
    assert_eq!(step.num_steps(), 1);
}

#[test]
fn a_counter_in_the_loss_is_noticed() {
    let _guard = seeded();
    let count = AtomicUsize::new(0);
    let loss = move |model: &Linear, x: Tensor<2>| {
        let factor = 1.0 + count.fetch_add(1, Ordering::SeqCst) as f64;
        model.forward(x).square().mean().mul_scalar(factor)
    };
    let mut step = compile(layer, loss, SgdConfig::new().build(), Mode::single()).unwrap();
    let x = data(0, [4, 4], &Device::flex());
    step.step(0.0, &x).unwrap();
    let error = step.step(0.0, &x).unwrap_err().to_string();
    assert!(error.contains("NumericFloat.MulScalar"), "{error}");
}

#[test]
fn nan_constants_are_equal_in_every_trace() {
    let _guard = seeded();
    let loss = |model: &Linear, x: Tensor<2>| {
        let y = model.forward(x);
        let filled = y.clone().mask_fill(y.greater_elem(0.0), f32::NAN);
        let is_none = filled.clone().is_nan();
        filled.mask_fill(is_none, 0.5).square().mean()
    };
    let batch = |index, device: &Device| data(index, [4, 4], device);
    let expected = eager::train(layer, loss, batch, 4, |_| 0.1, SgdConfig::new().init());
    Device::flex().seed(1);
    let mut step = compile(layer, loss, SgdConfig::new().build(), Mode::single()).unwrap();
    for (index, expected) in expected.losses.iter().enumerate() {
        let loss = step.step(0.1, &batch(index, &Device::flex())).unwrap();
        assert!(
            (loss - f64::from(*expected)).abs() <= 1e-6 * loss.abs(),
            "{loss} is not {expected}"
        );
    }
}

#[test]
fn a_schedule_is_a_tensor_of_the_batch() {
    let _guard = seeded();
    let loss = |model: &Linear, (x, factor): (Tensor<2>, Tensor<1>)| {
        model.forward(x).square().mean() * factor
    };
    let batch = |step: usize, device: &Device| {
        let factor = Tensor::from_floats([1.0 + step as f32], device);
        (data(step, [4, 4], device), factor)
    };
    let optimizer = SgdConfig::new();
    let expected = eager::train(layer, loss, batch, 6, |_| 1e-1, optimizer.init());
    let device = Device::flex();
    device.seed(1);
    let mut step = compile(layer, loss, optimizer.build(), Mode::single()).unwrap();
    for (index, expected) in expected.losses.iter().enumerate() {
        let loss = step.step(1e-1, &batch(index, &device)).unwrap();
        assert_eq!(loss as f32, *expected, "loss of step {index}");
    }
    assert_eq!(step.num_traces(), 1);
}

#[test]
fn a_failure_to_prepare_a_step_is_reported_and_all_ranks_continue() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let rank = world.rank();
        // Rank 1 reads a value if the batch has two rows.
        let loss = move |model: &Linear, x: Tensor<2>| {
            let y = model.forward(x.clone()).square().mean();
            if rank == 1 && x.dims()[0] == 2 {
                let _ = y.clone().into_scalar::<f32>();
            }
            y
        };
        let mode = Mode::data_parallel(world, Strategy::FullShard);
        let mut step = compile(layer, loss, SgdConfig::new().build(), mode)?;
        let mut said = Vec::new();
        for rows in [3, 3, 2, 3] {
            let result = step.step(1e-1, &data(rank, [rows, 4], &device));
            said.push(result.map_err(|error| error.to_string()));
        }
        Ok(said)
    };
    let said = launch(LaunchConfig::new(2), body).unwrap();
    for (rank, said) in said.iter().enumerate() {
        for index in [0, 1, 3] {
            assert!(said[index].is_ok(), "rank {rank}: {:?}", said[index]);
        }
        let text = said[2].clone().unwrap_err();
        let wanted = ["rank 1 could not prepare", "cannot capture the loss"][rank];
        assert!(text.contains(wanted), "rank {rank}: {text}");
    }
}
