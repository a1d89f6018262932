//! Compiled steps in a training run.

use burn::module::{ModuleMapper, Param, Parameter};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn::train::{InferenceStep, LearnerModel, TrainStep};
use burn_fsdp_certificate::compile_on;
use burn_fsdp_collectives::{Fingerprint, ProcessGroup};
use burn_fsdp_mesh::Strategy;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{
    BackendIr, Batch, CompiledStep, Evaluation, Mode, OptimizerGroups, ShardSpec,
};
use burn_fsdp_tensors::moved_to;

use crate::agreement::check_same;
use crate::compiled_output::CompiledOutput;
use crate::compiled_state::{Fields, resume, staged};
use crate::course::{Course, Ranks};
use crate::groups::{REPLICATE, mesh};
use crate::rank::{Rank, Start, check_scratch};
use crate::scratch::Scratch;
use crate::staging::Staged;
use crate::trainer::Trainer;
use burn_fsdp_glue::error::Error;

/// The parts of a compiled training run that all ranks share.
pub(crate) struct Setup<Be: BackendIr, N, F> {
    pub(crate) init: N,
    pub(crate) forward: F,
    pub(crate) optimizer: OptimizerGroups,
    pub(crate) strategy: Strategy,
    pub(crate) options: Options,
    /// Each rank's device, as the backend's own.
    pub(crate) own: Vec<Be::Device>,
}

/// The inputs of a compiled step: a batch, and the factor of its loss if it is one of several of a step.
type Input<I> = (I, Option<Tensor<1>>);

/// The outputs of a compiled step besides the loss that is differentiated.
type Output<O> = (Tensor<1>, <O as CompiledOutput>::Tensors);

/// Trains on one rank. Returns the whole model on Burn's CPU device, on rank 0 of threads or in every process.
///
/// Collective.
pub(crate) fn train<Be, M, I, O, N, F>(
    world: &ProcessGroup,
    start: Start<M>,
    setup: &Setup<Be, N, F>,
) -> Result<Option<M>, Error>
where
    Be: BackendIr,
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
    check_items(&course, world.size())?;
    if course.among == Ranks::Processes {
        let style = format!("{:?} {:?}", setup.strategy, setup.options);
        check_same(
            world,
            &course,
            &model,
            &[("the strategy and its options", Fingerprint::of(&style))],
        )?;
    }
    check_scratch(&course, lead.as_ref())?;
    let on = device.clone().inner();
    let (step, evaluation) = compiled(world, &on, course.settings.replicas, setup)?;
    let fields = Fields::of(&model, &step);
    if course.among == Ranks::Processes {
        fields.check_same(world)?;
    }
    let mut trainer = Compiled {
        fields,
        step,
        evaluation,
        batches: Vec::new(),
        device: on,
    };
    if *course.epochs.start() > 1 {
        let Compiled { step, fields, .. } = &mut trainer;
        resume(step, world, fields, (model, whole))?;
    } else {
        drop(model);
    }
    let is_returned = world.rank() == 0 || course.among == Ranks::Processes;
    let mut rank = Rank {
        world: world.clone(),
        device,
        // A compiled step compares them itself.
        rates: None,
        trainer,
        learner,
        course,
        lead,
    };
    rank.train(&training, &validation)?;
    let mut whole = is_returned.then(|| (setup.init)(&Device::flex().autodiff()));
    let Compiled {
        fields, mut step, ..
    } = rank.trainer;
    for path in fields.computed() {
        let value = step.parameter(path)?;
        whole = whole.map(|model| model.map(&mut Put::new(path, value)));
    }
    for (path, value) in fields.own() {
        whole = whole.map(|model| model.map(&mut Put::new(path, value.clone())));
    }
    Ok(whole.map(|model| model.valid()))
}

/// Checks that the ranks get equally many items, because their batches must have the same shapes.
fn check_items<M: LearnerModel>(course: &Course<M>, ranks: usize) -> Result<(), Error> {
    let all = [
        ("training", course.items),
        ("validation", course.validated_items),
    ];
    let uneven = all
        .into_iter()
        .find(|(_, items)| !items.is_multiple_of(ranks));
    match uneven {
        Some((of, items)) => Err(Error::UnevenItems { of, items, ranks }),
        None => Ok(()),
    }
}

/// A compiled step of a training run, and the evaluation of its validations.
type Steps<Be, I, O> = (
    CompiledStep<Input<I>, Be, Output<O>>,
    Evaluation<I, Output<O>>,
);

/// Compiles the step and the evaluation of a rank on `device`.
///
/// Collective.
fn compiled<Be, M, I, O, N, F>(
    world: &ProcessGroup,
    device: &Device,
    replicas: usize,
    setup: &Setup<Be, N, F>,
) -> Result<Steps<Be, I, O>, Error>
where
    Be: BackendIr,
    M: LearnerModel,
    I: Batch,
    O: CompiledOutput,
    N: Fn(&Device) -> M + Clone + Send + 'static,
    F: Fn(&M, I) -> O + Clone + Send + 'static,
{
    let mode = mode(world, replicas, setup)?;
    let (init, forward) = (setup.init.clone(), setup.forward.clone());
    let loss = move |model: &M, (batch, factor): Input<I>| {
        let (loss, tensors) = forward(model, batch).into_tensors();
        let scaled = match factor {
            Some(factor) => loss.clone() * factor,
            None => loss.clone(),
        };
        (scaled, (loss, tensors))
    };
    let of_rank_0 = |_: &ShardSpec<'_>| Ok::<_, Error>(None);
    let on = (device, setup.own[world.rank()].clone());
    let optimizer = setup.optimizer.clone();
    let values = (init.clone(), of_rank_0);
    let step = compile_on::<Be, _, _, _, _, (), Error>(values, loss, optimizer, mode, (), on)?;
    let forward = setup.forward.clone();
    let evaluation = Evaluation::on(device, init, move |model: &M, batch: I| {
        forward(model, batch).into_tensors()
    });
    Ok((step, evaluation))
}

/// Returns the mode of the run's steps.
///
/// Collective.
fn mode<Be: BackendIr, N, F>(
    world: &ProcessGroup,
    replicas: usize,
    setup: &Setup<Be, N, F>,
) -> Result<Mode, Error> {
    let options = setup.options.clone();
    if replicas == 1 {
        return Ok(Mode::data_parallel(world.clone(), setup.strategy).options(options));
    }
    let mesh = mesh(world, replicas)?;
    Ok(Mode::hybrid(mesh, REPLICATE, setup.strategy)?.options(options))
}

/// A compiled step, with the batches of the current step.
struct Compiled<Be: BackendIr, I: Batch, O: CompiledOutput> {
    fields: Fields,
    step: CompiledStep<Input<I>, Be, Output<O>>,
    evaluation: Evaluation<I, Output<O>>,
    batches: Vec<I>,
    /// The rank's device, without autodiff.
    device: Device,
}

impl<Be: BackendIr, I: Batch, O: CompiledOutput> Compiled<Be, I, O> {
    /// Returns an output on the rank's device, so that the metrics' own tensors have the same integer types.
    fn output(&self, tensors: Output<O>) -> O {
        let (loss, tensors) = moved_to(tensors, &self.device);
        O::from_tensors(loss, tensors)
    }
}

impl<Be, M, I, O> Trainer<M> for Compiled<Be, I, O>
where
    Be: BackendIr,
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
        let factor = (count > 1).then(|| Tensor::from_data([count as f32], &self.device));
        let batches = self.batches.drain(..);
        let batches: Vec<Input<I>> = batches.map(|batch| (batch, factor.clone())).collect();
        self.step.step_accumulated(rates, &batches)?;
        let outputs = self.step.outputs()?.into_iter();
        Ok(outputs.map(|tensors| self.output(tensors)).collect())
    }

    fn begin_validation(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn validate(&mut self, batch: I, weight: f64) -> Result<O, Error> {
        if weight != 1.0 {
            return Err(Error::UnevenBatches);
        }
        let tensors = self.step.evaluate(&mut self.evaluation, &batch)?;
        Ok(self.output(tensors))
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

    fn put<const D: usize, K: Basic>(&mut self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        if self.place.join(".") != self.path {
            return param;
        }
        match self.value.take() {
            Some(value) => param.map(|old| {
                let value = value.convert_dtype(old.dtype());
                let dtype = value.dtype();
                Tensor::from_data(value, (&old.device(), dtype))
            }),
            None => param,
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
        self.put(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.put(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.put(param)
    }
}
