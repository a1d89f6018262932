//! Matrix products and linear layers.

use burn_ir::{
    BaseOperationIr, BinaryOpIr, FloatOperationIr as Float, LinearOpIr,
    ModuleOperationIr as Module, NumericOperationIr, OperationIr, ShapeOpIr, TensorIr,
};

use crate::error::Error;
use crate::graph::{Graph, Node, Role};
use crate::place::signature::{Letter, Signature, alphabet};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    match operation {
        OperationIr::Float(_, Float::Matmul(op)) => Some(product(&op.lhs, &op.rhs, &op.out)),
        OperationIr::Int(burn_ir::IntOperationIr::Matmul(op)) => {
            Some(product(&op.lhs, &op.rhs, &op.out))
        }
        OperationIr::Module(Module::Linear(op)) => Some(linear(op)),
        OperationIr::Module(Module::LinearXBackward(op)) => Some(
            Signature::new()
                .input(&op.weight, "kn")
                .input_of(&op.output_grad, rows(&op.output_grad, 'n'))
                .output_of(&op.out, rows(&op.out, 'k'))
                .sums('n'),
        ),
        OperationIr::Module(Module::LinearWeightBackward(op)) => {
            let signature = Signature::new()
                .input_of(&op.x, rows(&op.x, 'k'))
                .input_of(&op.output_grad, rows(&op.output_grad, 'n'))
                .output(&op.out, "kn");
            Some(over_rows(signature, &op.x))
        }
        OperationIr::Module(Module::LinearBiasBackward(op)) => {
            let signature = Signature::new()
                .input_of(&op.output_grad, rows(&op.output_grad, 'n'))
                .output(&op.out, "n");
            Some(over_rows(signature, &op.output_grad))
        }
        _ => None,
    }
}

/// Returns the signature `[.., m, k] x [.., k, n] -> [.., m, n]`, batch dims broadcast.
fn product(lhs: &TensorIr, rhs: &TensorIr, out: &TensorIr) -> Signature {
    let shape = out.shape.to_vec();
    let num_batch = shape.len().saturating_sub(2);
    let letters = |tensor: &TensorIr, last: [Letter; 2]| {
        let own = tensor.shape.to_vec();
        let mut letters = alphabet(num_batch);
        for (letter, (own, out)) in letters.iter_mut().zip(own.iter().zip(&shape)) {
            if own != out {
                *letter = None;
            }
        }
        letters.extend(last.map(Some));
        letters
    };
    Signature::new()
        .input_of(lhs, letters(lhs, ['m', 'k']))
        .input_of(rhs, letters(rhs, ['k', 'n']))
        .output_of(out, letters(out, ['m', 'n']))
        .sums('k')
}

/// Returns the signature `x[.., k] weight[k, n] + bias[n]`. With a bias, which would be added on every rank, `k` is
/// whole.
fn linear(op: &LinearOpIr) -> Signature {
    let signature = Signature::new();
    match &op.bias {
        None => signature
            .input_of(&op.x, rows(&op.x, 'k'))
            .input(&op.weight, "kn")
            .output_of(&op.out, rows(&op.out, 'n'))
            .sums('k'),
        Some(bias) => {
            let mut x = rows(&op.x, 'k');
            if let Some(last) = x.last_mut() {
                *last = None;
            }
            signature
                .input_of(&op.x, x)
                .input(&op.weight, ".n")
                .input(bias, "n")
                .output_of(&op.out, rows(&op.out, 'n'))
        }
    }
}

/// Returns letters of the alphabet for the leading dims, and `last` for the last one.
fn rows(tensor: &TensorIr, last: Letter) -> Vec<Option<Letter>> {
    let mut letters = alphabet(tensor.shape.num_dims());
    if let Some(letter) = letters.last_mut() {
        *letter = Some(last);
    }
    letters
}

/// Declares sums over all dims of `tensor` but the last.
fn over_rows(signature: Signature, tensor: &TensorIr) -> Signature {
    let leading = alphabet(tensor.shape.num_dims().saturating_sub(1));
    leading
        .into_iter()
        .flatten()
        .fold(signature, Signature::sums)
}

/// Splits a linear layer into its product and the addition of its bias, so that the product can be cut along the dim
/// that it sums over.
///
/// # Errors
///
/// [`Error::Internal`] for values that are not declared.
pub(crate) fn without_bias(graph: &mut Graph, node: &Node) -> Result<Option<Vec<Node>>, Error> {
    let OperationIr::Module(Module::Linear(op)) = &node.operation else {
        return Ok(None);
    };
    let Some(bias) = &op.bias else {
        return Ok(None);
    };
    let shape = op.out.shape.to_vec();
    let product = graph.add_value(shape.clone(), op.out.dtype, Role::Temporary);
    let mut row = vec![1; shape.len()];
    if let (Some(last), Some(size)) = (row.last_mut(), shape.last()) {
        *last = *size;
    }
    let wide = graph.add_value(row, bias.dtype, Role::Temporary);
    let operations = [
        OperationIr::Module(Module::Linear(LinearOpIr {
            bias: None,
            out: graph.write(product)?,
            ..op.clone()
        })),
        OperationIr::BaseFloat(BaseOperationIr::Reshape(ShapeOpIr {
            input: bias.clone(),
            out: graph.write(wide)?,
        })),
        OperationIr::NumericFloat(
            op.out.dtype,
            NumericOperationIr::Add(BinaryOpIr {
                lhs: graph.read(product)?,
                rhs: graph.read(wide)?,
                out: op.out.clone(),
            }),
        ),
    ];
    let nodes = operations.map(|operation| Node {
        operation,
        ..node.clone()
    });
    Ok(Some(nodes.into()))
}
