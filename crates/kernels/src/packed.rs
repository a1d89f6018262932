//! Products of halves as products of widened panels.
//!
//! Without fast instructions for halves, the library for halves takes up to twice the time of a product in 32 bits,
//! because it converts each half for every block of the result. Here parts of the factors are widened once, in the
//! order in which the innermost loop reads them. That loop multiplies a few rows by a few columns, with all sums in
//! vector registers. The memory for copies does not depend on the size of the product.
//!
//! A sum is a chain of fused multiplications and additions in the order of the addends, rounded once at the end. It
//! does not depend on the sizes of parts and tiles, on the other rows and columns, or on the number of threads.

use burn::tensor::bf16;

use crate::halves::{narrow_into, widen_into, widened};
use crate::matrix::Matrix;
use crate::vectors::{Kernel, vectorized};

/// Maximum number of rows, of addends and of columns that are widened at a time. A panel of addends and columns fits
/// into the first-level cache, and the rows into the second.
const MOST_ROWS: usize = 192;
const MOST_ADDENDS: usize = 448;
const MOST_COLUMNS: usize = 512;

/// Maximum number of rows that use the same widened columns.
const MOST_HELD: usize = 1152;

/// Computes a product in tiles of `ROWS` rows and `COLUMNS` columns, which the innermost loop holds in registers.
/// `store` receives a row's index, the first column, and the row's rounded sums from there on.
pub(crate) fn multiply<const ROWS: usize, const COLUMNS: usize>(
    lhs: Matrix<'_, bf16>,
    rhs: Matrix<'_, bf16>,
    store: impl FnMut(usize, usize, &[bf16]),
) {
    let held = part_size(lhs.rows, MOST_HELD, ROWS);
    let columns = part_size(rhs.columns, MOST_COLUMNS, COLUMNS);
    let addends = part_size(lhs.columns, MOST_ADDENDS, 1);
    let rows = part_size(held, MOST_ROWS, ROWS);
    // Sums that are complete after the first part are not held.
    let num_held = if addends < lhs.columns {
        (held / ROWS) * (columns / COLUMNS)
    } else {
        0
    };
    let mut product = Product::<_, ROWS, COLUMNS> {
        left: vec![0.0; rows * addends],
        right: vec![0.0; columns * addends],
        sums: vec![[[0.0; COLUMNS]; ROWS]; num_held],
        store,
    };
    for (first_column, num_columns) in parts(rhs.columns, columns) {
        for (first_row, num_rows) in parts(lhs.rows, held) {
            for (addend, depth) in parts(lhs.columns, addends) {
                let lhs_part = lhs.part_of_columns(addend..addend + depth);
                let rhs_part = rhs.part_of_rows(addend..addend + depth);
                let rhs_part = rhs_part.part_of_columns(first_column..first_column + num_columns);
                vectorized(Pack::<COLUMNS> {
                    elements: rhs_part.elements,
                    strides: [rhs_part.strides[1], rhs_part.strides[0]],
                    num_lines: num_columns,
                    depth,
                    panels: &mut product.right,
                });
                for (row, height) in parts(num_rows, rows) {
                    let block = Block {
                        is_first: addend == 0,
                        is_last: addend + depth == lhs.columns,
                        first: [first_row + row, first_column],
                        size: [height, num_columns],
                        first_tile: row / ROWS,
                        tiles_per_panel: held / ROWS,
                    };
                    let start = first_row + row;
                    product.add(lhs_part.part_of_rows(start..start + height), block);
                }
            }
        }
    }
}

/// Returns a size of parts that are about equal, at most `most` before it is rounded up to a multiple.
fn part_size(len: usize, most: usize, multiple: usize) -> usize {
    let num_parts = len.div_ceil(most).max(1);
    len.div_ceil(num_parts).max(1).next_multiple_of(multiple)
}

/// Returns the start and length of each part.
fn parts(len: usize, part: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len)
        .step_by(part)
        .map(move |start| (start, part.min(len - start)))
}

/// The memory of a product.
struct Product<F, const ROWS: usize, const COLUMNS: usize> {
    /// Panels of rows.
    left: Vec<f32>,
    /// Panels of columns.
    right: Vec<f32>,
    /// Incomplete sums, by panel of columns and then by panel of rows.
    sums: Vec<[[f32; COLUMNS]; ROWS]>,
    store: F,
}

/// A part of the result, to which a part of the addends is added.
struct Block {
    is_first: bool,
    is_last: bool,
    /// The first row and column.
    first: [usize; 2],
    /// Numbers of rows and columns.
    size: [usize; 2],
    /// The place of the block's first tile in a panel of columns.
    first_tile: usize,
    tiles_per_panel: usize,
}

impl<F, const ROWS: usize, const COLUMNS: usize> Product<F, ROWS, COLUMNS>
where
    F: FnMut(usize, usize, &[bf16]),
{
    /// Adds the products of rows and the packed columns.
    fn add(&mut self, lhs: Matrix<'_, bf16>, block: Block) {
        let depth = lhs.columns;
        vectorized(Pack::<ROWS> {
            elements: lhs.elements,
            strides: lhs.strides,
            num_lines: lhs.rows,
            depth,
            panels: &mut self.left,
        });
        let [height, width] = block.size;
        let (left, _) = self.left.as_chunks::<ROWS>();
        let (right, _) = self.right.as_chunks::<COLUMNS>();
        for (panel, (column, num_columns)) in parts(width, COLUMNS).enumerate() {
            let columns = &right[panel * depth..][..depth];
            for (tile, (row, num_rows)) in parts(height, ROWS).enumerate() {
                let rows = &left[tile * depth..][..depth];
                let held = panel * block.tiles_per_panel + block.first_tile + tile;
                let mut sums = if block.is_first {
                    [[0.0; COLUMNS]; ROWS]
                } else {
                    self.sums[held]
                };
                vectorized(Add {
                    rows,
                    columns,
                    tile: &mut sums,
                });
                if !block.is_last {
                    self.sums[held] = sums;
                    continue;
                }
                let halves = vectorized(Round(&sums));
                let first = [block.first[0] + row, block.first[1] + column];
                for (row, halves) in halves[..num_rows].iter().enumerate() {
                    // A copy of a known length is faster.
                    if num_columns == COLUMNS {
                        (self.store)(first[0] + row, first[1], halves);
                    } else {
                        (self.store)(first[0] + row, first[1], &halves[..num_columns]);
                    }
                }
            }
        }
    }
}

/// Adds products to a tile.
///
/// The innermost loop is a kernel of its own, because the compiler holds the sums in registers only in a small function.
struct Add<'a, const ROWS: usize, const COLUMNS: usize> {
    rows: &'a [[f32; ROWS]],
    columns: &'a [[f32; COLUMNS]],
    tile: &'a mut [[f32; COLUMNS]; ROWS],
}

impl<const ROWS: usize, const COLUMNS: usize> Kernel for Add<'_, ROWS, COLUMNS> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut sums = *self.tile;
        for (left, right) in self.rows.iter().zip(self.columns) {
            for row in 0..ROWS {
                for column in 0..COLUMNS {
                    sums[row][column] = left[row].mul_add(right[column], sums[row][column]);
                }
            }
        }
        *self.tile = sums;
    }
}

/// Rounds a tile.
struct Round<'a, const ROWS: usize, const COLUMNS: usize>(&'a [[f32; COLUMNS]; ROWS]);

impl<const ROWS: usize, const COLUMNS: usize> Kernel for Round<'_, ROWS, COLUMNS> {
    type Output = [[bf16; COLUMNS]; ROWS];

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut tile = [[bf16::ZERO; COLUMNS]; ROWS];
        for (halves, sums) in tile.iter_mut().zip(self.0) {
            narrow_into(sums, halves);
        }
        tile
    }
}

/// Widens rows or columns into panels of `N` lines, one value of each line at a time. The lines that the last panel
/// lacks are zero.
struct Pack<'a, const N: usize> {
    elements: &'a [bf16],
    /// Distances between lines, and between the values of a line.
    strides: [usize; 2],
    num_lines: usize,
    /// Number of values of a line.
    depth: usize,
    panels: &'a mut [f32],
}

impl<const N: usize> Kernel for Pack<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let panels = self.panels.chunks_exact_mut(N * self.depth);
        for (panel, (first, num_lines)) in panels.zip(parts(self.num_lines, N)) {
            let (panel, _) = panel.as_chunks_mut();
            let lines = &self.elements[first * self.strides[0]..];
            interleave::<N>(lines, self.strides, num_lines, panel);
        }
    }
}

/// Number of values of a line that are transposed at a time.
const BLOCK: usize = 16;

/// Widens lines into a panel.
#[inline(always)]
fn interleave<const N: usize>(
    elements: &[bf16],
    [line, next]: [usize; 2],
    num_lines: usize,
    panel: &mut [[f32; N]],
) {
    if num_lines == N && line == 1 {
        for (at, to) in panel.iter_mut().enumerate() {
            *to = array(&elements[at * next..]);
        }
        return;
    }
    let mut done = 0;
    if num_lines == N && next == 1 {
        let depth = panel.len();
        let lines: [&[bf16]; N] = std::array::from_fn(|at| &elements[at * line..][..depth]);
        let (blocks, _) = panel.as_chunks_mut::<BLOCK>();
        for block in blocks {
            // Transposed in pairs, which takes half as many loads and stores.
            let mut pairs = [[0; N]; BLOCK / 2];
            for (number, line) in lines.iter().enumerate() {
                let (values, _) = line[done..done + BLOCK].as_chunks();
                for (pair, values) in pairs.iter_mut().zip(values) {
                    let [first, second]: [bf16; 2] = *values;
                    pair[number] = u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16;
                }
            }
            for (lines, pairs) in block.as_chunks_mut().0.iter_mut().zip(pairs) {
                *lines = [
                    pairs.map(|pair| f32::from_bits(pair << 16)),
                    pairs.map(|pair| f32::from_bits(pair & 0xFFFF_0000)),
                ];
            }
            done += BLOCK;
        }
    }
    for (at, to) in panel.iter_mut().enumerate().skip(done) {
        *to = [0.0; N];
        for (number, to) in to[..num_lines].iter_mut().enumerate() {
            *to = widened(elements[number * line + at * next]);
        }
    }
}

/// Widens the first halves of a slice. The compiler uses vector instructions because the copy cannot overlap them.
#[inline(always)]
fn array<const N: usize>(halves: &[bf16]) -> [f32; N] {
    let mut floats = [0.0; N];
    widen_into(&halves[..N], &mut floats);
    floats
}
