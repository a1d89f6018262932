//! Burn's own training loop, sharded, compared with the same loop on one device.
#![cfg(feature = "train")]

mod adapters;
#[cfg(any(feature = "ndarray", feature = "wgpu"))]
#[path = "../devices/backends.rs"]
mod backends;
mod compiled;
#[cfg(any(feature = "ndarray", feature = "wgpu"))]
mod compiled_devices;
mod compiled_processes;
mod hybrid;
#[path = "../../../collectives/tests/launcher/mod.rs"]
mod launcher;
mod network;
mod older;
mod processes;
#[path = "../beside_burn/runs.rs"]
mod runs;
mod scaled;
mod shards;
#[path = "../../../collectives/tests/skipped/mod.rs"]
mod skipped;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::{Dataset, DatasetError};
use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Lora, Module, ModuleVisitor, Param};
use burn::optim::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::optim::{AdafactorConfig, AdamWConfig, LambConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, EarlyStoppingStrategy, InferenceStep, Interrupter, Learner,
    LearningResult, MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining, TrainStep,
};
use burn_fsdp::train::{FullySharded, Lent};
use burn_fsdp::{Clip, Error, LaunchConfig, ShardPolicy, Strategy};

use network::{BATCH, Digitizer, Digits, Item, Net, items, loader};
use runs::{joined, logged};

fn device() -> Device {
    Device::flex().autodiff()
}

fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new()
        .with_weight_decay(0.1)
        .with_epsilon(1e-3)
        .init()
}

fn rates() -> impl Into<burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler> {
    let config = LinearLrSchedulerConfig::new(3e-2, 1e-2, 12);
    config.init().expect("a schedule")
}

/// A training run of some epochs in a folder, with the metrics of classification.
fn training<M>(
    folder: &Path,
    (trained, validated): (Vec<Item>, Vec<Item>),
    batch: usize,
) -> SupervisedTraining<M>
where
    M: burn::train::LearnerModel
        + TrainStep<Input = Digits, Output = ClassificationOutput>
        + InferenceStep<Input = Digits, Output = ClassificationOutput>,
{
    SupervisedTraining::new(folder, loader(trained, batch), loader(validated, batch))
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_application_logger(None)
        .num_epochs(3)
}

/// Every value of a model, by path.
#[derive(Default)]
struct Values {
    path: Vec<String>,
    of: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Values {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = param.val().into_data().try_to_vec().expect("floats");
        self.of.push((self.path.join("."), values));
    }
}

fn values<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    let mut values = Values::default();
    model.visit(&mut values);
    values.of
}

fn assert_close<M: Module, N: Module>(got: &M, expected: &N, most: f32) {
    let (got, expected) = (values(got), values(expected));
    assert_eq!(got.len(), expected.len());
    assert!(got.len() >= 6);
    for ((path, got), (_, expected)) in got.iter().zip(&expected) {
        assert_eq!(got.len(), expected.len(), "{path}");
        for (i, (a, b)) in got.iter().zip(expected).enumerate() {
            assert!(
                (a - b).abs() <= most * (1.0 + b.abs()),
                "{path}[{i}]: {a} beside {b}"
            );
        }
    }
}

fn sharded(
    folder: &Path,
    data: (Vec<Item>, Vec<Item>),
    ranks: usize,
    change: impl Fn(SupervisedTraining<Lent<Net>>) -> SupervisedTraining<Lent<Net>>,
) -> Result<LearningResult<Net>, Error> {
    by(&on(ranks), Net::new(&device()), folder, data, change)
}

fn on(ranks: usize) -> FullySharded {
    let policy = ShardPolicy::new().units(["conv", "hidden"]);
    FullySharded::new(LaunchConfig::new(ranks)).policy(policy)
}

/// Trains a model by a strategy.
fn by(
    strategy: &FullySharded,
    model: Net,
    folder: &Path,
    data: (Vec<Item>, Vec<Item>),
    change: impl Fn(SupervisedTraining<Lent<Net>>) -> SupervisedTraining<Lent<Net>>,
) -> Result<LearningResult<Net>, Error> {
    let training = change(training(folder, data, BATCH));
    strategy.launch(training, model, optimizer(), rates())
}

/// Trains on one device by Burn's own strategy, on the items that `ranks` ranks have together in each step.
fn plain(
    folder: &Path,
    data: (Vec<Item>, Vec<Item>),
    ranks: usize,
    change: impl Fn(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
) -> LearningResult<Net> {
    plainly(Net::new(&device()), folder, data, ranks, change)
}

/// Trains a model as [`plain`] does.
fn plainly(
    model: Net,
    folder: &Path,
    (trained, validated): (Vec<Item>, Vec<Item>),
    ranks: usize,
    change: impl Fn(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
) -> LearningResult<Net> {
    let data = (
        joined(&trained, ranks, BATCH),
        joined(&validated, ranks, BATCH),
    );
    let training = change(training(folder, data, ranks * BATCH));
    training.launch(Learner::new(model, optimizer(), rates()))
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

#[test]
fn weights_and_metrics_match_one_device() {
    // The cases: divisible; smaller last batches; a rank that runs out; ranks without any validation item.
    for (ranks, trained, validated) in [
        (1, 10, 5),
        (2, 16, 8),
        (2, 22, 7),
        (2, 9, 1),
        (3, 26, 5),
        (4, 33, 3),
    ] {
        let data = (items(trained, 1), items(validated, 2));
        let (ours, burns) = (folder(), folder());
        let result = sharded(ours.path(), data.clone(), ranks, |training| training);
        let result = result.unwrap_or_else(|error| panic!("{error}"));
        assert!(result.error.is_none() && result.interrupted.is_none());
        let expected = plain(burns.path(), data, ranks, |training| training);
        assert_close(&result.model, &expected.model, 1e-5);
        for epoch in 1..=3 {
            for split in ["train", "valid"] {
                let (got, counted) = logged(ours.path(), split, epoch, "Accuracy");
                let (expected, all) = logged(burns.path(), split, epoch, "Accuracy");
                assert_eq!(counted, all, "{ranks} ranks, {split}");
                assert!(
                    (got - expected).abs() < 1e-3,
                    "{split} {epoch}: {got}, {expected}"
                );
            }
        }
        if (ranks, trained) == (2, 16) {
            let (got, _) = logged(ours.path(), "train", 3, "Loss");
            let (expected, _) = logged(burns.path(), "train", 3, "Loss");
            assert!((got - expected).abs() < 1e-5, "{got}, {expected}");
        }
    }
}

#[test]
fn accumulated_gradients_match_one_device() {
    let data = || (items(26, 1), items(4, 2));
    let (ours, burns) = (folder(), folder());
    let result = sharded(ours.path(), data(), 2, |training| {
        training.grads_accumulation(3)
    });
    let result = result.unwrap_or_else(|error| panic!("{error}"));
    let expected = plain(burns.path(), data(), 2, |training| {
        training.grads_accumulation(3)
    });
    assert_close(&result.model, &expected.model, 1e-5);
}

#[test]
fn a_checkpoint_resumes_on_any_number_of_ranks_and_on_one_device() {
    let data = || (items(20, 1), items(6, 2));
    let (ours, burns) = (folder(), folder());
    let through = sharded(ours.path(), data(), 2, |training| training);
    let through = through.unwrap_or_else(|error| panic!("{error}"));
    let first = |folder: &Path| {
        let result = sharded(folder, data(), 2, |training| {
            training.with_default_checkpointers().num_epochs(2)
        });
        result.unwrap_or_else(|error| panic!("{error}"));
    };
    // On two ranks again, to the bit.
    first(burns.path());
    let resumed = sharded(burns.path(), data(), 2, |training| {
        training.with_default_checkpointers().checkpoint(2)
    });
    let resumed = resumed.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(values(&resumed.model), values(&through.model));
    // On one device, by Burn's own strategy.
    let other = folder();
    first(other.path());
    let plain = plain(other.path(), data(), 2, |training| {
        training.with_default_checkpointers().checkpoint(2)
    });
    assert_close(&plain.model, &through.model, 1e-5);
    // From one device to three ranks.
    let (third, fourth) = (folder(), folder());
    let begin = |folder: &Path| {
        self::plain(folder, data(), 3, |training| {
            training.with_default_checkpointers().num_epochs(1)
        });
    };
    begin(third.path());
    begin(fourth.path());
    let got = sharded(third.path(), data(), 3, |training| {
        training.with_default_checkpointers().checkpoint(1)
    });
    let got = got.unwrap_or_else(|error| panic!("{error}"));
    let expected = self::plain(fourth.path(), data(), 3, |training| {
        training.with_default_checkpointers().checkpoint(1)
    });
    assert_close(&got.model, &expected.model, 1e-5);
}

/// Ends after the second epoch, and counts the calls.
#[derive(Clone)]
struct AfterTwo(Arc<AtomicUsize>);

impl EarlyStoppingStrategy for AfterTwo {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed);
        epoch == 2
    }
}

#[test]
fn early_stopping_ends_all_ranks() {
    let asked = Arc::new(AtomicUsize::new(0));
    let at = folder();
    let result = sharded(at.path(), (items(12, 1), items(6, 2)), 3, |training| {
        training.early_stopping(AfterTwo(asked.clone()))
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(asked.load(Ordering::Relaxed), 2);
    assert!(at.path().join("train/epoch-2").is_dir());
    assert!(!at.path().join("train/epoch-3").exists());
    // Burn's own strategy, with a metric of all ranks.
    let at = folder();
    let result = sharded(at.path(), (items(12, 1), items(6, 2)), 2, |training| {
        training
            .num_epochs(40)
            .early_stopping(MetricEarlyStoppingStrategy::new(
                &LossMetric::new(),
                Aggregate::Mean,
                Direction::Highest,
                Split::Train,
                StoppingCondition::NoImprovementSince { n_epochs: 2 },
            ))
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    assert!(!at.path().join("train/epoch-20").exists());
}

/// Interrupts when the tenth item is read, or fails there.
struct Watched {
    items: Vec<Item>,
    read: AtomicUsize,
    interrupter: Option<Interrupter>,
}

impl Dataset<Item> for Watched {
    fn get(&self, index: usize) -> Result<Item, DatasetError> {
        if self.read.fetch_add(1, Ordering::Relaxed) == 10 {
            match &self.interrupter {
                Some(interrupter) => interrupter.stop(Some("enough")),
                None => return Err(DatasetError::new(std::io::Error::other("the disk is gone"))),
            }
        }
        Ok(self.items[index])
    }

    fn len(&self) -> usize {
        self.items.len()
    }
}

fn watched(interrupter: Option<Interrupter>) -> LearningResult<Net> {
    let at = folder();
    let items = items(40, 1);
    let own = interrupter.clone().unwrap_or_default();
    let dataset = Watched {
        items: items.clone(),
        read: AtomicUsize::new(0),
        interrupter,
    };
    let watched = DataLoaderBuilder::new(Digitizer)
        .batch_size(BATCH)
        .build(dataset);
    let training = SupervisedTraining::new(at.path(), watched, loader(items, BATCH))
        .metrics((LossMetric::new(),))
        .with_application_logger(None)
        .with_interrupter(own);
    let result = FullySharded::new(LaunchConfig::new(2)).launch(
        training,
        Net::new(&device()),
        optimizer(),
        1e-2,
    );
    result.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn stopping_one_rank_stops_all() {
    let result = watched(Some(Interrupter::new()));
    let reason = result
        .interrupted
        .and_then(|interrupted| interrupted.reason);
    assert_eq!(reason.as_deref(), Some("enough"));
    let result = watched(None);
    let error = result.error.expect("the loader failed").to_string();
    assert!(error.contains("the disk is gone"), "{error}");
}

#[test]
fn unsupported_settings_are_named_in_the_error() {
    let launch = |sharded: FullySharded, optimizer: ModuleOptimizer| {
        let at = folder();
        let training = training(at.path(), (items(8, 1), items(4, 2)), BATCH);
        let result = sharded.launch(training, Net::new(&device()), optimizer, 1e-2);
        result.err().map(|error| error.to_string())
    };
    let two = || FullySharded::new(LaunchConfig::new(2));
    let clipped = AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
    let refused = launch(two(), clipped.init()).expect("it clips each shard by itself");
    assert!(refused.contains("clip"), "{refused}");
    let policy = ShardPolicy::new().units(["nowhere"]);
    let refused = launch(two().policy(policy), optimizer()).expect("no such unit");
    assert!(refused.contains("nowhere"), "{refused}");
    let policy = ShardPolicy::new().replicate_axis("replicate");
    let refused = launch(two().policy(policy), optimizer()).expect("no such axis");
    assert!(
        refused.contains("`replicate`") && refused.contains("`.replicas(n)`"),
        "{refused}"
    );
    let policy = ShardPolicy::new().ignore(["head"]);
    let refused = launch(two().policy(policy), optimizer()).expect("each rank's own");
    assert!(refused.contains("`head.weight`"), "{refused}");
    let policy = ShardPolicy::new().lora(Lora::new(2, 2.0));
    let refused = launch(two().policy(policy), optimizer()).expect("nobody would save them");
    assert!(refused.contains("LoRA"), "{refused}");
    let refused = launch(FullySharded::new(LaunchConfig::new(0)), optimizer());
    assert!(refused.is_some());
    assert_eq!(launch(two(), optimizer()), None);
    // A model that was returned for inference trains again after `train`.
    let at = folder();
    let again = |model: Net| {
        let training = training(at.path(), (items(8, 1), items(4, 2)), BATCH);
        two().launch(training, model, optimizer(), 1e-2)
    };
    let returned = again(Net::new(&device())).unwrap_or_else(|error| panic!("{error}"));
    let refused = again(returned.model.clone())
        .err()
        .expect("it has no autodiff");
    assert!(refused.to_string().contains("autodiff"), "{refused}");
    let trained = again(returned.model.clone().train());
    let trained = trained.unwrap_or_else(|error| panic!("{error}"));
    assert_ne!(values(&trained.model), values(&returned.model));
}

#[test]
fn an_unresumable_checkpoint_is_rejected_before_the_first_step() {
    let launch = |optimizer: ModuleOptimizer, saves: bool| {
        let at = folder();
        let training = training(at.path(), (items(8, 1), items(4, 2)), BATCH).num_epochs(1);
        let training = if saves {
            training.with_default_checkpointers()
        } else {
            training
        };
        let model = Net::new(&device()).in_bf16();
        let result =
            FullySharded::new(LaunchConfig::new(2)).launch(training, model, optimizer, 1e-2);
        result.err().map(|error| error.to_string())
    };
    let refused = launch(optimizer(), true).expect("its moments would come back in another type");
    for words in ["BF16", "F32", "moment"] {
        assert!(refused.contains(words), "{words}: {refused}");
    }
    // Neither the loop nor the optimizer keeps anything.
    assert_eq!(launch(optimizer(), false), None);
    assert_eq!(launch(SgdConfig::new().init(), true), None);
}

#[test]
fn other_policies_give_the_same_result() {
    let data = || (items(18, 1), items(4, 2));
    let burns = folder();
    let expected = plain(burns.path(), data(), 2, |training| training);
    for policy in [
        ShardPolicy::new().strategy(Strategy::NoShard),
        ShardPolicy::new()
            .strategy(Strategy::ShardGradOp)
            .units(["conv", "head"]),
        ShardPolicy::new().gradient_hook(|_, gradient| gradient),
        ShardPolicy::new()
            .whole_below(30)
            .prefetch(1)
            .units(["hidden"]),
    ] {
        let ours = folder();
        let result = FullySharded::new(LaunchConfig::new(2))
            .policy(policy)
            .launch(
                training(ours.path(), data(), BATCH),
                Net::new(&device()),
                optimizer(),
                rates(),
            );
        let result = result.unwrap_or_else(|error| panic!("{error}"));
        assert_close(&result.model, &expected.model, 1e-5);
    }
}

#[test]
fn gradients_are_clipped_by_the_norm_of_all_ranks() {
    let launch = |clip: Option<f64>| {
        let at = folder();
        let two = FullySharded::new(LaunchConfig::new(2));
        let two = match clip {
            Some(most) => two.clip_grad_norm(Clip::to(most)),
            None => two,
        };
        let training = training(at.path(), (items(16, 1), items(4, 2)), BATCH).num_epochs(1);
        // Without momentum, a step is as long as its gradient.
        let sgd = burn::optim::SgdConfig::new().init();
        let result = two.launch(training, Net::new(&device()), sgd, 1.0);
        values(&result.unwrap_or_else(|error| panic!("{error}")).model)
    };
    let begin = values(&Net::new(&device()));
    let moved = |end: &[(String, Vec<f32>)]| -> f64 {
        let all = begin
            .iter()
            .zip(end)
            .flat_map(|(a, b)| a.1.iter().zip(&b.1));
        all.map(|(a, b)| f64::from(a - b).powi(2))
            .sum::<f64>()
            .sqrt()
    };
    // Two steps of at most 0.01 each.
    let most = moved(&launch(Some(0.01)));
    assert!(most <= 0.0201 && most > 0.01, "{most}");
    assert!(moved(&launch(None)) > 0.05);
}

/// If the optimizer keeps whole tensors, Burn's files of a training run equal those of one device, both ways.
#[test]
fn optimizers_of_whole_tensors_step_only_owned_parameters() {
    let optimizers: [fn() -> ModuleOptimizer; 3] = [
        || AdafactorConfig::new().init(),
        || LambConfig::new().init(),
        || {
            let clipped = AdamWConfig::new().with_epsilon(1e-3);
            clipped
                .with_grad_clipping(Some(GradientClippingConfig::Norm(1e-2)))
                .init()
        },
    ];
    for make in optimizers {
        let ours = |folder: &Path, epochs: usize, from: Option<usize>| {
            let training = training(folder, (items(16, 1), items(4, 2)), BATCH);
            let training = training.with_default_checkpointers().num_epochs(epochs);
            let training = match from {
                Some(epoch) => training.checkpoint(epoch),
                None => training,
            };
            let policy = ShardPolicy::new()
                .units(["conv", "hidden"])
                .one_owner(["**"]);
            let sharded = FullySharded::new(LaunchConfig::new(2)).policy(policy);
            let result = sharded.launch(training, Net::new(&device()), make(), 1e-2);
            result.unwrap_or_else(|error| panic!("{error}")).model
        };
        let burns = |folder: &Path, epochs: usize, from: Option<usize>| {
            let data = (
                joined(&items(16, 1), 2, BATCH),
                joined(&items(4, 2), 2, BATCH),
            );
            let training = training(folder, data, 2 * BATCH);
            let training = training.with_default_checkpointers().num_epochs(epochs);
            let training = match from {
                Some(epoch) => training.checkpoint(epoch),
                None => training,
            };
            training
                .launch(Learner::new(Net::new(&device()), make(), 1e-2))
                .model
        };
        let (at, other) = (folder(), folder());
        let through = burns(folder().path(), 3, None);
        ours(at.path(), 2, None);
        assert_close(&burns(at.path(), 3, Some(2)), &through, 1e-5);
        burns(other.path(), 1, None);
        assert_close(&ours(other.path(), 3, Some(1)), &through, 1e-5);
    }
}
