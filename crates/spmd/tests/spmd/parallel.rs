//! Several ranks against one on the joined batch.

use burn::tensor::Device;
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, launch};
use burn_fsdp_spmd::{DataParallel, Error, Mode, compile};

use crate::compiled::seeded;
use crate::eager::{self, adamw};
use crate::models::{Gpt, tokens};

const STEPS: usize = 10;
const ROWS: usize = 12;

/// Losses and parameters of a GPT trained by that many ranks.
fn trained(num_ranks: usize, style: DataParallel) -> (Vec<f64>, Vec<(String, Vec<f32>)>) {
    Device::flex().seed(1);
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mode = Mode::data_parallel(world.clone(), style).verified();
        let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
        let rows = ROWS / num_ranks;
        let mut losses = Vec::new();
        for index in 0..STEPS {
            losses.push(step.step(1e-2, &tokens(index, world.rank() * rows, rows, &device))?);
        }
        let paths: Vec<_> = step
            .parameters()
            .iter()
            .map(|spec| spec.path.clone())
            .collect();
        let mut parameters = Vec::new();
        for path in paths {
            let data = step.parameter(&path)?;
            parameters.push((path.to_string(), data.try_to_vec::<f32>().unwrap()));
        }
        Ok((losses, parameters))
    };
    let mut results = launch(LaunchConfig::new(num_ranks), body).unwrap();
    for other in &results[1..] {
        assert_eq!(other, &results[0], "the ranks differ");
    }
    results.swap_remove(0)
}

#[test]
fn ranks_together_train_like_one_on_the_joined_batch() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, |_| 1e-2, adamw().init());
    for style in [DataParallel::Replicate, DataParallel::FullyShard] {
        for num_ranks in [1, 2, 3, 4] {
            let (losses, parameters) = trained(num_ranks, style);
            for (step, (loss, expected)) in losses.iter().zip(&expected.losses).enumerate() {
                let difference = (loss - f64::from(*expected)).abs() / f64::from(*expected);
                let allowed = if num_ranks == 1 { 0.0 } else { 1e-5 };
                assert!(
                    difference <= allowed,
                    "{style:?} on {num_ranks} ranks, step {step}: {loss} is not {expected}"
                );
            }
            for (path, values) in parameters {
                let expected = expected.parameters[&path].try_to_vec::<f32>().unwrap();
                let largest = expected
                    .iter()
                    .fold(0f32, |most, value| most.max(value.abs()));
                for (value, expected) in values.iter().zip(&expected) {
                    assert!(
                        (value - expected).abs() <= 2e-3 * largest.max(1e-2),
                        "{style:?} on {num_ranks} ranks, {path}: {value} is not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn ranks_with_other_batch_shapes_are_told() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<bool, Error> {
        let device = Device::flex();
        let mode = Mode::data_parallel(world.clone(), DataParallel::FullyShard);
        let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
        let batch = tokens(0, 0, 1 + world.rank(), &device);
        Ok(matches!(
            step.step(1e-2, &batch),
            Err(Error::GraphsDiffer { rank: 1 })
        ))
    };
    let told = launch(LaunchConfig::new(2), body).unwrap();
    assert_eq!(told, [true, true]);
    let _ = OperationKind::ALL;
}
