//! How a tensor lies on the ranks of a mesh.

use std::fmt;

use burn_fsdp_mesh::{Mesh, Partition, Placement};
use serde::{Deserialize, Serialize};

use crate::region::num_elements;
use crate::{Error, Region};

/// Where a shard may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// Between any two elements in row-major order ([`Partition::flat`]); only `Shard(0)` occurs.
    Elements,
    /// Along the dim that the placement names, in the sizes of `torch.chunk`.
    Dims,
}

/// How a tensor lies on a mesh: one [`Placement`] per axis, and where shards are cut.
///
/// Several sharded axes cut one after the other, the slowest axis first. Padding is no part of a
/// layout: it is never stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// One per axis of the mesh, slowest first.
    pub placements: Vec<Placement>,
    /// Where shards are cut.
    pub cut: Cut,
}

impl Layout {
    /// Every rank of the mesh holds the whole tensor.
    pub fn replicated(mesh: &Mesh) -> Self {
        Self {
            placements: vec![Placement::Replicate; mesh.axes().len()],
            cut: Cut::Dims,
        }
    }

    /// Flat shards along one axis of the mesh, copies along the others.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] if the mesh has no such axis.
    pub fn flat(mesh: &Mesh, axis: &str) -> Result<Self, Error> {
        Self::along(mesh, axis, 0, Cut::Elements)
    }

    /// Shards of a dim along one axis of the mesh, copies along the others.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] if the mesh has no such axis.
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

    /// The elements of a tensor of this shape that `rank` holds. They may be none.
    ///
    /// # Errors
    ///
    /// A rank outside the mesh, not one placement per axis, a dim that the tensor lacks, a
    /// [`Partial`](Placement::Partial) tensor, or more elements than a `usize` counts.
    pub fn region(&self, shape: &[usize], mesh: &Mesh, rank: usize) -> Result<Region, Error> {
        let coordinate = mesh.coordinate(rank)?;
        // A scalar is one row, as in `Partition::rows`.
        let shape = if shape.is_empty() { &[1] } else { shape };
        let total = num_elements(shape).ok_or_else(|| burn_fsdp_mesh::Error::TooManyElements {
            shape: shape.to_vec(),
            num_shards: mesh.size(),
        })?;
        self.check(shape, mesh)?;
        let shards = self.placements.iter().zip(mesh.axes()).zip(coordinate);
        let shards = shards.filter_map(|((placement, axis), index)| match placement {
            Placement::Shard(dim) => Some((*dim, axis.size, index)),
            _ => None,
        });
        if self.cut == Cut::Elements {
            let mut range = 0..total;
            for (_, num_shards, index) in shards {
                let part = Partition::flat(range.len(), num_shards)?.range(index);
                range = range.start + part.start..range.start + part.end;
            }
            return Ok(Region::Flat(range));
        }
        let mut offsets = vec![0; shape.len()];
        let mut sizes = shape.to_vec();
        for (dim, num_shards, index) in shards {
            let part = Partition::flat(sizes[dim], num_shards)?.range(index);
            offsets[dim] += part.start;
            sizes[dim] = part.len();
        }
        // The same kind of region on every rank, whatever the sizes.
        if self.cuts_rows_only() {
            let row_len = shape.get(1..).map_or(Some(1), num_elements).unwrap_or(0);
            let start = offsets.first().copied().unwrap_or(0) * row_len;
            let num_rows = sizes.first().copied().unwrap_or(1);
            return Ok(Region::Flat(start..start + num_rows * row_len));
        }
        Ok(Region::Box { offsets, sizes })
    }

    /// Whether no dim but 0 is cut.
    fn cuts_rows_only(&self) -> bool {
        self.placements
            .iter()
            .all(|placement| matches!(placement, Placement::Replicate | Placement::Shard(0)))
    }

    fn check(&self, shape: &[usize], mesh: &Mesh) -> Result<(), Error> {
        let invalid = |expected: String, got: String| {
            Err(Error::Argument {
                argument: "layout",
                expected,
                got,
            })
        };
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
                Placement::Shard(0) if self.cut == Cut::Elements => {}
                Placement::Shard(_) if self.cut == Cut::Elements => {
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

/// Prints as `shard(0)` or `replicate x shard(1)`, with `flat ` before it where elements are cut.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let placements: Vec<_> = self.placements.iter().map(ToString::to_string).collect();
        if self.cut == Cut::Elements {
            f.write_str("flat ")?;
        }
        f.write_str(&placements.join(" x "))
    }
}
