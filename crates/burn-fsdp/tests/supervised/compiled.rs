//! Compiled steps, in Burn's own loop.

use std::path::Path;

use burn::module::Module;
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::Device;
use burn::train::{Learner, LearningResult, SupervisedTraining};
use burn_fsdp::train::{FullySharded, Lent};
use burn_fsdp::{Clip, Error, LaunchConfig, LossScaler, ShardPolicy, Strategy};

use super::network::{BATCH, Item, Net, Normalised, Ordered, items};
use super::runs::{joined, logged};
use super::{assert_close, device, folder, plain, rates, sharded, training, values};

/// Trains by compiled steps.
pub(crate) fn compiled(
    strategy: &FullySharded,
    style: Strategy,
    folder: &Path,
    data: (Vec<Item>, Vec<Item>),
    change: impl Fn(SupervisedTraining<Lent<Net>>) -> SupervisedTraining<Lent<Net>>,
) -> Result<LearningResult<Net>, Error> {
    let optimizer = AdamWConfig::new().with_weight_decay(0.1).with_epsilon(1e-3);
    strategy.launch_compiled(
        change(training(folder, data, BATCH)),
        (Net::on, Net::classify),
        (optimizer.build(), rates()),
        (style, Default::default()),
    )
}

fn on(ranks: usize) -> FullySharded {
    FullySharded::new(LaunchConfig::new(ranks))
}

#[test]
fn compiled_steps_match_one_device() {
    use Strategy::{FullShard, NoShard, ShardGradOp};
    for (ranks, replicas, style, trained, validated) in [
        (1, 1, NoShard, 10, 5),
        (2, 1, FullShard, 20, 6),
        (2, 1, NoShard, 16, 8),
        (3, 1, ShardGradOp, 27, 3),
        (4, 2, FullShard, 32, 4),
    ] {
        let data = (items(trained, 1), items(validated, 2));
        let (ours, burns) = (folder(), folder());
        let strategy = on(ranks).replicas(replicas);
        let got = compiled(&strategy, style, ours.path(), data.clone(), |it| it);
        let got = got.unwrap_or_else(|error| panic!("{error}"));
        assert!(got.error.is_none() && got.interrupted.is_none());
        let want = plain(burns.path(), data, ranks, |it| it);
        assert_close(&got.model, &want.model, 1e-5);
        for epoch in 1..=3 {
            for split in ["train", "valid"] {
                let (got, counted) = logged(ours.path(), split, epoch, "Accuracy");
                let (want, all) = logged(burns.path(), split, epoch, "Accuracy");
                assert_eq!(counted, all, "{ranks} ranks, {split}");
                assert!((got - want).abs() < 1e-3, "{split} {epoch}: {got}, {want}");
            }
        }
        if trained == 16 {
            let (got, _) = logged(ours.path(), "train", 3, "Loss");
            let (want, _) = logged(burns.path(), "train", 3, "Loss");
            assert!((got - want).abs() < 1e-5, "{got}, {want}");
        }
    }
}

/// The last step of an epoch has one batch only, which is smaller.
#[test]
fn accumulated_compiled_steps_match_one_device() {
    let data = || (items(30, 1), items(4, 2));
    let (ours, burns) = (folder(), folder());
    let got = compiled(&on(2), Strategy::FullShard, ours.path(), data(), |it| {
        it.grads_accumulation(3)
    });
    let got = got.unwrap_or_else(|error| panic!("{error}"));
    let want = plain(burns.path(), data(), 2, |it| it.grads_accumulation(3));
    assert_close(&got.model, &want.model, 1e-5);
    for (split, epoch) in [("train", 1), ("train", 3), ("valid", 2)] {
        let (got, counted) = logged(ours.path(), split, epoch, "Accuracy");
        let (want, all) = logged(burns.path(), split, epoch, "Accuracy");
        assert_eq!(counted, all, "{split} {epoch}");
        assert!((got - want).abs() < 1e-3, "{split} {epoch}: {got}, {want}");
    }
}

#[test]
fn checkpoints_move_between_compiled_steps_the_eager_engine_and_burn() {
    let data = || (items(20, 1), items(6, 2));
    let by_compiled =
        |folder: &Path,
         ranks: usize,
         change: fn(SupervisedTraining<Lent<Net>>) -> SupervisedTraining<Lent<Net>>| {
            let result = compiled(&on(ranks), Strategy::FullShard, folder, data(), change);
            result.unwrap_or_else(|error| panic!("{error}")).model
        };
    let through = folder();
    let through = by_compiled(through.path(), 2, |it| it);
    let begun = || {
        let at = folder();
        by_compiled(at.path(), 2, |it| {
            it.with_default_checkpointers().num_epochs(2)
        });
        at
    };
    // By compiled steps again, to the bit.
    let resumed = by_compiled(begun().path(), 2, |it| {
        it.with_default_checkpointers().checkpoint(2)
    });
    assert_eq!(values(&resumed), values(&through));
    // By the eager engine, and by Burn alone.
    let at = begun();
    let eager = sharded(at.path(), data(), 2, |it| {
        it.with_default_checkpointers().checkpoint(2)
    });
    let eager = eager.unwrap_or_else(|error| panic!("{error}"));
    assert_close(&eager.model, &through, 1e-5);
    let at = begun();
    let burns = plain(at.path(), data(), 2, |it| {
        it.with_default_checkpointers().checkpoint(2)
    });
    assert_close(&burns.model, &through, 1e-5);
    // From Burn alone to four ranks.
    let (first, second) = (folder(), folder());
    for at in [&first, &second] {
        plain(at.path(), (items(20, 1), items(4, 2)), 4, |it| {
            it.with_default_checkpointers().num_epochs(1)
        });
    }
    let got = compiled(
        &on(4).replicas(2),
        Strategy::FullShard,
        first.path(),
        (items(20, 1), items(4, 2)),
        |it| it.with_default_checkpointers().checkpoint(1),
    );
    let got = got.unwrap_or_else(|error| panic!("{error}"));
    let want = plain(second.path(), (items(20, 1), items(4, 2)), 4, |it| {
        it.with_default_checkpointers().checkpoint(1)
    });
    assert_close(&got.model, &want.model, 1e-5);
}

#[test]
fn what_compiled_steps_lack_is_refused() {
    let refused = |strategy: FullySharded, data| {
        let at = folder();
        let refused = compiled(&strategy, Strategy::FullShard, at.path(), data, |it| it);
        refused.err().expect("refused").to_string()
    };
    let even = || (items(8, 1), items(4, 2));
    let scaler = LossScaler::default();
    for (strategy, words) in [
        (on(2).policy(ShardPolicy::new()), "`FullySharded::policy`"),
        (on(2).clip_grad_norm(Clip::to(1.0)), "`Options::clip`"),
        (on(2).loss_scaler(scaler), "`Options::loss_scaling`"),
        (
            on(2).devices([Device::flex().autodiff()]),
            "`launch_compiled_on`",
        ),
        (on(4).replicas(3), "`FullySharded::replicas(3)`"),
        (on(2).replicas(0), "`FullySharded::replicas(0)`"),
    ] {
        let message = refused(strategy, even());
        assert!(message.contains(words), "{message}");
    }
    let message = refused(on(2), (items(9, 1), items(4, 2)));
    assert!(
        message.contains("9 items") && message.contains("training"),
        "{message}"
    );
    let message = refused(on(2), (items(8, 1), items(3, 2)));
    assert!(
        message.contains("3 items") && message.contains("validation"),
        "{message}"
    );
}

/// Running statistics are part of the step, of its checkpoints and of the result.
#[test]
fn running_statistics_match_one_device() {
    let data = |ranks: usize| (items(20 * ranks, 1), items(6 * ranks, 2));
    let trained = |ranks: usize,
                   folder: &Path,
                   change: fn(
        SupervisedTraining<Lent<Normalised>>,
    ) -> SupervisedTraining<Lent<Normalised>>| {
        let result = on(ranks).launch_compiled(
            change(training(folder, data(ranks), BATCH)),
            (Normalised::on, Normalised::classify),
            (SgdConfig::new().build(), 1e-2),
            (Strategy::FullShard, Default::default()),
        );
        result.unwrap_or_else(|error| panic!("{error}")).model
    };
    let at = folder();
    let want = training::<Normalised>(at.path(), data(1), BATCH).launch(Learner::new(
        Normalised::on(&device()),
        SgdConfig::new().init(),
        1e-2,
    ));
    for ranks in 1..=3 {
        let at = folder();
        let through = trained(ranks, at.path(), |it| it);
        if ranks == 1 {
            assert_close(&through, &want.model, 1e-5);
        }
        assert!(through.devices().iter().all(|device| !device.is_autodiff()));
        let at = folder();
        trained(ranks, at.path(), |it| {
            it.with_default_checkpointers().num_epochs(2)
        });
        let resumed = trained(ranks, at.path(), |it| {
            it.with_default_checkpointers().checkpoint(2)
        });
        assert_eq!(values(&resumed), values(&through), "{ranks} ranks");
    }
}

/// Integers and booleans are part of the step, of its checkpoints and of the result.
#[test]
fn integers_and_booleans_are_those_of_the_model() {
    let data = || (items(24, 1), items(4, 2));
    let trained = |first: i32, at: &Path, epochs: usize, from: Option<usize>| {
        let training = training(at, data(), BATCH).with_default_checkpointers();
        let training = training.num_epochs(epochs);
        on(2).launch_compiled(
            match from {
                Some(epoch) => training.checkpoint(epoch),
                None => training,
            },
            (
                move |device: &Device| Ordered::on(first, device),
                Ordered::classify,
            ),
            (SgdConfig::new().build(), 1e-1),
            (Strategy::FullShard, Default::default()),
        )
    };
    let joined = || (joined(&data().0, 2, BATCH), joined(&data().1, 2, BATCH));
    let plainly = |at: &Path, epochs: usize, from: Option<usize>| {
        let learner = Learner::new(Ordered::on(1, &device()), SgdConfig::new().init(), 1e-1);
        let training = training::<Ordered>(at, joined(), 2 * BATCH).with_default_checkpointers();
        let training = training.num_epochs(epochs);
        let training = match from {
            Some(epoch) => training.checkpoint(epoch),
            None => training,
        };
        training.launch(learner).model
    };
    let (at, plain) = (folder(), folder());
    let got = trained(1, at.path(), 1, None).unwrap_or_else(|error| panic!("{error}"));
    assert_close(&got.model, &plainly(plain.path(), 1, None), 1e-5);
    // Another order of the outputs trains otherwise.
    let other = trained(2, folder().path(), 1, None).unwrap_or_else(|error| panic!("{error}"));
    assert_ne!(values(&other.model), values(&got.model));
    // A resumed run has the order of its checkpoint, like Burn's, whatever the model was created with.
    for from in [&at, &plain] {
        let resumed = trained(2, from.path(), 2, Some(1));
        let resumed = resumed.unwrap_or_else(|error| panic!("{error}"));
        assert!(resumed.error.is_none(), "{:?}", resumed.error);
        let want = plainly(plain.path(), 2, Some(1));
        assert_close(&resumed.model, &want, 1e-5);
        assert_eq!(resumed.model.order(), [1, 2, 0]);
    }
}

/// Burn reads the states of a model of 16 bits in 32, which compiled steps convert back.
#[test]
fn models_of_16_bits_are_resumed() {
    let data = || (items(16, 1), items(4, 2));
    let trained =
        |at: &Path,
         ranks: usize,
         change: fn(SupervisedTraining<Lent<Net>>) -> SupervisedTraining<Lent<Net>>| {
            let result = on(ranks).launch_compiled(
                change(training(at, data(), BATCH)).with_default_checkpointers(),
                (|device: &Device| Net::on(device).in_bf16(), Net::classify),
                (AdamWConfig::new().build(), 1e-2),
                (Strategy::FullShard, Default::default()),
            );
            values_of_16_bits(&result.unwrap_or_else(|error| panic!("{error}")).model)
        };
    let (at, whole) = (folder(), folder());
    let through = trained(whole.path(), 2, |it| it);
    trained(at.path(), 2, |it| it.num_epochs(1));
    assert_eq!(trained(at.path(), 2, |it| it.checkpoint(1)), through);
    let first = folder();
    trained(first.path(), 1, |it| it.num_epochs(1));
    assert!(trained(first.path(), 2, |it| it.checkpoint(1)).len() >= 6);
}

fn values_of_16_bits(model: &Net) -> Vec<(String, Vec<f32>)> {
    struct Widened;
    impl burn::module::ModuleMapper for Widened {
        fn map_float<const D: usize>(
            &mut self,
            param: burn::module::Param<burn::tensor::Tensor<D>>,
        ) -> burn::module::Param<burn::tensor::Tensor<D>> {
            param.map(|value| {
                assert_eq!(value.dtype(), burn::tensor::DType::BF16);
                value.cast(burn::tensor::FloatDType::F32)
            })
        }
    }
    values(&model.clone().map(&mut Widened))
}
