//! The fixed properties of a parameter in its unit, and a table with one value per slot.

use std::ops::{Deref, DerefMut, Range};
use std::path::Path;
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_collectives::{ElementType, FullPart, Part, Source};
use burn_fsdp_mesh::Partition;

use crate::adapter::Adapter;
use crate::base_bits::Quantized;
use crate::layer::Layer;
use crate::packing::Packed;

/// The part of a parameter that a rank holds between steps, and how its gradient is reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holding {
    /// This rank's shard; all or none of the parameter if the partition has a sole owner. Full gradients are
    /// reduce-scattered with the unit.
    Shard,
    /// The whole parameter; one all-reduce per step covers the gradients of all such parameters.
    Whole,
    /// The whole parameter; gradients are all-reduced with the unit.
    Replica,
}

/// An element type, in Burn and in the transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) dtype: DType,
    pub(crate) wire: ElementType,
}

impl Element {
    pub(crate) fn size(self) -> usize {
        self.wire.size()
    }
}

/// The element types of one parameter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elements {
    /// The type of the stored values.
    pub(crate) stored: Element,
    /// The type of the full parameter and its gradient.
    pub(crate) compute: Element,
    /// The type in which gradients are reduced.
    pub(crate) reduce: Element,
}

/// The largest number of dims that optimizers see; a parameter with more dims is flattened.
pub(crate) const MAX_DIMS: usize = 6;

/// One parameter of a unit.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Path in the module, such as `blocks.3.fc.weight`.
    pub(crate) path: String,
    /// Shape of the whole parameter.
    pub(crate) shape: Vec<usize>,
    /// The types in which the parameter's elements are stored, computed with, and reduced.
    pub(crate) elements: Elements,
    /// The partition of the flat elements; a single shard if every rank holds the whole.
    pub(crate) partition: Partition,
    pub(crate) holding: Holding,
    /// The form of shards in fewer bits, in gathers or also at rest, if any.
    pub(crate) packed: Option<Packed>,
    pub(crate) adapter: Option<Adapter>,
    /// The layer around the parameter, if the layer does not compute in the parameter's type.
    pub(crate) unfit: Option<Arc<Layer>>,
    /// The folder for files with this rank's part and its gradient, if they are not in memory.
    pub(crate) folder: Option<Arc<Path>>,
    /// True if the parameter is trained when the module is sharded.
    pub(crate) starts_trained: bool,
}

impl Slot {
    /// Returns the bytes of the whole parameter in its stored type.
    pub(crate) fn full_bytes(&self) -> usize {
        self.partition.num_elements() * self.elements.stored.size()
    }

    /// Returns the number of bytes of the whole parameter, or of its gradient, in its compute type.
    pub(crate) fn unsharded_bytes(&self) -> usize {
        self.partition.num_elements() * self.elements.compute.size()
    }

    /// Returns the parameter as part of a collective on shards, with elements of the type `element`.
    pub(crate) fn part(&self, source: Source, element: Element) -> Part {
        Part {
            source,
            partition: self.partition,
            element: element.wire,
        }
    }

    /// Returns the parameter as part of a collective on whole tensors.
    pub(crate) fn full_part(&self, source: Source, element: Element) -> FullPart {
        FullPart {
            source,
            num_elements: self.partition.num_elements(),
            element: element.wire,
        }
    }

    /// Returns the number of elements that rank `rank` holds, which is also the size of its reduced gradient.
    pub(crate) fn held_elements(&self, rank: usize) -> usize {
        if self.is_gathered() {
            self.partition.len(rank)
        } else {
            self.partition.num_elements()
        }
    }

    /// Returns the elements that rank `rank` of the group holds between steps.
    pub(crate) fn held_range(&self, rank: usize) -> Range<usize> {
        if self.is_gathered() {
            self.partition.range(rank)
        } else {
            0..self.partition.num_elements()
        }
    }

    /// Returns true if optimizers see only a flat shard of the parameter.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_gathered() && self.partition.sole_owner().is_none()
    }

    /// Returns true if optimizers see the parameter flat, whether sharded or whole.
    pub(crate) fn is_flattened(&self) -> bool {
        self.is_cut() || self.shape.len() > MAX_DIMS
    }

    /// Returns true if another rank of the group holds the whole parameter, so rank `rank` holds none of it.
    pub(crate) fn is_elsewhere(&self, rank: usize) -> bool {
        let owner = self.partition.sole_owner();
        self.is_gathered() && owner.is_some_and(|owner| owner != rank)
    }

    /// Returns the number of dims that optimizers see.
    pub(crate) fn shown_dims(&self) -> usize {
        if self.is_flattened() {
            1
        } else {
            self.shape.len()
        }
    }

    /// Returns the shape that optimizers on rank `rank` of the group see.
    pub(crate) fn shown_shape(&self, rank: usize) -> Vec<usize> {
        match (self.is_flattened(), self.is_elsewhere(rank)) {
            (true, _) => vec![self.held_elements(rank)],
            (false, false) => self.shape.clone(),
            (false, true) => vec![0; self.shape.len()],
        }
    }

    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        let mut dims = [0; D];
        dims.copy_from_slice(&self.shape);
        dims
    }

    /// Returns the number of bytes that rank `rank` of the group holds between steps.
    pub(crate) fn held_bytes(&self, rank: usize) -> usize {
        match self.quantized() {
            Some(quantized) => quantized.bytes.len(self.part_of(rank)),
            None => self.held_elements(rank) * self.elements.stored.size(),
        }
    }

    /// Returns the form of the parameter's elements at rest, if a policy holds them in fewer bits.
    pub(crate) fn quantized(&self) -> Option<&Quantized> {
        match &self.packed {
            Some(Packed::Held(quantized)) => Some(quantized),
            _ => None,
        }
    }

    /// Returns the number of the partition's part that rank `rank` of the group holds.
    pub(crate) fn part_of(&self, rank: usize) -> usize {
        if self.is_gathered() { rank } else { 0 }
    }

    /// Returns true if the parameter's elements must be gathered from other ranks before use.
    pub(crate) fn is_gathered(&self) -> bool {
        self.holding == Holding::Shard
    }
}

/// An optional value for each slot of a unit.
#[derive(Debug, Clone)]
pub(crate) struct Slots<T>(Vec<Option<T>>);

impl<T> Slots<T> {
    pub(crate) fn empty(len: usize) -> Self {
        (0..len).map(|_| None).collect()
    }
}

impl<T> FromIterator<Option<T>> for Slots<T> {
    fn from_iter<I: IntoIterator<Item = Option<T>>>(places: I) -> Self {
        Self(places.into_iter().collect())
    }
}

impl<T> IntoIterator for Slots<T> {
    type Item = Option<T>;
    type IntoIter = std::vec::IntoIter<Option<T>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<T> Deref for Slots<T> {
    type Target = [Option<T>];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<T> DerefMut for Slots<T> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}
