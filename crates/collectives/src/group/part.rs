//! The tensors of an operation, with the bytes that a rank contributes to each.

use burn_fsdp_mesh::Partition;
use burn_fsdp_rendezvous::ElementType;
use burn_fsdp_transport::Source;

/// A tensor in an operation that splits tensors into one shard per rank.
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
    /// Creates a part to which this rank contributes `source`.
    pub fn new(source: Source, partition: Partition, element: ElementType) -> Self {
        Self {
            source,
            partition,
            element,
        }
    }

    /// Creates a part to which this rank contributes nothing.
    pub fn absent(partition: Partition, element: ElementType) -> Self {
        Self::new(Source::empty(), partition, element)
    }
}

/// A tensor in an operation that does not split tensors.
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
    /// Creates a part with all elements of `source`. If `source` is not a whole number of elements, the operation
    /// returns an error.
    pub fn new(source: Source, element: ElementType) -> Self {
        let num_elements = source.len() / element.size();
        Self {
            source,
            num_elements,
            element,
        }
    }

    /// Creates a part to which this rank contributes nothing.
    pub fn absent(num_elements: usize, element: ElementType) -> Self {
        Self {
            source: Source::empty(),
            num_elements,
            element,
        }
    }
}

/// A tensor of an operation that changes the dim along which it is partitioned.
///
/// Take a tensor of `F x T` elements. Each rank holds a shard along `F`, partitioned by `from`. It receives its shard
/// along `T`, partitioned by `to`. Further dims are folded into the rows of one of the two; see [`Partition::rows`].
#[derive(Debug, Clone)]
pub struct CrossPart {
    /// The bytes that this rank contributes: for each rank of the group, in rank order, the elements of this rank's
    /// shard that the other rank will receive.
    pub source: Source,
    /// The partition of the tensor before the operation.
    pub from: Partition,
    /// The partition of the tensor after the operation.
    pub to: Partition,
    /// Type of the elements.
    pub element: ElementType,
}

impl CrossPart {
    /// Creates a part to which this rank contributes `source`.
    pub fn new(source: Source, from: Partition, to: Partition, element: ElementType) -> Self {
        Self {
            source,
            from,
            to,
            element,
        }
    }
}
