//! The compiled step: its graphs, its tensors, and the pending part of its last step.

use std::collections::BTreeMap;
use std::fmt;
use std::slice::from_ref;
use std::sync::Arc;

use burn::backend::Flex;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::TensorData;
use burn_fsdp_tensors::Staged;
use burn_ir::BackendIr;
use parking_lot::Mutex;

use super::agree::agree;
use super::cache::{Graphs, Made, Setting, Tracer};
use super::idle::IdleState;
use super::pending::{Pending, Prepared};
use super::restored::Restored;
use super::scaler::Scaler;
use crate::custom::CustomOperations;
use crate::error::Error;
use crate::graph::Graph;
use crate::initial::InitialValues;
use crate::lower::{Lower, Summary};
use crate::mode::{Mode, Purpose};
use crate::norm::GRAD_NORM;
use crate::run::{Executor, MemoryTable, Results, Timeline};
use crate::trace::{Batch, HostScalars, OutputValue, ParameterSpec, StepScalars, fill};

/// One rank's compiled train step, with its parameters and optimizer states.
pub struct CompiledStep<B, Be: BackendIr = Flex, O = ()> {
    pub(super) graphs: Graphs<B>,
    pub(super) mode: Mode,
    pub(super) specs: Vec<ParameterSpec>,
    pub(super) scalars: HostScalars,
    pub(super) executor: Executor<Be>,
    /// The initial values, until the first graph takes them.
    pub(super) initial: Option<InitialValues>,
    /// States that were set since the last step, by path and slot; the next step begins with them.
    pub(super) restored: BTreeMap<(String, String), Restored>,
    /// The pending part of the last step, if nodes of it run in the next one.
    pub(super) pending: Option<Pending>,
    /// The graph whose constants are loaded.
    pub(super) loaded: Option<Arc<Graph>>,
    /// The graph of the last step, or of the batch prepared last, with its parameters, layouts and ids.
    pub(super) current: Option<Arc<Graph>>,
    pub(super) poisoned: Option<String>,
    pub(super) done: Done<O>,
}

/// Results of the steps so far, apart from parameters and states.
pub(super) struct Done<O> {
    /// Number of steps.
    pub(super) steps: u64,
    /// Outputs of the last step apart from the loss, one for each micro-batch.
    pub(super) outputs: Vec<Outputs>,
    /// The norm of the gradients of the last step, if they were clipped.
    pub(super) grad_norm: Option<f64>,
    /// The scale of the next loss, if it is scaled.
    pub(super) scaler: Option<Scaler>,
    /// States that no step changes.
    pub(super) idle: Vec<IdleState>,
    templates: Templates<O>,
}

/// Outputs of a run apart from the loss: the number of their template, and values by name.
pub(super) type Outputs = (usize, BTreeMap<Arc<str>, TensorData>);

/// The outputs of each trace apart from the loss, with small tensors as placeholders.
pub(super) type Templates<O> = Arc<Mutex<Vec<O>>>;

impl<B: Batch, Be: BackendIr, O> CompiledStep<B, Be, O> {
    /// Creates a step that has not run.
    pub(super) fn new(
        (tracer, templates): (Tracer<B>, Templates<O>),
        mode: Mode,
        specs: Vec<ParameterSpec>,
        scalars: HostScalars,
        executor: Executor<Be>,
        initial: InitialValues,
    ) -> Self {
        let scaler = mode.options.loss_scaling.map(Scaler::new);
        Self {
            graphs: Graphs::new(tracer),
            mode,
            specs,
            scalars,
            executor,
            initial: Some(initial),
            restored: BTreeMap::new(),
            pending: None,
            loaded: None,
            current: None,
            poisoned: None,
            done: Done {
                steps: 0,
                outputs: Vec::new(),
                grad_norm: None,
                scaler,
                idle: Vec::new(),
                templates,
            },
        }
    }

    /// Sets the operations that graphs may use in addition to Burn's, for models that capture custom operations. All
    /// ranks must set the same ones, before the first step.
    #[must_use]
    pub fn operations(mut self, operations: CustomOperations<Be>) -> Self {
        self.executor.set_operations(operations);
        self
    }

    /// Sets the function that makes plans of traces, such as one that also proves them. All ranks must set the same one,
    /// before the first step.
    #[must_use]
    pub fn lowered_by(mut self, lower: Lower) -> Self {
        self.graphs.lower = lower;
        self
    }

    /// Runs one train step and returns the loss: in data parallelism the mean over the ranks, with placements the loss
    /// of the joined batch. All ranks must call it, each with its part of the batch, all parts of the same shapes. The
    /// learning rate is a number, or Burn's rates for several groups.
    ///
    /// # Errors
    ///
    /// - Errors of tracing, for the first batch of its shapes. Parameters are unchanged.
    /// - [`Error::GraphsDiffer`] or [`Error::PeerNotReady`], on all ranks, if they are not about to run the same graph,
    ///   for example because one has a batch of a different shape. Nothing has changed, and the run may continue.
    /// - [`Error::NotRepeatable`]: see [`compile`](crate::compile()).
    /// - [`Error::LossScale`] if gradients overflow at every scale. The step was skipped.
    /// - [`Error::Execution`] and [`Error::Collective`], from the step itself. After these, every call returns
    ///   [`Error::Poisoned`].
    pub fn step(&mut self, rates: impl Into<ModuleLearningRate>, batch: &B) -> Result<f64, Error> {
        self.run(&rates.into(), batch, None)
    }

    /// Runs [`step`](Self::step) and records its timeline.
    ///
    /// # Errors
    ///
    /// Same as [`step`](Self::step).
    pub fn step_with_timeline(
        &mut self,
        rates: impl Into<ModuleLearningRate>,
        batch: &B,
    ) -> Result<(f64, Timeline), Error> {
        let mut timeline = Timeline::new();
        let loss = self.run(&rates.into(), batch, Some(&mut timeline))?;
        Ok((loss, timeline))
    }

    pub(super) fn run(
        &mut self,
        rates: &ModuleLearningRate,
        batch: &B,
        mut timeline: Option<&mut Timeline>,
    ) -> Result<f64, Error> {
        if self.done.scaler.is_some() {
            return self.run_micro(rates, from_ref(batch), timeline);
        }
        let Prepared {
            graph,
            scalars,
            before,
            own,
            stepped,
            pending,
            ..
        } = self.prepare(rates, batch)?;
        // Tracing, and the agreement of the ranks, are not part of the step.
        if let Some(timeline) = timeline.as_deref_mut() {
            *timeline = Timeline::new();
        }
        self.feed(&graph, batch);
        self.executor.draw_for(self.done.steps, 0);
        self.executor.moved_scalars(before);
        let results = self.executor.run(&graph, &scalars, timeline);
        let results = results.inspect_err(|error| self.poison(error))?;
        self.scalars
            .advance(&own, |path| stepped.contains_key(path));
        self.done.steps += 1;
        let template = graph.template();
        self.current = Some(graph);
        self.pending = pending;
        self.done.grad_norm = grad_norm(&results);
        self.done.outputs = vec![(template, results.outputs)];
        self.flush_in_time()?;
        let loss = results.loss.as_ref();
        loss.and_then(|loss| loss.iter::<f64>().next())
            .ok_or_else(|| Error::Internal("the loss is empty".to_owned()))
    }

    /// Records that values are in an undefined state, unless the error was found before anything changed.
    pub(super) fn poison(&mut self, error: &Error) {
        if !matches!(
            error,
            Error::Missing { .. } | Error::GroupSize { .. } | Error::TensorMismatch { .. }
        ) {
            self.poisoned = Some(error.to_string());
            self.pending = None;
        }
    }

    pub(super) fn expect_defined(&self) -> Result<(), Error> {
        match &self.poisoned {
            Some(reason) => Err(Error::Poisoned {
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Agrees with the other ranks on the graphs that this rank would run, if it has any. `batch` is a micro-batch,
    /// with the number of micro-batches.
    pub(super) fn agreed<T, E: Batch>(
        &self,
        prepared: Result<T, Error>,
        fingerprint: impl Fn(&T) -> u64,
        rates: &ModuleLearningRate,
        batch: (&E, usize),
    ) -> Result<T, Error> {
        let said = prepared.as_ref().ok().map(fingerprint);
        let agreed = agree(self.mode.ranks().group(), said, rates, Some(batch));
        prepared.and_then(|prepared| agreed.map(|()| prepared))
    }

    /// Reopens the placements that were decided before a failed agreement, because ranks may have decided by different
    /// graphs.
    pub(super) fn reopen(&mut self, was_open: bool) {
        if was_open && self.initial.is_some() {
            self.mode.reopen();
            self.graphs.clear();
        }
    }

    /// Returns the graphs for the given batch and optimizer step.
    pub(super) fn compiled(
        &mut self,
        purpose: Purpose,
        batch: &B,
        step: &StepScalars,
    ) -> Result<Made, Error> {
        let setting = Setting {
            mode: &mut self.mode,
            specs: &self.specs,
            scalars: &self.scalars,
            operations: self.executor.operations(),
        };
        self.graphs.of(purpose, batch, step, setting)
    }

    /// Loads a graph's constants into the executor.
    pub(super) fn load(&mut self, graph: &Arc<Graph>) {
        let loaded = self.loaded.as_ref();
        if !loaded.is_some_and(|loaded| Arc::ptr_eq(loaded, graph)) {
            self.executor.load_constants(graph);
            self.loaded = Some(graph.clone());
        }
    }

    /// Returns the graph of the last step, or of the batch prepared last; `None` if there is neither. After a step over
    /// micro-batches it is the graph of the last of them, without the optimizer.
    pub fn graph(&self) -> Option<&Graph> {
        self.current.as_deref()
    }

    /// Returns the summary that the [lowering](Self::lowered_by) of the most recently used graph made. It is the
    /// certificate of a graph that was [proved](Mode::certified), and `None` for other graphs.
    pub fn certificate(&self) -> Option<&dyn Summary> {
        self.graphs.summary()
    }

    /// Returns the graph that [`step`](Self::step) would run for a batch, created if necessary. With a scaled loss, it
    /// is the graph of the batch without the optimizer. All ranks must call it.
    ///
    /// # Errors
    ///
    /// Same as [`step`](Self::step).
    pub fn compile_for(
        &mut self,
        rates: impl Into<ModuleLearningRate>,
        batch: &B,
    ) -> Result<Arc<Graph>, Error> {
        let rates = rates.into();
        match self.done.scaler {
            Some(_) => self.micro_graph(&rates, from_ref(batch)),
            None => Ok(self.prepare(&rates, batch)?.graph),
        }
    }

    /// Returns the number of graphs traced so far.
    pub fn num_traces(&self) -> usize {
        self.graphs.num_traces()
    }

    /// Returns the norm that the gradients of the last step had before they were clipped, the same on all ranks. It is
    /// `None` before a step, after a skipped one, and if [`Options`](crate::passes::schedule::Options::clip_grad_norm)
    /// do not clip.
    pub fn grad_norm(&self) -> Option<f64> {
        self.done.grad_norm
    }

    /// Returns the loss closure's other outputs in the last step, on Burn's CPU device: one for each micro-batch, and
    /// none before a step. In data parallelism they cover this rank's part of the batch, with placements the joined
    /// batch.
    ///
    /// # Errors
    ///
    /// [`Error::Internal`] if a template does not match its step, which does not happen.
    pub fn outputs(&self) -> Result<Vec<O>, Error>
    where
        O: Batch,
    {
        let templates = self.done.templates.lock();
        let outputs = self.done.outputs.iter().map(|(template, values)| {
            let template = templates.get(*template);
            let template = template.ok_or_else(|| Error::Internal("a trace was lost".to_owned()));
            fill(template?, |name| {
                values.get(name).cloned().map(OutputValue::Read)
            })
        });
        outputs.collect()
    }

    /// Returns the number of steps done, including skipped ones.
    pub fn num_steps(&self) -> u64 {
        self.done.steps
    }

    /// Returns the memory table of this rank's tensors.
    pub fn memory(&self) -> &MemoryTable {
        self.executor.table()
    }

    /// Returns the copies that collectives have made so far between the host and a device with its own memory. On
    /// Burn's CPU backend there are none.
    pub fn staged(&self) -> Staged {
        self.executor.staged()
    }

    /// Begins a new measurement of peak memory.
    pub fn reset_peak(&mut self) {
        self.executor.table_mut().reset_peak();
    }

    /// Returns the specs of all tensors: first the module's, in module order, and then any that an override adds.
    pub fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }
}

impl<B, Be: BackendIr, O> fmt::Debug for CompiledStep<B, Be, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledStep")
            .field("mode", &self.mode)
            .field("steps", &self.done.steps)
            .field("graphs", &self.graphs.len())
            .finish_non_exhaustive()
    }
}

/// Returns the norm of the gradients, if the graph measured it.
pub(super) fn grad_norm(results: &Results) -> Option<f64> {
    results.outputs.get(GRAD_NORM)?.iter::<f64>().next()
}
