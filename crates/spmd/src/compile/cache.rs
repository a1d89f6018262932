//! The graphs of a step, one for each set of shapes and operations of the optimizer.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use burn_ir::BackendIr;

use super::repeat::difference;
use crate::custom::CustomOperations;
use crate::error::Error;
use crate::graph::{Graph, Node, Phase};
use crate::lower::{Lower, Lowered, Lowering, Summary, lower_dumped};
use crate::mode::{Mode, Purpose};
use crate::stages::StepGraphs;
use crate::trace::{Batch, HostScalars, InputSpec, ParameterSpec, StepScalars, fixed_of, specs_of};

pub(super) type Tracer<B> = Box<dyn Fn(&B, &StepScalars, &Mode) -> Result<Graph, Error> + Send>;

/// The purpose, inputs and optimizer operations for which a graph was created.
#[derive(Debug, Clone, PartialEq)]
struct Key {
    purpose: Purpose,
    inputs: Vec<InputSpec>,
    /// Names and hashes of the batch's values that are not tensors.
    fixed: Vec<(String, u64)>,
    /// The operation sequence of each parameter's optimizer step, as in [`StepScalars::structure`].
    structure: Vec<(usize, usize)>,
}

/// The parameters that get a gradient and therefore an optimizer step. Each path maps to the path of the first
/// parameter with the same gradient, which identifies the pending gradient.
pub(super) type Stepped = BTreeMap<Arc<str>, Arc<str>>;

/// The graphs that were created for a key.
#[derive(Debug, Clone)]
pub(super) struct Made {
    pub(super) compiled: Compiled,
    /// Fingerprint of all graphs.
    pub(super) fingerprint: u64,
    pub(super) stepped: Arc<Stepped>,
    /// The summary of the plan, if its lowering made one.
    pub(super) summary: Option<Arc<dyn Summary>>,
}

#[derive(Debug, Clone)]
pub(super) enum Compiled {
    Whole(Arc<Graph>),
    Iteration {
        setup: Arc<Graph>,
        main: Arc<Graph>,
        cleanup: Arc<Cleanup>,
    },
    Micro {
        first: Arc<Graph>,
        next: Arc<Graph>,
        update: Arc<Graph>,
    },
}

/// The graph that runs only the nodes that were moved into the next step.
#[derive(Debug)]
pub(super) struct Cleanup {
    pub(super) graph: Arc<Graph>,
    pub(super) fingerprint: u64,
    /// Maximum number of steps for which the nodes stay pending; `None` for no limit.
    pub(super) max_iterations: Option<NonZeroU64>,
    /// True if the moved nodes are the optimizer, which depends on no batch.
    pub(super) is_optimizer: bool,
}

/// The cached graphs of a key.
struct Entry {
    made: Made,
    /// The original trace, until the step has been traced a second time and compared.
    traced: Option<Box<Graph>>,
}

/// The parts of a compiled step from which graphs are created.
pub(super) struct Setting<'a, Be: BackendIr> {
    pub(super) mode: &'a mut Mode,
    pub(super) specs: &'a [ParameterSpec],
    pub(super) scalars: &'a HostScalars,
    pub(super) operations: &'a CustomOperations<Be>,
}

/// The graphs that were created, and the tracer that creates others.
pub(super) struct Graphs<B> {
    tracer: Tracer<B>,
    /// Makes plans of traces.
    pub(super) lower: Lower,
    /// The cached graphs, with the most recently used ones at the back.
    kept: VecDeque<(Key, Entry)>,
    num_traces: usize,
    /// Number of the compiled step within its process.
    number: u64,
}

/// Number of compiled steps that the process has created.
static STEPS: AtomicU64 = AtomicU64::new(0);

impl<B: Batch> Graphs<B> {
    pub(super) fn new(tracer: Tracer<B>) -> Self {
        Self {
            tracer,
            lower: |graph, step: Lowering<'_>| step.lower(graph),
            kept: VecDeque::new(),
            num_traces: 0,
            number: STEPS.fetch_add(1, Relaxed),
        }
    }

    /// Returns the compiled step's number, which is unique in the process.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the number of graphs traced so far.
    pub(super) fn num_traces(&self) -> usize {
        self.num_traces
    }

    /// Removes all cached graphs.
    pub(super) fn clear(&mut self) {
        self.kept.clear();
    }

    /// Returns the graphs for the given batch or micro-batch and optimizer step, and creates them if none are cached.
    pub(super) fn of<Be: BackendIr>(
        &mut self,
        purpose: Purpose,
        batch: &B,
        step: &StepScalars,
        setting: Setting<'_, Be>,
    ) -> Result<Made, Error> {
        let cache = setting.mode.cache;
        let key = Key {
            purpose,
            inputs: specs_of(batch)?,
            fixed: fixed_of(batch),
            structure: step.structure(),
        };
        let found = self.kept.iter().position(|(other, _)| *other == key);
        let entry = match found {
            Some(index) => {
                self.check_again(index, batch, step, setting.mode)?;
                let entry = self.kept.remove(index);
                entry.ok_or_else(|| Error::Internal("a graph was lost".to_owned()))?
            }
            None => (key, self.make(purpose, batch, step, setting)?),
        };
        let made = entry.1.made.clone();
        self.kept.push_back(entry);
        while self.kept.len() > cache {
            self.kept.pop_front();
            tracing::warn!(
                target: "burn_fsdp",
                graphs = cache,
                "a compiled step has seen more shapes than it caches graphs for, and traces dropped ones again; pad \
                 batches to fewer shapes, or cache more graphs (Mode::cache)"
            );
        }
        Ok(made)
    }

    /// When a graph is used for the second time, traces it again with this batch, and rejects it if the two traces
    /// differ.
    fn check_again(
        &mut self,
        index: usize,
        batch: &B,
        step: &StepScalars,
        mode: &Mode,
    ) -> Result<(), Error> {
        let Some(first) = &self.kept[index].1.traced else {
            return Ok(());
        };
        let again = (self.tracer)(batch, step, mode)?;
        if let Some(difference) = difference(first, &again) {
            return Err(Error::NotRepeatable { difference });
        }
        self.kept[index].1.traced = None;
        Ok(())
    }

    fn make<Be: BackendIr>(
        &mut self,
        purpose: Purpose,
        batch: &B,
        step: &StepScalars,
        setting: Setting<'_, Be>,
    ) -> Result<Entry, Error> {
        let mode = &mut *setting.mode;
        mode.check_names(setting.specs, &specs_of(batch)?)?;
        self.num_traces += 1;
        let traced = (self.tracer)(batch, step, mode)?;
        let graph = setting.operations.describe(traced.clone())?;
        check_optimizer(&graph, mode, setting.scalars)?;
        let graph = mode.prepare(graph)?;
        let stepped = Arc::new(stepped(&graph));
        let Lowered { graphs, summary } = lower_dumped(graph, mode, purpose, self.lower)?;
        let fingerprint = graphs.fingerprint();
        let compiled = match graphs {
            StepGraphs::Whole(graph) => Compiled::Whole(Arc::from(graph)),
            StepGraphs::Iteration(iteration) => Compiled::Iteration {
                setup: Arc::new(iteration.setup),
                main: Arc::new(iteration.main),
                cleanup: Arc::new(Cleanup {
                    fingerprint: iteration.cleanup.fingerprint(),
                    graph: Arc::new(iteration.cleanup),
                    max_iterations: iteration.max_iterations,
                    is_optimizer: iteration.is_optimizer,
                }),
            },
            StepGraphs::Micro(steps) => Compiled::Micro {
                first: Arc::new(steps.first),
                next: Arc::new(steps.next),
                update: Arc::new(steps.update),
            },
        };
        Ok(Entry {
            made: Made {
                compiled,
                fingerprint,
                stepped,
                summary,
            },
            traced: Some(Box::new(traced)),
        })
    }
}

impl<B> Graphs<B> {
    /// Returns the summary of the graph that was used last.
    pub(super) fn summary(&self) -> Option<&dyn Summary> {
        let (_, last) = self.kept.back()?;
        last.made.summary.as_deref()
    }

    /// Returns the number of keys whose graphs are cached.
    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }
}

fn stepped(graph: &Graph) -> Stepped {
    let mut owners = BTreeMap::new();
    let parameters = graph.parameters().iter();
    let stepped = parameters.filter_map(|parameter| {
        let owner = owners.entry(parameter.gradient?);
        let owner: &Arc<str> = owner.or_insert_with(|| parameter.path.clone());
        Some((parameter.path.clone(), owner.clone()))
    });
    stepped.collect()
}

/// Rejects an optimizer that would compute different parameters on each rank.
fn check_optimizer(graph: &Graph, mode: &Mode, scalars: &HostScalars) -> Result<(), Error> {
    let is_drawn = |node: &&Node| node.phase == Phase::Optimizer && node.is_opaque();
    let drawn = graph.nodes().iter().find(is_drawn);
    match drawn.filter(|_| mode.ranks().size() > 1) {
        Some(node) => {
            let path = node.path.as_deref().unwrap_or_default();
            let reason = format!("every rank gets different results from {}", node.name());
            Err(scalars.untraceable(path, reason))
        }
        None => Ok(()),
    }
}
