//! Products of two matrices, written to memory that holds nothing yet. All `unsafe` code of this crate.

#![allow(
    unsafe_code,
    reason = "libraries write results to memory that would be filled with zeros first otherwise"
)]

use std::mem::MaybeUninit;

use burn::tensor::{DType, Element, bf16};
use bytemuck::Pod;
use rayon::prelude::*;

/// Rows of a product of halves that are not divided among threads.
const ROWS: usize = 32;

/// Multiplications from which on one product is divided among threads, as Burn's CPU backend does.
const LARGE: usize = 192 * 192 * 192;

/// Multiplications from which on a batch of products is.
const LARGE_BATCH: usize = 128 * 128 * 128;

/// A matrix in memory, from its first element on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    elements: &'a [T],
    rows: usize,
    columns: usize,
    /// Distances between rows, and between columns.
    strides: [usize; 2],
}

/// Whether a product is divided among threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// It is computed by the calling thread.
    One,
    /// It is divided among those of the calling thread's pool, if the library does so.
    Pool,
}

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

impl<'a, T> Matrix<'a, T> {
    /// # Panics
    ///
    /// If there are fewer elements.
    pub(crate) fn new(elements: &'a [T], [rows, columns]: [usize; 2], strides: [usize; 2]) -> Self {
        if rows > 0 && columns > 0 {
            let [along_rows, along_columns] =
                [(rows - 1, strides[0]), (columns - 1, strides[1])].map(|(a, b)| a.checked_mul(b));
            let last = along_rows.zip(along_columns);
            let last = last.and_then(|(rows, columns)| rows.checked_add(columns));
            let is_inside = last.is_some_and(|last| last < elements.len());
            assert!(is_inside, "a matrix ends behind its elements");
        }
        Self {
            elements,
            rows,
            columns,
            strides,
        }
    }

    /// Returns some of the rows.
    fn part(self, first: usize, rows: usize) -> Self {
        let elements = &self.elements[first * self.strides[0]..];
        Self::new(elements, [rows, self.columns], self.strides)
    }

    /// Returns the distances between rows, and between columns.
    fn signed(self) -> [isize; 2] {
        self.strides.map(|stride| stride as isize)
    }
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
        let lhs = lhs.part(part * rows, out.len() / width);
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
        let ([lhs_rows, lhs_columns], [rhs_rows, rhs_columns]) = (lhs.signed(), rhs.signed());
        let parallelism = match by {
            Threads::One => gemm::Parallelism::None,
            Threads::Pool => gemm::Parallelism::Rayon(0),
        };
        // SAFETY: the caller's; `out` is not read, as the flag in front of `lhs` says.
        unsafe {
            gemm::gemm(
                lhs.rows,
                rhs.columns,
                lhs.columns,
                out,
                1,
                rhs.columns as isize,
                false,
                lhs.elements.as_ptr(),
                lhs_columns,
                lhs_rows,
                rhs.elements.as_ptr(),
                rhs_columns,
                rhs_rows,
                0.0,
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
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
