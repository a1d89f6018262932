//! What the ranks do together.

use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::{Partition, ReduceOp};

/// A collective operation of the schedule: the meaning of an `OperationIr::Custom` node.
///
/// Its inputs and outputs are those of the node, one of each per part, in the same order:
///
/// | kind | input of a part | output of a part |
/// |---|---|---|
/// | all-gather | this rank's part, any shape of `chunk_len` elements | the whole, any shape of `num_elements` |
/// | reduce-scatter | the whole, any shape | this rank's part, any shape of `chunk_len`, padding zero |
/// | all-reduce | the whole | the whole |
///
/// Where the operation is split in two nodes, that of stage [`Stage::Start`] has the inputs above and
/// outputs of the shapes above that must not be read: their memory is being written. The node of
/// stage [`Stage::Wait`] reads those and writes the results, in the same memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Collective {
    /// What is done.
    pub kind: CollectiveKind,
    /// Which mesh axis the ranks lie on.
    pub axis: Arc<str>,
    /// Names the operation in ledgers and errors.
    pub label: Arc<str>,
    /// The tensors that travel together.
    pub parts: Vec<CollectivePart>,
    /// How addends combine; `None` for all-gather.
    pub reduction: Option<ReduceOp>,
    /// What the tensors are to the step.
    pub payload: Payload,
    /// The whole operation, or a half of it.
    pub stage: Stage,
}

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveKind {
    /// Every rank gets the shards of all.
    AllGather,
    /// Every rank gets its shard of the combination of all.
    ReduceScatter,
    /// Every rank gets the combination of all.
    AllReduce,
}

/// What a collective moves: passes that join and move collectives look at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Payload {
    /// Parts of parameters, which are given and may be gathered at any time before their use.
    Parameter,
    /// Gradients and the loss, whose results nothing but the optimizer reads.
    Gradient,
    /// What the next operations read, or what is not there before this node runs.
    Activation,
}

/// One tensor of a collective.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectivePart {
    /// The parameter, gradient or other name of it.
    pub path: Arc<str>,
    /// Which rank has which elements.
    pub partition: Partition,
    /// Type of the elements.
    pub dtype: DType,
}

impl CollectivePart {
    /// Bytes of the whole tensor.
    pub fn num_bytes(&self) -> usize {
        self.partition.num_elements() * self.dtype.size()
    }
}

/// How much of a collective a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Start and wait.
    Whole,
    /// Start it and go on.
    Start,
    /// Wait for what was started.
    Wait,
}

impl Collective {
    /// Such as `all_gather`, `start_all_gather` or `wait_all_gather`.
    pub fn name(&self) -> String {
        let stage = match self.stage {
            Stage::Whole => "",
            Stage::Start => "start_",
            Stage::Wait => "wait_",
        };
        format!("{stage}{}", self.kind)
    }

    /// Bytes of the whole tensors.
    pub fn num_bytes(&self) -> usize {
        self.parts.iter().map(CollectivePart::num_bytes).sum()
    }
}

impl CollectiveKind {
    /// Such as `all_gather`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
        }
    }
}

impl std::fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}
