//! Layouts of tensors on the ranks of a mesh.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::region::num_elements;
use crate::{Error, Mesh, Partition, Placement, Region};

/// Where the shards of a tensor may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// Cuts between any two elements in row-major order ([`Partition::flat`]). All ranks hold nearly equal shards.
    /// Allows only `Shard(0)`.
    #[default]
    Elements,
    /// Cuts between rows of the placement's dim. The sizes are the same as `torch.chunk`'s, as in PyTorch's
    /// `fully_shard` for dim 0.
    Dims,
    /// Cuts between elements, but only at multiples of this number ([`Partition::multiples`]), for formats that store
    /// data per block of elements. Allows only `Shard(0)`.
    Multiples(usize),
}

impl Cut {
    /// Returns the number whose multiples are the allowed cuts between elements; `None` if dims are cut.
    fn multiple(self) -> Option<usize> {
        match self {
            Self::Elements => Some(1),
            Self::Multiples(multiple) => Some(multiple),
            Self::Dims => None,
        }
    }
}

/// Prints as `flat`, `rows` or `multiples of 256`.
impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elements => f.write_str("flat"),
            Self::Dims => f.write_str("rows"),
            Self::Multiples(multiple) => write!(f, "multiples of {multiple}"),
        }
    }
}

/// The layout of a tensor on a mesh: one [`Placement`] per axis, and where shards may begin.
///
/// If several axes are sharded, they cut one after the other, slowest axis first. A layout has no padding, because
/// padding is never stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// The placements, one per axis of the mesh, slowest first.
    pub placements: Vec<Placement>,
    /// Where the tensor's shards may begin.
    pub cut: Cut,
    /// The index, along the only sharded axis, of the ranks that hold all elements while the others hold none; `None`
    /// if the tensor is divided. See [`owned`](Self::owned).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<usize>,
}

impl Layout {
    /// Returns the layout of a tensor on a single rank, in a mesh without axes.
    pub fn one_rank() -> Self {
        Self {
            placements: Vec::new(),
            cut: Cut::Dims,
            owner: None,
        }
    }

    /// Returns true if every rank holds the whole tensor.
    pub fn is_whole(&self) -> bool {
        let mut placements = self.placements.iter();
        placements.all(|placement| *placement == Placement::Replicate)
    }

    /// Returns the shape of `rank`'s part of a tensor of shape `shape`. A whole copy and the part of an owner have the
    /// tensor's shape. Any other part has one dim if elements are cut.
    ///
    /// # Errors
    ///
    /// The same as [`region`](Self::region), but none if every rank holds the whole tensor.
    pub fn part_shape(
        &self,
        shape: &[usize],
        mesh: &Mesh,
        rank: usize,
    ) -> Result<Vec<usize>, Error> {
        if self.is_whole() {
            return Ok(shape.to_vec());
        }
        if self.cut.multiple().is_some() {
            let len = self.region(shape, mesh, rank)?.len();
            let is_all = self.owner.is_some() && num_elements(shape) == Some(len);
            return Ok(if is_all { shape.to_vec() } else { vec![len] });
        }
        Ok(self.bounds(shape, mesh, rank)?.1)
    }

    /// Returns the layout in which every rank of the mesh holds the whole tensor.
    pub fn replicated(mesh: &Mesh) -> Self {
        Self {
            placements: vec![Placement::Replicate; mesh.axes().len()],
            cut: Cut::Dims,
            owner: None,
        }
    }

    /// Returns the layout with flat shards along one axis of the mesh and copies along the other axes.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`].
    pub fn flat(mesh: &Mesh, axis: &str) -> Result<Self, Error> {
        Self::along(mesh, axis, 0, Cut::Elements)
    }

    /// Returns the layout of a tensor that one rank owns: the ranks at index `owner` along one axis of the mesh hold
    /// all of its elements, and the others none. The other axes have copies.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`]; [`Error::NoSuchShard`].
    pub fn owned(mesh: &Mesh, axis: &str, owner: usize) -> Result<Self, Error> {
        Partition::one_owner(0, mesh.axis(axis)?.size, owner)?;
        Ok(Self {
            owner: Some(owner),
            ..Self::flat(mesh, axis)?
        })
    }

    /// Returns the layout with flat shards along one axis of the mesh and copies along the other axes. Shards begin
    /// only at multiples of `multiple` elements.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`].
    pub fn multiples(mesh: &Mesh, axis: &str, multiple: usize) -> Result<Self, Error> {
        Self::along(mesh, axis, 0, Cut::Multiples(multiple))
    }

    /// Returns the layout that shards dim `dim` along one axis of the mesh, with copies along the other axes.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`].
    pub fn dim(mesh: &Mesh, axis: &str, dim: usize) -> Result<Self, Error> {
        Self::along(mesh, axis, dim, Cut::Dims)
    }

    fn along(mesh: &Mesh, axis: &str, dim: usize, cut: Cut) -> Result<Self, Error> {
        mesh.axis(axis)?;
        let placement = |name: &str| {
            if name == axis {
                Placement::Shard(dim)
            } else {
                Placement::Replicate
            }
        };
        Ok(Self {
            placements: mesh.axes().iter().map(|a| placement(&a.name)).collect(),
            cut,
            owner: None,
        })
    }

    /// Returns the partition of `num_elements` elements over one sharded axis of `num_shards` ranks; `None` if dims are
    /// cut instead of elements.
    ///
    /// # Errors
    ///
    /// The errors of [`Partition::multiples`] and [`Partition::one_owner`].
    pub fn partition(
        &self,
        num_elements: usize,
        num_shards: usize,
    ) -> Result<Option<Partition>, Error> {
        let divide = |multiple| match self.owner {
            Some(owner) => Partition::one_owner(num_elements, num_shards, owner),
            None => Partition::multiples(num_elements, multiple, num_shards),
        };
        self.cut.multiple().map(divide).transpose()
    }

    /// Returns the elements that `rank` holds of a tensor of shape `shape`, possibly none.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]; [`Error::TooManyElements`]; [`Error::InvalidLayout`] for a number of placements that
    /// differs from the number of axes, a dim that the tensor lacks or that the [cut](Cut) does not allow, an owner
    /// unless exactly one axis cuts elements, or a [`Partial`](Placement::Partial) tensor; [`Error::NoSuchShard`] for
    /// an owner outside the axis.
    pub fn region(&self, shape: &[usize], mesh: &Mesh, rank: usize) -> Result<Region, Error> {
        // A scalar is one row, as in `Partition::rows`.
        let shape = if shape.is_empty() { &[1] } else { shape };
        if self.cut.multiple().is_some() {
            let mut range = 0..num_elements(shape).ok_or_else(|| too_many(shape, mesh))?;
            for (_, num_shards, index) in self.shards(shape, mesh, rank)? {
                if let Some(partition) = self.partition(range.len(), num_shards)? {
                    let part = partition.range(index);
                    range = range.start + part.start..range.start + part.end;
                }
            }
            return Ok(Region::Flat(range));
        }
        let (offsets, sizes) = self.bounds(shape, mesh, rank)?;
        // Every rank gets the same kind of region, regardless of the sizes.
        if self.cuts_rows_only() {
            let row_len = shape.get(1..).map_or(Some(1), num_elements).unwrap_or(0);
            let start = offsets.first().copied().unwrap_or(0) * row_len;
            let num_rows = sizes.first().copied().unwrap_or(1);
            return Ok(Region::Flat(start..start + num_rows * row_len));
        }
        Ok(Region::Box { offsets, sizes })
    }

    /// Returns the first index and the number of indices of `rank`'s part along each dim.
    fn bounds(
        &self,
        shape: &[usize],
        mesh: &Mesh,
        rank: usize,
    ) -> Result<(Vec<usize>, Vec<usize>), Error> {
        let mut offsets = vec![0; shape.len()];
        let mut sizes = shape.to_vec();
        for (dim, num_shards, index) in self.shards(shape, mesh, rank)? {
            let part = Partition::flat(sizes[dim], num_shards)?.range(index);
            offsets[dim] += part.start;
            sizes[dim] = part.len();
        }
        Ok((offsets, sizes))
    }

    /// For each sharded axis, returns the dim that it cuts, the number of shards, and the index of `rank`'s shard.
    fn shards(
        &self,
        shape: &[usize],
        mesh: &Mesh,
        rank: usize,
    ) -> Result<impl Iterator<Item = (usize, usize, usize)>, Error> {
        let coordinate = mesh.coordinate(rank)?;
        num_elements(shape).ok_or_else(|| too_many(shape, mesh))?;
        self.check(shape, mesh)?;
        let axes = self.placements.iter().zip(mesh.axes()).zip(coordinate);
        Ok(
            axes.filter_map(|((placement, axis), index)| match placement {
                Placement::Shard(dim) => Some((*dim, axis.size, index)),
                _ => None,
            }),
        )
    }

    /// Returns true if no dim other than dim 0 is cut.
    fn cuts_rows_only(&self) -> bool {
        self.placements
            .iter()
            .all(|placement| matches!(placement, Placement::Replicate | Placement::Shard(0)))
    }

    fn check(&self, shape: &[usize], mesh: &Mesh) -> Result<(), Error> {
        let invalid = |expected: String, got: String| Err(Error::InvalidLayout { expected, got });
        if self.placements.len() != mesh.axes().len() {
            let expected = format!("one placement for each axis of mesh {mesh}");
            return invalid(expected, self.to_string());
        }
        let cuts = self.placements.iter();
        let num_cuts = cuts.filter(|on| matches!(on, Placement::Shard(_))).count();
        if self.owner.is_some() && (self.cut, num_cuts) != (Cut::Elements, 1) {
            let expected = "an owner only with exactly one axis that cuts elements".to_owned();
            return invalid(expected, self.to_string());
        }
        for placement in &self.placements {
            match placement {
                Placement::Partial(_) => {
                    let expected = "no partial placement; reduce the tensor first".to_owned();
                    return invalid(expected, self.to_string());
                }
                Placement::Shard(0) if self.cut.multiple().is_some() => {}
                Placement::Shard(_) if self.cut.multiple().is_some() => {
                    let expected = "shard(0) or replicate when elements are cut".to_owned();
                    return invalid(expected, self.to_string());
                }
                Placement::Shard(dim) if *dim >= shape.len() => {
                    let expected = format!("a shard of one of the {} dims", shape.len());
                    return invalid(expected, self.to_string());
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Prints as `shard(0)` or `replicate x shard(1)`, with the prefix `flat ` or `flat, multiples of 256, ` if elements
/// are cut, and the prefix `all at 2 of ` if one rank holds all of them.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let placements: Vec<_> = self.placements.iter().map(ToString::to_string).collect();
        match (self.owner, self.cut) {
            (Some(owner), _) => write!(f, "all at {owner} of ")?,
            (None, Cut::Elements) => f.write_str("flat ")?,
            (None, Cut::Multiples(multiple)) => write!(f, "flat, multiples of {multiple}, ")?,
            (None, Cut::Dims) => {}
        }
        f.write_str(&placements.join(" x "))
    }
}

/// A placement on one axis of a mesh, with the axis's name and size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisPlacement {
    /// Name of the axis.
    pub axis: Arc<str>,
    /// Number of ranks along the axis.
    pub num_ranks: usize,
    /// The tensor's placement on the axis.
    pub placement: Placement,
}

/// Prints as `model: shard(1)`.
impl fmt::Display for AxisPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.axis, self.placement)
    }
}

/// Returns the padded shape of a tensor's parts in a compiled step, which is the same on every rank.
///
/// Each cut dim is divided by the number of ranks and rounded up. If a dim does not divide evenly, the last ranks have
/// fewer rows, as with [`Cut::Dims`], followed by padding.
pub fn local_shape(shape: &[usize], placements: &[AxisPlacement]) -> Vec<usize> {
    let mut local = shape.to_vec();
    for placement in placements {
        if let Placement::Shard(dim) = placement.placement
            && let Some(size) = local.get_mut(dim)
        {
            *size = size.div_ceil(placement.num_ranks);
        }
    }
    local
}

fn too_many(shape: &[usize], mesh: &Mesh) -> Error {
    Error::TooManyElements {
        shape: shape.to_vec(),
        num_shards: mesh.size(),
    }
}
