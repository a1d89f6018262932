//! Compiled training by Burn's loop.

use std::sync::Arc;

use burn::backend::Flex;
use burn::optim::ModuleOptimizer;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::tensor::Device;
use burn::train::{InferenceStep, LearnerModel, LearningResult, SupervisedTraining, TrainStep};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_mesh::Strategy;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{BackendIr, Batch, OptimizerGroups};

use crate::compiled::{Setup, train};
use crate::compiled_output::CompiledOutput;
use crate::fully_sharded::FullySharded;
use crate::lent::Lent;
use crate::portable::Portable;
use crate::rank::Start;
use crate::running::{check_threads, process, run};
use crate::settings::{Engine, Settings};
use crate::strategy::{Left, Process};
use burn_fsdp_glue::error::Error;

/// The function for compiled steps with processes as ranks.
const COMPILED_AMONG_PROCESSES: &str = "launch_compiled_among_processes";

impl FullySharded {
    /// Works like [`launch`](Self::launch), but compiles the train step, as [`compile`] does. Ranks are threads on
    /// Burn's CPU backend; see also [`launch_compiled_among_processes`](Self::launch_compiled_among_processes) and
    /// [`launch_compiled_on`](Self::launch_compiled_on).
    ///
    /// `init` creates the model on a device, also on one without autodiff, where `Tensor::require_grad` panics. `forward`
    /// computes a batch's output, which the model's own [`TrainStep`] and [`InferenceStep`] also compute: their `step`
    /// functions are not called. Training and validation
    /// have the same types of batches and outputs. `strategy` and `options` are those of compiled steps; clipping, loss
    /// scaling and precision are among the options.
    ///
    /// Checkpoints, metrics, schedules, gradient accumulation and early stopping are those of [`launch`](Self::launch),
    /// and so are the checkpoints' files: both can resume the other's. A batch's tensors must have the same shapes on
    /// all ranks, so the items must divide evenly among the ranks, and loaders have at most one worker.
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
    /// use burn_fsdp::{LaunchConfig, Strategy};
    ///
    /// #[derive(Module, Debug)]
    /// struct Net {
    ///     layer: Linear,
    /// }
    ///
    /// impl Net {
    ///     fn forward(&self, batch: Tensor<2>) -> RegressionOutput {
    ///         let output = self.layer.forward(batch.clone()).tanh();
    ///         let loss = MseLoss::new().forward(output.clone(), batch.clone(), Reduction::Mean);
    ///         RegressionOutput { loss, output, targets: batch }
    ///     }
    /// }
    /// #
    /// # impl TrainStep for Net {
    /// #     type Input = Tensor<2>;
    /// #     type Output = RegressionOutput;
    /// #     fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
    /// #         let output = self.forward(batch);
    /// #         TrainOutput::new(self, output.loss.backward(), output)
    /// #     }
    /// # }
    /// #
    /// # impl InferenceStep for Net {
    /// #     type Input = Tensor<2>;
    /// #     type Output = RegressionOutput;
    /// #     fn step(&self, batch: Tensor<2>) -> RegressionOutput {
    /// #         self.forward(batch)
    /// #     }
    /// # }
    /// #
    /// # #[derive(Clone)]
    /// # struct Rows;
    /// # impl Batcher<[f32; 4], Tensor<2>> for Rows {
    /// #     fn batch(&self, rows: Vec<[f32; 4]>, device: &Device) -> Tensor<2> {
    /// #         let rows = rows.into_iter().map(|row| Tensor::<1>::from_floats(row, device));
    /// #         Tensor::stack(rows.collect(), 0)
    /// #     }
    /// # }
    ///
    /// let rows = (0..24).map(|i| [0, 1, 2, 3].map(|j| ((i * 7 + j * 3) % 11) as f32 / 11.0));
    /// let loader = DataLoaderBuilder::new(Rows).batch_size(4).build(InMemDataset::new(rows.collect()));
    /// let folder = tempfile::tempdir()?;
    /// let training = SupervisedTraining::new(folder.path(), loader.clone(), loader)
    ///     .metric_train_numeric(LossMetric::new())
    /// #   .renderer(Box::new(burn::train::renderer::CliMetricsRenderer::new()))
    ///     .num_epochs(2);
    /// let init = |device: &Device| Net { layer: LinearConfig::new(4, 4).init(device) };
    /// let result = FullySharded::new(LaunchConfig::new(2)).launch_compiled(
    ///     training,
    ///     (init, Net::forward),
    ///     (AdamWConfig::new().build(), 1e-2),
    ///     (Strategy::FullShard, Default::default()),
    /// )?;
    /// assert!(result.error.is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::EagerSetting`] if a policy, clipping, a loss scaler or devices were set; [`Error::UnevenItems`];
    /// [`Error::UnevenBatches`]; the errors of [`compile`], and those of
    /// [`launch`](Self::launch).
    ///
    /// [`compile`]: burn_fsdp_certificate::compile
    pub fn launch_compiled<M, I, O>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        closures: (
            impl Fn(&Device) -> M + Clone + Send + Sync + 'static,
            impl Fn(&M, I) -> O + Clone + Send + Sync + 'static,
        ),
        (optimizer, rates): (impl Into<OptimizerGroups>, impl Into<ModuleLrScheduler>),
        style: (Strategy, Options),
    ) -> Result<LearningResult<M>, Error>
    where
        M: LearnerModel + TrainStep<Input = I, Output = O> + InferenceStep<Input = I, Output = O>,
        I: Batch,
        O: CompiledOutput,
    {
        check_threads(COMPILED_AMONG_PROCESSES)?;
        let on = |_| (Device::flex(), Default::default());
        let learner = (optimizer.into(), rates.into());
        self.compiled::<Flex, _, _, _>(training, closures, learner, style, (on, None))
    }

    /// Works like [`launch_compiled`](Self::launch_compiled), but if a launcher such as `mpirun` has started the program
    /// several times, each process is one rank, as with
    /// [`launch_among_processes`](Self::launch_among_processes). Also compared are the strategy, the options, and the
    /// values of integer and boolean tensors. Each step compares its operations, and the numbers of its optimizer.
    ///
    /// Collective over all processes. Each of them gets the whole model.
    ///
    /// # Errors
    ///
    /// As [`launch_compiled`](Self::launch_compiled) and [`launch_among_processes`](Self::launch_among_processes).
    pub fn launch_compiled_among_processes<M, I, O>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        closures: (
            impl Fn(&Device) -> M + Clone + Send + Sync + 'static,
            impl Fn(&M, I) -> O + Clone + Send + Sync + 'static,
        ),
        (optimizer, rates): (impl Into<OptimizerGroups>, impl Into<ModuleLrScheduler>),
        style: (Strategy, Options),
    ) -> Result<LearningResult<M>, Error>
    where
        M: LearnerModel + TrainStep<Input = I, Output = O> + InferenceStep<Input = I, Output = O>,
        I: Batch,
        O: CompiledOutput + Portable,
    {
        let on = |_| (Device::flex(), Default::default());
        let learner = (optimizer.into(), rates.into());
        self.compiled::<Flex, _, _, _>(training, closures, learner, style, (on, process()?))
    }

    /// Works like [`launch_compiled`](Self::launch_compiled), with threads as ranks and a device for each of them. `on`
    /// returns the device of a rank, as Burn's device and as the backend's own device. Both must be the same device of
    /// the backend `Be`, for example `|rank| (Device::wgpu(DeviceKind::DiscreteGpu(rank)), WgpuDevice::DiscreteGpu(rank))`.
    ///
    /// `init` also runs on Burn's CPU device. The loaders create batches on the rank's device. Steps run as in
    /// [`compile_on`](burn_fsdp_certificate::compile_on). The metrics get the outputs on the rank's device, and the
    /// caller gets the whole model on Burn's CPU device.
    ///
    /// # Errors
    ///
    /// As [`launch_compiled`](Self::launch_compiled).
    pub fn launch_compiled_on<Be, M, I, O>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        closures: (
            impl Fn(&Device) -> M + Clone + Send + Sync + 'static,
            impl Fn(&M, I) -> O + Clone + Send + Sync + 'static,
        ),
        (optimizer, rates): (impl Into<OptimizerGroups>, impl Into<ModuleLrScheduler>),
        style: (Strategy, Options),
        on: impl Fn(usize) -> (Device, Be::Device),
    ) -> Result<LearningResult<M>, Error>
    where
        Be: BackendIr,
        M: LearnerModel + TrainStep<Input = I, Output = O> + InferenceStep<Input = I, Output = O>,
        I: Batch,
        O: CompiledOutput,
    {
        check_threads(COMPILED_AMONG_PROCESSES)?;
        let learner = (optimizer.into(), rates.into());
        self.compiled::<Be, _, _, _>(training, closures, learner, style, (on, None))
    }

    /// Runs Burn's loop with compiled steps, and returns the whole model.
    fn compiled<Be, M, I, O>(
        &self,
        training: SupervisedTraining<Lent<M>>,
        (init, forward): (
            impl Fn(&Device) -> M + Clone + Send + Sync + 'static,
            impl Fn(&M, I) -> O + Clone + Send + Sync + 'static,
        ),
        (optimizer, rates): (OptimizerGroups, ModuleLrScheduler),
        (strategy, options): (Strategy, Options),
        (on, process): (impl Fn(usize) -> (Device, Be::Device), Option<Process<M>>),
    ) -> Result<LearningResult<M>, Error>
    where
        Be: BackendIr,
        M: LearnerModel + TrainStep<Input = I, Output = O> + InferenceStep<Input = I, Output = O>,
        I: Batch,
        O: CompiledOutput,
    {
        self.check_compiled()?;
        let (devices, own) = (0..self.0.ranks.ranks()).map(on).unzip();
        let settings = Settings {
            devices,
            engine: Engine::Compiled,
            ..self.0.clone()
        };
        let model = init(&Device::flex().autodiff());
        let learner = (ModuleOptimizer::from(optimizer.clone()), rates);
        let setup = Setup::<Be, _, _> {
            init,
            forward,
            optimizer,
            strategy,
            options,
            own,
        };
        let body = move |world: &ProcessGroup, start: Start<M>| train(world, start, &setup);
        let left = Left::nothing();
        let body = Arc::new(body);
        let result = run(&settings, training, model, learner, process, left, body)?;
        let model = result.model.into_iter().flatten().next();
        Ok(LearningResult {
            model: model.expect("ranks that did not fail have returned it"),
            renderer: result.renderer,
            interrupted: result.interrupted,
            error: result.error,
        })
    }

    /// Rejects settings that compiled steps do not have.
    fn check_compiled(&self) -> Result<(), Error> {
        let settings = &self.0;
        let refused = [
            (
                settings.policy.is_some(),
                "policy",
                "pass the strategy and `Options`, whose `units` are chosen in the same way",
            ),
            (
                settings.clip.is_some(),
                "clip_grad_norm",
                "set `Options::clip`",
            ),
            (
                settings.scaler.is_some(),
                "loss_scaler",
                "set `Options::loss_scaling`",
            ),
            (
                !settings.devices.is_empty(),
                "devices",
                "pass a function of the rank to `launch_compiled_on`",
            ),
        ];
        match refused.into_iter().find(|(is_set, ..)| *is_set) {
            Some((_, setting, instead)) => Err(Error::EagerSetting { setting, instead }),
            None => Ok(()),
        }
    }
}
