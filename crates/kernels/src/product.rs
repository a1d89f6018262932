//! Products of two matrices, written to uninitialized memory or added to existing values.

#![allow(
    unsafe_code,
    reason = "libraries write results to memory that would be filled with zeros first otherwise"
)]

use std::mem::MaybeUninit;

use burn::tensor::{DType, Element, bf16};
use bytemuck::Pod;
use rayon::prelude::*;

use crate::matrix::Matrix;
use crate::method::HalfProducts;
use crate::packed;
use crate::threads::Threads;
use crate::turned;
use crate::widened;

/// The rows of a product of halves are divided among threads in multiples of this number.
const ROWS: usize = 32;

/// Minimum number of multiplications of a product that is divided among threads, as in Burn's CPU backend.
const LARGE: usize = 192 * 192 * 192;

/// Minimum number of multiplications of a batch of products that is divided among threads.
const LARGE_BATCH: usize = 128 * 128 * 128;

/// An element type whose matrices can be multiplied.
pub(crate) trait Factor: Element + Pod + Send + Sync {
    /// Multiplies two matrices with the library for this type.
    ///
    /// # Safety
    ///
    /// `out` must be valid for writes of the rows of `lhs` times the columns of `rhs`, in order. The matrices must have
    /// the sizes that they specify. The number of columns of `lhs` must equal the number of rows of `rhs` and be at
    /// least one.
    unsafe fn multiply(lhs: Matrix<'_, Self>, rhs: Matrix<'_, Self>, out: *mut Self, by: Threads);
}

/// Returns products of these sizes, stored one after the other. `factors` returns the two matrices of each product.
///
/// The work is divided among threads as in Burn.
///
/// # Panics
///
/// If the sizes do not match.
pub(crate) fn products<'a, T: Factor>(
    num_products: usize,
    [rows, columns]: [usize; 2],
    factors: impl Fn(usize) -> (Matrix<'a, T>, Matrix<'a, T>) + Sync,
) -> Vec<T> {
    let sizes = rows.checked_mul(columns);
    let sizes = sizes.and_then(|len| Some((len, len.checked_mul(num_products)?)));
    let (len, total) = sizes.expect("the elements of a product can be counted");
    let mut elements = Vec::with_capacity(total);
    if total == 0 {
        return elements;
    }
    let out = &mut elements.spare_capacity_mut()[..total];
    let size = len.saturating_mul(factors(0).0.columns);
    let write = |index, out: &mut [MaybeUninit<T>], by| {
        let (lhs, rhs) = factors(index);
        multiply_among_threads(lhs, rhs, out, by);
    };
    let of_batch = size.saturating_mul(num_products);
    let is_many = num_products >= 4 && of_batch >= LARGE_BATCH;
    let by = if size >= LARGE && !is_many {
        Threads::Pool
    } else {
        Threads::One
    };
    // Each part has the size of one product, which `multiply` checks, and all parts are written.
    if by == Threads::One && num_products > 1 && of_batch >= LARGE_BATCH {
        let parts = out.par_chunks_exact_mut(len).enumerate();
        parts.for_each(|(index, out)| write(index, out, by));
    } else {
        let parts = out.chunks_exact_mut(len).enumerate();
        parts.for_each(|(index, out)| write(index, out, by));
    }
    // SAFETY: that many elements are allocated, and all have been written.
    unsafe { elements.set_len(total) };
    elements
}

/// Adds products of these sizes to a matrix with rows of length `row_len`. The products are in separate columns, side
/// by side from column `first`. `factors` returns the two matrices of each product.
///
/// # Panics
///
/// If the sizes do not match, or the columns are out of range.
pub(crate) fn add_products<'a>(
    num_products: usize,
    [rows, columns]: [usize; 2],
    factors: impl Fn(usize) -> (Matrix<'a, f32>, Matrix<'a, f32>) + Sync,
    into: &mut [f32],
    [row_len, first]: [usize; 2],
) {
    let end = num_products.checked_mul(columns);
    let end = end.and_then(|columns| columns.checked_add(first));
    let is_inside = end.is_some_and(|end| end <= row_len);
    let needed = rows.checked_mul(row_len);
    let is_there = needed.is_some_and(|needed| needed <= into.len());
    assert!(is_inside && is_there, "the columns of all products");
    if num_products == 0 || rows == 0 || columns == 0 {
        return;
    }
    let into = Columns(into.as_mut_ptr());
    let add = |index: usize| {
        let (lhs, rhs) = factors(index);
        assert_eq!(
            [lhs.rows, rhs.columns],
            [rows, columns],
            "the size of each product"
        );
        assert_eq!(lhs.columns, rhs.rows, "the inner sizes must be equal");
        if lhs.columns == 0 {
            return;
        }
        let into = Target {
            // SAFETY: the first row has these columns, as asserted above.
            elements: unsafe { into.at(first + index * columns) },
            row_stride: row_len,
            adds: true,
        };
        // SAFETY: the rows are in `into`, as asserted above, and so are these columns of each row. No other product
        // has them.
        unsafe { multiply_floats(lhs, rhs, into, Threads::One) };
    };
    let size = rows
        .saturating_mul(columns)
        .saturating_mul(factors(0).0.columns);
    if num_products > 1 && size.saturating_mul(num_products) >= LARGE_BATCH {
        (0..num_products).into_par_iter().for_each(add);
    } else {
        (0..num_products).for_each(add);
    }
}

/// The rows of a matrix in which each thread writes separate columns.
#[derive(Clone, Copy)]
struct Columns(*mut f32);

impl Columns {
    /// Returns the first element of a column.
    ///
    /// # Safety
    ///
    /// The first row must have that column.
    unsafe fn at(self, column: usize) -> *mut f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.add(column) }
    }
}

// SAFETY: this is only a pointer. The code that writes through it explains why no other thread writes there.
unsafe impl Send for Columns {}
// SAFETY: as above.
unsafe impl Sync for Columns {}

/// Writes a product. The library for 32-bit floats divides the work among threads.
fn multiply_among_threads<T: Factor>(
    lhs: Matrix<'_, T>,
    rhs: Matrix<'_, T>,
    out: &mut [MaybeUninit<T>],
    by: Threads,
) {
    let num_threads = rayon::current_num_threads();
    if T::dtype() != DType::BF16 || by == Threads::One || num_threads == 1 {
        return multiply(lhs, rhs, out, by);
    }
    let width = rhs.columns;
    let rows = rows_of_part(lhs.rows, num_threads);
    let parts = out.par_chunks_mut(rows * width).enumerate();
    parts.for_each(|(part, out)| {
        let first = part * rows;
        let lhs = lhs.part_of_rows(first..first + out.len() / width);
        multiply(lhs, rhs, out, Threads::One);
    });
}

/// Returns the number of rows in a part of a product of halves. If there are several parts, the last one has more than
/// a few rows. For few rows, the library uses another method, whose sums round differently, but the bits must not
/// depend on the number of threads.
fn rows_of_part(rows: usize, num_threads: usize) -> usize {
    const FEW: usize = 16;
    let mut part = rows.div_ceil(num_threads).next_multiple_of(ROWS);
    while part < rows && (1..=FEW).contains(&(rows % part)) {
        part += ROWS;
    }
    part
}

/// Writes the product of two matrices, row after row.
fn multiply<T: Factor>(
    lhs: Matrix<'_, T>,
    rhs: Matrix<'_, T>,
    out: &mut [MaybeUninit<T>],
    by: Threads,
) {
    assert_eq!(lhs.columns, rhs.rows, "the inner sizes must be equal");
    let len = lhs.rows.checked_mul(rhs.columns);
    assert_eq!(Some(out.len()), len, "the size of the result");
    if lhs.columns == 0 {
        out.fill(MaybeUninit::new(T::zeroed()));
        return;
    }
    // SAFETY: the assertions above and in `Matrix::new` are the requirements.
    unsafe { T::multiply(lhs, rhs, out.as_mut_ptr().cast(), by) };
}

impl Factor for f32 {
    unsafe fn multiply(lhs: Matrix<'_, Self>, rhs: Matrix<'_, Self>, out: *mut Self, by: Threads) {
        let width = rhs.columns;
        let copied = turned::copied_columns([lhs.rows, width], rhs.strides);
        let part = |first: usize| Target {
            // SAFETY: guaranteed by the caller. The columns of a strip are among the result's columns.
            elements: unsafe { out.add(first) },
            row_stride: width,
            adds: false,
        };
        if copied == 0 {
            // SAFETY: guaranteed by the caller.
            return unsafe { multiply_floats(lhs, rhs, part(0), by) };
        }
        let mut copy = Vec::with_capacity(rhs.rows * copied);
        for strip in turned::strips(width) {
            let columns = rhs.part_of_columns(strip.clone());
            let columns = turned::copy_in_order(columns, &mut copy, by);
            // SAFETY: the strips are parts of the rows that the caller guarantees.
            unsafe { multiply_floats(lhs, columns, part(strip.start), by) };
        }
    }
}

/// The destination of a product of 32-bit floats.
struct Target {
    elements: *mut f32,
    /// Distance between the starts of two rows.
    row_stride: usize,
    /// True if the product is added to the existing values, which must be initialized.
    adds: bool,
}

/// Calls the library for 32-bit floats.
///
/// # Safety
///
/// As for [`Factor::multiply`], with the target's rows.
unsafe fn multiply_floats(lhs: Matrix<'_, f32>, rhs: Matrix<'_, f32>, out: Target, by: Threads) {
    let ([lhs_rows, lhs_columns], [rhs_rows, rhs_columns]) = (lhs.signed(), rhs.signed());
    let parallelism = match by {
        Threads::One => gemm::Parallelism::None,
        Threads::Pool => gemm::Parallelism::Rayon(0),
    };
    // SAFETY: guaranteed by the caller. Existing values are read only if the product is added to them, as the flag
    // before `lhs` specifies.
    unsafe {
        gemm::gemm(
            lhs.rows,
            rhs.columns,
            lhs.columns,
            out.elements,
            1,
            out.row_stride as isize,
            out.adds,
            lhs.elements.as_ptr(),
            lhs_columns,
            lhs_rows,
            rhs.elements.as_ptr(),
            rhs_columns,
            rhs_rows,
            if out.adds { 1.0 } else { 0.0 },
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

impl Factor for bf16 {
    unsafe fn multiply(lhs: Matrix<'_, Self>, rhs: Matrix<'_, Self>, out: *mut Self, _: Threads) {
        // SAFETY: guaranteed by the caller.
        unsafe { multiply_by(HalfProducts::chosen(), lhs, rhs, out) }
    }
}

/// Multiplies two matrices of halves with a method.
///
/// # Safety
///
/// As for [`Factor::multiply`].
unsafe fn multiply_by(
    method: HalfProducts,
    lhs: Matrix<'_, bf16>,
    rhs: Matrix<'_, bf16>,
    out: *mut bf16,
) {
    let width = rhs.columns;
    let store = |row: usize, first: usize, halves: &[bf16]| {
        debug_assert!(row < lhs.rows && first + halves.len() <= width);
        // SAFETY: `out` is valid for writes of all rows, as guaranteed by the caller, and is no part of `halves`.
        unsafe {
            let start = out.add(row * width + first);
            start.copy_from_nonoverlapping(halves.as_ptr(), halves.len());
        }
    };
    match method {
        // SAFETY: guaranteed by the caller.
        HalfProducts::Instructions => unsafe { multiply_halves(lhs, rhs, out) },
        HalfProducts::SmallTiles => packed::multiply::<6, 16>(lhs, rhs, store),
        HalfProducts::LargeTiles => packed::multiply::<12, 32>(lhs, rhs, store),
        HalfProducts::Copies => widened::multiply(lhs, rhs, multiply_copies, store),
    }
}

/// Calls the library for halves.
///
/// # Safety
///
/// As for [`Factor::multiply`].
unsafe fn multiply_halves(lhs: Matrix<'_, bf16>, rhs: Matrix<'_, bf16>, out: *mut bf16) {
    let ([lhs_rows, lhs_columns], [rhs_rows, rhs_columns]) = (lhs.signed(), rhs.signed());
    // Freed after the product, because the library's default workspace would stay with the thread.
    let mut copies = gemmkit::Workspace::new();
    // SAFETY: guaranteed by the caller. `out` is not read, because its factor is zero.
    unsafe {
        gemmkit::gemm_unchecked_with(
            &mut copies,
            lhs.rows,
            lhs.columns,
            rhs.columns,
            bf16::ONE,
            lhs.elements.as_ptr(),
            lhs_rows,
            lhs_columns,
            rhs.elements.as_ptr(),
            rhs_rows,
            rhs_columns,
            bf16::ZERO,
            out,
            rhs.columns as isize,
            1,
            gemmkit::Parallelism::Serial,
        );
    }
}

/// Multiplies 32-bit copies of parts of the factors, and adds the product to `sums` if the flag is set.
fn multiply_copies(lhs: Matrix<'_, f32>, rhs: Matrix<'_, f32>, sums: &mut [f32], adds: bool) {
    assert_eq!(lhs.columns, rhs.rows, "the inner sizes must be equal");
    assert_eq!(sums.len(), lhs.rows * rhs.columns, "one sum an element");
    let into = Target {
        elements: sums.as_mut_ptr(),
        row_stride: rhs.columns,
        adds,
    };
    // SAFETY: the sums have the size of the result, as asserted above, and are initialized.
    unsafe { multiply_floats(lhs, rhs, into, Threads::One) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halves(len: usize, seed: usize) -> Vec<bf16> {
        let value = |at: usize| (((at + seed) * 7919 % 1013) as f32 - 506.0) / 307.0;
        (0..len).map(|at| bf16::from_f32(value(at))).collect()
    }

    fn strides(is_turned: bool, [rows, columns]: [usize; 2]) -> [usize; 2] {
        if is_turned { [1, rows] } else { [columns, 1] }
    }

    fn product(method: HalfProducts, lhs: Matrix<'_, bf16>, rhs: Matrix<'_, bf16>) -> Vec<bf16> {
        assert_eq!(lhs.columns, rhs.rows);
        let mut out = vec![bf16::NAN; lhs.rows * rhs.columns];
        // SAFETY: the result has the rows of the left factor and the columns of the right one.
        unsafe { multiply_by(method, lhs, rhs, out.as_mut_ptr()) };
        out
    }

    /// Forces each method, regardless of the processor, and compares it with sums in 64 bits. The sizes have one part
    /// or several, with narrow ends.
    #[test]
    fn all_methods_for_halves_match_64_bits() {
        for method in HalfProducts::ALL {
            for [m, k, n] in [
                [1, 1, 1],
                [3, 2049, 530],
                [275, 30, 2],
                [40, 4200, 17],
                [2, 256, 1100],
            ] {
                for [turned_lhs, turned_rhs] in
                    [[false; 2], [true, false], [false, true], [true; 2]]
                {
                    let (left, right) = (halves(m * k, 1), halves(k * n, 2));
                    let lhs = Matrix::new(&left, [m, k], strides(turned_lhs, [m, k]));
                    let rhs = Matrix::new(&right, [k, n], strides(turned_rhs, [k, n]));
                    let out = product(method, lhs, rhs);
                    let at = |matrix: Matrix<'_, bf16>, row: usize, column: usize| {
                        let [rows, columns] = matrix.strides;
                        matrix.elements[row * rows + column * columns].to_f64()
                    };
                    for (index, found) in out.iter().enumerate() {
                        let (row, column) = (index / n, index % n);
                        let terms = (0..k).map(|i| at(lhs, row, i) * at(rhs, i, column));
                        let (exact, size) = terms
                            .fold((0.0, 0.0), |(sum, size): (f64, f64), term| {
                                (sum + term, size + term.abs())
                            });
                        let allowed = exact.abs() / 240.0 + size * 1e-6 + 1e-6;
                        let difference = (found.to_f64() - exact).abs();
                        assert!(
                            difference <= allowed,
                            "{method:?}: {found} is not {exact} of {m}, {k}, {n}"
                        );
                    }
                }
            }
        }
    }

    /// Otherwise ranks that choose different tiles would compute different bits.
    #[test]
    fn tiles_have_the_bits_of_chains_of_fused_additions() {
        for [m, k, n] in [[1, 1, 1], [25, 33, 70], [1300, 450, 20], [30, 1500, 600]] {
            for [turned_lhs, turned_rhs] in [[false; 2], [true, false], [false, true], [true; 2]] {
                let (left, right) = (halves(m * k, 1), halves(k * n, 2));
                let lhs = Matrix::new(&left, [m, k], strides(turned_lhs, [m, k]));
                let rhs = Matrix::new(&right, [k, n], strides(turned_rhs, [k, n]));
                let at = |matrix: Matrix<'_, bf16>, row: usize, column: usize| {
                    let [rows, columns] = matrix.strides;
                    matrix.elements[row * rows + column * columns].to_f32()
                };
                let sum = |row: usize, column: usize| {
                    let add = |sum, i| at(lhs, row, i).mul_add(at(rhs, i, column), sum);
                    bf16::from_f32((0..k).fold(0.0, add))
                };
                let [small, large] = [HalfProducts::SmallTiles, HalfProducts::LargeTiles]
                    .map(|method| product(method, lhs, rhs));
                assert!(small == large, "{m}, {k}, {n}");
                // Some rows and columns, because all of them would take long.
                for row in (0..m).step_by(m / 20 + 1) {
                    for column in (0..n).step_by(n / 20 + 1) {
                        assert_eq!(small[row * n + column], sum(row, column), "{m}, {k}, {n}");
                    }
                }
            }
        }
    }
}
