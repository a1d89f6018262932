//! The strategy as users call it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use burn::optim::ModuleOptimizer;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::tensor::Device;
use burn::train::logger::InMemoryMetricLogger;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    InferenceStep, Learner, LearnerModel, LearningResult, SupervisedTraining, TrainStep,
    TrainingStrategy,
};
use burn_fsdp_collectives::{LaunchConfig, LaunchError, ProcessGroup, processes};
use burn_fsdp_shard::{BufferSync, Clip, ShardPolicy, sync_buffers, unsharded};

use crate::error::Error;
use crate::train::lent::Lent;
use crate::train::lock::held;
use crate::train::outputs::Codecs;
use crate::train::portable::Portable;
use crate::train::settings::Settings;
use crate::train::strategy::{Ending, Left, Process, Silently, Strategy};

/// Fully sharded training by Burn's own loop: a strategy for
/// [`SupervisedTraining`](burn::train::SupervisedTraining), with ranks that are threads of this process, or
/// [processes](Self::launch_among_processes).
///
/// One line of a program changes: where it says `training.launch(Learner::new(model, optimizer, rates))`, it says
/// `FullySharded::new(LaunchConfig::new(2)).launch(training, model, optimizer, rates)?`. Everything else of
/// [`SupervisedTraining`](burn::train::SupervisedTraining) stays: its metrics are those of the rows of all ranks, its
/// dashboard is one, early stopping and interruption end all ranks after the same step, and its checkpoints are
/// those of a training on one device, from which any number of ranks, or none of ours, goes on.
///
/// # Data
///
/// Each rank takes a part of the loaders' items, as Burn's distributed training does it: neighbours, so that a step
/// is over as many items as there are ranks times a batch. Where the items do not divide, the ranks that have run out go
/// through a batch again whose rows count for nothing, and gradients are averaged by the number of items that the loaders
/// have read for them: a step is the mean over its items, if the loss is the mean over its batch. (A batch strategy of
/// one's own that holds items back is counted by what it reads, not by what it gives.) Validation is divided, too, and
/// every item is counted once. A metric that counts batches and not rows, as Burn's `LossMetric`, counts each rank's.
///
/// # What is different
///
/// - The optimizer has to work element by element, or the policy to give parameters to
///   [one owner](ShardPolicy::one_owner), or the training is refused; for clipping by the norm of all gradients there is
///   [`clip_grad_norm`](Self::clip_grad_norm), over the gradients of all ranks.
/// - `gradient_checkpointing` of the training has no effect: build the model on a device with
///   `.autodiff().gradient_checkpointing()`, without which full weights stay alive for backward.
/// - Running statistics (batch normalization) are each rank's own, of its rows; those of rank 0 are saved and returned.
/// - A policy that ignores trained modules is refused: they would be each rank's own.
/// - A loss has to come from the model's parameters on every rank: a rank whose step skips the model lets the others wait.
/// - Metrics that join the outputs of all steps (AUROC) want them on one device.
/// - Checkpointers of one's own that look into records hold what they read: what they get is read when it is asked for.
/// - Outputs of a step are values of any type, which do not travel between processes: where the program was started by
///   `mpirun`, [`launch`](Self::launch) is refused, and [`launch_among_processes`](Self::launch_among_processes) is the way.
///
/// # Memory
///
/// No process holds the whole model: a rank has its shards of parameters, gradients and optimizer state, and what the eager engine
/// has around their use. Parameters of a model that Burn has not initialized yet (as `LinearConfig::init` returns them) are
/// initialized one at a time on rank 0, and divided; of a model that is initialized the values go as they are divided, if the
/// program has no clone of it. Checkpoints are Burn's own files of the whole model and optimizer, from which any number of ranks goes
/// on, and Burn without sharding: tensor by tensor rank 0 gathers them into files of a [scratch](Self::scratch) folder, from which
/// Burn's checkpointers write, and tensor by tensor it reads and divides them when a training resumes. So rank 0 holds one whole
/// parameter, or the state of one, a few times for a moment. (This is so on the CPU backend. Where the program's default device is
/// another, a checkpoint is read there whole.)
///
/// [`launch`](Self::launch) and [`launch_among_processes`](Self::launch_among_processes) return the whole model: on the ranks that
/// get it it is whole when the training ends. [`launch_sharded`](Self::launch_sharded) hands each rank's shards to a function of
/// yours instead, and never has more.
///
/// ```
/// use std::sync::Arc;
///
/// use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
/// use burn::data::dataset::InMemDataset;
/// use burn::module::Module;
/// use burn::nn::loss::{MseLoss, Reduction};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn::train::metric::LossMetric;
/// use burn::train::{InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
/// use burn_fsdp::train::FullySharded;
/// use burn_fsdp::{LaunchConfig, ShardPolicy};
///
/// #[derive(Module, Debug)]
/// struct Net {
///     first: Linear,
///     second: Linear,
/// }
///
/// impl Net {
///     fn forward(&self, batch: Tensor<2>) -> RegressionOutput {
///         let output = self.second.forward(self.first.forward(batch.clone()).tanh());
///         let loss = MseLoss::new().forward(output.clone(), batch.clone(), Reduction::Mean);
///         RegressionOutput { loss, output, targets: batch }
///     }
/// }
///
/// impl TrainStep for Net {
///     type Input = Tensor<2>;
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
///         let output = self.forward(batch);
///         TrainOutput::new(self, output.loss.backward(), output)
///     }
/// }
///
/// impl InferenceStep for Net {
///     type Input = Tensor<2>;
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Tensor<2>) -> RegressionOutput {
///         self.forward(batch)
///     }
/// }
///
/// #[derive(Clone)]
/// struct Rows;
///
/// impl Batcher<[f32; 4], Tensor<2>> for Rows {
///     fn batch(&self, rows: Vec<[f32; 4]>, device: &Device) -> Tensor<2> {
///         let rows = rows.into_iter().map(|row| Tensor::<1>::from_floats(row, device));
///         Tensor::stack(rows.collect(), 0)
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let rows = (0..20).map(|i| [0, 1, 2, 3].map(|j| ((i * 7 + j * 3) % 11) as f32 / 11.0));
/// let loader = DataLoaderBuilder::new(Rows).batch_size(4).build(InMemDataset::new(rows.collect()));
/// let model = Net {
///     first: LinearConfig::new(4, 8).init(&device),
///     second: LinearConfig::new(8, 4).init(&device),
/// };
/// let folder = tempfile::tempdir()?;
/// let training = SupervisedTraining::new(folder.path(), loader.clone(), loader)
///     .metric_train_numeric(LossMetric::new())
///     .metric_valid_numeric(LossMetric::new())
/// #   .renderer(Box::new(burn::train::renderer::CliMetricsRenderer::new()))
///     .num_epochs(2);
/// // Before: let result = training.launch(Learner::new(model, AdamWConfig::new().init(), 1e-2));
/// let result = FullySharded::new(LaunchConfig::new(2))
///     .policy(ShardPolicy::new().units(["first", "second"]))
///     .launch(training, model, AdamWConfig::new().init(), 1e-2)?;
/// assert!(result.error.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct FullySharded(Settings);

impl FullySharded {
    /// Returns the strategy with these ranks, the default policy, and no clipping. All ranks compute on the
    /// device of the model.
    pub fn new(ranks: LaunchConfig) -> Self {
        Self(Settings {
            ranks,
            policy: ShardPolicy::new(),
            clip: None,
            devices: Vec::new(),
            scratch: None,
        })
    }

    /// Sets what is a unit, and the rest of what is said of sharding. A mesh of one axis is all there is: a policy with
    /// a replicate axis is refused.
    #[must_use]
    pub fn policy(mut self, policy: ShardPolicy) -> Self {
        self.0.policy = policy;
        self
    }

    /// Clips the gradients of each step by their norm over all ranks.
    #[must_use]
    pub fn clip_grad_norm(mut self, clip: Clip) -> Self {
        self.0.clip = Some(clip);
        self
    }

    /// Sets the devices: rank `i` computes on the `i`th one, and from the first one again where there are fewer than ranks.
    #[must_use]
    pub fn devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.0.devices = devices.into_iter().collect();
        self
    }

    /// Sets the folder for files that are there while a checkpoint is written or read: on rank 0 the whole model and its
    /// optimizer's state, of the checkpoint that is written and of the one before (for a moment the model once more, before its
    /// optimizer's state is there), and when a training resumes each rank's part of the state. By default it is what `TMPDIR`
    /// names, or `/var/tmp`; not a folder that is kept in memory, or they are in memory after all.
    #[must_use]
    pub fn scratch(mut self, folder: impl Into<PathBuf>) -> Self {
        self.0.scratch = Some(folder.into());
        self
    }

    /// Trains `model`, in place of `training.launch(Learner::new(model, optimizer, rates))`. All ranks start from
    /// its values, or from the checkpoint that `training` names. Returns what Burn's loop does, with the whole model, which rank 0
    /// puts together at the end; [`launch_sharded`](Self::launch_sharded) is for those that do not fit.
    ///
    /// Called once, by the program; the ranks are started here, and have ended when it returns.
    ///
    /// # Errors
    ///
    /// A rank that failed; an optimizer that works with whole tensors where parameters are cut; a policy that does not fit
    /// the model; ranks that are processes. What ends Burn's own loop (a loader, a metric, a file) is in
    /// [`LearningResult::error`](burn::train::LearningResult), as without sharding.
    pub fn launch<M: LearnerModel>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        model: M,
        optimizer: ModuleOptimizer,
        rates: impl Into<ModuleLrScheduler>,
    ) -> Result<LearningResult<M>, Error> {
        check_threads()?;
        let whole = Whole::OfRank0;
        self.launch_whole(training, model, (optimizer, rates.into()), None, whole)
    }

    /// Does what [`launch`](Self::launch) does, and has each rank do something with its shards of the trained model in place of
    /// returning it whole: to [save](crate::save()) it, say, to generate from it, or nothing. Returns what the ranks have returned, in
    /// their order.
    ///
    /// `end` gets the ranks of the training, of one shard axis, the model in training mode, whose type is that of the whole one, and
    /// the optimizer with the state of the rank's shards. All ranks call it at the same point, so that it may do what is collective.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch), and what `end` returns.
    pub fn launch_sharded<M: LearnerModel, T: Send + 'static>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        model: M,
        optimizer: ModuleOptimizer,
        rates: impl Into<ModuleLrScheduler>,
        end: impl Fn(&ProcessGroup, M, ModuleOptimizer) -> Result<T, Error> + Send + Sync + 'static,
    ) -> Result<LearningResult<Vec<T>>, Error> {
        check_threads()?;
        let learner = (optimizer, rates.into());
        self.train(
            training,
            model,
            learner,
            None,
            Left::nothing(),
            Arc::new(end),
        )
    }

    /// Does what [`launch`](Self::launch) does, and where a launcher such as `mpirun` has started the program several
    /// times, each process is one rank.
    ///
    /// Every process makes loaders, model, optimizer and training as if it were alone, and calls this, once. Compared before the
    /// first step, and refused where they differ: the epochs, the accumulation, the clipping, the numbers of items, the paths and
    /// shapes of the model's tensors, and what the optimizer does with a parameter; in every step, the learning rates of
    /// all parameters. Float parameters, running states and the optimizer's state need not be alike: all ranks start from those of
    /// rank 0; integer and boolean parameters must. What nothing compares: plain tensors in the model, its settings (as the rate of a dropout), the
    /// sizes of batches, and what the items are. Datasets have to have the same items in the same order, of which each rank takes a
    /// part. Burn's generator is one per process: seed it with the rank, or all ranks drop out alike.
    ///
    /// A launcher that has started one process counts as none, as in [`launch`](burn_fsdp_collectives::launch()): ranks are threads
    /// then. A process that ends before it calls this leaves the others waiting in MPI's own beginning, where no deadline
    /// counts, unless it ends with an error, which has the launcher end them.
    ///
    /// Rank 0's metrics are those of all rows, and it alone logs, renders, saves, and asks the strategies of early
    /// stopping and checkpointing; outputs of the others are sent to it after each step, whole: with large logits
    /// that costs time and, on rank 0, memory. Whoever interrupts one process interrupts all; an error of Burn's loop in
    /// one is in [`LearningResult::error`](burn::train::LearningResult) of all. Checkpoints are opened by every process, before
    /// anything else, and read by rank 0: where one does not see the folder, Burn panics there, and the launcher ends the others. Loggers of one's
    /// own are made in every process and used on rank 0.
    ///
    /// Collective over all processes. Each of them gets the whole model, with rank 0's running statistics;
    /// [`launch_sharded_among_processes`](Self::launch_sharded_among_processes) is for those that do not fit.
    ///
    /// ```no_run
    /// # use burn::optim::ModuleOptimizer;
    /// # use burn::train::{InferenceStep, LearnerModel, RegressionOutput, SupervisedTraining, TrainStep};
    /// # use burn_fsdp::train::{FullySharded, Lent};
    /// # use burn_fsdp::{Error, LaunchConfig};
    /// use burn_fsdp::collectives::launcher_ranks;
    ///
    /// # fn run<M>(training: SupervisedTraining<Lent<M>>, model: M, optimizer: ModuleOptimizer) -> Result<(), Error>
    /// # where M: LearnerModel + TrainStep<Output = RegressionOutput> + InferenceStep<Output = RegressionOutput> {
    /// // As many ranks as `mpirun` has started processes, or two threads where it has started one.
    /// let ranks = LaunchConfig::new(launcher_ranks().unwrap_or(2));
    /// let result = FullySharded::new(ranks).launch_among_processes(training, model, optimizer, 1e-2)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch). [`LaunchError::OtherSize`] if there are more or fewer processes than ranks;
    /// [`LaunchError::Again`] for a second training of the same processes; [`LaunchError::Failed`] with the text of
    /// [`Error::OtherTraining`] if a process is about to train something else, with that of the sharding's
    /// `OptimizersDiffer` or `Disagreement` if its optimizer or an integer parameter is another, and with that of an output
    /// which [`Portable::unpack`] does not take.
    pub fn launch_among_processes<M>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        model: M,
        optimizer: ModuleOptimizer,
        rates: impl Into<ModuleLrScheduler>,
    ) -> Result<LearningResult<M>, Error>
    where
        M: LearnerModel,
        <M as TrainStep>::Output: Portable,
        <M as InferenceStep>::Output: Portable,
    {
        let Some(process) = process()? else {
            return self.launch(training, model, optimizer, rates);
        };
        let learner = (optimizer, rates.into());
        self.launch_whole(training, model, learner, Some(process), Whole::OfAll)
    }

    /// Does what [`launch_sharded`](Self::launch_sharded) does, and where a launcher such as `mpirun` has started the program
    /// several times, each process is one rank, as with [`launch_among_processes`](Self::launch_among_processes). What its rank has
    /// returned is all that a process gets then.
    ///
    /// Collective over all processes.
    ///
    /// # Errors
    ///
    /// As [`launch_among_processes`](Self::launch_among_processes), and what `end` returns.
    pub fn launch_sharded_among_processes<M, T: Send + 'static>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        model: M,
        optimizer: ModuleOptimizer,
        rates: impl Into<ModuleLrScheduler>,
        end: impl Fn(&ProcessGroup, M, ModuleOptimizer) -> Result<T, Error> + Send + Sync + 'static,
    ) -> Result<LearningResult<Vec<T>>, Error>
    where
        M: LearnerModel,
        <M as TrainStep>::Output: Portable,
        <M as InferenceStep>::Output: Portable,
    {
        let process = process()?;
        let learner = (optimizer, rates.into());
        self.train(
            training,
            model,
            learner,
            process,
            Left::nothing(),
            Arc::new(end),
        )
    }

    /// Has Burn's loop train, and returns the whole model.
    fn launch_whole<M: LearnerModel>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        model: M,
        learner: (ModuleOptimizer, ModuleLrScheduler),
        process: Option<Process<M>>,
        whole: Whole,
    ) -> Result<LearningResult<M>, Error> {
        let left = Left::nothing();
        let text = left.text.clone();
        let end = move |world: &ProcessGroup, model: M, optimizer: ModuleOptimizer| {
            drop(optimizer);
            let model = match whole {
                Whole::OfRank0 => unsharded(&model, world.rank() == 0)?,
                Whole::OfAll => {
                    let model = sync_buffers(model, BufferSync::Broadcast)?;
                    unsharded(&model, true)?
                }
            };
            if let Some(model) = &model {
                *held(&text) = model.to_string();
            }
            Ok(model)
        };
        let result = self.train(training, model, learner, process, left, Arc::new(end))?;
        let model = result.model.into_iter().flatten().next();
        Ok(LearningResult {
            model: model.expect("ranks that did not fail have returned it"),
            renderer: result.renderer,
            interrupted: result.interrupted,
            error: result.error,
        })
    }

    /// Has Burn's loop train, with ranks that are threads, or the one that is this process.
    fn train<M: LearnerModel, T: Send + 'static>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        model: M,
        (optimizer, rates): (ModuleOptimizer, ModuleLrScheduler),
        process: Option<Process<M>>,
        left: Left<T>,
        ending: Ending<M, T>,
    ) -> Result<LearningResult<Vec<T>>, Error> {
        if self.0.ranks.ranks() == 0 {
            return Err(LaunchError::NoRanks.into());
        }
        if model.devices().iter().any(|device| !device.is_autodiff()) {
            return Err(Error::UntrackedInTraining);
        }
        let is_silent = process.as_ref().is_some_and(|process| process.rank > 0);
        let strategy = Strategy::new(self.0.clone(), process, ending, left.clone());
        let training = match is_silent {
            false => training.with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy))),
            // Files and the terminal are rank 0's.
            true => training
                .with_application_logger(None)
                .with_metric_logger(InMemoryMetricLogger::default())
                .renderer(Box::new(CliMetricsRenderer::new()))
                .with_training_strategy(TrainingStrategy::Custom(Arc::new(Silently(strategy)))),
        };
        let learner = Learner::new(Lent::new(model), optimizer, rates);
        // Where a rank failed because the thread of metrics is gone, Burn's loop panics at its end.
        let result = catch_unwind(AssertUnwindSafe(|| training.launch(learner)));
        let returned = held(&left.outcome).take().transpose()?;
        let result = result.unwrap_or_else(|panic| resume_unwind(panic));
        Ok(LearningResult {
            model: returned.expect("Burn's loop has had the ranks train"),
            renderer: result.renderer,
            interrupted: result.interrupted,
            error: result.error,
        })
    }
}

/// Who gets the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whole {
    OfRank0,
    OfAll,
}

/// Checks that ranks can be threads: that no launcher has started the program several times.
fn check_threads() -> Result<(), Error> {
    match processes()? {
        None => Ok(()),
        Some(found) => Err(Error::TrainingAmongProcesses {
            launcher: found.launcher.to_owned(),
            processes: found.size,
        }),
    }
}

/// Returns the rank that this process is, if a launcher has started several.
fn process<M: LearnerModel>() -> Result<Option<Process<M>>, Error>
where
    <M as TrainStep>::Output: Portable,
    <M as InferenceStep>::Output: Portable,
{
    let process = processes()?.map(|found| Process {
        rank: found.rank,
        codecs: Codecs::new(),
    });
    Ok(process)
}
