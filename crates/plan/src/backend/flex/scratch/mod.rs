//! Bytes that operations of Burn's CPU backend allocate and free while they run, in addition to their operands and
//! results.
//!
//! The rules follow `burn-flex` 0.22.1, operation by operation, for ranks with one thread. Each further thread adds at
//! most one tile of a convolution or a copied operand of a product. Operations without a rule count no bytes. Scratch
//! bytes hold no tensor of the graph, so only the process's allocator counts them, and not the executor's table.

mod convolution;
mod product;

use burn::tensor::DType;
use burn_fsdp_spmd::{copied_columns, plain};
use burn_ir::{
    BaseOperationIr as Base, FloatOperationIr as F, MatmulOpIr, ModuleOperationIr as M,
    NumericOperationIr as N, OperationIr, ReduceDimsOpIr, TensorIr,
};

use self::convolution::{Given, Window, forward, input_gradient, transposed, weight_gradient};
use self::product::Product;
use crate::backend::model::Operand;

/// Returns the bytes that an operation takes in addition to its operands and results. `operands` are in the order in
/// which the operation lists its inputs.
pub(super) fn scratch(operation: &OperationIr, operands: &[Operand]) -> u64 {
    match operation {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            base(op, operands)
        }
        OperationIr::NumericFloat(_, op) => numeric(op, operands),
        OperationIr::NumericInt(_, op) => numeric(op, operands),
        OperationIr::Float(_, F::Matmul(op)) => matmul(op, operands),
        OperationIr::Module(op) => module(op, operands),
        OperationIr::Custom(_) => kernel(operation, operands),
        _ => 0,
    }
}

/// Returns the scratch bytes of a kernel that depend on the memory order of its operands and are therefore not in its
/// profile.
fn kernel(operation: &OperationIr, operands: &[Operand]) -> u64 {
    match plain(operation) {
        Some(OperationIr::Float(DType::F32, F::Matmul(_))) => {
            product(false, operands).map_or(0, |product| kernel_product(product, &operands[1]))
        }
        Some(OperationIr::NumericFloat(dtype, N::SumDim(op))) => {
            let is_in_order = is_in_order(operands);
            let behind: usize = op.input.shape[op.axis + 1..].iter().product();
            match dtype == DType::F32 && (behind <= 1 || !is_in_order) {
                // Burn's own operation.
                true => reduced(&op.input.shape.to_vec(), op.axis, &op.out, is_in_order),
                false => copied(operands.first(), &op.input),
            }
        }
        Some(OperationIr::BaseFloat(Base::Cast(op))) => copied(operands.first(), &op.input),
        _ => 0,
    }
}

/// Returns the bytes of a 32-bit product by the kernel, which copies some right factors strip by strip.
fn kernel_product(product: Product, right: &Operand) -> u64 {
    let (sizes, dims) = ([product.m, product.n], right.strides.shape.len());
    let strides = [dims - 2, dims - 1].map(|dim| usize::try_from(right.strides.stride(dim)));
    let columns = match strides {
        [Ok(row), Ok(column)] => copied_columns(sizes, [row, column]),
        // Burn multiplies flipped tensors.
        _ => 0,
    };
    if columns == 0 {
        return product.packed_bytes(size_of::<f32>());
    }
    let strip = Product {
        n: columns,
        is_right_by_row: true,
        is_right_by_column: false,
        ..product
    };
    (product.k * columns * size_of::<f32>()) as u64 + strip.packed_bytes(size_of::<f32>())
}

fn bytes(tensor: &TensorIr) -> u64 {
    (tensor.shape.num_elements() * tensor.dtype.size()) as u64
}

/// Returns true if the elements of the first operand are contiguous in the order of its dims, as far as is known.
fn is_in_order(operands: &[Operand]) -> bool {
    let first = operands.first();
    first.is_none_or(|operand| operand.strides.is_contiguous())
}

/// Returns true if `FlexTensor::to_contiguous` copies: unless the elements are in order and fill their memory.
fn is_copied(operand: &Operand) -> bool {
    !(operand.strides.is_from_start() && operand.strides.num_elements() == operand.memory_elements)
}

fn copied(operand: Option<&Operand>, tensor: &TensorIr) -> u64 {
    match operand.is_some_and(is_copied) {
        true => bytes(tensor),
        false => 0,
    }
}

fn base(op: &Base, operands: &[Operand]) -> u64 {
    match op {
        // `FlexTensor::empty` first allocates unaligned bytes, which are copied to aligned memory.
        Base::Empty(op) | Base::Zeros(op) => bytes(&op.out),
        Base::RepeatDim(op) => bytes(&op.out) + copied(operands.first(), &op.tensor),
        Base::Gather(op) => indices(&op.indices),
        Base::Scatter(op) => indices(&op.indices) + copied(operands.get(2), &op.value),
        Base::Select(op) => indices(&op.indices) + copied(operands.first(), &op.tensor),
        Base::SelectAssign(op) => indices(&op.indices) + copied(operands.get(2), &op.value),
        _ => 0,
    }
}

/// Returns the bytes of `read_indices`, which widens short indices.
fn indices(tensor: &TensorIr) -> u64 {
    match tensor.dtype.size() < size_of::<isize>() {
        true => (tensor.shape.num_elements() * size_of::<isize>()) as u64,
        false => 0,
    }
}

fn numeric(op: &N, operands: &[Operand]) -> u64 {
    let is_in_order = is_in_order(operands);
    match op {
        N::SumDim(op) | N::MeanDim(op) => {
            reduced(&op.input.shape.to_vec(), op.axis, &op.out, is_in_order)
        }
        N::SumDims(op) => reduced_in_turn(op, is_in_order),
        _ => 0,
    }
}

/// Returns the bytes of `reduce_dim_f32`. An input that is not in order is copied if more than one dim is before or
/// after the reduced one. Sums over any dim except the last are computed in aligned memory and copied.
fn reduced(shape: &[usize], axis: usize, out: &TensorIr, is_in_order: bool) -> u64 {
    let size = out.dtype.size();
    let num_bytes = shape.iter().product::<usize>() * size;
    let copy = match !is_in_order && (axis > 1 || shape.len() > axis + 2) {
        true => num_bytes,
        false => 0,
    };
    let behind: usize = shape[axis + 1..].iter().product();
    match behind > 1 && out.dtype == DType::F32 {
        true => (copy + num_bytes / shape[axis].max(1)) as u64,
        false => copy as u64,
    }
}

/// Returns the bytes of `float_sum_dims`, which reduces one dim after the other.
fn reduced_in_turn(op: &ReduceDimsOpIr, is_in_order: bool) -> u64 {
    let size = op.out.dtype.size() as u64;
    let mut shape = op.input.shape.to_vec();
    let (mut most, mut input, mut is_in_order) = (0, 0, is_in_order);
    for axis in &op.axes {
        let beside = reduced(&shape, *axis, &op.out, is_in_order);
        shape[*axis] = 1;
        let output = shape.iter().product::<usize>() as u64 * size;
        most = most.max(input + beside + output);
        (input, is_in_order) = (output, true);
    }
    // The output of the last reduction is the result.
    most.saturating_sub(bytes(&op.out))
}

/// Returns the bytes of `matmul`. The output is zeroed first, see [`base`], and operands are copied after that.
fn matmul(op: &MatmulOpIr, operands: &[Operand]) -> u64 {
    let is_half = op.out.dtype == DType::BF16;
    let ([left, right], Some(product)) = (operands, product(is_half, operands)) else {
        return 0;
    };
    if is_half {
        // Operands and output in 32 bits.
        let num_elements = |tensor: &TensorIr| 4 * tensor.shape.num_elements() as u64;
        let output = num_elements(&op.out);
        let copies = copied(Some(left), &op.lhs) + copied(Some(right), &op.rhs);
        let operands = num_elements(&op.lhs) + num_elements(&op.rhs);
        return copies + operands + output + output.max(product.packed_bytes(4));
    }
    bytes(&op.out).max(product.packed_bytes(op.out.dtype.size()))
}

/// Returns the product of the operands. Halves are put in order first.
fn product(is_half: bool, operands: &[Operand]) -> Option<Product> {
    let [left, right] = operands else { return None };
    let (left_dims, right_dims) = (left.strides.shape.len(), right.strides.shape.len());
    if left_dims < 2 || right_dims < 2 {
        return None;
    }
    Some(Product {
        m: left.strides.shape[left_dims - 2],
        n: right.strides.shape[right_dims - 1],
        k: left.strides.shape[left_dims - 1],
        is_left_by_row: is_half || left.strides.stride(left_dims - 1) == 1,
        is_left_by_column: !is_half && left.strides.stride(left_dims - 2) == 1,
        is_right_by_row: is_half || right.strides.stride(right_dims - 1) == 1,
        is_right_by_column: !is_half && right.strides.stride(right_dims - 2) == 1,
    })
}

fn module(op: &M, operands: &[Operand]) -> u64 {
    let given = |tensor: &TensorIr, index: usize| {
        let is_copied = operands.get(index).is_some_and(is_copied);
        Given::new(&tensor.shape.to_vec(), is_copied)
    };
    let copy = |tensor: &TensorIr, index: usize| copied(operands.get(index), tensor);
    // The options of convolutions in one, two and three dims have different types.
    macro_rules! window {
        ($op:expr) => {{
            let options = &$op.options;
            let (stride, padding) = (&options.stride, &options.padding);
            Window::new(stride, padding, &options.dilation, options.groups)
        }};
    }
    let forward = |x: &TensorIr, weight: &TensorIr, out: &TensorIr, window: Window| {
        let work = |size| forward(&given(x, 0), &given(weight, 1), &window, size);
        in_32_bits([x, weight, out], work)
    };
    let transposed = |x: &TensorIr, weight: &TensorIr, out: &TensorIr, groups: usize| {
        let work = |size| transposed(&given(x, 0), &given(weight, 1), groups, size);
        in_32_bits([x, weight, out], work)
    };
    // Both gradients list the input, the weights and the gradient of the output.
    let input_gradient = |x: &TensorIr, weight: &TensorIr, grad: &TensorIr, window: Window| {
        let [given_x, given_grad] = [given(x, 0), given(grad, 2)];
        let work = |size| input_gradient(&given_grad, &given(weight, 1), &given_x, &window, size);
        in_32_bits([grad, weight, x], work)
    };
    let weight_gradient = |x: &TensorIr, weight: &TensorIr, grad: &TensorIr, window: Window| {
        let shape = weight.shape.to_vec();
        let work = |size| weight_gradient(&given(x, 0), &given(grad, 2), &shape, &window, size);
        in_32_bits([x, grad, weight], work)
    };
    match op {
        M::Conv1d(op) => forward(&op.x, &op.weight, &op.out, window!(op)),
        M::Conv2d(op) => forward(&op.x, &op.weight, &op.out, window!(op)),
        M::Conv3d(op) => forward(&op.x, &op.weight, &op.out, window!(op)),
        M::Conv1dXBackward(op) => input_gradient(&op.x, &op.weight, &op.output_grad, window!(op)),
        M::Conv2dXBackward(op) => input_gradient(&op.x, &op.weight, &op.output_grad, window!(op)),
        M::Conv3dXBackward(op) => input_gradient(&op.x, &op.weight, &op.output_grad, window!(op)),
        M::Conv1dWeightBackward(op) => {
            weight_gradient(&op.x, &op.weight, &op.output_grad, window!(op))
        }
        M::Conv2dWeightBackward(op) => {
            weight_gradient(&op.x, &op.weight, &op.output_grad, window!(op))
        }
        M::Conv3dWeightBackward(op) => {
            weight_gradient(&op.x, &op.weight, &op.output_grad, window!(op))
        }
        // Channels come first, which makes the reshape copy.
        M::Conv1dBiasBackward(op) => bias_gradient(&op.output_grad, operands.get(2)),
        M::Conv2dBiasBackward(op) => bias_gradient(&op.output_grad, operands.get(2)),
        M::Conv3dBiasBackward(op) => bias_gradient(&op.output_grad, operands.get(2)),
        M::ConvTranspose1d(op) => transposed(&op.x, &op.weight, &op.out, op.options.groups),
        M::ConvTranspose2d(op) => transposed(&op.x, &op.weight, &op.out, op.options.groups),
        M::ConvTranspose3d(op) => transposed(&op.x, &op.weight, &op.out, op.options.groups),
        // Rows are added to zeros, see `base`.
        M::EmbeddingBackward(op) => {
            bytes(&op.out).max(copy(&op.out_grad, 1) + indices(&op.indices))
        }
        M::Embedding(op) => indices(&op.indices),
        M::AvgPool2d(op) => copy(&op.x, 0),
        M::AvgPool2dBackward(op) => copy(&op.grad, 1),
        M::AdaptiveAvgPool2d(op) => copy(&op.x, 0),
        M::AdaptiveAvgPool2dBackward(op) => copy(&op.grad, 1),
        M::MaxPool2d(op) => copy(&op.x, 0),
        M::MaxPool2dWithIndices(op) => copy(&op.x, 0),
        M::MaxPool2dWithIndicesBackward(op) => copy(&op.indices, 1) + copy(&op.grad, 2),
        _ => 0,
    }
}

fn bias_gradient(grad: &TensorIr, operand: Option<&Operand>) -> u64 {
    let is_in_order = grad.shape.to_vec().iter().take(2).any(|size| *size == 1);
    match is_in_order && operand.is_some_and(|operand| operand.strides.is_contiguous()) {
        true => 0,
        false => bytes(grad),
    }
}

/// Returns the scratch bytes of `bf16_via_f32`: operands and output in 32 bits, and the scratch of the 32-bit
/// operation.
fn in_32_bits(tensors: [&TensorIr; 3], work: impl Fn(usize) -> u64) -> u64 {
    let [first, ..] = tensors;
    if first.dtype != DType::BF16 {
        return work(first.dtype.size());
    }
    let num_elements: usize = tensors.iter().map(|t| t.shape.num_elements()).sum();
    4 * num_elements as u64 + work(4)
}
