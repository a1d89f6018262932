//! Products of halves as products of 32-bit copies of their parts, for processors on which tiles would be slow.
//!
//! Parts of the factors are copied to 32 bits, and the library for 32-bit floats multiplies the copies. Each copy serves
//! hundreds of rows or columns and is then replaced, so the memory for copies does not depend on the size of the
//! product. The sums stay in 32 bits, and each is rounded once.

use std::ops::Range;

use burn::tensor::bf16;

use crate::halves::{narrow, widen_into, widened};
use crate::matrix::Matrix;
use crate::turned::{BLOCK, CONFLICT};
use crate::vectors::{Kernel, vectorized};

/// Maximum number of rows, of addends and of columns that are converted at a time: copies and sums of 1.3 MiB.
const PART: Part = Part {
    rows: 256,
    addends: 512,
    columns: 256,
};

struct Part {
    rows: usize,
    addends: usize,
    columns: usize,
}

/// Number of rows or columns for which the library may use another method, whose sums round differently. No part is
/// that narrow unless the whole product is.
const FEW: usize = 16;

/// Computes a product part by part. `product` computes the product of 32-bit factors, and adds it to the last argument
/// if the flag is set. `store` receives a row's index, the first column, and the row's rounded sums from there on.
pub(crate) fn multiply(
    lhs: Matrix<'_, bf16>,
    rhs: Matrix<'_, bf16>,
    mut product: impl FnMut(Matrix<'_, f32>, Matrix<'_, f32>, &mut [f32], bool),
    mut store: impl FnMut(usize, usize, &[bf16]),
) {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let (mut sums, mut halves) = (Vec::new(), Vec::new());
    for columns in parts(rhs.columns, PART.columns) {
        let rhs = rhs.part_of_columns(columns.clone());
        for rows in parts(lhs.rows, PART.rows) {
            let lhs = lhs.part_of_rows(rows.clone());
            sums.resize(rows.len() * columns.len(), 0.0);
            for addends in parts(lhs.columns, PART.addends) {
                let lhs = widen(lhs.part_of_columns(addends.clone()), &mut left);
                let rhs = widen(rhs.part_of_rows(addends.clone()), &mut right);
                product(lhs, rhs, &mut sums, addends.start > 0);
            }
            halves.resize(sums.len(), bf16::ZERO);
            narrow(&sums, &mut halves);
            for (row, halves) in rows.zip(halves.chunks_exact(columns.len())) {
                store(row, columns.start, halves);
            }
        }
    }
}

/// Splits a length into parts of about `most` elements. No part has few elements unless the whole length does.
fn parts(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        if start == len {
            return None;
        }
        let end = if len - start <= most + FEW {
            len
        } else {
            start + most
        };
        let part = start..end;
        start = end;
        Some(part)
    })
}

/// Returns a 32-bit copy of a matrix, in the order that its elements have in memory if rows or columns are contiguous.
fn widen<'a>(halves: Matrix<'_, bf16>, copy: &'a mut Vec<f32>) -> Matrix<'a, f32> {
    let (rows, columns) = (halves.rows, halves.columns);
    let is_turned = halves.strides[1] != 1 && halves.strides[0] == 1;
    let (num_lines, len) = if is_turned {
        (columns, rows)
    } else {
        (rows, columns)
    };
    let between = line_stride(len);
    copy.resize(num_lines * between, 0.0);
    vectorized(Lines {
        halves: halves.elements,
        strides: if is_turned {
            [halves.strides[1], 1]
        } else {
            halves.strides
        },
        floats: copy,
        len,
        between,
    });
    let strides = if is_turned {
        [1, between]
    } else {
        [between, 1]
    };
    Matrix::new(copy, [rows, columns], strides)
}

/// Returns a distance between the starts of a copy's lines that keeps them from sharing cache sets.
fn line_stride(len: usize) -> usize {
    if len > 0 && (len * size_of::<f32>()).is_multiple_of(CONFLICT) {
        len + BLOCK
    } else {
        len
    }
}

/// Widens lines of halves.
struct Lines<'a> {
    halves: &'a [bf16],
    /// Distances between lines, and between the elements of a line.
    strides: [usize; 2],
    floats: &'a mut [f32],
    len: usize,
    between: usize,
}

impl Kernel for Lines<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { len, strides, .. } = self;
        if len == 0 {
            return;
        }
        for (line, floats) in self.floats.chunks_exact_mut(self.between).enumerate() {
            let halves = &self.halves[line * strides[0]..];
            if strides[1] == 1 {
                widen_into(&halves[..len], &mut floats[..len]);
                continue;
            }
            for (at, float) in floats[..len].iter_mut().enumerate() {
                *float = widened(halves[at * strides[1]]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_length_and_none_is_narrow() {
        for len in 0..600 {
            let parts: Vec<_> = parts(len, 64).collect();
            let ends = parts.iter().map(|part| part.end).collect::<Vec<_>>();
            let starts = parts.iter().map(|part| part.start);
            assert!(
                starts.eq([0]
                    .into_iter()
                    .chain(ends.iter().copied())
                    .take(parts.len()))
            );
            assert_eq!(ends.last().copied().unwrap_or(0), len);
            assert!(
                parts
                    .iter()
                    .all(|part| part.len() > FEW || part.len() == len)
            );
        }
    }
}
