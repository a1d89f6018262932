//! Errors of moving nodes into the next step.

/// The reason why nodes cannot run in the next step.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MoveError {
    /// A node that cannot move.
    #[error(
        "node {node} ({operation}) cannot run in the next step: {reason}; move nodes together with all nodes that read \
         their results"
    )]
    Node {
        /// Index of the node in the graph.
        node: usize,
        /// Name of its operation.
        operation: String,
        /// The reason.
        reason: &'static str,
    },

    /// A position after a reader of the moved node's result.
    #[error(
        "node {node} ({operation}) cannot run before node {before} of the next step: node {reader} ({reads}) reads its \
         result and comes earlier; move it to before that node (IterationGraph::first_read)"
    )]
    Late {
        /// Index of the moved node.
        node: usize,
        /// Name of its operation.
        operation: String,
        /// Index of the node that it should run before.
        before: usize,
        /// Index of the node that reads its result.
        reader: usize,
        /// Name of that node's operation.
        reads: String,
    },

    /// A move that chose no nodes.
    #[error("no node was chosen to run in the next step; remove the pass, or let it move nodes")]
    Nothing,

    /// A move of nodes in a step with a scaled loss.
    #[error(
        "a step with a scaled loss has several graphs, and none of their nodes can run in the next step; compute in \
         bf16, or remove the passes of Mode::move_to_next_iteration"
    )]
    Scaled,
}
