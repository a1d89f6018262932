//! The passes of a mode: its own, and the user's.

use std::sync::Arc;

use super::Mode;
use crate::error::Error;
use crate::graph::Graph;
use crate::passes::schedule::{self, OptimizerPlace, Options};
use crate::passes::{DeferOptimizer, IterationGraph, IterationMove, Pipeline};
use crate::transform::GraphTransform;

impl Mode {
    /// Adds a user pass, which runs after the insertion of collectives and before scheduling.
    #[must_use]
    pub fn transform(mut self, transform: impl GraphTransform + 'static) -> Self {
        self.user.transforms.push(Arc::new(transform));
        self
    }

    /// Adds a pass that moves nodes into the next step: a subgraph of its choice, see
    /// [`IterationGraph`](crate::passes::IterationGraph), or the reductions of some parameters with their part of the
    /// optimizer, see [`MoveReductions`](crate::passes::MoveReductions).
    ///
    /// A step then consists of three graphs ([`Iteration`](crate::passes::Iteration)). Calls that read or set
    /// parameters and states between two steps, including evaluations, first finish the last step
    /// ([`CompiledStep::flush`](crate::CompiledStep::flush)). So does a step whose moved nodes differ from the pending
    /// ones, for example because its batch has a different shape. If collectives were moved, all ranks must therefore
    /// make these calls together. Steps of several micro-batches keep their nodes, and a step whose loss is scaled is
    /// rejected ([`MoveError::Scaled`](crate::MoveError::Scaled)).
    #[must_use]
    pub fn move_to_next_iteration(mut self, pass: impl IterationMove + 'static) -> Self {
        self.user.moves.push(Arc::new(pass));
        self
    }

    /// Returns true if passes of the user move nodes into the next step.
    pub(super) fn moves_nodes(&self) -> bool {
        !self.user.moves.is_empty()
    }

    /// Returns the passes of the mode with these options, excluding the last passes.
    pub(crate) fn pipeline(&self, options: &Options) -> Result<Pipeline, Error> {
        let prefetch = options.prefetch.unwrap_or(self.ranks.overlaps());
        let options = options.clone().prefetch(prefetch);
        let transforms = &self.user.transforms;
        let pipeline =
            self.division
                .pipeline(&self.ranks, (&options, &self.names.owners), transforms)?;
        Ok(self.checked(pipeline))
    }

    /// Makes the pipeline verify the graph after each pass, if requested.
    fn checked(&self, pipeline: Pipeline) -> Pipeline {
        if self.verify {
            pipeline.verified()
        } else {
            pipeline
        }
    }

    /// Returns the last passes, which apply to each graph of a step.
    pub(crate) fn last(&self, options: &Options) -> Pipeline {
        self.checked(schedule::last(options))
    }

    /// Moves nodes into the next step, as the mode's options and the user's passes request, possibly none.
    ///
    /// # Errors
    ///
    /// The errors of the passes.
    pub(crate) fn moved(&self, graph: Graph) -> Result<IterationGraph, Error> {
        let mut moves = self.user.moves.iter();
        let step = moves.try_fold(IterationGraph::new(graph), |step, pass| {
            step.then(pass.as_ref())
        })?;
        match self.options.optimizer {
            OptimizerPlace::InNextForward => step.then(&DeferOptimizer),
            OptimizerPlace::AtEnd | OptimizerPlace::InBackward => Ok(step),
        }
    }
}
