//! Matrices whose columns are in memory one after the other, copied so that the rows are.
//!
//! The library of 32-bit products copies such a factor by itself, some elements of many columns at a time. Where the columns
//! begin at a multiple of 1 KiB from each other, as those of a weight of 768 or 4096 columns do, they fall into a few sets of the
//! cache and drive each other out: such a product ran at 85 % of the speed of others. Here a strip of columns is copied by whole
//! cache lines before it is multiplied.

use std::ops::Range;

use rayon::prelude::*;

use crate::matrix::Matrix;
use crate::threads::Threads;
use crate::vectors::{Kernel, vectorized};

/// Columns that are copied before they are multiplied, at least: 512 KiB for a thousand rows.
const STRIP: usize = 128;

/// Rows and columns that are exchanged at a time: a cache line of 32-bit floats.
const BLOCK: usize = 16;

/// Rows of the other factor from which on a copy costs little beside the product.
const MANY_ROWS: usize = 128;

/// Distance in bytes, of which a multiple between columns lets them share sets of a cache.
const CONFLICT: usize = 1024;

/// Returns the columns that are copied at a time of the right factor of a 32-bit product, at most; zero if it is multiplied as
/// it is. `sizes` are the rows and columns of the result, and `strides` the distances in elements between rows and between columns
/// of the factor.
///
/// A factor of few columns is never copied: where the result is small, the library sums up products of turned factors in
/// another order, and the bits shall be those of the factor as it is.
pub fn copied_columns([rows, columns]: [usize; 2], [row, column]: [usize; 2]) -> usize {
    let shares_sets = column > 1 && (column * size_of::<f32>()).is_multiple_of(CONFLICT);
    let is_copied = rows >= MANY_ROWS && columns >= BLOCK && row == 1 && shares_sets;
    match is_copied {
        true => strips(columns).map(|strip| strip.len()).max().unwrap_or(0),
        false => 0,
    }
}

/// Returns strips of columns, all of which have enough columns that the library sums up each product of the strip as it would in
/// the whole.
pub(crate) fn strips(columns: usize) -> impl Iterator<Item = Range<usize>> {
    let num_strips = (columns / STRIP).max(1);
    (0..num_strips).map(move |strip| {
        let end = match strip + 1 == num_strips {
            true => columns,
            false => (strip + 1) * STRIP,
        };
        strip * STRIP..end
    })
}

/// Returns a copy of a matrix whose columns are in order, row after row.
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

/// Copies some rows of a matrix whose columns are in order.
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
