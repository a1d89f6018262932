//! The collective operations, and their parameters.

use std::fmt;

use burn_fsdp_mesh::Partition;

use crate::{ElementType, Label, Reduction, Source};

/// The collective operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum OperationKind {
    /// A gather on every rank: the whole of tensors of which each holds a shard.
    AllGather,
    /// A reduction: every rank gets its shard of the combination of all ranks' tensors.
    ReduceScatter,
    /// A reduction: every rank gets the whole combination of all ranks' tensors.
    AllReduce,
    /// A copy: every rank gets the tensors of the root.
    Broadcast,
    /// A distribution: every rank gets its shard of the tensors of the root.
    Scatter,
    /// A gather on the root: the whole of tensors of which each rank holds a shard.
    Gather,
    /// A change of dim: of tensors of which each rank holds a shard along one dim, it gets its shard along another.
    AllToAll,
    /// A meeting: no rank goes on before all have come.
    Barrier,
    /// A message to all: every rank gets the bytes of every rank.
    Exchange,
}

impl OperationKind {
    /// All kinds.
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

/// The identity of an operation: a rank's name for one of its calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// The kind of the operation.
    pub kind: OperationKind,
    /// The name that the caller gives it.
    pub label: Label,
    /// Name of the group.
    pub group: Label,
    /// Number of operations that this rank started on this group before.
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

/// A tensor of an operation that cuts tensors into the ranks' shards.
#[derive(Debug, Clone)]
pub struct Part {
    /// The bytes that this rank contributes: its shard or its full tensor, depending on the operation.
    pub source: Source,
    /// The partition of the tensor among the ranks of the group.
    pub partition: Partition,
    /// Type of the elements.
    pub element: ElementType,
}

impl Part {
    /// Returns a tensor to which this rank contributes `source`.
    pub fn new(source: Source, partition: Partition, element: ElementType) -> Self {
        Self {
            source,
            partition,
            element,
        }
    }

    /// Returns a tensor to which this rank contributes nothing.
    pub fn absent(partition: Partition, element: ElementType) -> Self {
        Self::new(Source::empty(), partition, element)
    }
}

/// A tensor of an operation that leaves tensors whole.
#[derive(Debug, Clone)]
pub struct FullPart {
    /// The elements, in row-major order; empty on ranks that contribute nothing.
    pub source: Source,
    /// Number of elements of the tensor.
    pub num_elements: usize,
    /// Type of the elements.
    pub element: ElementType,
}

impl FullPart {
    /// Returns a tensor of all the elements in `source`. Bytes beyond a whole number of elements
    /// are reported as an error by the operation.
    pub fn new(source: Source, element: ElementType) -> Self {
        let num_elements = source.len() / element.size();
        Self {
            source,
            num_elements,
            element,
        }
    }

    /// Returns a tensor to which this rank contributes nothing.
    pub fn absent(num_elements: usize, element: ElementType) -> Self {
        Self {
            source: Source::empty(),
            num_elements,
            element,
        }
    }
}

/// A tensor of an operation that changes along which of its dims it is cut.
///
/// Of a tensor of `F x T` elements each rank holds a shard along `F`, cut as `from` says, and gets
/// its shard along `T`, cut as `to` says. More dims are folded into the rows of one of the two: see
/// [`Partition::rows`].
#[derive(Debug, Clone)]
pub struct CrossPart {
    /// The bytes that this rank contributes: for each rank of the group in turn, the elements that
    /// it will get, of those that this rank holds.
    pub source: Source,
    /// The partition of the tensor before.
    pub from: Partition,
    /// The partition of the tensor afterwards.
    pub to: Partition,
    /// Type of the elements.
    pub element: ElementType,
}

impl CrossPart {
    /// Returns a tensor to which this rank contributes `source`.
    pub fn new(source: Source, from: Partition, to: Partition, element: ElementType) -> Self {
        Self {
            source,
            from,
            to,
            element,
        }
    }
}

/// Type and cut of a tensor, which all ranks must agree on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Extent {
    pub(crate) element: ElementType,
    pub(crate) partition: Partition,
    /// The partition along another dim, if there is one.
    pub(crate) across: Option<Partition>,
}

impl Extent {
    /// Returns the number of elements of the whole tensor; `start` has checked that their bytes can be counted.
    pub(crate) fn num_elements(&self) -> usize {
        let across = self.across.map_or(1, |across| across.num_elements());
        self.partition.num_elements() * across
    }

    /// Returns the bytes of the whole tensor.
    pub(crate) fn num_bytes(&self) -> usize {
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
pub(crate) struct Signature {
    pub(crate) kind: OperationKind,
    pub(crate) label: Label,
    pub(crate) extents: Vec<Extent>,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) root: Option<usize>,
}

impl Signature {
    /// Returns the bytes of all full tensors together.
    pub(crate) fn num_bytes(&self) -> usize {
        self.extents
            .iter()
            .map(Extent::num_bytes)
            .fold(0, usize::saturating_add)
    }

    /// Returns how the two differ, in words for the one and the other, or `None` if they agree.
    pub(crate) fn difference(&self, other: &Self) -> Option<(String, String)> {
        if self == other {
            return None;
        }
        let (mut own, mut others) = (self.to_string(), other.to_string());
        let extents = self.extents.iter().zip(&other.extents);
        let first = extents.enumerate().find(|(_, (own, other))| own != other);
        if let Some((part, (own_extent, other_extent))) = first {
            own += &format!(", part {part} being {own_extent}");
            others += &format!(", part {part} being {other_extent}");
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
