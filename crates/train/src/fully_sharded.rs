//! The public interface of the strategy.

use std::path::PathBuf;

use burn::optim::ModuleOptimizer;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::tensor::{Device, Tensor};
use burn::train::{InferenceStep, LearnerModel, LearningResult, SupervisedTraining, TrainStep};
use burn_fsdp_collectives::{LaunchConfig, ProcessMesh};
use burn_fsdp_shard::{BufferSync, Clip, LossScaler, ShardPolicy, sync_buffers, unsharded};

use crate::lent::Lent;
use crate::portable::Portable;
use crate::running::{by_the_eager_engine, check_threads, process, run};
use crate::scaled::scaled;
use crate::settings::{Engine, Settings};
use crate::strategy::{Left, Process};
use burn_fsdp_glue::error::Error;

/// Fully sharded training by Burn's own loop: a strategy for [`SupervisedTraining`](burn::train::SupervisedTraining),
/// with threads of this process or with [processes](Self::launch_among_processes) as ranks.
///
/// One line of a program changes: `training.launch(Learner::new(model, optimizer, rates))` becomes
/// `FullySharded::new(LaunchConfig::new(2)).launch(training, model, optimizer, rates)?`. Everything else in
/// [`SupervisedTraining`](burn::train::SupervisedTraining) stays the same. Its metrics cover the rows of all ranks,
/// there is one dashboard, and early stopping and interruption end all ranks after the same step. Its checkpoints equal
/// those of a training run on one device. Any number of ranks can continue from them, and so can Burn without sharding.
///
/// # Data
///
/// Each rank takes a contiguous part of the loaders' items, so a step covers one batch per rank. If the items do not
/// divide evenly, the first ranks take one item more; in Burn's distributed training, the last rank takes the rest. The
/// ranks that run out process a batch again, and its rows do not count. Gradients are weighted by the number of items that the loaders have read for them. A step's gradient is then
/// the mean over the step's items, if the loss is the mean over its batch. (A custom batch strategy that holds items
/// back is counted by the items it reads, not by those it returns.) Validation is also divided, and every item is
/// counted once. A metric that counts batches instead of rows, such as Burn's `LossMetric`, counts the batches of every
/// rank.
///
/// # Differences
///
/// - The optimizer must work element by element, or the policy must assign parameters to [one
///   owner](ShardPolicy::one_owner). Otherwise the training is rejected. To clip by the norm of all gradients, use
///   [`clip_grad_norm`](Self::clip_grad_norm), which covers the gradients of all ranks.
/// - The training's `gradient_checkpointing` has no effect: build the model on a device with
///   `.autodiff().gradient_checkpointing()`, without which full weights stay alive for backward.
/// - Each rank has its own running statistics (batch normalization), from its rows; rank 0's are saved and returned.
/// - A policy that ignores trained modules is rejected, because each rank would train its own copy.
/// - A loss must depend on the model's parameters on every rank: if a rank's step skips the model, the others wait for
///   it.
/// - Metrics that join the outputs of all steps (AUROC) need them on one device.
/// - The policy cannot attach adapters. Call Burn's `apply_lora` on the model instead.
/// - Tensors of records are read on demand. A custom checkpointer that reads them keeps them in memory.
/// - Outputs of a step are values of any type, which cannot be sent between processes. If `mpirun` started the program,
///   [`launch`](Self::launch) is rejected; use [`launch_among_processes`](Self::launch_among_processes).
///
/// # Memory
///
/// No process holds the whole model: a rank holds its shards of parameters, gradients and optimizer state, and the full
/// weights that the eager engine gathers while it uses them. If Burn has not initialized the parameters of a model yet
/// (as `LinearConfig::init` returns them), they are initialized one at a time on rank 0, and divided. If a model is
/// initialized, its values are freed as they are divided, unless the program has a clone of it. Checkpoints are Burn's
/// own files of the whole model and optimizer. Rank 0 gathers them tensor by tensor into files of a
/// [scratch](Self::scratch) folder, from which Burn's checkpointers write. It also reads and divides them tensor by
/// tensor when a training run resumes. So rank 0 briefly holds a few copies of one whole parameter, or of its state.
/// (This holds on the CPU backend. If the program's default device is another, a checkpoint is read there as a whole.)
///
/// [`launch`](Self::launch) and [`launch_among_processes`](Self::launch_among_processes) return the whole model: the
/// ranks that get it hold all of it when the training ends. [`launch_sharded`](Self::launch_sharded) passes each rank's
/// shards to your function instead, so no rank ever holds more.
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
pub struct FullySharded(pub(crate) Settings);

impl FullySharded {
    /// Returns the strategy with these ranks, the default policy, and no clipping. All ranks compute on the
    /// device of the model.
    pub fn new(ranks: LaunchConfig) -> Self {
        Self(Settings {
            ranks,
            replicas: 1,
            policy: None,
            clip: None,
            scaler: None,
            devices: Vec::new(),
            engine: Engine::Eager,
            scratch: None,
        })
    }

    /// Sets the sharding policy, including the units. Set the number of replicas with [`replicas`](Self::replicas), not
    /// with the policy's axes.
    #[must_use]
    pub fn policy(mut self, policy: ShardPolicy) -> Self {
        self.0.policy = Some(policy);
        self
    }

    /// Selects hybrid sharding: the ranks form `replicas` groups of consecutive ranks, such as the ranks of one machine.
    /// Each group holds the whole model in shards, and gathers only within itself. Gradients are averaged over all
    /// ranks. The number of ranks must be a multiple of `replicas`. The default is one replica.
    #[must_use]
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.0.replicas = replicas;
        self
    }

    /// Clips the gradients of each step by their norm over all ranks.
    #[must_use]
    pub fn clip_grad_norm(mut self, clip: Clip) -> Self {
        self.0.clip = Some(clip);
        self
    }

    /// Scales the losses, so that small gradients in `f16` do not become zero. The steps of the model must compute their
    /// backward with [`scale_loss`](Self::scale_loss); a step that does not is an error. A step with a gradient that is
    /// infinite or not a number, on any rank, is skipped, and the scale decreases. Burn's checkpoints do not contain the
    /// scale, so a resumed training run starts with the scaler's first scale.
    #[must_use]
    pub fn loss_scaler(mut self, scaler: LossScaler) -> Self {
        self.0.scaler = Some(scaler);
        self
    }

    /// Returns the loss times the current scale, for the backward in [`TrainStep::step`](burn::train::TrainStep::step):
    /// `FullySharded::scale_loss(output.loss.clone()).backward()`. Without a [scaler](Self::loss_scaler), and outside of
    /// a sharded training run, it returns the loss unchanged.
    ///
    /// Not collective. Each call in a step must scale a loss of that step.
    pub fn scale_loss<const D: usize>(loss: Tensor<D>) -> Tensor<D> {
        scaled(loss)
    }

    /// Sets the devices: rank `i` computes on the `i`th one. If there are fewer devices than ranks, the devices repeat.
    #[must_use]
    pub fn devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.0.devices = devices.into_iter().collect();
        self
    }

    /// Sets the folder for files that exist while a checkpoint is written or read. On rank 0 they hold the whole model
    /// and its optimizer's state, for the current checkpoint and the previous one (and briefly the model once more,
    /// before its optimizer's state is written). When a training run resumes, they also hold each rank's part of the
    /// state. The default is the folder in `TMPDIR`, or `/var/tmp`. Do not use a folder in memory, which would keep the
    /// files in memory after all.
    #[must_use]
    pub fn scratch(mut self, folder: impl Into<PathBuf>) -> Self {
        self.0.scratch = Some(folder.into());
        self
    }

    /// Trains `model`, in place of `training.launch(Learner::new(model, optimizer, rates))`. All ranks start from its
    /// values, or from the checkpoint that `training` names. Returns the result of Burn's loop with the whole model,
    /// which rank 0 assembles at the end. For models that do not fit on one rank, use
    /// [`launch_sharded`](Self::launch_sharded).
    ///
    /// Call it once in the program: it starts the ranks, and returns when they have ended.
    ///
    /// # Errors
    ///
    /// A rank that failed; an optimizer that needs whole tensors although the policy divides them; a policy that does
    /// not fit the model; ranks that are processes. An error that ends Burn's own loop (a loader, a metric, a file) is
    /// in [`LearningResult::error`](burn::train::LearningResult), as without sharding.
    pub fn launch<M: LearnerModel>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        model: M,
        optimizer: ModuleOptimizer,
        rates: impl Into<ModuleLrScheduler>,
    ) -> Result<LearningResult<M>, Error> {
        check_threads("launch_among_processes")?;
        let whole = Whole::OfRank0;
        self.launch_whole(training, model, (optimizer, rates.into()), None, whole)
    }

    /// Works like [`launch`](Self::launch), but passes each rank's shards of the trained model to `end` instead of
    /// returning the whole model. For example, `end` can [save](burn_fsdp_glue::blocking::save) it, generate from it,
    /// or do nothing.
    /// Returns the ranks' results, in rank order.
    ///
    /// `end` receives the mesh over which the model is sharded, the model, and the optimizer with the state of the rank's
    /// shards. The model is in training mode and has the type of the whole model. All ranks call `end` at
    /// the same point, so it may call collective functions.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch), and errors of `end`.
    pub fn launch_sharded<M: LearnerModel, T: Send + 'static>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        model: M,
        optimizer: ModuleOptimizer,
        rates: impl Into<ModuleLrScheduler>,
        end: impl Fn(&ProcessMesh, M, ModuleOptimizer) -> Result<T, Error> + Send + Sync + 'static,
    ) -> Result<LearningResult<Vec<T>>, Error> {
        check_threads("launch_sharded_among_processes")?;
        let learner = (optimizer, rates.into());
        run(
            &self.0,
            training,
            model,
            learner,
            None,
            Left::nothing(),
            by_the_eager_engine(end),
        )
    }

    /// Works like [`launch`](Self::launch), but if a launcher such as `mpirun` has started the program several times,
    /// each process is one rank.
    ///
    /// Every process sets up loaders, model, optimizer and training as if it were alone, and calls this function once.
    /// Some settings are compared before the first step, and a difference is rejected: the epochs, the accumulation,
    /// the clipping, the numbers of items, the paths and shapes of the model's tensors, and the optimizer's behavior
    /// for each parameter. The learning rates of all parameters are compared in every step. Float parameters, running
    /// states and the optimizer's state need not agree, because all ranks start from rank 0's; integer and boolean
    /// parameters must agree. Other values are not compared: plain tensors in the model, its settings (such as a
    /// dropout rate), the sizes of batches, and the contents of the items. Datasets must have the same items in the
    /// same order, and each rank takes a part of them. Burn's generator exists once per process: seed it with the rank,
    /// or all ranks use the same dropout.
    ///
    /// If a launcher has started one process, it is ignored and ranks are threads, as in
    /// [`launch`](burn_fsdp_collectives::launch()). If a process ends before it calls this function, the others wait in
    /// MPI's own initialization, where no deadline applies. If it ends with an error, the launcher ends the others.
    ///
    /// Rank 0's metrics cover all rows. Only rank 0 logs, renders, saves, and decides on early stopping and
    /// checkpoints. The other ranks send it their whole outputs after each step: with large logits that costs time and,
    /// on rank 0, memory. An interruption of one process interrupts all. An error of Burn's loop in one process is in
    /// [`LearningResult::error`](burn::train::LearningResult) of all. Every process opens the checkpoints first, and
    /// rank 0 reads them. If a process does not see the folder, Burn panics there, and the launcher ends the others.
    /// Custom loggers are created in every process and used on rank 0.
    ///
    /// Collective over all processes. Each of them gets the whole model, with rank 0's running statistics.
    /// For models that do not fit, use
    /// [`launch_sharded_among_processes`](Self::launch_sharded_among_processes).
    ///
    /// ```no_run
    /// # use burn::optim::ModuleOptimizer;
    /// # use burn::train::{InferenceStep, LearnerModel, RegressionOutput, SupervisedTraining, TrainStep};
    /// # use burn_fsdp::train::{FullySharded, Lent};
    /// # use burn_fsdp::{Error, LaunchConfig};
    /// use burn_fsdp::launcher_ranks;
    ///
    /// # fn run<M>(training: SupervisedTraining<Lent<M>>, model: M, optimizer: ModuleOptimizer) -> Result<(), Error>
    /// # where M: LearnerModel + TrainStep<Output = RegressionOutput> + InferenceStep<Output = RegressionOutput> {
    /// // A rank for each process that `mpirun` has started, or two threads if it has not started several.
    /// let ranks = LaunchConfig::new(launcher_ranks().unwrap_or(2));
    /// let result = FullySharded::new(ranks).launch_among_processes(training, model, optimizer, 1e-2)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch). [`LaunchError::OtherSize`] if there are more or fewer processes than ranks.
    /// [`LaunchError::Again`] for a second training run of the same processes. [`LaunchError::Failed`] has the text of
    /// another error:
    ///
    /// - [`Error::OtherTraining`] if a process is about to run a different training;
    /// - `OptimizersDiffer` or `Disagreement`, errors of sharding, if an optimizer or an integer parameter differs;
    /// - the error for an output that [`Portable::unpack`] rejects.
    ///
    /// [`LaunchError::OtherSize`]: burn_fsdp_collectives::LaunchError::OtherSize
    /// [`LaunchError::Again`]: burn_fsdp_collectives::LaunchError::Again
    /// [`LaunchError::Failed`]: burn_fsdp_collectives::LaunchError::Failed
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

    /// Works like [`launch_sharded`](Self::launch_sharded), but if a launcher such as `mpirun` has started the program
    /// several times, each process is one rank, as with [`launch_among_processes`](Self::launch_among_processes). A
    /// process then gets only its own rank's result.
    ///
    /// Collective over all processes.
    ///
    /// # Errors
    ///
    /// As [`launch_among_processes`](Self::launch_among_processes), and errors of `end`.
    pub fn launch_sharded_among_processes<M, T: Send + 'static>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        model: M,
        optimizer: ModuleOptimizer,
        rates: impl Into<ModuleLrScheduler>,
        end: impl Fn(&ProcessMesh, M, ModuleOptimizer) -> Result<T, Error> + Send + Sync + 'static,
    ) -> Result<LearningResult<Vec<T>>, Error>
    where
        M: LearnerModel,
        <M as TrainStep>::Output: Portable,
        <M as InferenceStep>::Output: Portable,
    {
        let process = process()?;
        let learner = (optimizer, rates.into());
        run(
            &self.0,
            training,
            model,
            learner,
            process,
            Left::nothing(),
            by_the_eager_engine(end),
        )
    }

    /// Runs Burn's loop, and returns the whole model.
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
        let end = move |mesh: &ProcessMesh, model: M, optimizer: ModuleOptimizer| {
            drop(optimizer);
            let model = match whole {
                Whole::OfRank0 => unsharded(&model, mesh.world().rank() == 0)?,
                Whole::OfAll => {
                    let model = sync_buffers(model, BufferSync::Broadcast)?;
                    unsharded(&model, true)?
                }
            };
            if let Some(model) = &model {
                *text.lock() = model.to_string();
            }
            Ok(model)
        };
        let body = by_the_eager_engine(end);
        let result = run(&self.0, training, model, learner, process, left, body)?;
        let model = result.model.into_iter().flatten().next();
        Ok(LearningResult {
            model: model.expect("ranks that did not fail have returned it"),
            renderer: result.renderer,
            interrupted: result.interrupted,
            error: result.error,
        })
    }
}

/// The ranks that get the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whole {
    OfRank0,
    OfAll,
}
