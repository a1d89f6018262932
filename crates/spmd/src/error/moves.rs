//! Errors of moves into the next step.

/// The reason why nodes cannot run in the next step.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MoveError {
    /// A node that cannot move.
    #[error(
        "node {node} ({operation}) cannot run in the next step: {reason}; move a subgraph whose results are read by nodes \
         that move alone, together with all of these"
    )]
    Node {
        /// Its place in the graph.
        node: usize,
        /// Name of its operation.
        operation: String,
        /// The reason.
        reason: &'static str,
    },

    /// A place after a reader of the moved node's result.
    #[error(
        "node {node} ({operation}) cannot run before node {before} of the next step: node {reader} ({reads}) reads there what \
         it makes, and comes earlier; move it to before that one (IterationGraph::first_read)"
    )]
    Late {
        /// The moved node.
        node: usize,
        /// Name of its operation.
        operation: String,
        /// The node before which it was to run.
        before: usize,
        /// The node that reads its result.
        reader: usize,
        /// Name of that node's operation.
        reads: String,
    },

    /// A move that chose no nodes.
    #[error("nothing was chosen to run in the next step; leave the pass out, or let it move nodes")]
    Nothing,

    /// A step whose loss is scaled, which keeps its nodes.
    #[error(
        "a step whose loss is scaled is several graphs, of which no node runs in the next step; compute in bf16, or leave \
         the passes of Mode::move_to_next_iteration out"
    )]
    Scaled,
}
