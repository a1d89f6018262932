//! One parameter's place in its unit: what does not change over the life of the module.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use burn::tensor::DType;
use burn_fsdp_collectives::{ElementType, FullPart, Part, Source};
use burn_fsdp_mesh::Partition;

/// What a rank holds of a parameter between steps, and how its gradient is reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holding {
    /// A shard; full gradients are reduce-scattered with the unit.
    Shard,
    /// The whole parameter; its gradient shares one all-reduce a step with all others.
    Whole,
    /// The whole parameter; gradients are all-reduced with the unit.
    Replica,
}

/// One parameter of a unit.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Path in the module, such as `blocks.3.fc.weight`.
    pub(crate) path: String,
    /// Shape of the whole parameter.
    pub(crate) shape: Vec<usize>,
    /// Element type of the stored values.
    pub(crate) dtype: DType,
    /// The same, in the words of the transport.
    pub(crate) element: ElementType,
    /// Element type in which the parameter computes.
    pub(crate) compute: DType,
    /// The same, in the words of the transport.
    pub(crate) compute_element: ElementType,
    /// Element type in which gradients are reduced.
    pub(crate) reduce: DType,
    /// The same, in the words of the transport.
    pub(crate) reduce_element: ElementType,
    /// How the flat elements are cut; one shard where every rank holds the whole.
    pub(crate) partition: Partition,
    /// What this rank holds.
    pub(crate) holding: Holding,
    /// Set when the optimizer of the module's first parameter has been tried.
    pub(crate) is_tried: AtomicBool,
}

impl Slot {
    /// Bytes of the whole parameter as it is stored.
    pub(crate) fn full_bytes(&self) -> usize {
        self.partition.num_elements() * self.element.size()
    }

    /// Bytes of the whole parameter, or of its gradient, as it computes.
    pub(crate) fn unsharded_bytes(&self) -> usize {
        self.partition.num_elements() * self.compute_element.size()
    }

    /// The parameter as a part of a collective among the shards' holders, with elements of the
    /// type `element`.
    pub(crate) fn part(&self, source: Source, element: ElementType) -> Part {
        Part {
            source,
            partition: self.partition,
            element,
        }
    }

    /// The parameter as a part of a collective among whole tensors.
    pub(crate) fn full_part(&self, source: Source, element: ElementType) -> FullPart {
        FullPart {
            source,
            num_elements: self.partition.num_elements(),
            element,
        }
    }

    /// Elements of a reduced gradient on rank `rank`: those of what it holds.
    pub(crate) fn held_elements(&self, rank: usize) -> usize {
        match self.is_gathered() {
            true => self.partition.len(rank),
            false => self.partition.num_elements(),
        }
    }

    /// The elements that rank `rank` of the group holds between steps.
    pub(crate) fn held_range(&self, rank: usize) -> Range<usize> {
        match self.is_gathered() {
            true => self.partition.range(rank),
            false => 0..self.partition.num_elements(),
        }
    }

    /// The shape, as an array of the parameter's rank.
    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        let mut dims = [0; D];
        dims.copy_from_slice(&self.shape);
        dims
    }

    /// Bytes that rank `rank` of the group holds between steps.
    pub(crate) fn held_bytes(&self, rank: usize) -> usize {
        self.held_elements(rank) * self.element.size()
    }

    /// Whether its elements have to be gathered from other ranks before use.
    pub(crate) fn is_gathered(&self) -> bool {
        self.holding == Holding::Shard
    }
}
