//! Collectives of a graph: kind, parts and payload.

use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_collectives::{Contract, ElementType, OperationKind, Share};
use burn_fsdp_mesh::{Partition, ReduceOp};
use burn_fsdp_tensors::{moved_type, reduced_type};

/// A collective operation of the schedule, which an `OperationIr::Custom` node represents.
///
/// The node has one input and one output per part, in the order of the parts:
///
/// | kind | input of a part | output of a part |
/// |---|---|---|
/// | all-gather | this rank's part, any shape of `chunk_len` elements | the whole, any shape of `num_elements` |
/// | reduce-scatter | the whole, any shape | this rank's part, any shape of `chunk_len` elements, padded with zeros |
/// | all-reduce | the whole | the whole |
/// | all-to-all | this rank's part, with the ranks' shares in rank order | the received shares, in rank order |
///
/// If the operation is split into two nodes, the one with stage [`Stage::Start`] has the inputs and the output shapes
/// above. Its outputs must not be read while their memory is being written. The node with stage [`Stage::Wait`] takes
/// them as inputs and writes the results to the same memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Collective {
    /// Kind of the operation.
    pub kind: CollectiveKind,
    /// Mesh axis along which the ranks communicate.
    pub axis: Arc<str>,
    /// Name of the operation in ledgers and errors.
    pub label: Arc<str>,
    /// The tensors that are sent together.
    pub parts: Vec<CollectivePart>,
    /// How the ranks' values are reduced; `None` if data only moves.
    pub reduction: Option<ReduceOp>,
    /// Role of the tensors in the step.
    pub payload: Payload,
    /// The part of the operation that the node runs.
    pub stage: Stage,
}

/// The kind of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveKind {
    /// All-gather: every rank gets the shards of all ranks.
    AllGather,
    /// Reduce-scatter: every rank gets its shard of the reduced tensor.
    ReduceScatter,
    /// All-reduce: every rank gets the whole reduced tensor.
    AllReduce,
    /// All-to-all: tensors that are sharded along one dim become sharded along another.
    AllToAll,
}

/// The role of the tensors in a collective, for passes that join and move collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Payload {
    /// Parts of parameters, which are given and may be gathered at any time before their use.
    Parameter,
    /// Gradients and the loss. Their results are read after backward: by the optimizer, by gradient clipping, or by a
    /// mean over replicas.
    Gradient,
    /// Other values, which are computed shortly before the node or read shortly after it.
    Activation,
}

/// A tensor of a collective.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectivePart {
    /// Name of the tensor: the path of the parameter that it belongs to, or another name.
    pub path: Arc<str>,
    /// Partition of the elements among the ranks.
    pub partition: Partition,
    /// Partition after an all-to-all, along another dim. The tensor has one element for each pair of an element of
    /// `partition` and an element of `across`.
    pub across: Option<Partition>,
    /// Element type during communication.
    pub dtype: DType,
    /// Element type of the result, which may be wider than `dtype` for a reduction.
    pub result: DType,
}

impl CollectivePart {
    /// Returns the number of elements of the whole tensor.
    pub fn num_elements(&self) -> usize {
        self.len_by(Share::Full, Partition::num_elements)
    }

    /// Returns the size of the whole tensor in bytes.
    pub fn num_bytes(&self) -> usize {
        self.num_elements() * self.dtype.size()
    }

    /// Returns the number of elements of a rank's share.
    pub fn share_len(&self, share: Share, rank: usize) -> usize {
        self.len_by(share, |partition| partition.len(rank))
    }

    /// Returns the number of elements of the largest share, to which every rank's share is padded.
    pub fn padded_len(&self, share: Share) -> usize {
        self.len_by(share, Partition::chunk_len)
    }

    fn len_by(&self, share: Share, cut: impl Fn(&Partition) -> usize) -> usize {
        let whole = Partition::num_elements;
        let (partition, across) = (&self.partition, self.across.as_ref());
        match share {
            Share::Own => cut(partition) * across.map_or(1, whole),
            Share::Across => whole(partition) * across.map_or(1, cut),
            Share::Full => whole(partition) * across.map_or(1, whole),
            _ => 0,
        }
    }
}

/// The part of a collective that a node runs: all of it, its start or its wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// The whole collective.
    Whole,
    /// Only the start of the collective.
    Start,
    /// Only the wait for a collective that was started.
    Wait,
}

impl Collective {
    /// Returns the name, such as `all_gather`, `start_all_gather` or `wait_all_gather`.
    pub fn name(&self) -> String {
        let stage = match self.stage {
            Stage::Whole => "",
            Stage::Start => "start_",
            Stage::Wait => "wait_",
        };
        format!("{stage}{}", self.kind)
    }

    /// Returns the size of the whole tensors in bytes, as communicated.
    pub fn num_bytes(&self) -> usize {
        self.parts.iter().map(CollectivePart::num_bytes).sum()
    }

    /// Returns the type of the results, if it differs from the type that a reduction sends. It is the same for all
    /// parts.
    pub fn widened(&self) -> Option<DType> {
        let mut parts = self.parts.iter();
        let widened = parts.find(|part| part.result != part.dtype);
        widened.map(|part| part.result)
    }
}

impl CollectiveKind {
    /// Returns the name, such as `all_gather`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::AllToAll => "all_to_all",
        }
    }

    /// Returns the process group's operation of this kind.
    pub fn operation(self) -> OperationKind {
        match self {
            Self::AllGather => OperationKind::AllGather,
            Self::ReduceScatter => OperationKind::ReduceScatter,
            Self::AllReduce => OperationKind::AllReduce,
            Self::AllToAll => OperationKind::AllToAll,
        }
    }

    /// Returns the contract: which ranks send and receive which data.
    pub fn contract(self) -> Contract {
        self.operation().contract()
    }

    /// Returns the process group's type for elements of `dtype`, if an operation of this kind can carry them. More types
    /// can be moved than reduced.
    pub fn element_of(self, dtype: DType) -> Option<ElementType> {
        if self.contract().reduces {
            reduced_type(dtype)
        } else {
            moved_type(dtype)
        }
    }

    /// Returns the number of rounds around a ring of the ranks: two for an all-reduce, otherwise one.
    pub fn rounds(self) -> u32 {
        let contract = self.contract();
        if contract.reduces && contract.gets.share == Share::Full {
            2
        } else {
            1
        }
    }

    /// Returns the bytes that circulate in each round, for tensors of `num_bytes`. This is `num_bytes`, or one rank's
    /// share if no rank has whole tensors before or afterwards.
    pub fn circulating_bytes(self, num_bytes: u64, num_ranks: usize) -> u64 {
        let contract = self.contract();
        if [contract.gives.share, contract.gets.share].contains(&Share::Full) {
            num_bytes
        } else {
            num_bytes / num_ranks.max(1) as u64
        }
    }
}

impl std::fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}
