//! Compiled training by Burn's loop.

use std::sync::Arc;

use burn::optim::ModuleOptimizer;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::tensor::Device;
use burn::train::{InferenceStep, LearnerModel, LearningResult, SupervisedTraining, TrainStep};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_mesh::Strategy;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Batch, OptimizerGroups};

use crate::compiled::{Setup, train};
use crate::compiled_output::CompiledOutput;
use crate::fully_sharded::FullySharded;
use crate::lent::Lent;
use crate::rank::Start;
use crate::running::{check_threads, run};
use crate::strategy::Left;
use burn_fsdp_glue::error::Error;

impl FullySharded {
    /// Works like [`launch`](Self::launch), but compiles the train step, as [`compile`] does.
    /// Only Burn's CPU backend runs it, with threads as ranks.
    ///
    /// `init` creates the model on a device, also on one without autodiff, where `Tensor::require_grad` panics. `forward`
    /// computes a batch's output, which the model's own [`TrainStep`] and [`InferenceStep`] also compute: their `step`
    /// functions are not called. Training and validation
    /// have the same types of batches and outputs. `strategy` and `options` are those of compiled steps; clipping, loss
    /// scaling and precision are among the options.
    ///
    /// Checkpoints, metrics, schedules, gradient accumulation and early stopping are those of [`launch`](Self::launch),
    /// and so are the checkpoints' files: both can resume the other's. A batch's tensors must have the same shapes on
    /// all ranks, so the items must divide evenly among the ranks.
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
        (init, forward): (
            impl Fn(&Device) -> M + Clone + Send + Sync + 'static,
            impl Fn(&M, I) -> O + Clone + Send + Sync + 'static,
        ),
        (optimizer, rates): (impl Into<OptimizerGroups>, impl Into<ModuleLrScheduler>),
        (strategy, options): (Strategy, Options),
    ) -> Result<LearningResult<M>, Error>
    where
        M: LearnerModel + TrainStep<Input = I, Output = O> + InferenceStep<Input = I, Output = O>,
        I: Batch,
        O: CompiledOutput,
    {
        check_threads()?;
        self.check_compiled()?;
        let model = init(&Device::flex().autodiff());
        let optimizer = optimizer.into();
        let learner = (ModuleOptimizer::from(optimizer.clone()), rates.into());
        let setup = Setup {
            init,
            forward,
            optimizer,
            strategy,
            options,
        };
        let body = move |world: &ProcessGroup, start: Start<M>| train(world, start, &setup);
        let left = Left::nothing();
        let result = run(
            &self.0,
            training,
            model,
            learner,
            None,
            left,
            Arc::new(body),
        )?;
        let model = result.model.into_iter().flatten().next();
        Ok(LearningResult {
            model: model.expect("rank 0 has returned it"),
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
                "they run on the CPU",
            ),
        ];
        match refused.into_iter().find(|(is_set, ..)| *is_set) {
            Some((_, setting, instead)) => Err(Error::EagerSetting { setting, instead }),
            None => Ok(()),
        }
    }
}
