//! Matrices with contiguous columns, copied so that their rows are contiguous.
//!
//! The library for 32-bit products copies such a matrix internally, a few elements from many columns at a time. If the
//! distance between columns is a multiple of 1 KiB, as in a weight of 768 or 4096 columns, the columns share a few sets
//! of the cache and evict each other. Such a product ran at 85 % of the speed of others. Here a strip of columns is
//! copied in whole cache lines before it is multiplied.

use std::ops::Range;

use rayon::prelude::*;

use crate::matrix::Matrix;
use crate::threads::Threads;
use crate::vectors::{Kernel, vectorized};

/// Minimum number of columns in a strip, unless the factor has fewer: 512 KiB for a thousand rows.
const STRIP: usize = 128;

/// Number of rows and columns that are transposed at a time: a cache line of 32-bit floats.
pub(crate) const BLOCK: usize = 16;

/// Minimum number of rows of the other factor for a copy to be cheap compared with the product.
const MANY_ROWS: usize = 128;

/// Columns whose distance is a multiple of this many bytes map to the same cache sets.
pub(crate) const CONFLICT: usize = 1024;

/// Returns the maximum number of columns of a 32-bit product's right factor that are copied at a time, or zero if the
/// factor is multiplied directly. The first argument is the number of rows and columns of the result. The second is the
/// distance in elements between rows and between columns of the factor.
///
/// A factor with few columns is never copied. For a small result, the library sums products of transposed factors in a
/// different order, and the bits must be the same as without a copy.
pub(crate) fn copied_columns([rows, columns]: [usize; 2], [row, column]: [usize; 2]) -> usize {
    let shares_sets = column > 1 && (column * size_of::<f32>()).is_multiple_of(CONFLICT);
    let is_copied = rows >= MANY_ROWS && columns >= BLOCK && row == 1 && shares_sets;
    if is_copied {
        strips(columns).map(|strip| strip.len()).max().unwrap_or(0)
    } else {
        0
    }
}

/// Returns strips of columns. Each is wide enough for the library to sum its products in the same order as for the
/// whole factor.
pub(crate) fn strips(columns: usize) -> impl Iterator<Item = Range<usize>> {
    let num_strips = (columns / STRIP).max(1);
    (0..num_strips).map(move |strip| {
        let end = if strip + 1 == num_strips {
            columns
        } else {
            (strip + 1) * STRIP
        };
        strip * STRIP..end
    })
}

/// Copies a matrix with contiguous columns into one with contiguous rows.
pub(crate) fn copy_in_order<'a>(
    of: Matrix<'_, f32>,
    copy: &'a mut Vec<f32>,
    by: Threads,
) -> Matrix<'a, f32> {
    debug_assert_eq!(
        of.strides[0], 1,
        "the elements of a column follow each other"
    );
    copy.resize(of.rows * of.columns, 0.0);
    let len = BLOCK * of.columns.max(1);
    let turn = |(block, rows): (usize, &mut [f32])| {
        let first_row = block * BLOCK;
        vectorized(Turn {
            of,
            first_row,
            rows,
        });
    };
    match by {
        Threads::One => copy.chunks_mut(len).enumerate().for_each(turn),
        Threads::Pool => copy.par_chunks_mut(len).enumerate().for_each(turn),
    }
    Matrix::new(copy, [of.rows, of.columns], [of.columns, 1])
}

/// Copies some rows of a matrix with contiguous columns.
struct Turn<'a> {
    of: Matrix<'a, f32>,
    first_row: usize,
    rows: &'a mut [f32],
}

impl Kernel for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self {
            of,
            first_row,
            rows,
        } = self;
        let width = of.columns;
        let height = rows.len() / width.max(1);
        for first in (0..width).step_by(BLOCK) {
            let columns = BLOCK.min(width - first);
            let source = &of.elements[first * of.strides[1] + first_row..];
            if columns < BLOCK || height < BLOCK {
                for row in 0..height {
                    for column in 0..columns {
                        rows[row * width + first + column] = source[column * of.strides[1] + row];
                    }
                }
                continue;
            }
            let mut block = [[0.0; BLOCK]; BLOCK];
            for column in 0..BLOCK {
                let line = &source[column * of.strides[1]..][..BLOCK];
                for row in 0..BLOCK {
                    block[row][column] = line[row];
                }
            }
            for row in 0..BLOCK {
                rows[row * width + first..][..BLOCK].copy_from_slice(&block[row]);
            }
        }
    }
}
