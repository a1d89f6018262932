//! Functions from graph to graph.
//!
//! A pass implements [`GraphTransform`]; [`Pipeline`] applies passes in order. A pass declares the
//! passes that it must come after and those that it must come before: applying it twice, or
//! in the wrong place, is an error. After each pass the [`verifier`](verify()) checks the graph, in debug
//! builds and wherever [`Pipeline::verified`] asks for it.

pub mod schedule;
pub mod verify;

mod bucket;
mod cse;
mod dead_code;
mod dedup;
mod deferred_optimizer;
mod early_optimizer;
mod liveness;
mod recompute;
mod regather;
mod rewrite;
mod shard;
mod split;
mod stand_ins;
mod unit;

pub use bucket::Bucket;
pub use cse::CommonSubexpressions;
pub use dead_code::DeadCode;
pub use dedup::Deduplicate;
pub use deferred_optimizer::{DeferOptimizer, Iteration};
pub use early_optimizer::EarlyOptimizer;
pub use liveness::Liveness;
pub use recompute::Recompute;
pub use regather::Regather;
pub use shard::InsertCollectives;
pub use split::{Prefetch, SinkWaits, Split};
pub use stand_ins::StandIns;
pub use unit::{AssignUnits, Units, unit_of};
pub use verify::verify;

use crate::Error;
use crate::graph::Graph;

/// A function from graph to graph.
///
/// ```
/// use burn_fsdp_spmd::Error;
/// use burn_fsdp_spmd::graph::Graph;
/// use burn_fsdp_spmd::passes::{GraphTransform, Pipeline};
///
/// /// Counts nodes, and changes nothing.
/// #[derive(Debug)]
/// struct Count;
///
/// impl GraphTransform for Count {
///     fn name(&self) -> &'static str {
///         "count"
///     }
///
///     fn transform(&self, graph: Graph) -> Result<Graph, Error> {
///         println!("{} nodes", graph.nodes().len());
///         Ok(graph)
///     }
/// }
///
/// let graph = Pipeline::new().then(Count).run(Graph::new())?;
/// assert_eq!(graph.applied(), ["count"]);
/// // Once is enough.
/// assert!(Pipeline::new().then(Count).run(graph).is_err());
/// # Ok::<(), Error>(())
/// ```
pub trait GraphTransform: std::fmt::Debug + Send + Sync {
    /// What errors and [`Graph::applied`] call it.
    fn name(&self) -> &'static str;

    /// The passes that must have been applied before it.
    fn after(&self) -> &'static [&'static str] {
        &[]
    }

    /// The passes that must not have been applied before it.
    fn before(&self) -> &'static [&'static str] {
        &[]
    }

    /// The new graph.
    ///
    /// # Errors
    ///
    /// If the graph cannot be transformed.
    fn transform(&self, graph: Graph) -> Result<Graph, Error>;
}

/// Passes in the order in which they are applied.
#[derive(Debug, Default)]
pub struct Pipeline {
    passes: Vec<Box<dyn GraphTransform>>,
    is_verified: bool,
}

impl Pipeline {
    /// No passes; verified in debug builds.
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

    /// Verifies the graph after each pass, in release builds, too.
    #[must_use]
    pub fn verified(mut self) -> Self {
        self.is_verified = true;
        self
    }

    /// Applies the passes.
    ///
    /// # Errors
    ///
    /// [`Error::PassTwice`], [`Error::PassOrder`], [`Error::InvalidGraph`] or an error of a pass.
    pub fn run(&self, mut graph: Graph) -> Result<Graph, Error> {
        for pass in &self.passes {
            graph = apply(pass.as_ref(), graph)?;
            if self.is_verified {
                verify(&graph).map_err(|error| after(error, pass.name()))?;
            }
        }
        Ok(graph)
    }
}

/// Applies one pass.
///
/// # Errors
///
/// [`Error::PassTwice`], [`Error::PassOrder`] or an error of the pass.
pub fn apply(pass: &dyn GraphTransform, graph: Graph) -> Result<Graph, Error> {
    let name = pass.name();
    let has = |other: &str| graph.applied().contains(&other);
    if has(name) {
        return Err(Error::PassTwice { pass: name });
    }
    let order = |relation, other| Error::PassOrder {
        pass: name,
        relation,
        other,
    };
    if let Some(missing) = pass.after().iter().find(|other| !has(other)) {
        return Err(order("after", missing));
    }
    if let Some(early) = pass.before().iter().find(|other| has(other)) {
        return Err(order("before", early));
    }
    let start = std::time::Instant::now();
    let num_nodes = graph.nodes().len();
    let mut graph = pass.transform(graph)?;
    graph.mark_applied(name);
    tracing::debug!(
        pass = name,
        before = num_nodes,
        after = graph.nodes().len(),
        elapsed = ?start.elapsed(),
        "pass"
    );
    Ok(graph)
}

fn after(error: Error, pass: &'static str) -> Error {
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
