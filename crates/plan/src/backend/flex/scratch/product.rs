//! The bytes that a matrix product copies into the order in which its loops read them.
//!
//! The rules follow `gemm-common` 0.19.0, `gemm_basic_generic` and `kernel_params`, with the tile of processors with
//! AVX-512 and caches of this size. Other processors have smaller tiles and copy a few rows less.

/// Rows of a tile in bytes: four registers of AVX-512.
const TILE_ROW_BYTES: usize = 256;
/// Columns of a tile.
const TILE_COLUMNS: usize = 6;
/// Number of registers that the rows of a tile fill.
const REGISTERS: usize = 4;
/// Maximum number of elements of the inner dim that are processed at once.
const DEPTH: usize = 512;
/// Number of bytes that the left operand may take in a second-level cache of 1 MiB with 16 ways.
const LEFT_CACHE_BYTES: usize = 14 * (1 << 16);
/// Maximum number of rows of tiles that are handled at once.
const MAX_TILES: usize = 8;
/// Number of tiles above which a right operand is copied, even if its order allows direct reads.
const RIGHT_TILES: usize = 128;

/// A product of an `m` by `k` matrix and a `k` by `n` matrix, written row by row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// True if the rows of the left matrix are contiguous.
    pub(super) is_left_by_row: bool,
    /// True if the columns of the left matrix are contiguous.
    pub(super) is_left_by_column: bool,
    /// True if the rows of the right matrix are contiguous.
    pub(super) is_right_by_row: bool,
    /// True if the columns of the right matrix are contiguous.
    pub(super) is_right_by_column: bool,
}

impl Product {
    /// Returns the number of copied bytes, for elements of this size.
    pub(super) fn packed_bytes(self, element_size: usize) -> u64 {
        // A row-by-row result is computed as the product of the transposed matrices, the right one first.
        let (rows, columns, depth) = (self.n, self.m, self.k);
        if rows == 0 || columns == 0 || depth <= 2 {
            return 0;
        }
        let is_along_depth = self.is_right_by_column && self.is_left_by_row;
        let is_vector =
            |num_rows: usize, is_by_row: bool| num_rows == 1 && (is_by_row || is_along_depth);
        if (is_along_depth && rows * columns <= 256)
            || is_vector(columns, self.is_right_by_row)
            || is_vector(rows, self.is_left_by_column)
        {
            return 0;
        }
        let tile_rows = TILE_ROW_BYTES / element_size;
        let register = tile_rows / REGISTERS;
        let rounds = depth.div_ceil(DEPTH);
        let is_small = rows <= 64 && columns <= 64;
        let at_once = match is_small {
            true => depth.min(DEPTH),
            false => depth.div_ceil(rounds),
        };
        let most_rows = LEFT_CACHE_BYTES / (element_size * at_once) / tile_rows * tile_rows;
        let blocks = rows.div_ceil(most_rows.max(tile_rows));
        let block_rows = rows.div_ceil(blocks * tile_rows).min(MAX_TILES) * tile_rows;
        let is_first_copied = (is_small || rows <= 2 * block_rows)
            && (!rows.is_multiple_of(register) || !self.is_right_by_row);
        let is_second_copied = match self.is_left_by_row {
            true => rows > RIGHT_TILES * tile_rows,
            false => rows > 2 * tile_rows,
        };
        let mut copied = 0;
        if is_first_copied {
            copied += rows.next_multiple_of(tile_rows) * at_once;
        }
        if is_second_copied {
            copied += columns.next_multiple_of(TILE_COLUMNS) * at_once;
        }
        (copied * element_size) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(m: usize, k: usize, n: usize) -> Product {
        Product {
            m,
            n,
            k,
            is_left_by_row: true,
            is_left_by_column: false,
            is_right_by_row: true,
            is_right_by_column: false,
        }
    }

    #[test]
    fn operands_in_reading_order_are_not_copied() {
        assert_eq!(product(32, 128, 256).packed_bytes(4), 0);
    }

    #[test]
    fn a_transposed_operand_is_copied_in_whole_tiles() {
        let right = Product {
            is_right_by_row: false,
            is_right_by_column: true,
            ..product(32, 256, 250)
        };
        assert_eq!(right.packed_bytes(4), 256 * 256 * 4);
        let left = Product {
            is_left_by_row: false,
            is_left_by_column: true,
            ..product(256, 1024, 256)
        };
        assert_eq!(left.packed_bytes(4), 258 * 512 * 4);
    }

    #[test]
    fn a_deep_product_copies_a_part_at_a_time() {
        assert_eq!(product(16, 12544, 10).packed_bytes(4), 64 * 512 * 4);
    }
}
