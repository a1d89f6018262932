//! The trait that passes implement, and the check of their order.

use std::fmt;

use burn::tensor::TensorData;

use crate::error::Error;
use crate::graph::Graph;
use crate::pass_id::PassId;

/// A tensor that a user's pass keeps from step to step, such as a moving average of the loss.
///
/// The ranks hold equal copies. It begins with rank 0's `initial`. In the graph it is an entry of
/// [`Graph::parameters`](crate::graph::Graph::parameters) that is a buffer; an [`Update`](crate::graph::Update) replaces
/// it after a step. The new value must be the same on all ranks, as the loss is. Any other value is an
/// [`Error::InvalidGraph`].
///
/// [`CompiledStep::parameter`](crate::CompiledStep::parameter) reads it, `set_parameter` sets it, and checkpoints
/// contain it, all under its path. In a step of several micro-batches, each micro-batch updates it, also if the optimizer
/// then skips the step.
#[derive(Debug, Clone, PartialEq)]
pub struct PassState {
    /// Path of the tensor, which must differ from the paths of the model's tensors.
    pub path: String,
    /// The value before the first step.
    pub initial: TensorData,
}

/// A transformation of a graph.
///
/// ```
/// use burn_fsdp_spmd::Error;
/// use burn_fsdp_spmd::graph::Graph;
/// use burn_fsdp_spmd::passes::{GraphTransform, PassId, Pipeline};
///
/// /// Counts nodes, and changes nothing.
/// #[derive(Debug)]
/// struct Count;
///
/// impl GraphTransform for Count {
///     fn id(&self) -> PassId {
///         PassId::User("count")
///     }
///
///     fn transform(&self, graph: Graph) -> Result<Graph, Error> {
///         println!("{} nodes", graph.nodes().len());
///         Ok(graph)
///     }
/// }
///
/// let graph = Pipeline::new().then(Count).run(Graph::new())?;
/// assert_eq!(graph.applied(), [PassId::User("count")]);
/// // A pass cannot be applied twice.
/// assert!(Pipeline::new().then(Count).run(graph).is_err());
/// # Ok::<(), Error>(())
/// ```
pub trait GraphTransform: fmt::Debug + Send + Sync {
    /// Returns the name of the pass, as used in errors and [`Graph::applied`].
    fn id(&self) -> PassId;

    /// Returns the passes that must have been applied before this one.
    fn after(&self) -> &'static [PassId] {
        &[]
    }

    /// Returns the passes that must not have been applied before this one.
    fn before(&self) -> &'static [PassId] {
        &[]
    }

    /// Returns false for a graph that the pass would not change; a pipeline then skips the pass. The default is true.
    fn acts_on(&self, _graph: &Graph) -> bool {
        true
    }

    /// Adds the states that the pass keeps from step to step. `states` has those of the mode's earlier passes, which may
    /// also be removed. The default adds none.
    ///
    /// All ranks must add states of the same paths, shapes and types. The graph of an evaluation has no states.
    fn states(&self, _states: &mut Vec<PassState>) {}

    /// Transforms the graph.
    ///
    /// # Errors
    ///
    /// If the graph cannot be transformed.
    fn transform(&self, graph: Graph) -> Result<Graph, Error>;
}

/// Rejects a graph to which a pass of `after` was not applied, or a pass of `before` was.
///
/// # Errors
///
/// [`Error::PassOrder`].
pub(crate) fn check_order(
    graph: &Graph,
    pass: PassId,
    after: &[PassId],
    before: &[PassId],
) -> Result<(), Error> {
    let has = |other: &PassId| graph.applied().contains(other);
    let order = |relation, other: &PassId| Error::PassOrder {
        pass,
        relation,
        other: *other,
    };
    if let Some(missing) = after.iter().find(|other| !has(other)) {
        return Err(order("after", missing));
    }
    match before.iter().find(|other| has(other)) {
        Some(early) => Err(order("before", early)),
        None => Ok(()),
    }
}
