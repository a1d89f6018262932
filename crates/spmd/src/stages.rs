//! The graphs of a step, from its trace to the plan.

use burn_fsdp_collectives::Fingerprint;

use crate::error::Error;
use crate::graph::Graph;
use crate::mode::{Mode, Purpose};
use crate::passes::schedule::OptimizerPlace;
use crate::passes::{Accumulate, ClipGradients, Iteration, MicroSteps, Pipeline};

/// The graphs of a step.
#[derive(Debug)]
pub enum StepGraphs {
    /// A single graph for the whole step.
    Whole(Box<Graph>),
    /// The graphs of a step that moves nodes into the next one, such as the optimizer into the next forward.
    Iteration(Box<Iteration>),
    /// The graphs of a step over several micro-batches.
    Micro(Box<MicroSteps>),
}

/// Called while passes are applied, with each graph of a step: the trace, the result of each pass, and the graphs into
/// which the step is split. The name is empty for the graph of the whole step. Otherwise it is the name of a field of
/// [`Iteration`] or [`MicroSteps`].
///
/// A hook may reject a graph, or change it: for example, set the [sizes](Graph::decide_by) for the next pass.
pub type PassHook<'a> = dyn FnMut(&'static str, &mut Graph) -> Result<(), Error> + 'a;

impl StepGraphs {
    /// Applies the passes of a mode to a graph.
    ///
    /// # Errors
    ///
    /// The errors of the passes and of `hook`.
    pub(crate) fn of(
        mut graph: Graph,
        mode: &Mode,
        purpose: Purpose,
        hook: &mut PassHook<'_>,
    ) -> Result<Self, Error> {
        let options = match purpose {
            Purpose::Step => mode.options.clone(),
            // The norm covers all micro-batches, and the optimizer runs after them, regardless of the options.
            Purpose::Micro(_) => {
                let options = mode.options.clone().clip_grad_norm(None);
                options.optimizer(OptimizerPlace::InNextForward)
            }
        };
        hook("", &mut graph)?;
        let pipeline = mode.pipeline(&options)?;
        let plan = pipeline.run_seen(graph, &mut |graph| hook("", graph))?;
        // If a step has several graphs, the last passes are applied to each.
        let (last, none) = (mode.last(&options), Pipeline::new());
        let mut finished = |name: &'static str, mut graph: Graph| {
            hook(name, &mut graph)?;
            last.run_seen(graph, &mut |graph| hook(name, graph))
        };
        if let Purpose::Micro(num_batches) = purpose {
            let axes = mode.ranks().mesh()?.axes().to_vec();
            let clip = mode.options.clip.map(|clip| ClipGradients { clip, axes });
            let steps = Accumulate { num_batches, clip }.split(plan, &none)?;
            return Ok(Self::Micro(Box::new(MicroSteps {
                first: finished("first", steps.first)?,
                next: finished("next", steps.next)?,
                update: finished("update", steps.update)?,
            })));
        }
        let step = mode.moved(plan.clone())?;
        if step.is_whole() {
            let plan = last.run_seen(plan, &mut |graph| hook("", graph))?;
            return Ok(Self::Whole(Box::new(plan)));
        }
        let steps = step.split(&none)?;
        Ok(Self::Iteration(Box::new(Iteration {
            setup: finished("setup", steps.setup)?,
            main: finished("main", steps.main)?,
            cleanup: finished("cleanup", steps.cleanup)?,
            ..steps
        })))
    }

    /// Returns the graphs, in their order.
    pub fn all(&self) -> Vec<&Graph> {
        match self {
            Self::Whole(of) => vec![&**of],
            Self::Iteration(of) => vec![&of.setup, &of.main, &of.cleanup],
            Self::Micro(of) => vec![&of.first, &of.next, &of.update],
        }
    }

    /// Returns a fingerprint of all graphs, which is the same on every rank.
    pub fn fingerprint(&self) -> u64 {
        let all: Vec<u64> = self.all().into_iter().map(Graph::fingerprint).collect();
        let most = match self {
            Self::Iteration(of) => of.max_iterations,
            Self::Whole(_) | Self::Micro(_) => None,
        };
        Fingerprint::of(&(all, most))
    }
}
