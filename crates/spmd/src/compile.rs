//! The whole way from closures to steps.

mod state;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::Flex;
use burn::module::Module;
use burn::optim::Optimizer;
use burn::tensor::{Device, Tensor, TensorData};
use burn_ir::{BackendIr, TensorId};

use crate::graph::{Graph, Parameter, Role};
use crate::initial::InitialValues;
use crate::layout::{localize, slice, whole};
use crate::mode::{Lowered, Mode, lower_all};
use crate::run::{Executor, MemoryTable, Timeline};
use crate::trace::{
    Batch, HostScalars, InputSpec, OptimizerStep, ParameterSpec, StepScalars, TraceConfig, data_of,
    parameters, specs_of, trace_joined,
};
use crate::{CustomOperations, Error};
use state::Restored;

/// Compiles a train step: `loss` of the module that `init` makes and a batch, its gradients, and a
/// step of `optimizer` for every parameter. All ranks of the mode's group must call it, with the same
/// arguments.
///
/// Graphs are made when the first batch of its shapes comes. Initial values are those that `init`
/// gives on rank 0; no rank ever holds more than its shards and one whole parameter.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_spmd::{Mode, compile};
///
/// let mut step = compile(
///     |device: &Device| LinearConfig::new(3, 1).init(device),
///     |model: &Linear, (x, y): (Tensor<2>, Tensor<2>)| (model.forward(x) - y).square().mean(),
///     AdamWConfig::new().build(),
///     Mode::single(),
/// )?;
/// let device = Device::flex();
/// let batch = (Tensor::ones([8, 3], &device), Tensor::full([8, 1], 10.0, &device));
/// let first = step.step(1e-1, &batch)?;
/// for _ in 0..10 {
///     step.step(1e-1, &batch)?;
/// }
/// assert!(step.step(1e-1, &batch)? < first);
/// assert_eq!(step.parameter("weight")?.shape().to_vec(), [3, 1]);
/// # Ok::<(), burn_fsdp_spmd::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Uncapturable`] if `init` reads the value of a tensor; [`Error::ElementType`];
/// [`Error::Collective`].
pub fn compile<M, B, O>(
    init: impl Fn(&Device) -> M + Send + 'static,
    loss: impl Fn(&M, B) -> Tensor<1> + Send + 'static,
    optimizer: O,
    mode: Mode,
) -> Result<CompiledStep<B>, Error>
where
    M: Module + 'static,
    B: Batch,
    O: Optimizer,
{
    compile_with(init, loss, optimizer, mode, Vec::new())
}

/// [`compile`] with overrides: parts of the module that cannot be traced as they are.
///
/// # Errors
///
/// As [`compile`]; [`Error::OverrideChangedParameters`] if an override does.
pub fn compile_with<M, B, O>(
    init: impl Fn(&Device) -> M + Send + 'static,
    loss: impl Fn(&M, B) -> Tensor<1> + Send + 'static,
    optimizer: O,
    mode: Mode,
    overrides: Vec<Box<dyn Override<M>>>,
) -> Result<CompiledStep<B>, Error>
where
    M: Module + 'static,
    B: Batch,
    O: Optimizer,
{
    let on = Default::default();
    compile_on::<Flex, M, B, O>(init, loss, optimizer, mode, overrides, &Device::flex(), on)
}

/// Replaces parts of a module while it is traced, and rewrites what the trace made of them.
///
/// Training starts from the values of the module that `init` makes; what replaces a part must have the
/// same parameters under the same paths.
pub trait Override<M>: Send {
    /// The module to trace instead.
    fn replace(&self, module: M) -> M;

    /// Rewrites the graph of the trace, before any pass. By default nothing changes.
    ///
    /// # Errors
    ///
    /// If the graph is not what it expects.
    fn rewrite(&self, graph: Graph) -> Result<Graph, Error> {
        Ok(graph)
    }
}

/// [`compile_with`] for another backend: parameters are initialised on `device`, and steps run on
/// `backend_device`.
///
/// # Errors
///
/// As [`compile`].
pub fn compile_on<Be, M, B, O>(
    init: impl Fn(&Device) -> M + Send + 'static,
    loss: impl Fn(&M, B) -> Tensor<1> + Send + 'static,
    optimizer: O,
    mode: Mode,
    overrides: Vec<Box<dyn Override<M>>>,
    device: &Device,
    backend_device: Be::Device,
) -> Result<CompiledStep<B, Be>, Error>
where
    Be: BackendIr,
    M: Module + 'static,
    B: Batch,
    O: Optimizer,
{
    let specs = parameters(&init)?;
    let replaced = |device: &Device| {
        let module = init(device);
        overrides
            .iter()
            .fold(module, |module, part| part.replace(module))
    };
    let traced = parameters(replaced)?;
    if let Some(path) = first_difference(&specs, &traced) {
        return Err(Error::OverrideChangedParameters { path });
    }
    let ranks: Vec<usize> = specs
        .iter()
        .filter(|spec| spec.is_trained)
        .map(|spec| spec.shape.len())
        .collect();
    let scalars = HostScalars::new(&optimizer, ranks)?;
    let initial = InitialValues::new(&init, &specs, &mode, device)?;
    let executor = Executor::new(backend_device, mode.group.clone()).with_axes(mode.axes()?);
    let tracer = move |batch: &B, config: TraceConfig, mode: &Mode| {
        let init = |device: &Device| {
            let parts = overrides.iter();
            parts.fold(init(device), |module, part| part.replace(module))
        };
        let loss = |model: &M, batch: B| loss(model, batch);
        let joined = |name: &str, shape: &[usize]| mode.joined_shape(name, shape);
        let graph = trace_joined(init, loss, &optimizer, (batch, &joined), config)?;
        overrides
            .iter()
            .try_fold(graph, |graph, part| part.rewrite(graph))
    };
    Ok(CompiledStep {
        tracer: Box::new(tracer),
        mode,
        specs,
        scalars,
        executor,
        initial: Some(initial),
        restored: BTreeMap::new(),
        graphs: VecDeque::new(),
        pending: None,
        loaded: None,
        current: None,
        steps: 0,
        poisoned: None,
        num_traces: 0,
        batch: PhantomData,
    })
}

/// The first path at which two modules differ.
fn first_difference(a: &[ParameterSpec], b: &[ParameterSpec]) -> Option<String> {
    let longest = a.len().max(b.len());
    let index = (0..longest).find(|index| a.get(*index) != b.get(*index))?;
    let spec = a.get(index).or(b.get(index))?;
    Some(spec.path.to_string())
}

type Tracer<B> = Box<dyn Fn(&B, TraceConfig, &Mode) -> Result<Graph, Error> + Send>;

/// What a graph was made for.
#[derive(Debug, Clone, PartialEq)]
struct Key {
    inputs: Vec<InputSpec>,
    step: OptimizerStep,
    structure: BTreeMap<usize, Vec<String>>,
}

/// The graphs that were made for a key.
#[derive(Debug, Clone)]
enum Compiled {
    Whole(Arc<Graph>),
    Iteration {
        setup: Arc<Graph>,
        main: Arc<Graph>,
        cleanup: Arc<Graph>,
    },
}

/// An optimizer's step that has been put off: gradients wait for it.
struct Pending {
    step: OptimizerStep,
    learning_rate: f64,
    scalars: StepScalars,
    /// Does it without a step.
    cleanup: Arc<Graph>,
}

/// What the next call runs.
struct Prepared {
    graph: Arc<Graph>,
    scalars: StepScalars,
    /// What is put off by it.
    pending: Option<Pending>,
}

/// A compiled train step with its parameters and optimizer states, of one rank.
pub struct CompiledStep<B, Be: BackendIr = Flex> {
    tracer: Tracer<B>,
    mode: Mode,
    specs: Vec<ParameterSpec>,
    scalars: HostScalars,
    executor: Executor<Be>,
    /// Until the first graph says where they go.
    initial: Option<InitialValues>,
    /// States that were set before there was a graph, by path and slot.
    restored: BTreeMap<(String, String), Restored>,
    /// The one used last at the back.
    graphs: VecDeque<(Key, Compiled)>,
    /// The last step's optimizer, if it has been put off.
    pending: Option<Pending>,
    /// The graph whose constants are loaded.
    loaded: Option<Arc<Graph>>,
    /// Of the last step: it knows parameters, layouts and ids.
    current: Option<Arc<Graph>>,
    steps: u64,
    poisoned: Option<String>,
    num_traces: usize,
    batch: PhantomData<fn(B)>,
}

impl<B: Batch, Be: BackendIr> CompiledStep<B, Be> {
    /// Knows these operations beside Burn's, for models that capture some of their own. All ranks must
    /// give the same, before the first step.
    #[must_use]
    pub fn with_operations(mut self, operations: CustomOperations<Be>) -> Self {
        self.executor.set_operations(operations);
        self
    }

    /// Runs one train step and returns the loss, averaged over the ranks. All ranks must call it,
    /// each with its part of the batch, all parts of the same shapes.
    ///
    /// # Errors
    ///
    /// Those of tracing, the first time that a batch of these shapes comes; parameters are unchanged then.
    /// [`Error::Execution`] and [`Error::Collective`] from the step itself; after those,
    /// every call returns [`Error::Poisoned`].
    pub fn step(&mut self, learning_rate: f64, batch: &B) -> Result<f64, Error> {
        self.run(learning_rate, batch, None)
    }

    /// [`step`](Self::step), and what it did when.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    pub fn step_with_timeline(
        &mut self,
        learning_rate: f64,
        batch: &B,
    ) -> Result<(f64, Timeline), Error> {
        self.prepare(learning_rate, batch)?;
        let mut timeline = Timeline::new();
        let loss = self.run(learning_rate, batch, Some(&mut timeline))?;
        Ok((loss, timeline))
    }

    fn run(
        &mut self,
        learning_rate: f64,
        batch: &B,
        timeline: Option<&mut Timeline>,
    ) -> Result<f64, Error> {
        if let Some(reason) = &self.poisoned {
            return Err(Error::Poisoned {
                reason: reason.clone(),
            });
        }
        let Prepared {
            graph,
            scalars,
            pending,
        } = self.prepare(learning_rate, batch)?;
        for (id, (_, data)) in graph.inputs().iter().zip(data_of(batch)) {
            self.executor.set(*id, data);
        }
        let loss = self.executor.run(&graph, &scalars, timeline);
        let loss = loss.inspect_err(|error| self.poison(error))?;
        self.scalars.advance(learning_rate);
        self.steps += 1;
        self.current = Some(graph);
        self.pending = pending;
        loss.iter::<f64>()
            .next()
            .ok_or_else(|| Error::Internal("the loss is empty".to_owned()))
    }

    /// [`step`](Self::step), after which nothing is left to do: with
    /// [`OptimizerPlace::InNextForward`](crate::passes::schedule::OptimizerPlace::InNextForward) the
    /// optimizer's step, which the next call would do, is done. Everything that reads or sets parameters
    /// and states does that, too.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    pub fn last_step(&mut self, learning_rate: f64, batch: &B) -> Result<f64, Error> {
        let loss = self.step(learning_rate, batch)?;
        self.flush()?;
        Ok(loss)
    }

    /// Does the optimizer's step that has been put off, if there is one. Nothing moves between ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Execution`].
    pub fn flush(&mut self) -> Result<(), Error> {
        let Some(pending) = self.pending.take() else {
            return Ok(());
        };
        let graph = pending.cleanup;
        self.load(&graph);
        let done = self.executor.update(&graph, &pending.scalars);
        done.inspect_err(|error| self.poison(error))?;
        let gradients = graph.values().filter_map(|value| match value.role {
            Role::Pending(_) => Some(value.id),
            _ => None,
        });
        for id in gradients {
            self.executor.remove(id);
        }
        Ok(())
    }

    /// Notes that values are in no defined state, unless the error was found before anything changed.
    fn poison(&mut self, error: &Error) {
        if !matches!(error, Error::Missing { .. } | Error::GroupSize { .. }) {
            self.poisoned = Some(error.to_string());
        }
    }

    /// The graph for such a batch, made if there is none, and the scalars that it runs with.
    fn prepare(&mut self, learning_rate: f64, batch: &B) -> Result<Prepared, Error> {
        let scalars = self.scalars.peek(learning_rate)?;
        let step = match self.steps {
            0 => OptimizerStep::First,
            _ => OptimizerStep::Next,
        };
        let now = self.compiled(learning_rate, batch, step, &scalars)?;
        let prepared = match (now, &self.pending) {
            (Compiled::Whole(graph), _) => Prepared {
                graph,
                scalars,
                pending: None,
            },
            (Compiled::Iteration { setup, cleanup, .. }, before) => {
                let before = before.as_ref();
                let before = before.map(|p| (p.learning_rate, p.step, p.scalars.clone()));
                let (graph, with) = match before {
                    None => (setup, scalars.clone()),
                    // The optimizer's part of this graph is the step before's.
                    Some((rate, step, with)) => match self.compiled(rate, batch, step, &with)? {
                        Compiled::Iteration { main, .. } => (main, with),
                        Compiled::Whole(graph) => (graph, with),
                    },
                };
                Prepared {
                    graph,
                    scalars: with,
                    pending: Some(Pending {
                        step,
                        learning_rate,
                        scalars,
                        cleanup,
                    }),
                }
            }
        };
        let graph = &prepared.graph;
        if let Some(initial) = self.initial.take() {
            for (id, data) in initial.into_values(graph, &self.mode)? {
                self.executor.set(id, data);
            }
        }
        self.restore(graph)?;
        self.load(graph);
        self.current = Some(graph.clone());
        Ok(prepared)
    }

    /// Makes a graph's constants available.
    fn load(&mut self, graph: &Arc<Graph>) {
        let loaded = self.loaded.as_ref();
        if !loaded.is_some_and(|loaded| Arc::ptr_eq(loaded, graph)) {
            self.executor.load_constants(graph);
            self.loaded = Some(graph.clone());
        }
    }

    /// The graphs for such a batch and step of the optimizer.
    fn compiled(
        &mut self,
        learning_rate: f64,
        batch: &B,
        step: OptimizerStep,
        scalars: &StepScalars,
    ) -> Result<Compiled, Error> {
        let key = Key {
            inputs: specs_of(batch)?,
            step,
            structure: scalars.structure().clone(),
        };
        let found = self.graphs.iter().position(|(other, _)| *other == key);
        let entry = match found.and_then(|index| self.graphs.remove(index)) {
            Some(entry) => entry,
            None => (key, self.make(learning_rate, batch, step)?),
        };
        let compiled = entry.1.clone();
        self.graphs.push_back(entry);
        while self.graphs.len() > self.mode.cache {
            self.graphs.pop_front();
        }
        Ok(compiled)
    }

    fn make(
        &mut self,
        learning_rate: f64,
        batch: &B,
        step: OptimizerStep,
    ) -> Result<Compiled, Error> {
        let config = TraceConfig {
            step,
            learning_rate,
        };
        self.num_traces += 1;
        let graph = (self.tracer)(batch, config, &self.mode)?;
        let graph = self.executor.operations().describe(graph)?;
        self.mode.decide(&graph)?;
        match lower_all(graph, &self.mode)? {
            Lowered::Whole(graph) => {
                self.agree(&graph)?;
                Ok(Compiled::Whole(Arc::new(graph)))
            }
            Lowered::Iteration(iteration) => {
                self.agree(&iteration.main)?;
                Ok(Compiled::Iteration {
                    setup: Arc::new(iteration.setup),
                    main: Arc::new(iteration.main),
                    cleanup: Arc::new(iteration.cleanup),
                })
            }
        }
    }

    /// Makes sure that all ranks have the same graph.
    fn agree(&self, graph: &Graph) -> Result<(), Error> {
        let fingerprint = graph.fingerprint().to_le_bytes().to_vec();
        let all = self.mode.group.exchange("compiled graph", fingerprint);
        let all = all.map_err(|source| Error::Collective {
            node: 0,
            source: Arc::new(source),
        })?;
        match all.iter().position(|other| *other != all[0]) {
            Some(rank) => Err(Error::GraphsDiffer { rank }),
            None => Ok(()),
        }
    }

    /// The graph of the last step, or of the batch prepared last; `None` before.
    pub fn graph(&self) -> Option<&Graph> {
        self.current.as_deref()
    }

    /// Makes the graph for a batch, as [`step`](Self::step) would, and runs nothing. All ranks must call it.
    ///
    /// # Errors
    ///
    /// Those of tracing.
    pub fn compile_for(&mut self, learning_rate: f64, batch: &B) -> Result<Arc<Graph>, Error> {
        Ok(self.prepare(learning_rate, batch)?.graph)
    }

    /// How many graphs have been traced so far.
    pub fn num_traces(&self) -> usize {
        self.num_traces
    }

    /// Number of steps done.
    pub fn num_steps(&self) -> u64 {
        self.steps
    }

    /// What this rank's tensors take.
    pub fn memory(&self) -> &MemoryTable {
        self.executor.table()
    }

    /// Begins a new measurement of the peak.
    pub fn reset_peak(&mut self) {
        self.executor.table_mut().reset_peak();
    }

    /// The tensors of the module in the order in which it is visited.
    pub fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// A parameter or buffer as a whole. All ranks must call it, and all get it.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`], [`Error::Collective`].
    pub fn parameter(&mut self, path: &str) -> Result<TensorData, Error> {
        self.spec(path)?;
        self.flush()?;
        if let Some(initial) = &self.initial {
            return initial.whole(path, &self.mode);
        }
        let (parameter, value) = self.located(path)?;
        let local = self.executor.get(value)?;
        self.whole(&parameter, &local)
    }

    /// This rank's part of a parameter: all of it, or a flat shard without padding.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`].
    pub fn shard(&mut self, path: &str) -> Result<TensorData, Error> {
        self.spec(path)?;
        self.flush()?;
        if let Some(initial) = &self.initial {
            return initial.local(path);
        }
        let (parameter, value) = self.located(path)?;
        let local = self.executor.get(value)?;
        Ok(state::unpadded(local, &parameter.layout, &self.mode))
    }

    /// Sets a parameter or buffer as a whole. Every rank must call it with the same data.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`]; [`Error::TensorMismatch`] if it has another shape or type.
    pub fn set_parameter(&mut self, path: &str, data: TensorData) -> Result<(), Error> {
        self.flush()?;
        let spec = self.spec(path)?;
        if data.shape().to_vec() != spec.shape || data.dtype() != spec.dtype {
            return Err(Error::mismatch(
                "parameter",
                path.to_owned(),
                (&spec.shape, spec.dtype),
                &data,
            ));
        }
        if let Some(initial) = &mut self.initial {
            return initial.set(path, data, &self.mode);
        }
        let (parameter, value) = self.located(path)?;
        let local = localize(&data, &parameter.layout, &self.mode)?;
        self.executor.set(value, local);
        Ok(())
    }

    /// The optimizer's states of a parameter as wholes, by name; empty before the first step. All ranks
    /// must call it.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`], [`Error::Collective`].
    pub fn states(&mut self, path: &str) -> Result<Vec<(String, TensorData)>, Error> {
        self.spec(path)?;
        self.flush()?;
        let Some(graph) = self.current.clone() else {
            return Ok(Vec::new());
        };
        let (parameter, _) = self.located(path)?;
        let mut states = Vec::new();
        for id in &parameter.states {
            let Some(Role::State { slot, .. }) = graph.value(*id).map(|v| &v.role) else {
                continue;
            };
            if self.executor.has(*id) {
                let local = self.executor.get(*id)?;
                states.push((slot.to_string(), self.whole(&parameter, &local)?));
            }
        }
        Ok(states)
    }

    /// Continues a run after that many steps: the optimizer's counters are set to it, and every state
    /// must be set with [`set_state`](Self::set_state) before the next step.
    pub fn resume(&mut self, steps: u64, learning_rate: f64) {
        for _ in self.steps..steps {
            self.scalars.advance(learning_rate);
        }
        self.steps = self.steps.max(steps);
    }

    /// Sets a state of the optimizer as a whole, under the name that [`states`](Self::states) gives it.
    /// Every rank must call it with the same data.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`] for the path. A slot that does not exist, or data of another shape or type,
    /// is found by the next step.
    pub fn set_state(&mut self, path: &str, slot: &str, data: TensorData) -> Result<(), Error> {
        self.spec(path)?;
        self.flush()?;
        let key = (path.to_owned(), slot.to_owned());
        self.restored.insert(key, Restored::Whole(data));
        Ok(())
    }

    /// Puts the states that were set where a graph has them.
    fn restore(&mut self, graph: &Graph) -> Result<(), Error> {
        for ((path, slot), data) in std::mem::take(&mut self.restored) {
            let parameter = graph.parameter(&path);
            let states = parameter
                .map(|parameter| parameter.states.as_slice())
                .unwrap_or_default();
            let named = states
                .iter()
                .filter_map(|id| Some((*id, graph.value(*id)?)));
            let named: Vec<_> = named
                .filter_map(|(id, value)| match &value.role {
                    Role::State { slot, .. } => Some((id, slot.clone())),
                    _ => None,
                })
                .collect();
            let found = named.iter().find(|(_, other)| **other == *slot);
            let (Some(parameter), Some((id, _))) = (parameter, found) else {
                let known: Vec<_> = named.iter().map(|(_, slot)| slot.as_ref()).collect();
                return Err(Error::UnknownName {
                    what: "optimizer state",
                    name: format!("{path} {slot}"),
                    known: known.join(", "),
                });
            };
            let local = data.into_local(parameter, &slot, &self.mode)?;
            self.executor.set(*id, local);
        }
        Ok(())
    }

    fn whole(&self, parameter: &Parameter, local: &TensorData) -> Result<TensorData, Error> {
        let Parameter {
            path,
            layout,
            shape,
            ..
        } = parameter;
        whole(&self.mode, path, local, layout, shape)
    }

    fn spec(&self, path: &str) -> Result<&ParameterSpec, Error> {
        let found = self.specs.iter().find(|spec| &*spec.path == path);
        found.ok_or_else(|| {
            let known = self.specs.iter().take(8).map(|spec| spec.path.as_ref());
            Error::UnknownName {
                what: "parameter",
                name: path.to_owned(),
                known: known.collect::<Vec<_>>().join(", "),
            }
        })
    }

    fn located(&self, path: &str) -> Result<(Parameter, TensorId), Error> {
        let graph = self.current.as_ref();
        let parameter = graph.and_then(|graph| graph.parameter(path)).cloned();
        let parameter =
            parameter.ok_or_else(|| Error::Internal(format!("parameter {path} is in no graph")))?;
        let value = parameter.value;
        Ok((parameter, value))
    }
}

impl<B, Be: BackendIr> fmt::Debug for CompiledStep<B, Be> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledStep")
            .field("mode", &self.mode)
            .field("steps", &self.steps)
            .field("graphs", &self.graphs.len())
            .finish_non_exhaustive()
    }
}
