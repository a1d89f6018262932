//! Pipelines: sequences of passes.

use std::time::Instant;

use super::verify::verify;
use crate::error::Error;
use crate::graph::Graph;
use crate::pass_id::PassId;
use crate::transform::{GraphTransform, check_order};

/// A list of passes in the order in which they are applied.
#[derive(Debug, Default)]
pub struct Pipeline {
    passes: Vec<Box<dyn GraphTransform>>,
    is_verified: bool,
}

impl Pipeline {
    /// Creates an empty pipeline. Graphs are verified in debug builds.
    pub fn new() -> Self {
        Self {
            passes: Vec::new(),
            is_verified: cfg!(debug_assertions),
        }
    }

    /// Appends a pass.
    #[must_use]
    pub fn then(mut self, pass: impl GraphTransform + 'static) -> Self {
        self.passes.push(Box::new(pass));
        self
    }

    /// Appends the passes of another pipeline.
    #[must_use]
    pub fn and(mut self, last: Self) -> Self {
        self.passes.extend(last.passes);
        self
    }

    /// Verifies the graph after each pass, even in release builds.
    #[must_use]
    pub fn verified(mut self) -> Self {
        self.is_verified = true;
        self
    }

    /// Applies the passes in order, and returns the resulting graph.
    ///
    /// # Errors
    ///
    /// [`Error::PassTwice`], [`Error::PassOrder`], [`Error::InvalidGraph`] or an error of a pass.
    pub fn run(&self, graph: Graph) -> Result<Graph, Error> {
        self.run_seen(graph, &mut |_| Ok(()))
    }

    /// Like [`run`](Self::run), but calls `see` with the result of each pass before verification.
    ///
    /// # Errors
    ///
    /// Same as [`run`](Self::run); the errors of `see`.
    pub(crate) fn run_seen(
        &self,
        mut graph: Graph,
        see: &mut dyn FnMut(&mut Graph) -> Result<(), Error>,
    ) -> Result<Graph, Error> {
        for pass in self.acting_on(&graph) {
            graph = apply(pass, graph)?;
            see(&mut graph)?;
            if self.is_verified {
                verify(&graph).map_err(|error| after(error, pass.id()))?;
            }
        }
        Ok(graph)
    }

    /// Applies the passes, and returns the original graph and the result of each pass.
    ///
    /// # Errors
    ///
    /// Same as [`run`](Self::run).
    pub fn stages(&self, graph: Graph) -> Result<Vec<Graph>, Error> {
        let mut stages = vec![graph.clone()];
        self.run_seen(graph, &mut |graph| {
            stages.push(graph.clone());
            Ok(())
        })?;
        Ok(stages)
    }

    /// Returns the passes that act on a graph.
    fn acting_on(&self, graph: &Graph) -> Vec<&dyn GraphTransform> {
        let passes = self.passes.iter().map(AsRef::as_ref);
        passes.filter(|pass| pass.acts_on(graph)).collect()
    }
}

/// Applies one pass, without verifying the result.
///
/// # Errors
///
/// [`Error::PassTwice`], [`Error::PassOrder`] or an error of the pass.
pub fn apply(pass: &dyn GraphTransform, graph: Graph) -> Result<Graph, Error> {
    let id = pass.id();
    if graph.applied().contains(&id) {
        return Err(Error::PassTwice { pass: id });
    }
    check_order(&graph, id, pass.after(), pass.before())?;
    let start = Instant::now();
    let num_nodes = graph.nodes().len();
    let mut graph = pass.transform(graph)?;
    graph.mark_applied(id);
    tracing::debug!(
        pass = %id,
        before = num_nodes,
        after = graph.nodes().len(),
        elapsed = ?start.elapsed(),
        "pass"
    );
    Ok(graph)
}

fn after(error: Error, pass: PassId) -> Error {
    match error {
        Error::InvalidGraph {
            rule,
            node,
            operation,
            reason,
            ..
        } => Error::InvalidGraph {
            rule,
            after: Some(pass),
            node,
            operation,
            reason,
        },
        error => error,
    }
}
