//! Steps that ranks refuse together, and the steps after them.

use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{Error, Mode, Strategy, compile};

use crate::compiled::seeded;

/// Ranks run in the next step the graph that they traced for a refused step, whatever the learning rate is.
#[test]
fn a_run_continues_with_another_learning_rate_after_a_rejected_step() {
    let _guard = seeded();
    // Rates and rows of either rank.
    const PLAN: [[(f64, usize); 2]; 6] = [
        [(0.1, 4), (0.1, 5)],
        [(0.09, 4), (0.09, 4)],
        [(0.08, 4), (0.07, 4)],
        [(0.07, 4), (0.07, 4)],
        [(0.06, 3), (0.06, 4)],
        [(0.05, 3), (0.05, 3)],
    ];
    for place in [OptimizerPlace::InBackward, OptimizerPlace::InNextForward] {
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let rank = world.rank();
            let init = |device: &Device| LinearConfig::new(8, 4).init(device);
            let loss = |model: &Linear, x: Tensor<2>| model.forward(x).square().mean();
            let mode = Mode::data_parallel(world, Strategy::FullShard);
            let mode = mode.options(Options::default().optimizer(place));
            let mut step = compile(init, loss, AdamWConfig::new().build(), mode)?;
            let steps = PLAN.iter().map(|of| {
                let (rate, rows) = of[rank];
                let batch = Tensor::<2>::ones([rows, 8], &Device::flex());
                step.step(rate, &batch).map(|_| ())
            });
            Ok(steps.collect::<Vec<_>>())
        };
        for results in launch(LaunchConfig::new(2), body).unwrap() {
            for (result, [first, second]) in results.iter().zip(PLAN) {
                if first == second {
                    assert!(result.is_ok(), "{place:?}: {result:?}")
                } else {
                    assert!(
                        matches!(result, Err(Error::GraphsDiffer { .. })),
                        "{place:?}: {result:?}"
                    )
                }
            }
        }
    }
}

/// Graphs contain no numbers of the optimizer, but ranks compare these in every step.
#[test]
fn optimizers_of_other_settings_are_refused() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let beta = if world.rank() == 0 { 0.9 } else { 0.8 };
        let init = |device: &Device| LinearConfig::new(8, 4).init(device);
        let loss = |model: &Linear, x: Tensor<2>| model.forward(x).square().mean();
        let mode = Mode::data_parallel(world, Strategy::FullShard);
        let optimizer = AdamWConfig::new().with_beta_1(beta).build();
        let mut step = compile(init, loss, optimizer, mode)?;
        let batch = Tensor::<2>::ones([4, 8], &Device::flex());
        let batches = [batch.clone(), batch.clone()];
        Ok([step.step(0.1, &batch), step.step_accumulated(0.1, &batches)])
    };
    for results in launch(LaunchConfig::new(2), body).unwrap() {
        for result in results {
            let is_refused = matches!(result, Err(Error::GraphsDiffer { .. }));
            assert!(is_refused, "{result:?}");
        }
    }
}
