//! Applies a mode's passes to a traced step.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use burn_fsdp_mesh::{Clip, Mesh, Pattern};

use crate::dump::Watch;
use crate::error::{Error, ProofError};
use crate::graph::Graph;
use crate::mode::{Certify, Mode, Purpose};
use crate::passes::schedule::OptimizerPlace;
use crate::passes::verify::{verify, verify_types};
use crate::place::Expand;
use crate::stages::{PassHook, StepGraphs};

/// A summary of a plan, which the [lowering](Lower) of its step made: its certificate, for example.
pub trait Summary: Any + fmt::Debug + fmt::Display + Send + Sync {}

impl<T: Any + fmt::Debug + fmt::Display + Send + Sync> Summary for T {}

/// A step that is ready to run.
#[derive(Debug)]
pub struct Lowered {
    pub(crate) graphs: StepGraphs,
    pub(crate) summary: Option<Arc<dyn Summary>>,
}

/// A function that makes the plan of a traced step: [`Lowering::lower`], or one that also hooks into the passes. See
/// [`CompiledStep::lowered_by`](crate::CompiledStep::lowered_by).
pub type Lower = fn(Graph, Lowering<'_>) -> Result<Lowered, Error>;

/// The settings with which a traced step is lowered to its plan.
pub struct Lowering<'a> {
    mode: &'a Mode,
    purpose: Purpose,
    watch: Option<&'a mut Watch<'a>>,
}

impl fmt::Debug for Lowering<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lowering").field(&self.purpose).finish()
    }
}

impl<'a> Lowering<'a> {
    /// Lowers steps of the given number of micro-batches. Nothing is [dumped](Mode::dump).
    pub fn new(mode: &'a Mode, num_batches: usize) -> Self {
        Self {
            mode,
            purpose: mode.purpose(num_batches),
            watch: None,
        }
    }

    /// Prepares a trace for the mode, which decides by it what is left open, and checks the parameter names in its
    /// options.
    ///
    /// # Errors
    ///
    /// The errors of [`compile`](crate::compile()) for the mode.
    pub fn prepared(graph: Graph, mode: &mut Mode) -> Result<Graph, Error> {
        let parameters = graph.parameters().iter().filter(|of| !of.is_buffer);
        let paths: Vec<&str> = parameters.map(|of| &*of.path).collect();
        mode.check_full(&paths)?;
        mode.prepare(graph)
    }

    /// Returns the mode's choice of which plans are proved.
    pub fn certify(&self) -> Certify {
        self.mode.certify()
    }

    /// Returns the number of micro-batches; `None` for a step of one batch.
    pub fn num_batches(&self) -> Option<usize> {
        match self.purpose {
            Purpose::Micro(num_batches) => Some(num_batches),
            Purpose::Step => None,
        }
    }

    /// Returns the mesh of the ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`].
    pub fn mesh(&self) -> Result<Mesh, Error> {
        self.mode.ranks().mesh()
    }

    /// Returns the clipping that the passes insert.
    pub fn clip(&self) -> Option<Clip> {
        self.mode.options.clip
    }

    /// Returns the placements of the batch, if the step is traced over the joined batch.
    ///
    /// # Errors
    ///
    /// [`Error::Internal`] if no trace was [prepared](Self::prepared).
    pub fn joined(&self) -> Result<Option<&'a Expand>, Error> {
        self.mode.joined()
    }

    /// Applies the passes to a prepared trace. `hook` is called with the trace, and with the result of each pass.
    ///
    /// # Errors
    ///
    /// The errors of the passes and of `hook`.
    pub fn run(&mut self, graph: Graph, hook: &mut PassHook<'_>) -> Result<StepGraphs, Error> {
        StepGraphs::of(graph, self.mode, self.purpose, &mut |part, graph| {
            hook(part, graph)?;
            if let Some(watch) = &mut self.watch {
                watch(part, graph);
            }
            Ok(())
        })
    }

    /// Checks the graphs of a plan, and returns the step that runs them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidGraph`]; [`ProofError::Unproved`].
    pub fn finish(
        &self,
        graphs: StepGraphs,
        summary: Option<Arc<dyn Summary>>,
    ) -> Result<Lowered, Error> {
        let is_verified = self.mode.verify;
        let check = if is_verified { verify } else { verify_types };
        graphs.all().into_iter().try_for_each(check)?;
        let nodes = graphs.all().into_iter().map(|plan| plan.nodes().len());
        self.mode.check_proved(graphs.fingerprint(), nodes.sum())?;
        Ok(Lowered { graphs, summary })
    }

    /// Lowers a prepared trace, without a proof.
    ///
    /// # Errors
    ///
    /// The errors of the passes; [`ProofError::NoProver`] if the mode requests a proof.
    pub fn lower(mut self, graph: Graph) -> Result<Lowered, Error> {
        if self.certify() == Certify::Always {
            return Err(ProofError::NoProver.into());
        }
        let graphs = self.run(graph, &mut |_, _| Ok(()))?;
        self.finish(graphs, None)
    }
}

/// Applies the passes of a mode to a one-rank graph, traced over the joined batch if the mode has one. If the mode's
/// optimizer runs in the next forward, the result is the main graph. If the loss is
/// [scaled](crate::passes::schedule::Options::scale_loss), the result is the graph of a micro-batch, without the
/// optimizer. Nothing is [dumped](Mode::dump).
///
/// # Errors
///
/// The errors of [`compile`](crate::compile()) for the mode, and of the passes.
pub fn lower(graph: Graph, mode: &Mode) -> Result<Graph, Error> {
    let mut mode = mode.clone();
    let graph = Lowering::prepared(graph, &mut mode)?;
    Ok(match Lowering::new(&mode, 1).lower(graph)?.graphs {
        StepGraphs::Whole(graph) => *graph,
        StepGraphs::Iteration(iteration) => iteration.main,
        StepGraphs::Micro(steps) => steps.next,
    })
}

/// Lowers a prepared trace, and dumps its graphs if the mode requests it.
pub(crate) fn lower_dumped(
    graph: Graph,
    mode: &Mode,
    purpose: Purpose,
    lower: Lower,
) -> Result<Lowered, Error> {
    let title = match purpose {
        Purpose::Step => "a step of one batch".to_owned(),
        Purpose::Micro(num_batches) => format!("a step of {num_batches} micro-batches"),
    };
    mode.dumped(&title, |watch| {
        let step = Lowering {
            mode,
            purpose,
            watch: Some(watch),
        };
        lower(graph, step)
    })
}

/// Applies the passes of a mode to the graph of an evaluation, which has no gradients.
pub(crate) fn lower_forward(graph: Graph, mode: &Mode) -> Result<Graph, Error> {
    let options = mode.options.clone().clip_grad_norm(None).recompute(None);
    let options = options.recompute_units::<Pattern>([]);
    let options = options.optimizer(OptimizerPlace::AtEnd);
    mode.dumped("an evaluation", |watch| {
        watch("", &graph);
        let passes = mode.pipeline(&options)?.and(mode.last(&options));
        let plan = passes.run_seen(graph, &mut |graph| {
            watch("", graph);
            Ok(())
        })?;
        verify_types(&plan)?;
        Ok(plan)
    })
}
