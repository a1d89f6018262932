//! Compiled steps in a training run.

use burn::module::{ModuleMapper, Param};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::{Device, Tensor, TensorData};
use burn::train::{InferenceStep, LearnerModel, TrainStep};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_mesh::Strategy;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Batch, CompiledStep, Evaluation, Mode, OptimizerGroups};

use crate::compiled_output::CompiledOutput;
use crate::compiled_state::{Fields, resume, staged};
use crate::groups::{REPLICATE, mesh};
use crate::rank::{Rank, Start, check_scratch};
use crate::scratch::Scratch;
use crate::staging::Staged;
use crate::trainer::Trainer;
use burn_fsdp_glue::error::Error;

/// The parts of a compiled training run that all ranks share.
pub(crate) struct Setup<N, F> {
    pub(crate) init: N,
    pub(crate) forward: F,
    pub(crate) optimizer: OptimizerGroups,
    pub(crate) strategy: Strategy,
    pub(crate) options: Options,
}

/// The inputs of a compiled step: a batch, and the factor of its loss if it is one of several of a step.
type Input<I> = (I, Option<Tensor<1>>);

/// The outputs of a compiled step besides the loss that is differentiated.
type Output<O> = (Tensor<1>, <O as CompiledOutput>::Tensors);

/// Trains on one rank. Returns the whole model on rank 0.
///
/// Collective.
pub(crate) fn train<M, I, O, N, F>(
    world: &ProcessGroup,
    start: Start<M>,
    setup: &Setup<N, F>,
) -> Result<Option<M>, Error>
where
    M: LearnerModel + TrainStep<Input = I, Output = O> + InferenceStep<Input = I, Output = O>,
    I: Batch,
    O: CompiledOutput,
    N: Fn(&Device) -> M + Clone + Send + 'static,
    F: Fn(&M, I) -> O + Clone + Send + 'static,
{
    let Start {
        model,
        whole,
        learner,
        training,
        validation,
        device,
        course,
        lead,
        ..
    } = start;
    for (of, items) in [
        ("training", course.items),
        ("validation", course.validated_items),
    ] {
        if !items.is_multiple_of(world.size()) {
            let ranks = world.size();
            return Err(Error::UnevenItems { of, items, ranks });
        }
    }
    check_scratch(&course, lead.as_ref())?;
    let mode = mode(world, course.settings.replicas, setup)?;
    let (init, forward) = (setup.init.clone(), setup.forward.clone());
    let loss = move |model: &M, (batch, factor): Input<I>| {
        let (loss, tensors) = forward(model, batch).into_tensors();
        let scaled = match factor {
            Some(factor) => loss.clone() * factor,
            None => loss.clone(),
        };
        (scaled, (loss, tensors))
    };
    let step = compile(init.clone(), loss, setup.optimizer.clone(), mode)?;
    let forward = setup.forward.clone();
    let evaluation = Evaluation::new(init, move |model: &M, batch: I| {
        forward(model, batch).into_tensors()
    });
    let mut trainer = Compiled {
        fields: Fields::of(&model, &step),
        step,
        evaluation,
        batches: Vec::new(),
    };
    if *course.epochs.start() > 1 {
        resume(&mut trainer.step, world, &model, whole)?;
    }
    drop(model);
    let mut rank = Rank {
        world: world.clone(),
        device,
        rates: None,
        trainer,
        learner,
        course,
        lead,
    };
    rank.train(&training, &validation)?;
    let mut whole = (world.rank() == 0).then(|| (setup.init)(&Device::flex().autodiff()));
    let Compiled {
        fields, mut step, ..
    } = rank.trainer;
    for path in fields.computed() {
        let value = step.parameter(path)?;
        whole = whole.map(|model| model.map(&mut Put::new(path, value)));
    }
    Ok(whole.map(|model| model.valid()))
}

/// Returns the mode of the run's steps.
///
/// Collective.
fn mode<N, F>(world: &ProcessGroup, replicas: usize, setup: &Setup<N, F>) -> Result<Mode, Error> {
    let options = setup.options.clone();
    if replicas == 1 {
        return Ok(Mode::data_parallel(world.clone(), setup.strategy).options(options));
    }
    let mesh = mesh(world, replicas)?;
    Ok(Mode::hybrid(mesh, REPLICATE, setup.strategy)?.options(options))
}

/// A compiled step, with the batches of the current step.
struct Compiled<I: Batch, O: CompiledOutput> {
    fields: Fields,
    step: CompiledStep<Input<I>, burn::backend::Flex, Output<O>>,
    evaluation: Evaluation<I, Output<O>>,
    batches: Vec<I>,
}

impl<M, I, O> Trainer<M> for Compiled<I, O>
where
    M: LearnerModel + TrainStep<Input = I, Output = O> + InferenceStep<Input = I, Output = O>,
    I: Batch,
    O: CompiledOutput,
{
    fn run(&mut self, batch: I, weight: f64) -> Result<Option<O>, Error> {
        if weight != 1.0 {
            return Err(Error::UnevenBatches);
        }
        self.batches.push(batch);
        Ok(None)
    }

    fn step(&mut self, rates: ModuleLearningRate) -> Result<Vec<O>, Error> {
        let count = self.batches.len();
        // A compiled step averages over its batches. Burn adds their gradients.
        let factor = (count > 1).then(|| Tensor::from_data([count as f32], &Device::flex()));
        let batches = self.batches.drain(..);
        let batches: Vec<Input<I>> = batches.map(|batch| (batch, factor.clone())).collect();
        self.step.step_accumulated(rates, &batches)?;
        let outputs = self.step.outputs()?.into_iter();
        let outputs = outputs.map(|(loss, tensors)| O::from_tensors(loss, tensors));
        Ok(outputs.collect())
    }

    fn begin_validation(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn validate(&mut self, batch: I) -> Result<O, Error> {
        let (loss, tensors) = self.step.evaluate(&mut self.evaluation, &batch)?;
        Ok(O::from_tensors(loss, tensors))
    }

    fn end_validation(&mut self) {}

    fn staged(&mut self, files: Option<Scratch>) -> Result<Option<Staged>, Error> {
        staged(&mut self.step, &self.fields, files)
    }
}

/// A mapper that puts a value into the tensor at a path.
struct Put {
    path: String,
    value: Option<TensorData>,
    place: Vec<String>,
}

impl Put {
    fn new(path: &str, value: TensorData) -> Self {
        Self {
            path: path.to_owned(),
            value: Some(value),
            place: Vec::new(),
        }
    }
}

impl ModuleMapper for Put {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.place.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.place.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.place.join(".") != self.path {
            return param;
        }
        match self.value.take() {
            Some(value) => param.map(|old| {
                let dtype = value.dtype();
                Tensor::from_data(value, (&old.device(), dtype))
            }),
            None => param,
        }
    }
}
