//! The model of an example in Burn's own loop, on several ranks and on one device.

mod runs;

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::optim::ModuleOptimizer;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::tensor::Device;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, LearnerModel, SupervisedTraining, TrainStep,
};
use burn_fsdp::compile::{self, OptimizerGroups};
use burn_fsdp::train::FullySharded;
use burn_fsdp::{LaunchConfig, ShardPolicy, Strategy};

pub(crate) use runs::joined;

const EPOCHS: usize = 2;
const SEED: u64 = 7;

/// The data, model and settings of an example's training.
pub(crate) struct Example<B, I> {
    pub(crate) batcher: B,
    /// Training items, and held-out items.
    pub(crate) items: (Vec<I>, Vec<I>),
    /// Items of a step, over all ranks.
    pub(crate) batch: usize,
    pub(crate) accumulation: usize,
    pub(crate) optimizer: fn() -> ModuleOptimizer,
    pub(crate) rates: fn() -> ModuleLrScheduler,
    pub(crate) policy: fn() -> ShardPolicy,
}

/// The batches from Burn's loaders.
pub(crate) trait Batch: Clone + Debug + Send + Sync + 'static {}

impl<T: Clone + Debug + Send + Sync + 'static> Batch for T {}

/// The models that Burn's loop trains here.
pub(crate) trait Classifier<T>:
    LearnerModel
    + TrainStep<Input = T, Output = ClassificationOutput>
    + InferenceStep<Input = T, Output = ClassificationOutput>
    + 'static
{
}

impl<T, M> Classifier<T> for M where
    M: LearnerModel
        + TrainStep<Input = T, Output = ClassificationOutput>
        + InferenceStep<Input = T, Output = ClassificationOutput>
        + 'static
{
}

/// The functions that create a model and compute a batch's output.
pub(crate) type Closures<M, T> = (fn(&Device) -> M, fn(&M, T) -> ClassificationOutput);

/// The means of loss and accuracy in each epoch, first on the training items, then on the held-out items.
pub(crate) type Metrics = Vec<(&'static str, usize, [f64; 2])>;

impl<B: Clone, I: Clone + Send + Sync + Debug + 'static> Example<B, I> {
    fn training<T, M>(
        &self,
        folder: &Path,
        (items, held_out): (Vec<I>, Vec<I>),
        batch: usize,
    ) -> SupervisedTraining<M>
    where
        T: Batch,
        B: Batcher<I, T> + 'static,
        M: Classifier<T>,
    {
        let loader = |items: Vec<I>| -> Arc<dyn DataLoader<T>> {
            let builder = DataLoaderBuilder::new(self.batcher.clone()).batch_size(batch);
            builder.build(InMemDataset::new(items))
        };
        SupervisedTraining::new(folder, loader(items), loader(held_out))
            .metrics((AccuracyMetric::new(), LossMetric::new()))
            .with_application_logger(None)
            .grads_accumulation(self.accumulation)
            .num_epochs(EPOCHS)
    }

    /// Trains a model on each of these numbers of ranks, and asserts that the metrics equal plain Burn's.
    pub(crate) fn assert_as_by_burn<T, M>(&self, new: impl Fn(&Device) -> M, ranks: &[usize])
    where
        T: Batch,
        B: Batcher<I, T> + 'static,
        M: Classifier<T>,
    {
        for &ranks in ranks {
            let expected = self.by_burn(seeded(&new), ranks);
            assert_equal(&self.on_ranks(seeded(&new), ranks), &expected);
        }
    }

    /// Trains a model on some ranks; each takes its part of every step.
    pub(crate) fn on_ranks<T, M>(&self, model: M, ranks: usize) -> Metrics
    where
        T: Batch,
        B: Batcher<I, T> + 'static,
        M: Classifier<T>,
    {
        let folder = tempfile::tempdir().expect("a folder");
        let training = self.training(folder.path(), self.items.clone(), self.batch / ranks);
        FullySharded::new(LaunchConfig::new(ranks))
            .policy((self.policy)())
            .launch(training, model, (self.optimizer)(), (self.rates)())
            .unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
        metrics(folder.path())
    }

    /// Trains a model by compiled steps on each of these numbers of ranks, and asserts that the metrics equal plain
    /// Burn's.
    pub(crate) fn assert_compiled_as_by_burn<T, M>(
        &self,
        model: Closures<M, T>,
        optimizer: fn() -> OptimizerGroups,
        ranks: &[usize],
    ) where
        T: Batch + compile::Batch,
        B: Batcher<I, T> + 'static,
        M: Classifier<T>,
    {
        for &ranks in ranks {
            let expected = self.by_burn(seeded(model.0), ranks);
            assert_equal(&self.compiled(model, optimizer, ranks), &expected);
        }
    }

    /// Trains a model by compiled steps on some ranks; each takes its part of every step.
    pub(crate) fn compiled<T, M>(
        &self,
        (new, forward): Closures<M, T>,
        optimizer: fn() -> OptimizerGroups,
        ranks: usize,
    ) -> Metrics
    where
        T: Batch + compile::Batch,
        B: Batcher<I, T> + 'static,
        M: Classifier<T>,
    {
        let folder = tempfile::tempdir().expect("a folder");
        let training = self.training(folder.path(), self.items.clone(), self.batch / ranks);
        // Rank 0 draws the initial values.
        Device::flex().seed(SEED);
        let closures = (
            move |device: &Device| new(device),
            move |model: &M, batch| forward(model, batch),
        );
        let style = (Strategy::FullShard, Default::default());
        FullySharded::new(LaunchConfig::new(ranks))
            .launch_compiled(training, closures, (optimizer(), (self.rates)()), style)
            .unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
        metrics(folder.path())
    }

    /// Trains a model with plain Burn on one device, on the items that `ranks` ranks have together in each
    /// step.
    fn by_burn<T, M>(&self, model: M, ranks: usize) -> Metrics
    where
        T: Batch,
        B: Batcher<I, T> + 'static,
        M: Classifier<T>,
    {
        let folder = tempfile::tempdir().expect("a folder");
        let order = |items: &[I]| joined(items, ranks, self.batch / ranks);
        let items = (order(&self.items.0), order(&self.items.1));
        self.training(folder.path(), items, self.batch)
            .launch(Learner::new(model, (self.optimizer)(), (self.rates)()));
        metrics(folder.path())
    }
}

/// The largest difference of a metric, relative to one and itself.
const MOST: f64 = 1e-4;

/// Returns a model with the same initial values each time.
pub(crate) fn seeded<M>(new: impl Fn(&Device) -> M) -> M {
    let device = Device::flex().autodiff();
    device.seed(SEED);
    new(&device)
}

/// Asserts that two training runs have measured the same metrics.
pub(crate) fn assert_equal(got: &Metrics, expected: &Metrics) {
    for ((split, epoch, got), (_, _, expected)) in got.iter().zip(expected) {
        println!("{split} {epoch}: {got:?}, one device {expected:?}");
        let is_close = |(a, b): (&f64, &f64)| (a - b).abs() <= MOST * (1.0 + b.abs());
        assert!(
            got.iter().zip(expected).all(is_close),
            "{split} {epoch}: {got:?}, one device {expected:?}"
        );
    }
    assert_eq!(got.len(), expected.len());
}

fn metrics(folder: &Path) -> Metrics {
    let epochs = ["train", "valid"].map(|split| (1..=EPOCHS).map(move |epoch| (split, epoch)));
    let epochs = epochs.into_iter().flatten().map(|(split, epoch)| {
        let of = |metric| runs::logged(folder, split, epoch, metric).0;
        (split, epoch, [of("Loss"), of("Accuracy")])
    });
    epochs.collect()
}
