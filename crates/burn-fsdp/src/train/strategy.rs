//! Burn's strategy: what is divided among the ranks, and what comes back.

use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerModel, LearningResult,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, ValidLoader,
};
use burn_fsdp_collectives::launch;

use crate::error::Error;
use crate::optimizer_record::{OptimizerParts, emptied};
use crate::train::course::{Course, Ranks};
use crate::train::lead::Lead;
use crate::train::lent::Lent;
use crate::train::lock::held;
use crate::train::outputs::{Codecs, Outputs};
use crate::train::rank::{Start, train};
use crate::train::rounds::Share;
use crate::train::settings::Settings;

/// The strategy as Burn's loop calls it. It returns nothing but a model, so that errors are left in `outcome`.
pub(crate) struct Strategy<M: LearnerModel> {
    settings: Settings,
    process: Option<Process<M>>,
    outcome: Arc<Mutex<Result<(), Error>>>,
}

/// The rank that this process is, among others.
pub(crate) struct Process<M: LearnerModel> {
    pub(crate) rank: usize,
    pub(crate) codecs: Codecs<M>,
}

impl<M: LearnerModel> Strategy<M> {
    pub(crate) fn new(
        settings: Settings,
        process: Option<Process<M>>,
        outcome: Arc<Mutex<Result<(), Error>>>,
    ) -> Self {
        Self {
            settings,
            process,
            outcome,
        }
    }

    /// Returns the device of each rank, with autodiff as the model has it: tensors of one operation must agree on that.
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

impl<M: LearnerModel> SupervisedLearningStrategy<Lent<M>> for Strategy<M> {
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
        let ended = whole
            .divided(devices, &course, lead, here)
            .and_then(|starts| {
                let start =
                    move |rank: usize| held(&starts[rank]).take().expect("a rank starts once");
                let ranks = launch(self.settings.ranks, move |world| {
                    train(&world, start(world.rank()))
                });
                Ok(ranks?)
            });
        let model = match ended {
            Ok(models) => models.into_iter().flatten().next(),
            Err(error) => {
                components.interrupter.stop(Some(&error.to_string()));
                *held(&self.outcome) = Err(error);
                None
            }
        };
        let processor = held(&processor).take();
        let processor = processor.expect("rank 0 has only used it");
        (Lent::returned(model), processor)
    }
}

/// The strategy in a process that is not rank 0: Burn's loop tells nobody here of a training of which rank 0 tells.
pub(crate) struct Silently<M: LearnerModel>(pub(crate) Strategy<M>);

impl<M: LearnerModel> SupervisedLearningStrategy<Lent<M>> for Silently<M> {
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

/// What one learner has, before the ranks get their parts of it.
struct Whole<M: LearnerModel> {
    model: M,
    optimizer: ModuleOptimizer,
    learner: Learner<Lent<M>>,
    training: Vec<Share<<M as TrainStep>::Input>>,
    validation: Vec<Share<<M as InferenceStep>::Input>>,
}

impl<M: LearnerModel> Whole<M> {
    /// Returns what each rank begins with that is `here`: all, or the one that this process is.
    fn divided(
        self,
        devices: Vec<Device>,
        course: &Course<M>,
        lead: Lead<M>,
        here: Option<usize>,
    ) -> Result<Vec<Mutex<Option<Start<M>>>>, Error> {
        let state = Arc::new(OptimizerParts::take(&self.optimizer)?);
        let bare = emptied(&self.optimizer);
        let mut lead = Some(lead);
        let shares = self.training.into_iter().zip(self.validation);
        let starts = devices.into_iter().zip(shares).enumerate();
        let starts = starts.map(|(rank, (device, shares))| {
            let is_here = here.is_none_or(|here| here == rank);
            Mutex::new(is_here.then(|| Start {
                model: self.model.clone(),
                optimizer: bare.clone(),
                state: state.clone(),
                learner: self.learner.clone(),
                training: shares.0,
                validation: shares.1,
                device,
                course: course.clone(),
                lead: lead.take_if(|_| rank == 0),
            }))
        });
        Ok(starts.collect())
    }
}
