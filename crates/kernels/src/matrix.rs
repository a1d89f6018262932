//! Matrices with any strides.

use std::ops::Range;

/// A matrix in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    pub(crate) elements: &'a [T],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Distances between rows and between columns, in elements.
    pub(crate) strides: [usize; 2],
}

impl<'a, T> Matrix<'a, T> {
    /// Creates a matrix.
    ///
    /// # Panics
    ///
    /// If there are too few elements.
    pub(crate) fn new(elements: &'a [T], [rows, columns]: [usize; 2], strides: [usize; 2]) -> Self {
        if rows > 0 && columns > 0 {
            let [along_rows, along_columns] =
                [(rows - 1, strides[0]), (columns - 1, strides[1])].map(|(a, b)| a.checked_mul(b));
            let last = along_rows.zip(along_columns);
            let last = last.and_then(|(rows, columns)| rows.checked_add(columns));
            let is_inside = last.is_some_and(|last| last < elements.len());
            assert!(is_inside, "a matrix ends after its elements");
        }
        Self {
            elements,
            rows,
            columns,
            strides,
        }
    }

    /// Returns the matrix of a range of rows.
    pub(crate) fn part_of_rows(self, rows: Range<usize>) -> Self {
        let elements = &self.elements[rows.start * self.strides[0]..];
        Self::new(elements, [rows.len(), self.columns], self.strides)
    }

    /// Returns the matrix of a range of columns.
    pub(crate) fn part_of_columns(self, columns: Range<usize>) -> Self {
        let elements = &self.elements[columns.start * self.strides[1]..];
        Self::new(elements, [self.rows, columns.len()], self.strides)
    }

    /// Returns the distances between rows and between columns as signed numbers.
    pub(crate) fn signed(self) -> [isize; 2] {
        self.strides.map(|stride| stride as isize)
    }
}
