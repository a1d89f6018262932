//! Pipelines: sequences of passes.

use std::time::Instant;

use super::verify::verify;
use crate::error::Error;
use crate::graph::{Graph, Sizes};
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
        self.run_seen(graph, &mut |_| {})
    }

    /// Like [`run`](Self::run), but calls `see` with the original graph, and with the result of each pass before
    /// verification.
    ///
    /// # Errors
    ///
    /// Same as [`run`](Self::run).
    pub(crate) fn run_seen(
        &self,
        mut graph: Graph,
        see: &mut dyn FnMut(&Graph),
    ) -> Result<Graph, Error> {
        see(&graph);
        for pass in self.acting_on(&graph) {
            graph = self.apply(pass, graph, see)?;
        }
        Ok(graph)
    }

    /// Applies the passes, and returns the original graph and the result of each pass.
    ///
    /// # Errors
    ///
    /// Same as [`run`](Self::run).
    pub fn stages(&self, graph: Graph) -> Result<Vec<Graph>, Error> {
        self.stages_seen(graph, &mut |_| {})
    }

    /// Like [`stages`](Self::stages), but calls `see` as [`run_seen`](Self::run_seen) does.
    ///
    /// # Errors
    ///
    /// Same as [`run`](Self::run).
    pub(crate) fn stages_seen(
        &self,
        graph: Graph,
        see: &mut dyn FnMut(&Graph),
    ) -> Result<Vec<Graph>, Error> {
        see(&graph);
        let passes = self.acting_on(&graph);
        let mut stages = vec![graph];
        for pass in passes {
            let before = stages[stages.len() - 1].clone();
            stages.push(self.apply(pass, before, see)?);
        }
        Ok(stages)
    }

    /// Applies the passes to a graph of the same step as `real`, at other shapes, and returns this graph and the result
    /// of each pass. `real` has the original graph and the result of each pass, and passes base decisions on the sizes
    /// in it. After each pass, `check` is called with the graph in `real` and the new graph.
    ///
    /// # Errors
    ///
    /// Same as [`run`](Self::run); the errors of `check`.
    pub(crate) fn stages_as(
        &self,
        graph: Graph,
        real: &[Graph],
        check: impl Fn(&Graph, &Graph) -> Result<(), Error>,
    ) -> Result<Vec<Graph>, Error> {
        let passes = self.acting_on(&graph).into_iter();
        let mut stages = vec![graph];
        for (pass, pair) in passes.zip(real.windows(2)) {
            let [before, after] = pair else { continue };
            let mut graph = stages[stages.len() - 1].clone();
            // Decisions about a value that the pass changes use its size before the pass.
            graph.decide_by(Sizes::of(after.values().chain(before.values())));
            let mut graph = self.apply(pass, graph, &mut |_| {})?;
            graph.decide_by(Sizes::default());
            check(after, &graph)?;
            stages.push(graph);
        }
        Ok(stages)
    }

    /// Returns the passes that act on a graph.
    fn acting_on(&self, graph: &Graph) -> Vec<&dyn GraphTransform> {
        let passes = self.passes.iter().map(AsRef::as_ref);
        passes.filter(|pass| pass.acts_on(graph)).collect()
    }

    /// Returns the pipeline with each pass replaced.
    #[cfg(test)]
    pub(crate) fn replaced(
        mut self,
        with: impl Fn(Box<dyn GraphTransform>) -> Box<dyn GraphTransform>,
    ) -> Self {
        self.passes = self.passes.into_iter().map(with).collect();
        self
    }

    fn apply(
        &self,
        pass: &dyn GraphTransform,
        graph: Graph,
        see: &mut dyn FnMut(&Graph),
    ) -> Result<Graph, Error> {
        let graph = apply(pass, graph)?;
        see(&graph);
        if self.is_verified {
            verify(&graph).map_err(|error| after(error, pass.id()))?;
        }
        Ok(graph)
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
