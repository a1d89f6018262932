//! The collective operations, and their parameters.

use std::fmt;

use burn_fsdp_mesh::Partition;

use super::element::ElementType;
use super::label::Label;
use super::reduction::Reduction;

/// A kind of collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum OperationKind {
    /// A gather on every rank: each rank holds a shard of the tensors and gets the full tensors.
    AllGather,
    /// A reduction: every rank gets its shard of the combination of all ranks' tensors.
    ReduceScatter,
    /// A reduction: every rank gets the whole combination of all ranks' tensors.
    AllReduce,
    /// A broadcast: every rank gets the root's tensors.
    Broadcast,
    /// A distribution: every rank gets its shard of the tensors of the root.
    Scatter,
    /// A gather on the root: each rank holds a shard of the tensors, and the root gets the full tensors.
    Gather,
    /// A change of the sharded dim: each rank contributes its shard along one dim and gets its shard along another.
    AllToAll,
    /// A synchronisation point: no rank continues before all have arrived.
    Barrier,
    /// An exchange: every rank gets the bytes of every rank.
    Exchange,
}

impl OperationKind {
    /// All kinds of operations.
    pub const ALL: [Self; 9] = [
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllReduce,
        Self::Broadcast,
        Self::Scatter,
        Self::Gather,
        Self::AllToAll,
        Self::Barrier,
        Self::Exchange,
    ];
}

/// Prints as the method that starts it: `all_gather`.
impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::Scatter => "scatter",
            Self::Gather => "gather",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
            Self::Exchange => "exchange",
        })
    }
}

/// The identity of an operation: its kind, label, group and sequence number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// The kind of the operation.
    pub kind: OperationKind,
    /// The name that the caller chooses for the operation.
    pub label: Label,
    /// The name of the group.
    pub group: Label,
    /// Number of operations that this rank started on this group before this one.
    pub sequence: u64,
}

/// Prints as `all_gather "blocks.3 unshard" (operation 5 of group "shard")`.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            label,
            group,
            sequence,
        } = self;
        write!(f, "{kind} {label} (operation {sequence} of group {group})")
    }
}

/// The type and partition of a tensor, which all ranks must agree on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extent {
    /// Type of the elements.
    pub element: ElementType,
    /// The partition of the tensor among the ranks.
    pub partition: Partition,
    /// The partition along another dim, if there is one.
    pub across: Option<Partition>,
}

impl Extent {
    /// Returns the number of elements of the whole tensor. `start` has checked that their bytes fit in a `usize`.
    #[inline]
    pub fn num_elements(&self) -> usize {
        let across = self.across.map_or(1, |across| across.num_elements());
        self.partition.num_elements() * across
    }

    /// Returns the bytes of the whole tensor.
    #[inline]
    pub fn num_bytes(&self) -> usize {
        self.num_elements() * self.element.size()
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.element, self.partition)?;
        match &self.across {
            Some(across) => write!(f, " across {across}"),
            None => Ok(()),
        }
    }
}

/// The claim that the ranks of an operation must agree on.
#[derive(Debug, Clone, PartialEq)]
pub struct Signature {
    /// The kind of the operation.
    pub kind: OperationKind,
    /// The label that the caller chooses.
    pub label: Label,
    /// The types and partitions of the tensors, one per part.
    pub extents: Vec<Extent>,
    /// How the ranks' tensors are combined, if they are.
    pub reduction: Option<Reduction>,
    /// The root in the group, if the operation has one.
    pub root: Option<usize>,
}

impl Signature {
    /// Returns the bytes of all full tensors together.
    #[inline]
    pub fn num_bytes(&self) -> usize {
        self.extents
            .iter()
            .map(Extent::num_bytes)
            .fold(0, usize::saturating_add)
    }

    /// Describes both signatures, including the first part that differs; `None` if they agree.
    pub fn difference(&self, other: &Self) -> Option<(String, String)> {
        if self == other {
            return None;
        }
        let (mut own, mut others) = (self.to_string(), other.to_string());
        let extents = self.extents.iter().zip(&other.extents);
        let first = extents.enumerate().find(|(_, (own, other))| own != other);
        if let Some((part, (own_extent, other_extent))) = first {
            own += &format!(", where part {part} is {own_extent}");
            others += &format!(", where part {part} is {other_extent}");
        }
        Some((own, others))
    }
}

/// Prints as `reduce_scatter "blocks.3 reduce" (sum) of 6 parts, 4096 bytes`.
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.label)?;
        if let Some(reduction) = &self.reduction {
            write!(f, " ({reduction})")?;
        }
        if let Some(root) = self.root {
            write!(f, " with root {root}")?;
        }
        match self.extents.len() {
            0 => Ok(()),
            1 => write!(f, " of 1 part, {} bytes", self.num_bytes()),
            num_parts => write!(f, " of {num_parts} parts, {} bytes", self.num_bytes()),
        }
    }
}
