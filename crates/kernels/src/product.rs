//! Products of two matrices, written to memory that holds nothing yet, or added to what is there.

#![allow(
    unsafe_code,
    reason = "libraries write results to memory that would be filled with zeros first otherwise"
)]

use std::mem::MaybeUninit;

use burn::tensor::{DType, Element, bf16};
use bytemuck::Pod;
use rayon::prelude::*;

use crate::matrix::Matrix;
use crate::threads::Threads;
use crate::turned;

/// Rows of a product of halves that are not divided among threads.
const ROWS: usize = 32;

/// Multiplications from which on one product is divided among threads, as Burn's CPU backend does.
const LARGE: usize = 192 * 192 * 192;

/// Multiplications from which on a batch of products is.
const LARGE_BATCH: usize = 128 * 128 * 128;

/// The types of which there are products.
pub(crate) trait Factor: Element + Pod + Send + Sync {
    /// Calls the library.
    ///
    /// # Safety
    ///
    /// `out` must be valid for writes of the rows of `lhs` times the columns of `rhs`, in order. The
    /// matrices must be as large as they say, the columns of `lhs` as many as the rows of `rhs`, and at least one.
    unsafe fn multiply(lhs: Matrix<'_, Self>, rhs: Matrix<'_, Self>, out: *mut Self, by: Threads);
}

/// Returns products, each of these sizes, one after the other. `factors` returns the two matrices of each.
///
/// They are divided among threads as Burn does.
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
    let by = match size >= LARGE && !is_many {
        true => Threads::Pool,
        false => Threads::One,
    };
    // Each part has the size of one product, which `multiply` checks, and all of them are written.
    if by == Threads::One && num_products > 1 && of_batch >= LARGE_BATCH {
        let parts = out.par_chunks_exact_mut(len).enumerate();
        parts.for_each(|(index, out)| write(index, out, by));
    } else {
        let parts = out.chunks_exact_mut(len).enumerate();
        parts.for_each(|(index, out)| write(index, out, by));
    }
    // SAFETY: that many are allocated, and all have been written.
    unsafe { elements.set_len(total) };
    elements
}

/// Adds products, each of these sizes, to rows of a matrix whose rows are `row_len` long: to as many columns each, side by
/// side from column `first` on. `factors` returns the two matrices of each.
///
/// # Panics
///
/// If the sizes do not match, or the columns are not there.
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
            // SAFETY: the first row has these columns, as is asserted above.
            elements: unsafe { into.at(first + index * columns) },
            row_stride: row_len,
            adds: true,
        };
        // SAFETY: the rows are in `into`, as is asserted above, and so are these columns of each; no other product has them.
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

/// The rows of a matrix, of which each thread writes columns of its own.
#[derive(Clone, Copy)]
struct Columns(*mut f32);

impl Columns {
    /// Returns the first element of a column.
    ///
    /// # Safety
    ///
    /// The first row must have that column.
    unsafe fn at(self, column: usize) -> *mut f32 {
        // SAFETY: the caller's.
        unsafe { self.0.add(column) }
    }
}

// SAFETY: it is a place alone. Who writes there says why nobody else does.
unsafe impl Send for Columns {}
// SAFETY: as above.
unsafe impl Sync for Columns {}

/// Writes a product. The library of 32-bit floats divides it among threads by itself.
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

/// Returns the rows of a part of a product of halves. The last part has more than few rows, or there is one part: for a few rows
/// the library takes another way, whose sums round otherwise, and the bits shall not depend on the threads.
fn rows_of_part(rows: usize, num_threads: usize) -> usize {
    const FEW: usize = 16;
    let mut part = rows.div_ceil(num_threads).next_multiple_of(ROWS);
    while part < rows && (1..=FEW).contains(&(rows % part)) {
        part += ROWS;
    }
    part
}

/// Returns the bytes in which the library of halves has copies of a product's factors, and sums of 32 bits where there are many
/// addends, on the threads of this pool.
pub(crate) fn scratch_of_halves([rows, columns, addends]: [usize; 3]) -> usize {
    /// Columns of the right factor that are copied at a time.
    const COLUMNS: usize = 256;
    /// Addends from which on the library goes over them in parts, at the earliest: it depends on the caches.
    const MANY: usize = 5000;
    let num_threads = rayon::current_num_threads();
    let part = rows_of_part(rows, num_threads).min(rows);
    let num_parts = rows.div_ceil(part.max(1)).min(num_threads);
    let copies = (part + COLUMNS) * addends * size_of::<bf16>();
    let sums = match addends >= MANY {
        true => (part * columns * size_of::<f32>()).next_power_of_two(),
        false => 0,
    };
    num_parts * (copies.next_power_of_two() + sums)
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
    // SAFETY: the assertions above and those of `Matrix::new` are what it asks for.
    unsafe { T::multiply(lhs, rhs, out.as_mut_ptr().cast(), by) };
}

impl Factor for f32 {
    unsafe fn multiply(lhs: Matrix<'_, Self>, rhs: Matrix<'_, Self>, out: *mut Self, by: Threads) {
        let width = rhs.columns;
        let copied = turned::copied_columns([lhs.rows, width], rhs.strides);
        let part = |first: usize| Target {
            // SAFETY: the caller's; the columns of a strip are some of the result's.
            elements: unsafe { out.add(first) },
            row_stride: width,
            adds: false,
        };
        if copied == 0 {
            // SAFETY: the caller's.
            return unsafe { multiply_floats(lhs, rhs, part(0), by) };
        }
        let mut copy = Vec::with_capacity(rhs.rows * copied);
        for strip in turned::strips(width) {
            let columns = rhs.part_of_columns(strip.clone());
            let columns = turned::copy_in_order(columns, &mut copy, by);
            // SAFETY: the strips are parts of the rows that the caller vouches for.
            unsafe { multiply_floats(lhs, columns, part(strip.start), by) };
        }
    }
}

/// Where a product of 32-bit floats goes.
struct Target {
    elements: *mut f32,
    /// Distance between the beginnings of rows.
    row_stride: usize,
    /// True if it is added to what is there, which must have been written then.
    adds: bool,
}

/// Calls the library of 32-bit floats.
///
/// # Safety
///
/// As of [`Factor::multiply`], with the rows of the target.
unsafe fn multiply_floats(lhs: Matrix<'_, f32>, rhs: Matrix<'_, f32>, out: Target, by: Threads) {
    let ([lhs_rows, lhs_columns], [rhs_rows, rhs_columns]) = (lhs.signed(), rhs.signed());
    let parallelism = match by {
        Threads::One => gemm::Parallelism::None,
        Threads::Pool => gemm::Parallelism::Rayon(0),
    };
    // SAFETY: the caller's; what is there is read only to add to it, as the flag in front of `lhs` says.
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
        let ([lhs_rows, lhs_columns], [rhs_rows, rhs_columns]) = (lhs.signed(), rhs.signed());
        // Freed after the product: the library's own would stay with the thread.
        let mut copies = gemmkit::Workspace::new();
        // SAFETY: the caller's; `out` is not read, as the factor in front of it is zero.
        unsafe {
            gemmkit::gemm_unchecked_with(
                &mut copies,
                lhs.rows,
                lhs.columns,
                rhs.columns,
                Self::ONE,
                lhs.elements.as_ptr(),
                lhs_rows,
                lhs_columns,
                rhs.elements.as_ptr(),
                rhs_rows,
                rhs_columns,
                Self::ZERO,
                out,
                rhs.columns as isize,
                1,
                gemmkit::Parallelism::Serial,
            );
        }
    }
}
