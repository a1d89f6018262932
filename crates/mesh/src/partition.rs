//! The partition of one tensor into shards.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Error;

/// The ranges of one tensor's elements, in row-major order, that contiguous shards hold.
///
/// The tensor is a sequence of rows that are never cut: single elements for [`flat`](Self::flat), rows of dim 0 for
/// [`rows`](Self::rows). Every shard holds `ceil(num_rows / num_shards)` rows as long as there are any, so the last
/// shards may be shorter or empty, as with `torch.chunk`:
///
/// ```text
/// 7 rows in 4 shards:  [0 1] [2 3] [4 5] [6]
/// 5 rows in 4 shards:  [0 1] [2 3] [4] []
/// ```
///
/// If a tensor has [one owner](Self::one_owner), one shard has all elements and the others have none. With
/// [`multiples`](Self::multiples), flat shards begin only at multiples of a number.
///
/// All lengths and ranges are in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Rows", into = "Rows")]
pub struct Partition {
    rows: Rows,
    /// Number of elements of the largest shard.
    chunk_len: usize,
}

/// The numbers that define a partition, and the form in which it is serialised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    num_rows: usize,
    row_len: usize,
    num_shards: usize,
    /// The shard with all rows, if the rows are not divided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<usize>,
    /// The number of rows that are kept together when the tensor is cut.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    multiple: usize,
}

fn one() -> usize {
    1
}

fn is_one(multiple: &usize) -> bool {
    *multiple == 1
}

impl Partition {
    /// Partitions `num_elements` elements, with cuts at any element. `num_elements` may be 0.
    ///
    /// # Errors
    ///
    /// [`Error::NoShards`], or [`Error::TooManyElements`] if `padded_len` overflows.
    pub fn flat(num_elements: usize, num_shards: usize) -> Result<Self, Error> {
        Self::multiples(num_elements, 1, num_shards)
    }

    /// Cuts `num_elements` elements only at multiples of `multiple`, so a block of that many elements is in one shard.
    /// A `multiple` of 0 counts as 1.
    ///
    /// ```text
    /// 7 elements at multiples of 2 in 3 shards:  [0 1 2 3] [4 5 6] []
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`flat`](Self::flat).
    pub fn multiples(
        num_elements: usize,
        multiple: usize,
        num_shards: usize,
    ) -> Result<Self, Error> {
        Rows {
            num_rows: num_elements,
            row_len: 1,
            num_shards,
            owner: None,
            multiple: multiple.max(1),
        }
        .try_into()
    }

    /// Assigns all `num_elements` elements to the shard `owner`, and none to the others.
    ///
    /// # Errors
    ///
    /// [`Error::NoShards`]; [`Error::NoSuchShard`]; [`Error::TooManyElements`] if `padded_len` overflows.
    pub fn one_owner(num_elements: usize, num_shards: usize, owner: usize) -> Result<Self, Error> {
        Rows {
            num_rows: num_elements,
            row_len: 1,
            num_shards,
            owner: Some(owner),
            multiple: 1,
        }
        .try_into()
    }

    /// Cuts a tensor of this shape between rows of dim 0. A scalar (shape `[]`) is one row.
    ///
    /// # Errors
    ///
    /// [`Error::NoShards`], or [`Error::TooManyElements`] if the number of elements or `padded_len` overflows.
    pub fn rows(shape: &[usize], num_shards: usize) -> Result<Self, Error> {
        let (num_rows, row_dims) = shape
            .split_first()
            .map_or((1, shape), |(n, dims)| (*n, dims));
        // An empty dim makes the tensor empty, even if the product of the other dims would overflow.
        let row_len = if row_dims.contains(&0) {
            Some(0)
        } else {
            row_dims
                .iter()
                .try_fold(1usize, |len, dim| len.checked_mul(*dim))
        };
        let too_many = || Error::TooManyElements {
            shape: shape.to_vec(),
            num_shards,
        };
        let rows = Rows {
            num_rows,
            row_len: row_len.ok_or_else(too_many)?,
            num_shards,
            owner: None,
            multiple: 1,
        };
        rows.try_into().map_err(|error| match error {
            Error::TooManyElements { .. } => too_many(),
            error => error,
        })
    }

    /// Returns the number of shards, including empty ones. At least 1.
    pub fn num_shards(&self) -> usize {
        self.rows.num_shards
    }

    /// Returns the number of elements of the whole tensor, without padding.
    pub fn num_elements(&self) -> usize {
        self.rows.num_rows * self.rows.row_len
    }

    /// Returns the number of rows, which are never cut.
    pub fn num_rows(&self) -> usize {
        self.rows.num_rows
    }

    /// Returns the number of elements of a row: 1 for [`flat`](Self::flat).
    pub fn row_len(&self) -> usize {
        self.rows.row_len
    }

    /// Returns the number of rows that are kept together: 1, except for [`multiples`](Self::multiples).
    pub fn multiple(&self) -> usize {
        self.rows.multiple
    }

    /// Returns the shard that owns all elements of a partition made by [`one_owner`](Self::one_owner), even if there
    /// are none; `None` if the tensor is divided.
    pub fn sole_owner(&self) -> Option<usize> {
        self.rows.owner
    }

    /// Returns the elements of a shard. The range of an empty shard is at the end of the tensor, or at its start for a
    /// shard before a sole owner.
    ///
    /// # Panics
    ///
    /// If there is no such shard.
    #[track_caller]
    pub fn range(&self, shard: usize) -> Range<usize> {
        let num_shards = self.num_shards();
        assert!(
            shard < num_shards,
            "shard {shard} is not in a partition of {num_shards} shards"
        );
        let end = self.num_elements();
        if let Some(owner) = self.rows.owner {
            return match shard.cmp(&owner) {
                Ordering::Less => 0..0,
                Ordering::Equal => 0..end,
                Ordering::Greater => end..end,
            };
        }
        // No overflow: (shard + 1) * chunk_len <= padded_len, which the constructor checked.
        let start = (shard * self.chunk_len).min(end);
        start..(start + self.chunk_len).min(end)
    }

    /// Returns the number of elements of a shard, without padding.
    ///
    /// # Panics
    ///
    /// If there is no such shard.
    #[track_caller]
    pub fn len(&self, shard: usize) -> usize {
        self.range(shard).len()
    }

    /// Returns true if the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.num_elements() == 0
    }

    /// Returns the number of elements of the largest shard: the first shard, or the sole owner's.
    pub fn chunk_len(&self) -> usize {
        self.chunk_len
    }

    /// Returns the number of elements when every shard is padded to the largest: `chunk_len * num_shards`.
    pub fn padded_len(&self) -> usize {
        self.chunk_len * self.num_shards()
    }

    /// Returns the number of elements that a shard lacks compared with the largest.
    ///
    /// # Panics
    ///
    /// If there is no such shard.
    #[track_caller]
    pub fn padding(&self, shard: usize) -> usize {
        self.chunk_len - self.len(shard)
    }

    /// Returns the shard that holds an element.
    ///
    /// # Panics
    ///
    /// If the tensor has no such element.
    #[track_caller]
    pub fn owner(&self, element: usize) -> usize {
        let num_elements = self.num_elements();
        assert!(
            element < num_elements,
            "element {element} is not in a tensor of {num_elements} elements"
        );
        self.rows.owner.unwrap_or(element / self.chunk_len)
    }

    /// Returns the ranges of all shards in order, including empty ones.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        let partition = *self;
        (0..self.num_shards()).map(move |shard| partition.range(shard))
    }

    /// Returns the shards that hold at least one element, as `(shard, range)` in order.
    pub fn non_empty(&self) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        self.ranges()
            .enumerate()
            .filter(|(_, range)| !range.is_empty())
    }
}

impl TryFrom<Rows> for Partition {
    type Error = Error;

    fn try_from(rows: Rows) -> Result<Self, Error> {
        let Rows {
            num_rows,
            row_len,
            num_shards,
            owner,
            multiple,
        } = rows;
        if num_shards == 0 {
            return Err(Error::NoShards {
                num_elements: num_rows.saturating_mul(row_len),
            });
        }
        if let Some(owner) = owner.filter(|owner| *owner >= num_shards) {
            return Err(Error::NoSuchShard { owner, num_shards });
        }
        let largest = match owner {
            Some(_) => Some(num_rows),
            None => {
                let largest = num_rows.div_ceil(num_shards);
                let largest = largest.checked_next_multiple_of(multiple);
                largest.map(|largest| largest.min(num_rows))
            }
        };
        let chunk_len = largest.and_then(|largest| largest.checked_mul(row_len));
        let padded_len = chunk_len.and_then(|chunk_len| chunk_len.checked_mul(num_shards));
        match (chunk_len, padded_len) {
            (Some(chunk_len), Some(_)) => Ok(Self { rows, chunk_len }),
            _ => Err(Error::TooManyElements {
                shape: vec![num_rows, row_len],
                num_shards,
            }),
        }
    }
}

impl From<Partition> for Rows {
    fn from(partition: Partition) -> Self {
        partition.rows
    }
}

/// Prints as `105 elements in 4 shards of 30` (`... of 30 (rows of 15)`), or `105 elements in shard 2 of 4`.
impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (num_elements, num_shards) = (self.num_elements(), self.num_shards());
        if let Some(owner) = self.rows.owner {
            return write!(
                f,
                "{num_elements} elements in shard {owner} of {num_shards}"
            );
        }
        write!(
            f,
            "{num_elements} elements in {num_shards} shards of {}",
            self.chunk_len
        )?;
        match (self.row_len(), self.multiple()) {
            (1, 1) => Ok(()),
            (1, multiple) => write!(f, " (multiples of {multiple})"),
            (row_len, _) => write!(f, " (rows of {row_len})"),
        }
    }
}
