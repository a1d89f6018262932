//! Burn's strategy: the split among ranks, and the results.

use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerModel, LearningResult,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, ValidLoader,
};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_tensors::launch;
use parking_lot::Mutex;

use crate::course::{Course, Ranks};
use crate::lead::Lead;
use crate::lent::Lent;
use crate::outputs::{Codecs, Outputs};
use crate::rank::Start;
use crate::rounds::Share;
use crate::settings::{Engine, Settings};
use burn_fsdp_glue::error::Error;
use burn_fsdp_glue::optimizer_record::emptied;

/// The function that trains on each rank, from its initial state to its result.
pub(crate) type Body<M, T> =
    Arc<dyn Fn(&ProcessGroup, Start<M>) -> Result<T, Error> + Send + Sync + 'static>;

/// The strategy that Burn's loop calls. Because it returns only a model, the ranks' results are stored in `outcome`.
pub(crate) struct Strategy<M: LearnerModel, T> {
    settings: Settings,
    process: Option<Process<M>>,
    body: Body<M, T>,
    left: Left<T>,
}

/// The ranks' results, in rank order, once all have ended.
pub(crate) type Outcome<T> = Arc<Mutex<Option<Result<Vec<T>, Error>>>>;

/// The results of a training run.
pub(crate) struct Left<T> {
    /// The results of this process's ranks, or the reason why one failed; `None` until they end.
    pub(crate) outcome: Outcome<T>,
    /// The description of the model in the summary.
    pub(crate) text: Arc<Mutex<String>>,
}

impl<T> Left<T> {
    pub(crate) fn nothing() -> Self {
        Self {
            outcome: Arc::default(),
            text: Arc::default(),
        }
    }
}

impl<T> Clone for Left<T> {
    fn clone(&self) -> Self {
        Self {
            outcome: self.outcome.clone(),
            text: self.text.clone(),
        }
    }
}

/// This process as one of several ranks.
pub(crate) struct Process<M: LearnerModel> {
    pub(crate) rank: usize,
    pub(crate) codecs: Codecs<M>,
}

impl<M: LearnerModel, T> Strategy<M, T> {
    pub(crate) fn new(
        settings: Settings,
        process: Option<Process<M>>,
        body: Body<M, T>,
        left: Left<T>,
    ) -> Self {
        Self {
            settings,
            process,
            body,
            left,
        }
    }

    /// Returns each rank's device with the model's autodiff context, which all tensors of an operation must share.
    fn devices(&self, model: &M) -> Vec<Device> {
        let of_model = model.devices().into_iter().next().unwrap_or_default();
        let given = self.settings.devices.iter();
        let given = given.map(|device| device.clone().with_autodiff_context_from(&of_model));
        let mut devices: Vec<_> = given.collect();
        if devices.is_empty() {
            devices.push(of_model);
        }
        let of_ranks = devices.iter().cycle().take(self.settings.ranks.ranks());
        of_ranks.cloned().collect()
    }
}

impl<M: LearnerModel, T: Send + 'static> SupervisedLearningStrategy<Lent<M>> for Strategy<M, T> {
    fn fit(
        &self,
        components: TrainingComponents<Lent<M>>,
        mut learner: Learner<Lent<M>>,
        training: TrainLoader<Lent<M>>,
        validation: ValidLoader<Lent<M>>,
        starting_epoch: usize,
    ) -> (Lent<M>, SupervisedTrainingEventProcessor<Lent<M>>) {
        let processor = Arc::new(Mutex::new(Some(components.event_processor)));
        let lent = Lent::take_from(&mut learner);
        let (model, optimizer) = lent.expect("the learner has just been given them");
        let devices = self.devices(&model);
        let codecs = self.process.as_ref().map(|process| process.codecs);
        let outputs = Arc::new(Outputs::of_ranks(devices.len(), codecs));
        let course = Course {
            settings: self.settings.clone(),
            among: match self.process {
                Some(_) => Ranks::Processes,
                None => Ranks::Threads,
            },
            epochs: starting_epoch..=components.num_epochs,
            accumulation: components.grad_accumulation,
            saves: components.checkpointer.is_some(),
            items: training.num_items(),
            validated_items: validation.num_items(),
            interrupter: components.interrupter.clone(),
            outputs: outputs.clone(),
        };
        let lead = Lead {
            processor: processor.clone(),
            outputs,
            interrupter: components.interrupter.clone(),
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
            store: components.event_store,
            staged: None,
        };
        let inner: Vec<_> = devices
            .iter()
            .map(|device| device.clone().inner())
            .collect();
        let whole = Whole {
            model,
            optimizer,
            learner,
            training: Share::of_ranks(&training, &devices),
            validation: Share::of_ranks(&validation, &inner),
        };
        let here = self.process.as_ref().map(|process| process.rank);
        let starts = whole.divided(devices, &course, lead, here);
        let body = self.body.clone();
        let ended = launch(self.settings.ranks, move |world| {
            let start = starts[world.rank()].lock().take();
            body(&world, start.expect("a rank starts once"))
        });
        if let Err(error) = &ended {
            components.interrupter.stop(Some(&error.to_string()));
        }
        *self.left.outcome.lock() = Some(ended.map_err(Error::from));
        let processor = processor.lock().take();
        let processor = processor.expect("rank 0 has only used it");
        (Lent::gone(&self.left.text.lock()), processor)
    }
}

/// The strategy in a process other than rank 0's: Burn's loop reports nothing here, because rank 0 reports the training
/// run.
pub(crate) struct Silently<M: LearnerModel, T>(pub(crate) Strategy<M, T>);

impl<M: LearnerModel, T: Send + 'static> SupervisedLearningStrategy<Lent<M>> for Silently<M, T> {
    fn train(
        &self,
        learner: Learner<Lent<M>>,
        training: TrainLoader<Lent<M>>,
        validation: ValidLoader<Lent<M>>,
        components: TrainingComponents<Lent<M>>,
    ) -> LearningResult<Lent<M>> {
        let starting_epoch = components.checkpoint.unwrap_or(0) + 1;
        let interrupter = components.interrupter.clone();
        let (model, processor) =
            self.fit(components, learner, training, validation, starting_epoch);
        LearningResult {
            model: model.valid(),
            renderer: processor.renderer(),
            interrupted: interrupter.interruption(),
            error: interrupter.error(),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<Lent<M>>,
        learner: Learner<Lent<M>>,
        training: TrainLoader<Lent<M>>,
        validation: ValidLoader<Lent<M>>,
        starting_epoch: usize,
    ) -> (Lent<M>, SupervisedTrainingEventProcessor<Lent<M>>) {
        let strategy = &self.0;
        strategy.fit(components, learner, training, validation, starting_epoch)
    }
}

/// The contents of a learner, before they are divided among the ranks.
struct Whole<M: LearnerModel> {
    model: M,
    optimizer: ModuleOptimizer,
    learner: Learner<Lent<M>>,
    training: Vec<Share<<M as TrainStep>::Input>>,
    validation: Vec<Share<<M as InferenceStep>::Input>>,
}

impl<M: LearnerModel> Whole<M> {
    /// Returns the initial state of each rank that is `here`: all ranks, or only the ranks of this process.
    fn divided(
        self,
        devices: Vec<Device>,
        course: &Course<M>,
        lead: Lead<M>,
        here: Option<usize>,
    ) -> Vec<Mutex<Option<Start<M>>>> {
        let bare = emptied(&self.optimizer);
        let (mut lead, mut whole) = (Some(lead), Some(self.optimizer));
        let shares = self.training.into_iter().zip(self.validation);
        let starts = devices.into_iter().zip(shares).enumerate();
        let starts = starts.map(|(rank, (device, shares))| {
            let is_here = here.is_none_or(|here| here == rank);
            Mutex::new(is_here.then(|| Start {
                model: match course.settings.engine {
                    Engine::Eager => self.model.clone().map(&mut Apart).fork(&device),
                    Engine::Compiled => self.model.clone().map(&mut Apart),
                },
                optimizer: bare.clone(),
                whole: whole.take_if(|_| rank == 0),
                learner: self.learner.clone(),
                training: shares.0,
                validation: shares.1,
                device,
                course: course.clone(),
                lead: lead.take_if(|_| rank == 0),
            }))
        });
        starts.collect()
    }
}

/// A mapper that keeps uninitialized parameters lazy when the module moves. Otherwise, the first of several clones to
/// move would initialize the parameters for all.
struct Apart;

impl ModuleMapper for Apart {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.is_initialized() {
            param
        } else {
            param.init_mapper(|value| value)
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        if param.is_initialized() {
            param
        } else {
            param.init_mapper(|value| value)
        }
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        if param.is_initialized() {
            param
        } else {
            param.init_mapper(|value| value)
        }
    }
}
