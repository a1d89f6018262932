//! Hands on the elements of one tensor of a step, as they are or transposed.

use crate::{Error, Region, Step, TensorEntry};

/// Bytes of tensors that are copied at a time.
const BLOCK_BYTES: usize = 16 << 20;

/// Hands on a whole tensor, block by block.
pub(super) fn copy(
    step: &Step,
    tensor: &TensorEntry,
    write: &mut impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut block = Vec::new();
    let len = BLOCK_BYTES / tensor.item_bytes();
    for start in (0..tensor.num_elements()).step_by(len) {
        let end = (start + len).min(tensor.num_elements());
        block.resize((end - start) * tensor.item_bytes(), 0);
        step.read_into(&tensor.name, &Region::Flat(start..end), &mut block)?;
        write(&block)?;
    }
    Ok(())
}

/// Hands on a matrix column by column: as the rows of its transpose.
///
/// As many columns as fit `max_bytes` are put together at a time, from blocks of rows.
pub(super) fn transpose(
    step: &Step,
    tensor: &TensorEntry,
    max_bytes: usize,
    write: &mut impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let &[num_rows, num_columns] = &tensor.shape[..] else {
        unreachable!("checked before anything was written");
    };
    let item_bytes = tensor.item_bytes();
    if num_rows == 0 || num_columns == 0 {
        return Ok(());
    }
    let width = (max_bytes / (num_rows * item_bytes)).clamp(1, num_columns);
    let (mut rows, mut columns) = (Vec::new(), Vec::new());
    for start in (0..num_columns).step_by(width) {
        let width = width.min(num_columns - start);
        let height = (BLOCK_BYTES / (width * item_bytes)).clamp(1, num_rows);
        columns.resize(width * num_rows * item_bytes, 0);
        for top in (0..num_rows).step_by(height) {
            let height = height.min(num_rows - top);
            rows.resize(height * width * item_bytes, 0);
            let region = Region::Box {
                offsets: vec![top, start],
                sizes: vec![height, width],
            };
            step.read_into(&tensor.name, &region, &mut rows)?;
            let part = Columns {
                bytes: &mut columns,
                height: num_rows,
                top,
            };
            part.fill(&rows, width, item_bytes);
        }
        write(&columns)?;
    }
    Ok(())
}

/// Columns of a matrix, one after another.
struct Columns<'a> {
    bytes: &'a mut [u8],
    /// Elements of a column.
    height: usize,
    /// The first row that is filled.
    top: usize,
}

impl Columns<'_> {
    /// Puts rows of `width` elements into their places.
    fn fill(self, rows: &[u8], width: usize, item_bytes: usize) {
        /// Elements of a tile's side: a tile of both sides fits the nearest cache.
        const TILE: usize = 32;
        let num_rows = rows.len() / (width * item_bytes);
        for (first_row, first_column) in (0..num_rows)
            .step_by(TILE)
            .flat_map(|row| (0..width).step_by(TILE).map(move |column| (row, column)))
        {
            for column in first_column..(first_column + TILE).min(width) {
                for row in first_row..(first_row + TILE).min(num_rows) {
                    let from = (row * width + column) * item_bytes;
                    let to = (column * self.height + self.top + row) * item_bytes;
                    self.bytes[to..to + item_bytes].copy_from_slice(&rows[from..from + item_bytes]);
                }
            }
        }
    }
}
