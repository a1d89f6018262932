//! The scratch bytes of convolutions: copies in a different order, windows copied into rows, and products of tiles.
//!
//! The rules follow `burn-flex` 0.22.1, `ops/conv.rs` and `ops/conv_transpose.rs`, and for the gradients
//! `burn-backend` 0.22.1, `backend/ops/modules/conv.rs`. Every thread has a separate tile, but only one is counted.

use super::product::Product;

/// Number of output positions whose windows are copied into rows at once.
const TILE: usize = 512;
/// Maximum number of bytes of a transposed convolution's columns that are computed at once.
const COLUMN_BYTES: usize = 8 << 20;

/// An operand of a convolution.
#[derive(Debug, Clone)]
pub(super) struct Given {
    /// Shape with all three spatial dims. If there are fewer, the leading ones are 1.
    pub(super) shape: [usize; 5],
    /// True if the tensor is copied first, because its elements are not in order or do not fill their memory.
    pub(super) is_copied: bool,
}

impl Given {
    pub(super) fn new(shape: &[usize], is_copied: bool) -> Self {
        let mut full = [1; 5];
        let (outer, space) = shape.split_at(2.min(shape.len()));
        full[..outer.len()].copy_from_slice(outer);
        full[5 - space.len()..].copy_from_slice(space);
        Self {
            shape: full,
            is_copied,
        }
    }

    /// Swaps batch and channels, which copies the tensor unless one of them is 1.
    fn swapped(&self) -> Self {
        let mut given = self.clone();
        given.shape.swap(0, 1);
        given.is_copied |= self.shape[0] != 1 && self.shape[1] != 1;
        given
    }

    /// Returns the channels of one of `groups` groups.
    fn group(&self, groups: usize) -> Self {
        let mut given = self.clone();
        given.shape[1] /= groups;
        given.is_copied |= groups > 1;
        given
    }

    fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn copied(&self) -> usize {
        match self.is_copied {
            true => self.num_elements(),
            false => 0,
        }
    }

    fn space(&self) -> [usize; 3] {
        [self.shape[2], self.shape[3], self.shape[4]]
    }
}

/// The strides, padding and dilation of the window along all three spatial dims, and the number of groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub(super) stride: [usize; 3],
    /// Padding before and after.
    pub(super) padding: [(usize, usize); 3],
    pub(super) dilation: [usize; 3],
    pub(super) groups: usize,
}

/// Padding of a dim. Some options have a single number for both sides.
pub(super) trait Sides {
    fn sides(&self) -> (usize, usize);
}

impl Sides for usize {
    fn sides(&self) -> (usize, usize) {
        (*self, *self)
    }
}

impl Sides for (usize, usize) {
    fn sides(&self) -> (usize, usize) {
        *self
    }
}

impl Window {
    pub(super) fn new(
        stride: &[usize],
        padding: &[impl Sides],
        dilation: &[usize],
        groups: usize,
    ) -> Self {
        fn last<T: Copy>(values: &[T], missing: T) -> [T; 3] {
            let mut full = [missing; 3];
            full[3 - values.len()..].copy_from_slice(values);
            full
        }
        let padding: Vec<_> = padding.iter().map(Sides::sides).collect();
        Self {
            stride: last(stride, 1),
            padding: last(&padding, (0, 0)),
            dilation: last(dilation, 1),
            groups,
        }
    }

    fn is_lopsided(&self) -> bool {
        self.padding.iter().any(|(before, after)| before != after)
    }

    /// Pads `x` with zeros, in new memory, if the padding differs between the sides. Also returns the number of
    /// elements of that memory.
    fn padded(&self, x: &Given) -> (Given, usize) {
        if !self.is_lopsided() {
            return (x.clone(), 0);
        }
        let mut given = x.clone();
        for (size, (before, after)) in given.shape[2..].iter_mut().zip(self.padding) {
            *size += before + after;
        }
        given.is_copied = false;
        let num_elements = given.num_elements();
        (given, num_elements)
    }

    fn symmetric(&self) -> Self {
        match self.is_lopsided() {
            true => Self {
                padding: [(0, 0); 3],
                ..*self
            },
            false => *self,
        }
    }

    fn output(&self, x: [usize; 3], kernel: [usize; 3]) -> [usize; 3] {
        std::array::from_fn(|dim| {
            let whole = x[dim] + 2 * self.padding[dim].0;
            let window = self.dilation[dim] * kernel[dim].saturating_sub(1) + 1;
            whole.saturating_sub(window) / self.stride[dim].max(1) + 1
        })
    }
}

/// Returns the bytes of a convolution in addition to its operands and output.
pub(super) fn forward(x: &Given, weight: &Given, window: &Window, element_size: usize) -> u64 {
    let (x, padded) = window.padded(x);
    let window = window.symmetric();
    let copies = padded + x.copied() + weight.copied();
    (copies * element_size) as u64 + inner(&x, weight, &window, element_size)
}

/// Returns the bytes of a convolution with operands in order, in addition to the operands and the output.
fn inner(x: &Given, weight: &Given, window: &Window, element_size: usize) -> u64 {
    let [_, channels_in, ..] = x.shape;
    let [channels_out, group_channels, ..] = weight.shape;
    let kernel = weight.space();
    let groups = window.groups.max(1);
    let space: usize = window.output(x.space(), kernel).iter().product();
    let group_out = channels_out / groups;
    let is_unpadded = window.padding == [(0, 0); 3];
    // Rows of weights times columns of the input, both in their order in memory.
    let product = Product {
        m: group_out,
        n: space,
        k: group_channels,
        is_left_by_row: true,
        is_left_by_column: group_channels == 1,
        is_right_by_row: true,
        is_right_by_column: space == 1,
    };
    if kernel == [1; 3] && window.stride == [1; 3] && is_unpadded {
        return product.packed_bytes(element_size);
    }
    let is_flat = kernel[0] == 1 && x.shape[2] == 1 && window.stride[0] == 1;
    let is_depthwise = group_channels == 1 && groups == channels_in && channels_out == channels_in;
    let is_narrow = groups == 1 && channels_in <= 4 && channels_out <= 16;
    // These add up the windows in place.
    if is_flat && (is_depthwise || is_narrow) {
        return 0;
    }
    let is_line = kernel[..2] == [1; 2] && x.shape[2..4] == [1; 2];
    let is_direct = groups == 1 && is_unpadded && window.dilation == [1; 3] && is_line;
    if is_direct && element_size > 2 && channels_in >= 32 && kernel[2] <= 8 && space <= 800 {
        let product = Product {
            is_left_by_row: kernel[2] == 1,
            is_left_by_column: false,
            is_right_by_row: window.stride[2] == 1,
            is_right_by_column: false,
            ..product
        };
        return product.packed_bytes(element_size);
    }
    let row = group_channels * kernel.iter().product::<usize>();
    let tile = TILE.min(space);
    // The weights and the input with channels last, the windows of a tile as rows, and their product.
    let elements = channels_out * row + x.num_elements() + (row + group_out) * tile;
    let product = Product {
        m: group_out,
        n: tile,
        k: row,
        is_left_by_row: true,
        is_left_by_column: row == 1,
        is_right_by_row: row == 1,
        is_right_by_column: true,
    };
    (elements * element_size) as u64 + product.packed_bytes(element_size)
}

/// Returns the bytes of the gradient of a convolution's input in addition to its operands and result. It is a
/// transposed convolution of the output's gradient.
pub(super) fn input_gradient(
    grad: &Given,
    weight: &Given,
    x: &Given,
    window: &Window,
    element_size: usize,
) -> u64 {
    let (padded, num_padded) = window.padded(x);
    // The gradient of the padded input exists at the same time as its inner part.
    let cropped = match window.is_lopsided() {
        true => num_padded + padded.num_elements(),
        false => 0,
    };
    (cropped * element_size) as u64 + transposed(grad, weight, window.groups, element_size)
}

/// Returns the bytes of a transposed convolution in addition to its operands and output.
pub(super) fn transposed(x: &Given, weight: &Given, groups: usize, element_size: usize) -> u64 {
    let space: usize = x.space().iter().product();
    let columns: usize = weight.shape[1..].iter().product();
    let most = (COLUMN_BYTES / element_size / columns.max(1)).max(1);
    let tile = space.min(most);
    let product = Product {
        m: columns,
        n: tile,
        k: x.shape[1] / groups.max(1),
        is_left_by_row: columns == 1,
        is_left_by_column: true,
        is_right_by_row: true,
        is_right_by_column: space == 1,
    };
    let elements = x.copied() + weight.copied() + columns * tile;
    (elements * element_size) as u64 + product.packed_bytes(element_size)
}

/// Returns the bytes of the gradient of a convolution's weights in addition to its operands and result. The gradient is
/// a convolution of the input with the output's gradient, with batch and channels swapped.
pub(super) fn weight_gradient(
    x: &Given,
    grad: &Given,
    weight: &[usize],
    window: &Window,
    element_size: usize,
) -> u64 {
    let (x, padded) = window.padded(x);
    let symmetric = window.symmetric();
    // The strides of one are the dilations of the other.
    let swapped = Window {
        stride: symmetric.dilation,
        dilation: symmetric.stride,
        groups: 1,
        ..symmetric
    };
    let groups = window.groups.max(1);
    let (x, grad) = (x.group(groups).swapped(), grad.group(groups).swapped());
    let mut bytes = (padded * element_size) as u64 + forward(&x, &grad, &swapped, element_size);
    if groups > 1 {
        // The result of one group at a time, before it is written to its place.
        let result = weight.iter().product::<usize>() / groups;
        bytes += (result * element_size) as u64;
    }
    bytes
}
