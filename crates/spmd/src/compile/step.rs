//! A step that runs: the graphs that it has, and what is pending.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::Flex;
use burn_ir::BackendIr;
use siphasher::sip::SipHasher13;

use super::repeat::difference;
use super::state::Restored;
use crate::graph::{Graph, Node, Phase, Role};
use crate::initial::InitialValues;
use crate::layout::collective;
use crate::mode::{Lowered, Mode, lower_all};
use crate::run::{Executor, MemoryTable, Timeline};
use crate::trace::{
    Batch, HostScalars, InputSpec, ParameterSpec, StepScalars, data_of, fixed_of, specs_of,
};
use crate::{CustomOperations, Error};

pub(super) type Tracer<B> = Box<dyn Fn(&B, &StepScalars, &Mode) -> Result<Graph, Error> + Send>;

/// What a graph was made for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Key {
    inputs: Vec<InputSpec>,
    /// What else of the batch decides: names and hashes.
    fixed: Vec<(String, u64)>,
    /// The operations of the optimizer's step.
    structure: Vec<(usize, usize)>,
}

/// The graphs that were made for a key.
#[derive(Debug, Clone)]
pub(super) struct Made {
    compiled: Compiled,
    /// Of all of them.
    fingerprint: u64,
    /// Paths of the parameters that get a gradient, and with it a step of the optimizer.
    stepped: Arc<BTreeSet<Arc<str>>>,
}

#[derive(Debug, Clone)]
enum Compiled {
    Whole(Arc<Graph>),
    Iteration {
        setup: Arc<Graph>,
        main: Arc<Graph>,
        cleanup: Arc<Graph>,
    },
}

/// The graphs of a key, as they are kept.
pub(super) struct Entry {
    made: Made,
    /// What was traced, until the step has been traced once more and compared.
    traced: Option<Box<Graph>>,
}

/// An optimizer's step that has been put off: gradients wait for it.
pub(super) struct Pending {
    scalars: StepScalars,
    stepped: Arc<BTreeSet<Arc<str>>>,
    /// Does it without a step.
    cleanup: Arc<Graph>,
}

/// What the next call runs.
struct Prepared {
    graph: Arc<Graph>,
    /// Equal on all ranks that run the same.
    fingerprint: u64,
    /// What it runs with: of the step before, if that one's optimizer has been put off.
    scalars: StepScalars,
    /// Of this step.
    own: StepScalars,
    stepped: Arc<BTreeSet<Arc<str>>>,
    /// What is put off by it.
    pending: Option<Pending>,
}

/// A compiled train step with its parameters and optimizer states, of one rank.
pub struct CompiledStep<B, Be: BackendIr = Flex> {
    pub(super) tracer: Tracer<B>,
    pub(super) mode: Mode,
    pub(super) specs: Vec<ParameterSpec>,
    pub(super) scalars: HostScalars,
    pub(super) executor: Executor<Be>,
    /// Until the first graph says where they go.
    pub(super) initial: Option<InitialValues>,
    /// States that were set before there was a graph, by path and slot.
    pub(super) restored: BTreeMap<(String, String), Restored>,
    /// The one used last at the back.
    pub(super) graphs: VecDeque<(Key, Entry)>,
    /// The last step's optimizer, if it has been put off.
    pub(super) pending: Option<Pending>,
    /// The graph whose constants are loaded.
    pub(super) loaded: Option<Arc<Graph>>,
    /// Of the last step: it knows parameters, layouts and ids.
    pub(super) current: Option<Arc<Graph>>,
    pub(super) steps: u64,
    pub(super) poisoned: Option<String>,
    pub(super) num_traces: usize,
    pub(super) batch: PhantomData<fn(B)>,
}

impl<B: Batch, Be: BackendIr> CompiledStep<B, Be> {
    /// A step that has not run.
    pub(super) fn new(
        tracer: Tracer<B>,
        mode: Mode,
        specs: Vec<ParameterSpec>,
        scalars: HostScalars,
        executor: Executor<Be>,
        initial: InitialValues,
    ) -> Self {
        Self {
            tracer,
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
        }
    }

    /// Knows these operations beside Burn's, for models that capture some of their own. All ranks must
    /// give the same, before the first step.
    #[must_use]
    pub fn with_operations(mut self, operations: CustomOperations<Be>) -> Self {
        self.executor.set_operations(operations);
        self
    }

    /// Runs one train step and returns the loss: the mean over the ranks in data parallelism, that of the
    /// joined batch by placements. All ranks must call it, each with its part of the batch, all parts of
    /// the same shapes.
    ///
    /// # Errors
    ///
    /// Those of tracing, the first time that a batch of these shapes comes; parameters are unchanged then.
    /// [`Error::GraphsDiffer`] or [`Error::PeerNotReady`] on all ranks where they have not all the same to run,
    /// because one has a batch of another shape, say: nothing has changed then, and the run may go on.
    /// [`Error::NotRepeatable`], see [`compile`](crate::compile()).
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
        let Prepared {
            graph,
            scalars,
            own,
            stepped,
            pending,
            ..
        } = self.prepare(learning_rate, batch)?;
        for (id, (_, data)) in graph.inputs().iter().zip(data_of(batch)) {
            self.executor.set(*id, data);
        }
        let loss = self.executor.run(&graph, &scalars, timeline);
        let loss = loss.inspect_err(|error| self.poison(error))?;
        self.scalars.advance(&own, |path| stepped.contains(path));
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
        self.expect_defined()?;
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
            self.pending = None;
        }
    }

    fn expect_defined(&self) -> Result<(), Error> {
        match &self.poisoned {
            Some(reason) => Err(Error::Poisoned {
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    /// The graph for such a batch, made if there is none, and the scalars that it runs with. All ranks
    /// must call it; they agree on what they run before anything changes, which takes one exchange of 8
    /// bytes.
    fn prepare(&mut self, learning_rate: f64, batch: &B) -> Result<Prepared, Error> {
        let was_open = self.mode.is_open();
        let prepared = self.prepare_own(learning_rate, batch);
        let prepared = self.agree(prepared, learning_rate, batch);
        let prepared = prepared.inspect_err(|_| {
            // Ranks may have decided by different graphs.
            if was_open && self.initial.is_some() {
                self.mode.reopen();
                self.graphs.clear();
            }
        })?;
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

    /// What this rank would run. Nothing moves between ranks, and the parameters and states change only by an
    /// optimizer's step that was due anyway.
    fn prepare_own(&mut self, learning_rate: f64, batch: &B) -> Result<Prepared, Error> {
        self.expect_defined()?;
        let own = self.scalars.peek(learning_rate)?;
        let Made {
            compiled,
            fingerprint,
            stepped,
        } = self.compiled(batch, &own)?;
        // A graph does the optimizer's step before for the parameters that it has gradients of.
        if let Some(pending) = &self.pending
            && pending.stepped != stepped
        {
            self.flush()?;
        }
        Ok(match (compiled, &self.pending) {
            (Compiled::Whole(graph), _) => Prepared {
                graph,
                fingerprint,
                scalars: own.clone(),
                own,
                stepped,
                pending: None,
            },
            (Compiled::Iteration { setup, cleanup, .. }, before) => {
                let before = before.as_ref().map(|before| before.scalars.clone());
                let (graph, fingerprint, scalars) = match before {
                    None => (setup, fingerprint, own.clone()),
                    // The optimizer's part of this graph is the step before's.
                    Some(with) => {
                        let made = self.compiled(batch, &with)?;
                        match made.compiled {
                            // Another graph of the same key than the one without a step before.
                            Compiled::Iteration { main, .. } => (main, !made.fingerprint, with),
                            Compiled::Whole(graph) => (graph, made.fingerprint, with),
                        }
                    }
                };
                Prepared {
                    graph,
                    fingerprint,
                    scalars,
                    pending: Some(Pending {
                        scalars: own.clone(),
                        stepped: stepped.clone(),
                        cleanup,
                    }),
                    own,
                    stepped,
                }
            }
        })
    }

    /// Makes sure that all ranks are about to run the same.
    fn agree(
        &self,
        own: Result<Prepared, Error>,
        learning_rate: f64,
        batch: &B,
    ) -> Result<Prepared, Error> {
        /// What a rank without a graph says.
        const NOT_READY: [u8; 8] = [0; 8];
        let said = match &own {
            Ok(prepared) => {
                let mut hasher = SipHasher13::new();
                (prepared.fingerprint, learning_rate.to_bits()).hash(&mut hasher);
                hasher.finish().max(1).to_le_bytes()
            }
            Err(_) => NOT_READY,
        };
        let group = &self.mode.group;
        let all = group.exchange("step", said.to_vec());
        let own = own?;
        let all = all.map_err(collective)?;
        if let Some(rank) = all.iter().position(|other| *other == NOT_READY) {
            return Err(Error::PeerNotReady { rank });
        }
        let Some(rank) = all.iter().position(|other| *other != all[0]) else {
            return Ok(own);
        };
        // All ranks are here: they tell each other why.
        let text = format!("{} at learning rate {learning_rate}", described(batch)?);
        let texts = group.exchange("batches of a step", text.into_bytes());
        let texts = texts.map_err(collective)?;
        let text = |rank: usize| String::from_utf8_lossy(&texts[rank]).into_owned();
        let (first, other) = (text(0), text(rank));
        let difference = match first == other {
            true => format!("both have {first}, but the model, the loss or the mode differ"),
            false => format!("rank 0 has {first}, rank {rank} has {other}"),
        };
        Err(Error::GraphsDiffer { rank, difference })
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
    fn compiled(&mut self, batch: &B, step: &StepScalars) -> Result<Made, Error> {
        let key = Key {
            inputs: specs_of(batch)?,
            fixed: fixed_of(batch),
            structure: step.structure(),
        };
        let found = self.graphs.iter().position(|(other, _)| *other == key);
        let entry = match found {
            Some(index) => {
                self.check_again(index, batch, step)?;
                let entry = self.graphs.remove(index);
                entry.ok_or_else(|| Error::Internal("a graph was lost".to_owned()))?
            }
            None => (key, self.make(batch, step)?),
        };
        let made = entry.1.made.clone();
        self.graphs.push_back(entry);
        while self.graphs.len() > self.mode.cache {
            self.graphs.pop_front();
            tracing::warn!(
                graphs = self.mode.cache,
                "a compiled step has seen more shapes than it keeps graphs for, and traces those that \
                 went again; pad batches to fewer shapes, or keep more graphs (Mode::with_cache)"
            );
        }
        Ok(made)
    }

    /// Traces a graph that is used for the second time again, with the batch at hand: what differs now
    /// would have been frozen.
    fn check_again(&mut self, index: usize, batch: &B, step: &StepScalars) -> Result<(), Error> {
        let Some(first) = &self.graphs[index].1.traced else {
            return Ok(());
        };
        let again = (self.tracer)(batch, step, &self.mode)?;
        if let Some(difference) = difference(first, &again) {
            return Err(Error::NotRepeatable { difference });
        }
        self.graphs[index].1.traced = None;
        Ok(())
    }

    fn make(&mut self, batch: &B, step: &StepScalars) -> Result<Entry, Error> {
        self.mode.check_names(&self.specs, &specs_of(batch)?)?;
        self.num_traces += 1;
        let traced = (self.tracer)(batch, step, &self.mode)?;
        let graph = self.executor.operations().describe(traced.clone())?;
        self.check_optimizer(&graph)?;
        self.mode.decide(&graph)?;
        let stepped = graph.parameters().iter().filter(|p| p.gradient.is_some());
        let stepped = Arc::new(stepped.map(|p| p.path.clone()).collect());
        let (compiled, fingerprint) = match lower_all(graph, &self.mode)? {
            Lowered::Whole(graph) => {
                let fingerprint = graph.fingerprint();
                (Compiled::Whole(Arc::from(graph)), fingerprint)
            }
            Lowered::Iteration(iteration) => {
                let fingerprint = iteration.main.fingerprint();
                let compiled = Compiled::Iteration {
                    setup: Arc::new(iteration.setup),
                    main: Arc::new(iteration.main),
                    cleanup: Arc::new(iteration.cleanup),
                };
                (compiled, fingerprint)
            }
        };
        Ok(Entry {
            made: Made {
                compiled,
                fingerprint,
                stepped,
            },
            traced: Some(Box::new(traced)),
        })
    }

    /// Refuses an optimizer that would give each rank other parameters.
    fn check_optimizer(&self, graph: &Graph) -> Result<(), Error> {
        let is_drawn = |node: &&Node| node.phase == Phase::Optimizer && node.is_opaque();
        let drawn = graph.nodes().iter().find(is_drawn);
        match drawn.filter(|_| self.mode.group.size() > 1) {
            Some(node) => {
                let path = node.path.as_deref().unwrap_or_default();
                let reason = format!("every rank has other results of {}", node.name());
                Err(self.scalars.untraceable(path, reason))
            }
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

/// A batch in words: names, types and shapes of its tensors, and its other values by hash.
fn described<B: Batch>(batch: &B) -> Result<String, Error> {
    let tensors = specs_of(batch)?;
    let tensors = tensors
        .iter()
        .map(|spec| format!("\"{}\" {:?} {:?}", spec.name, spec.dtype, spec.shape));
    let fixed = fixed_of(batch);
    let fixed = fixed
        .iter()
        .map(|(name, hash)| format!("\"{name}\" of hash {hash:016x}"));
    let parts: Vec<_> = tensors.chain(fixed).collect();
    Ok(match parts.is_empty() {
        true => "an empty batch".to_owned(),
        false => parts.join(", "),
    })
}
