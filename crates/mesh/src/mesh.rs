//! Ranks laid out as an n-d array with named axes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Error;

/// A named dimension of a [`Mesh`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Axis {
    /// Name of the axis, such as `shard`. It is unique in its mesh.
    pub name: String,
    /// Number of ranks along the axis, at least 1.
    pub size: usize,
}

/// Ranks `0..size` laid out as an n-d array with named axes, row-major: the last axis varies fastest.
///
/// In a mesh `replicate=2 x shard=4`, rank 6 is at coordinate `[1, 2]`. Its sub-group *along* an axis consists of the
/// ranks that differ from it only in that index: `[4, 5, 6, 7]` along `shard`, `[2, 6]` along `replicate`.
///
/// There is at least one axis, no axis is empty, and names are unique. A deserialised mesh is checked like a new one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<Axis>", into = "Vec<Axis>")]
pub struct Mesh {
    axes: Vec<Axis>,
    size: usize,
}

impl Mesh {
    /// Creates a mesh from the axes `(name, size)`, slowest first.
    ///
    /// # Errors
    ///
    /// [`Error::NoAxes`]; [`Error::EmptyAxis`] if an axis has size 0; [`Error::DuplicateAxis`] if a name occurs twice;
    /// [`Error::TooManyRanks`] if the number of ranks does not fit in a `usize`.
    pub fn new<N: Into<String>>(axes: impl IntoIterator<Item = (N, usize)>) -> Result<Self, Error> {
        let axes = axes.into_iter().map(|(name, size)| Axis {
            name: name.into(),
            size,
        });
        Self::try_from(axes.collect::<Vec<_>>())
    }

    /// Creates a mesh of `num_ranks` ranks along a single axis.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyAxis`] if there are no ranks.
    pub fn line(name: impl Into<String>, num_ranks: usize) -> Result<Self, Error> {
        Self::new([(name, num_ranks)])
    }

    /// Returns the number of ranks: the product of the axis sizes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the axes, slowest first.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// Returns the axis with this name.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`].
    pub fn axis(&self, name: &str) -> Result<&Axis, Error> {
        self.axis_index(name).map(|index| &self.axes[index])
    }

    /// Returns the coordinate of `rank`: one index per axis.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`].
    pub fn coordinate(&self, rank: usize) -> Result<Vec<usize>, Error> {
        self.check_rank(rank)?;
        let mut rest = rank;
        let mut coordinate = vec![0; self.axes.len()];
        for (index, axis) in coordinate.iter_mut().zip(&self.axes).rev() {
            *index = rest % axis.size;
            rest /= axis.size;
        }
        Ok(coordinate)
    }

    /// Returns the index of `rank` on the axis with this name.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`], [`Error::RankOutOfRange`].
    pub fn index_on(&self, axis: &str, rank: usize) -> Result<usize, Error> {
        let axis = self.axis_index(axis)?;
        Ok(self.coordinate(rank)?[axis])
    }

    /// Returns the rank at `coordinate`, one index per axis.
    ///
    /// # Errors
    ///
    /// [`Error::CoordinateOutOfRange`].
    pub fn rank(&self, coordinate: &[usize]) -> Result<usize, Error> {
        let inside = coordinate.len() == self.axes.len()
            && coordinate
                .iter()
                .zip(&self.axes)
                .all(|(index, axis)| *index < axis.size);
        if !inside {
            let coordinate = coordinate.to_vec();
            return Err(Error::CoordinateOutOfRange {
                coordinate,
                mesh: self.to_string(),
            });
        }
        let indices = coordinate.iter().zip(&self.axes);
        Ok(indices.fold(0, |rank, (index, axis)| rank * axis.size + index))
    }

    /// Returns the ranks that differ from `rank` only along one axis, including `rank` itself, in axis order.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`] or [`Error::RankOutOfRange`].
    pub fn ranks_along(&self, axis: &str, rank: usize) -> Result<Vec<usize>, Error> {
        let index = self.axis_index(axis)?;
        let own = self.coordinate(rank)?[index];
        let stride = self.stride(index);
        let first = rank - own * stride;
        Ok((0..self.axes[index].size)
            .map(|along| first + along * stride)
            .collect())
    }

    /// Returns the index of `rank`'s sub-group along an axis, which is below `size / axis.size`.
    ///
    /// Two ranks have the same color if and only if [`Mesh::ranks_along`] returns the same ranks for both.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`] or [`Error::RankOutOfRange`].
    pub fn color_along(&self, axis: &str, rank: usize) -> Result<usize, Error> {
        let index = self.axis_index(axis)?;
        self.check_rank(rank)?;
        let stride = self.stride(index);
        Ok(rank / (stride * self.axes[index].size) * stride + rank % stride)
    }

    /// Returns the difference between the ranks of two neighbours along an axis.
    fn stride(&self, axis_index: usize) -> usize {
        self.axes[axis_index + 1..]
            .iter()
            .map(|axis| axis.size)
            .product()
    }

    fn axis_index(&self, name: &str) -> Result<usize, Error> {
        self.axes
            .iter()
            .position(|axis| axis.name == name)
            .ok_or_else(|| Error::UnknownAxis {
                axis: name.to_owned(),
                mesh: self.to_string(),
            })
    }

    fn check_rank(&self, rank: usize) -> Result<(), Error> {
        if rank < self.size {
            return Ok(());
        }
        Err(Error::RankOutOfRange {
            rank,
            num_ranks: self.size,
            mesh: self.to_string(),
        })
    }
}

impl TryFrom<Vec<Axis>> for Mesh {
    type Error = Error;

    fn try_from(axes: Vec<Axis>) -> Result<Self, Error> {
        if axes.is_empty() {
            return Err(Error::NoAxes);
        }
        for (index, axis) in axes.iter().enumerate() {
            if axis.size == 0 {
                return Err(Error::EmptyAxis {
                    axis: axis.name.clone(),
                });
            }
            if axes[..index]
                .iter()
                .any(|earlier| earlier.name == axis.name)
            {
                return Err(Error::DuplicateAxis {
                    axis: axis.name.clone(),
                });
            }
        }
        let size = axes
            .iter()
            .try_fold(1usize, |size, axis| size.checked_mul(axis.size));
        match size {
            Some(size) => Ok(Self { axes, size }),
            None => Err(Error::TooManyRanks { mesh: join(&axes) }),
        }
    }
}

impl From<Mesh> for Vec<Axis> {
    fn from(mesh: Mesh) -> Self {
        mesh.axes
    }
}

/// Prints as `replicate=2 x shard=4`.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&join(&self.axes))
    }
}

fn join(axes: &[Axis]) -> String {
    let axes: Vec<_> = axes
        .iter()
        .map(|axis| format!("{}={}", axis.name, axis.size))
        .collect();
    axes.join(" x ")
}
