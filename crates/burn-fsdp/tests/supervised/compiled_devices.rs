//! Compiled steps in Burn's loop, on backends other than Flex. `ci/gpu.sh` runs the same test on wgpu.

use std::path::Path;

use burn::module::Module;
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::Device;
use burn::train::{Learner, LearningResult, SupervisedTraining};
use burn_fsdp::train::{FullySharded, Lent};
use burn_fsdp::{LaunchConfig, Strategy};

use crate::backends::Tested;
use crate::compiled::compiled;
use crate::network::{BATCH, Net, Ordered, items};
use crate::processes::done;
use crate::{assert_close, folder, logged, plain, plainly, rates, training};

/// Trains by compiled steps on a backend.
fn on<B: Tested>(
    strategy: &FullySharded,
    folder: &Path,
    data: usize,
    change: impl Fn(SupervisedTraining<Lent<Net>>) -> SupervisedTraining<Lent<Net>>,
) -> LearningResult<Net> {
    let optimizer = AdamWConfig::new().with_weight_decay(0.1).with_epsilon(1e-3);
    let data = (items(data, 1), items(4, 2));
    done(strategy.launch_compiled_on::<B, _, _, _>(
        change(training(folder, data, BATCH)),
        (Net::on, Net::classify),
        (optimizer.build(), rates()),
        (Strategy::FullShard, Default::default()),
        |_| (B::device(), B::own()),
    ))
}

/// The weights and metrics are those of Burn on one device of the backend. (The backends differ by more among each other.)
fn match_one_device<B: Tested>() {
    for (ranks, accumulation, replicas) in [(1, 1, 1), (2, 2, 1), (4, 1, 2)] {
        let trained = 8 * ranks + 4;
        let (ours, burns) = (folder(), folder());
        let strategy = FullySharded::new(LaunchConfig::new(ranks)).replicas(replicas);
        let got = on::<B>(&strategy, ours.path(), trained, |it| {
            it.grads_accumulation(accumulation)
        });
        assert!(got.error.is_none());
        let data = (items(trained, 1), items(4, 2));
        let model = Net::new(&B::device().autodiff());
        let want = plainly(model, burns.path(), data, ranks, |it| {
            it.grads_accumulation(accumulation)
        });
        assert_close(&got.model, &want.model, B::TOLERANCE);
        let devices = got.model.devices();
        assert!(devices.iter().all(|device| *device == Device::flex()));
        for split in ["train", "valid"] {
            let (got, counted) = logged(ours.path(), split, 3, "Accuracy");
            let (want, all) = logged(burns.path(), split, 3, "Accuracy");
            assert_eq!(counted, all, "{ranks} ranks");
            assert!((got - want).abs() < 1e-3, "{got}, {want}");
        }
    }
}

/// Integers and booleans of the model move to the backend, whose types for them differ.
fn have_integers_and_booleans<B: Tested>() {
    let (ours, burns) = (folder(), folder());
    let data = || (items(8, 1), items(4, 2));
    let result = FullySharded::new(LaunchConfig::new(1)).launch_compiled_on::<B, _, _, _>(
        training(ours.path(), data(), BATCH),
        (|device: &Device| Ordered::on(1, device), Ordered::classify),
        (SgdConfig::new().build(), 1e-1),
        (Strategy::FullShard, Default::default()),
        |_| (B::device(), B::own()),
    );
    let device = B::device().autodiff();
    let learner = Learner::new(Ordered::on(1, &device), SgdConfig::new().init(), 1e-1);
    let want = training::<Ordered>(burns.path(), data(), BATCH).launch(learner);
    assert_close(&done(result).model, &want.model, B::TOLERANCE);
}

/// A training run moves from the backend to the CPU, and back.
fn move_by_checkpoints<B: Tested>() {
    let (first, plainly) = (folder(), folder());
    let two = FullySharded::new(LaunchConfig::new(2));
    on::<B>(&two, first.path(), 20, |it| {
        it.with_default_checkpointers().num_epochs(1)
    });
    let data = || (items(20, 1), items(4, 2));
    let strategy = FullySharded::new(LaunchConfig::new(4));
    done(compiled(
        &strategy,
        Strategy::ShardGradOp,
        first.path(),
        data(),
        |it| it.with_default_checkpointers().checkpoint(1).num_epochs(2),
    ));
    let got = on::<B>(&two, first.path(), 20, |it| {
        it.with_default_checkpointers().checkpoint(2)
    });
    // Four ranks make other steps than two.
    plain(plainly.path(), data(), 2, |it| {
        it.with_default_checkpointers().num_epochs(1)
    });
    plain(plainly.path(), data(), 4, |it| {
        it.with_default_checkpointers().checkpoint(1).num_epochs(2)
    });
    let want = plain(plainly.path(), data(), 2, |it| {
        it.with_default_checkpointers().checkpoint(2)
    });
    assert_close(&got.model, &want.model, 10.0 * B::TOLERANCE);
}

/// Runs the tests on one backend.
macro_rules! on {
    ($name:ident, $backend:ty) => {
        mod $name {
            #[test]
            fn compiled_steps_match_one_device() {
                super::match_one_device::<$backend>();
            }

            #[test]
            fn integers_and_booleans_are_those_of_the_model() {
                super::have_integers_and_booleans::<$backend>();
            }

            #[test]
            fn training_runs_move_by_checkpoints() {
                super::move_by_checkpoints::<$backend>();
            }
        }
    };
}

#[cfg(feature = "ndarray")]
on!(ndarray, crate::backends::NdArray);
#[cfg(feature = "wgpu")]
on!(wgpu, burn::backend::Cube);
