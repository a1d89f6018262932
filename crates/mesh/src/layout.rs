//! The layout of a tensor on the ranks of a mesh.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::region::num_elements;
use crate::{Error, Mesh, Partition, Placement, Region};

/// The places where shards may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// Cuts between any two elements in row-major order ([`Partition::flat`]), so that all ranks hold nearly
    /// the same; only `Shard(0)` occurs.
    #[default]
    Elements,
    /// Cuts between rows of the dim that the placement names, in the sizes of `torch.chunk`, as PyTorch's
    /// `fully_shard` does for dim 0.
    Dims,
    /// Cuts between elements at multiples of this number ([`Partition::multiples`]), for what keeps something of each block of
    /// elements; only `Shard(0)` occurs.
    Multiples(usize),
}

impl Cut {
    /// Returns the number at whose multiples elements are cut, whatever their rows; `None` where dims are.
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
/// Several sharded axes cut one after the other, the slowest axis first. Padding is no part of a
/// layout: it is never stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// The placements, one per axis of the mesh, slowest first.
    pub placements: Vec<Placement>,
    /// The places where shards may begin.
    pub cut: Cut,
}

impl Layout {
    /// Returns the layout of a tensor that one rank holds alone, on a mesh without axes.
    pub fn one_rank() -> Self {
        Self {
            placements: Vec::new(),
            cut: Cut::Dims,
        }
    }

    /// Returns true if every rank holds the whole tensor.
    pub fn is_whole(&self) -> bool {
        let mut placements = self.placements.iter();
        placements.all(|placement| *placement == Placement::Replicate)
    }

    /// Returns the shape in which `rank` holds its part of a tensor of this shape: one dim where elements are cut.
    ///
    /// # Errors
    ///
    /// Those of [`region`](Self::region).
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
            return Ok(vec![self.region(shape, mesh, rank)?.len()]);
        }
        Ok(self.bounds(shape, mesh, rank)?.1)
    }

    /// Returns the layout in which every rank of the mesh holds the whole tensor.
    pub fn replicated(mesh: &Mesh) -> Self {
        Self {
            placements: vec![Placement::Replicate; mesh.axes().len()],
            cut: Cut::Dims,
        }
    }

    /// Returns the layout of flat shards along one axis of the mesh, and copies along the others.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`].
    pub fn flat(mesh: &Mesh, axis: &str) -> Result<Self, Error> {
        Self::along(mesh, axis, 0, Cut::Elements)
    }

    /// Returns the layout of flat shards that begin at multiples of a number, along one axis of the mesh, and copies along the
    /// others.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`].
    pub fn multiples(mesh: &Mesh, axis: &str, multiple: usize) -> Result<Self, Error> {
        Self::along(mesh, axis, 0, Cut::Multiples(multiple))
    }

    /// Returns the layout of shards of a dim along one axis of the mesh, and copies along the others.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`].
    pub fn dim(mesh: &Mesh, axis: &str, dim: usize) -> Result<Self, Error> {
        Self::along(mesh, axis, dim, Cut::Dims)
    }

    fn along(mesh: &Mesh, axis: &str, dim: usize, cut: Cut) -> Result<Self, Error> {
        mesh.axis(axis)?;
        let placement = |name: &str| match name == axis {
            true => Placement::Shard(dim),
            false => Placement::Replicate,
        };
        Ok(Self {
            placements: mesh.axes().iter().map(|a| placement(&a.name)).collect(),
            cut,
        })
    }

    /// Returns the elements of a tensor of this shape that `rank` holds, possibly none.
    ///
    /// # Errors
    ///
    /// A rank outside the mesh, not one placement per axis, a dim that the tensor lacks, a
    /// [`Partial`](Placement::Partial) tensor, or more elements than a `usize` counts.
    pub fn region(&self, shape: &[usize], mesh: &Mesh, rank: usize) -> Result<Region, Error> {
        // A scalar is one row, as in `Partition::rows`.
        let shape = if shape.is_empty() { &[1] } else { shape };
        if let Some(multiple) = self.cut.multiple() {
            let mut range = 0..num_elements(shape).ok_or_else(|| too_many(shape, mesh))?;
            for (_, num_shards, index) in self.shards(shape, mesh, rank)? {
                let part = Partition::multiples(range.len(), multiple, num_shards)?.range(index);
                range = range.start + part.start..range.start + part.end;
            }
            return Ok(Region::Flat(range));
        }
        let (offsets, sizes) = self.bounds(shape, mesh, rank)?;
        // The same kind of region on every rank, whatever the sizes.
        if self.cuts_rows_only() {
            let row_len = shape.get(1..).map_or(Some(1), num_elements).unwrap_or(0);
            let start = offsets.first().copied().unwrap_or(0) * row_len;
            let num_rows = sizes.first().copied().unwrap_or(1);
            return Ok(Region::Flat(start..start + num_rows * row_len));
        }
        Ok(Region::Box { offsets, sizes })
    }

    /// Returns the first index and the number of indices along each dim of what `rank` holds.
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

    /// Returns the dim that each sharded axis cuts, into how many shards, and which of them `rank` has.
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

    /// Returns true if no dim but 0 is cut.
    fn cuts_rows_only(&self) -> bool {
        self.placements
            .iter()
            .all(|placement| matches!(placement, Placement::Replicate | Placement::Shard(0)))
    }

    fn check(&self, shape: &[usize], mesh: &Mesh) -> Result<(), Error> {
        let invalid = |expected: String, got: String| Err(Error::InvalidLayout { expected, got });
        if self.placements.len() != mesh.axes().len() {
            let expected = format!("one placement for each axis of the mesh {mesh}");
            return invalid(expected, self.to_string());
        }
        for placement in &self.placements {
            match placement {
                Placement::Partial(_) => {
                    let expected = "a tensor whose addends are reduced".to_owned();
                    return invalid(expected, self.to_string());
                }
                Placement::Shard(0) if self.cut.multiple().is_some() => {}
                Placement::Shard(_) if self.cut.multiple().is_some() => {
                    let expected = "shard(0) or replicate where elements are cut".to_owned();
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

/// Prints as `shard(0)` or `replicate x shard(1)`, with `flat ` or `flat, multiples of 256, ` before it where elements are cut.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let placements: Vec<_> = self.placements.iter().map(ToString::to_string).collect();
        match self.cut {
            Cut::Elements => f.write_str("flat ")?,
            Cut::Multiples(multiple) => write!(f, "flat, multiples of {multiple}, ")?,
            Cut::Dims => {}
        }
        f.write_str(&placements.join(" x "))
    }
}

/// A placement on one axis of a mesh, with what is known of the axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisPlacement {
    /// Name of the axis.
    pub axis: Arc<str>,
    /// Number of ranks along it.
    pub num_ranks: usize,
    /// The placement of the tensor on it.
    pub placement: Placement,
}

/// Prints as `model: shard(1)`.
impl fmt::Display for AxisPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.axis, self.placement)
    }
}

/// Returns the shape in which every rank holds its part of a tensor that a step computes with: each dim that is cut is that
/// many times shorter, rounded up. Of a dim that does not divide the last ranks have fewer rows than that, in the sizes of
/// [`Cut::Dims`], and padding behind them.
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
