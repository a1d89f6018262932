//! Evaluation: a forward pass of the model on the parameters that a step trains.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use burn::backend::{DispatchKindConversion, DispatchTensor};
use burn::module::Module;
use burn::tensor::Device;
use burn_fsdp_tensors::{device_handle, host_handle, is_host_backend, of_handle};
use burn_ir::BackendIr;

use super::repeat::difference;
use super::step::CompiledStep;
use crate::custom::CustomOperations;
use crate::error::Error;
use crate::graph::Graph;
use crate::lower::lower_forward;
use crate::mode::Mode;
use crate::run::{Executor, Results};
use crate::trace::{
    Batch, Defaults, InputSpec, InputValue, OutputValue, ParameterSpec, StepScalars, fill,
    fixed_of, specs_of, trace_forward, values_of,
};

type Tracer<B, O> = Box<dyn Fn(&B, &Mode) -> Result<(Graph, O), Error> + Send>;

/// The specs of a batch's tensors, and the hashes of its other values.
type Key = (Vec<InputSpec>, Vec<(String, u64)>);

/// A forward pass of a model, run by [`CompiledStep::evaluate`] on the parameters that a step trains, for measurement
/// or inference.
///
/// It holds only graphs, one for each set of shapes. Parameters stay in the step, with their layout.
pub struct Evaluation<B, O> {
    tracer: Tracer<B, O>,
    /// Number of the compiled step for which the graphs were created; `None` before the first.
    of_step: Option<u64>,
    /// The cached graphs, with the most recently used ones at the back.
    kept: VecDeque<(Key, Entry<O>)>,
}

/// A graph, with the template of its results.
struct Entry<O> {
    graph: Arc<Graph>,
    /// The closure's result, with small tensors as placeholders.
    template: O,
    /// The original trace, until the forward has been traced a second time and compared.
    traced: Option<Box<Graph>>,
}

impl<B: Batch, O: Batch + Send> Evaluation<B, O> {
    /// Creates an evaluation of the module that `init` creates, which must be the step's module. `forward` returns any
    /// [`Batch`] of tensors. It is traced for the first batch of each set of shapes.
    ///
    /// The module runs in Burn's inference mode: no gradients, no dropout, and unchanged running statistics. The rules
    /// about [frozen values](crate::compile()) of a train step also apply here.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fsdp_spmd::{Evaluation, Mode, compile};
    ///
    /// let init = |device: &Device| LinearConfig::new(3, 1).init(device);
    /// let loss = |model: &Linear, (x, y): (Tensor<2>, Tensor<2>)| (model.forward(x) - y).square().mean();
    /// let mut step = compile(init, loss, SgdConfig::new().build(), Mode::single())?;
    /// let mut predictions = Evaluation::new(init, |model: &Linear, x: Tensor<2>| model.forward(x));
    ///
    /// let device = Device::flex();
    /// let x = Tensor::<2>::ones([8, 3], &device);
    /// step.step(1e-2, &(x.clone(), Tensor::ones([8, 1], &device)))?;
    /// let predicted: Tensor<2> = step.evaluate(&mut predictions, &x)?;
    /// assert_eq!(predicted.dims(), [8, 1]);
    /// # Ok::<(), burn_fsdp_spmd::Error>(())
    /// ```
    pub fn new<M: Module + 'static>(
        init: impl Fn(&Device) -> M + Send + 'static,
        forward: impl Fn(&M, B) -> O + Send + 'static,
    ) -> Self {
        Self::on(&Device::flex(), init, forward)
    }

    /// Creates an evaluation like [`new`](Self::new), for a step that was compiled on a device with other default types
    /// than Burn's CPU device.
    pub fn on<M: Module + 'static>(
        device: &Device,
        init: impl Fn(&Device) -> M + Send + 'static,
        forward: impl Fn(&M, B) -> O + Send + 'static,
    ) -> Self {
        let defaults = Some(Defaults::of(device));
        let tracer = move |batch: &B, mode: &Mode| {
            let joined = |name: &str, shape: &[usize]| mode.joined_shape(name, shape);
            let options = mode.trace_options(defaults);
            trace_forward(&init, &forward, (batch, &joined), &options)
        };
        Self {
            tracer: Box::new(tracer),
            of_step: None,
            kept: VecDeque::new(),
        }
    }

    /// Returns the graph of the last evaluated batch; `None` before the first.
    pub fn graph(&self) -> Option<&Graph> {
        self.kept.back().map(|(_, entry)| entry.graph.as_ref())
    }

    /// Returns the graph for the given batch and its template, and creates them if they are not cached.
    fn of<Be: BackendIr>(
        &mut self,
        batch: &B,
        mode: &mut Mode,
        specs: &[ParameterSpec],
        operations: &CustomOperations<Be>,
    ) -> Result<(Arc<Graph>, O), Error> {
        let key = (specs_of(batch)?, fixed_of(batch));
        let found = self.kept.iter().position(|(other, _)| *other == key);
        let entry = match found {
            Some(index) => {
                self.check_again(index, batch, mode)?;
                let entry = self.kept.remove(index);
                entry
                    .ok_or_else(|| Error::Internal("a graph was lost".to_owned()))?
                    .1
            }
            None => {
                mode.check_evaluation(&key.0)?;
                let (mut traced, template) = (self.tracer)(batch, mode)?;
                let before = traced.clone();
                traced.order_parameters(specs.iter().map(|spec| &spec.path));
                check_module(&traced, specs)?;
                mode.declare_states(&mut traced);
                let graph = operations.describe(traced.clone())?;
                mode.decide(&graph)?;
                Entry {
                    graph: Arc::new(lower_forward(graph, mode)?),
                    template,
                    traced: Some(Box::new(before)),
                }
            }
        };
        Ok(self.keep(key, entry, mode.cache))
    }

    /// When a graph is used for the second time, traces it again, and rejects it if the two traces differ.
    fn check_again(&mut self, index: usize, batch: &B, mode: &Mode) -> Result<(), Error> {
        let entry = &mut self.kept[index].1;
        let Some(first) = &entry.traced else {
            return Ok(());
        };
        let (again, _) = (self.tracer)(batch, mode)?;
        if let Some(difference) = difference(first, &again) {
            return Err(Error::NotRepeatable { difference });
        }
        entry.traced = None;
        Ok(())
    }

    fn keep(&mut self, key: Key, entry: Entry<O>, most: usize) -> (Arc<Graph>, O) {
        let made = (entry.graph.clone(), entry.template.clone());
        self.kept.push_back((key, entry));
        while self.kept.len() > most {
            self.kept.pop_front();
        }
        made
    }
}

impl<B, O> fmt::Debug for Evaluation<B, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Evaluation")
            .field("graphs", &self.kept.len())
            .finish_non_exhaustive()
    }
}

/// Rejects a module that differs from the step's.
fn check_module(graph: &Graph, specs: &[ParameterSpec]) -> Result<(), Error> {
    let parameters = graph.parameters();
    let is_alike = |(index, spec): (usize, &ParameterSpec)| {
        parameters.get(index).is_some_and(|parameter| {
            (&parameter.path, &parameter.shape) == (&spec.path, &spec.shape)
                && (parameter.dtype, parameter.is_buffer) == (spec.dtype, spec.is_buffer)
        })
    };
    // The step's own module lacks the tensors that an override adds.
    let is_own = !specs
        .iter()
        .all(|spec| parameters.iter().any(|of| of.path == spec.path));
    let mut asked = specs.iter().enumerate();
    let other = asked.find(|spec| !(is_alike(*spec) || is_own && spec.1.is_added));
    let path = other.map(|(_, spec)| spec.path.clone());
    let expected = specs
        .iter()
        .filter(|spec| !(is_own && spec.is_added))
        .count();
    let extra = parameters.get(expected).map(|extra| extra.path.clone());
    match path.or(extra) {
        None => Ok(()),
        Some(path) => Err(Error::Evaluation {
            reason: format!(
                "its module differs at \"{path}\" in path, shape or type; make it with the step's `init`, and use \
                 Evaluation::on for a device of other types"
            ),
        }),
    }
}

/// Checks that both graphs have each parameter under the same id and in the same layout.
fn check_layouts(graph: &Graph, of_step: &Graph) -> Result<(), Error> {
    let pairs = graph.parameters().iter().zip(of_step.parameters());
    let other = pairs.into_iter().find(|(own, other)| {
        (&own.path, own.value) != (&other.path, other.value) || own.layout != other.layout
    });
    match other {
        None => Ok(()),
        Some((own, other)) => Err(Error::Internal(format!(
            "{} is divided as {:?} in an evaluation and as {:?} in the step",
            own.path, own.layout, other.layout
        ))),
    }
}

impl<B: Batch, Be: BackendIr, O> CompiledStep<B, Be, O> {
    /// Runs an evaluation on the current parameters, without changing anything. Returns the closure's result, on Burn's
    /// CPU device. In data parallelism, the result covers this rank's batch; with placements, the joined batch. All
    /// ranks must call it, each with its batch, all of the same shapes.
    ///
    /// With placements, a tensor of the batch is placed like the tensor of the same name in training.
    ///
    /// Units are gathered one by one, as in a step's forward. A deferred optimizer step runs first.
    ///
    /// # Errors
    ///
    /// [`Error::Evaluation`] for a module other than the step's, for a tensor of the batch without a placement, and
    /// before the first step of [`DataParallel::Automatic`](crate::DataParallel::Automatic), which decides the
    /// placements; [`Error::Output`]; [`Error::NotRepeatable`]; the errors of [`step`](Self::step).
    pub fn evaluate<E: Batch, P: Batch + Send>(
        &mut self,
        evaluation: &mut Evaluation<E, P>,
        batch: &E,
    ) -> Result<P, Error> {
        let values = values_of(batch, host_handle);
        let (results, template) =
            self.evaluate_for(evaluation, (batch, values), |executor, graph| {
                executor.run(graph, &StepScalars::default(), None)
            })?;
        let read = |name: &str| results.outputs.get(name).cloned();
        fill(&template, |name| read(name).map(OutputValue::Read))
    }

    /// Runs an evaluation as [`evaluate`](Self::evaluate) does, in the memory of the step's device: the result is
    /// there, and tensors of the batch that are there are not copied.
    ///
    /// # Errors
    ///
    /// As [`evaluate`](Self::evaluate).
    pub fn evaluate_on_device<E: Batch, P: Batch + Send>(
        &mut self,
        evaluation: &mut Evaluation<E, P>,
        batch: &E,
    ) -> Result<P, Error>
    where
        DispatchTensor: DispatchKindConversion<Be>,
    {
        // The host is the device. Its tensors are read without copies, except views.
        if is_host_backend::<Be>() {
            return self.evaluate(evaluation, batch);
        }
        let device = self.executor.device();
        let values = values_of(batch, |tensor| device_handle(tensor, &device));
        let (results, template) =
            self.evaluate_for(evaluation, (batch, values), |executor, graph| {
                executor.run_on_device(graph, &StepScalars::default())
            })?;
        let lent = |name: &str| results.outputs.get(name).cloned();
        fill(&template, |name| {
            lent(name).map(of_handle).map(OutputValue::Lent)
        })
    }

    /// Runs an evaluation of a batch with these values by `run`, and returns its results and their template.
    fn evaluate_for<E: Batch, P: Batch + Send, T>(
        &mut self,
        evaluation: &mut Evaluation<E, P>,
        (batch, values): (&E, Vec<InputValue<Be>>),
        run: impl FnOnce(&mut Executor<Be>, &Graph) -> Result<Results<T>, Error>,
    ) -> Result<(Results<T>, P), Error> {
        let prepared = self.prepare_evaluation(evaluation, batch);
        let fingerprint = |(graph, ..): &(Arc<Graph>, P)| graph.fingerprint();
        let (graph, template) = self.agreed(prepared, fingerprint, &0.0.into(), (batch, 1))?;
        let lent = self.lend_initial(&graph);
        lent.inspect_err(|error| self.poison(error))?;
        self.load(&graph);
        self.feed_values(&graph, values);
        let ran = run(&mut self.executor, &graph);
        let taken = self.take_initial(&graph);
        let results = ran.inspect_err(|error| self.poison(error))?;
        taken?;
        Ok((results, template))
    }

    fn prepare_evaluation<E: Batch, P: Batch + Send>(
        &mut self,
        evaluation: &mut Evaluation<E, P>,
        batch: &E,
    ) -> Result<(Arc<Graph>, P), Error> {
        self.expect_defined()?;
        self.flush()?;
        if self.mode.is_open() {
            return Err(Error::Evaluation {
                reason: "the first train step decides its placements; run one first".to_owned(),
            });
        }
        let number = self.graphs.number();
        if evaluation.of_step.replace(number) != Some(number) {
            evaluation.kept.clear();
        }
        // An evaluation has no states of passes, which come last.
        let num_own = self.specs.len() - self.mode.pass_states().len();
        let made = evaluation.of(
            batch,
            &mut self.mode,
            &self.specs[..num_own],
            self.executor.operations(),
        )?;
        if let Some(current) = &self.current {
            check_layouts(&made.0, current)?;
        }
        Ok(made)
    }

    /// Passes the initial values to the executor, without a copy, unless a step has already taken them.
    fn lend_initial(&mut self, graph: &Graph) -> Result<(), Error> {
        let Some(initial) = &mut self.initial else {
            return Ok(());
        };
        for parameter in graph.parameters() {
            let data = initial.take(parameter, self.mode.ranks())?;
            self.executor.set(parameter.value, data);
        }
        Ok(())
    }

    /// Takes back the initial values that were lent to the executor.
    fn take_initial(&mut self, graph: &Graph) -> Result<(), Error> {
        let Some(initial) = &mut self.initial else {
            return Ok(());
        };
        for parameter in graph.parameters() {
            let data = self.executor.take(parameter.value)?;
            initial.set_local(&parameter.path, data)?;
        }
        Ok(())
    }
}
