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
        OperationIr::Module(Module::Linear(op)) => Some(match &op.bias {
            None => without(&op.x, &op.weight, &op.out),
            Some(bias) => with_bias(&op.x, &op.weight, bias, &op.out),
        }),
        OperationIr::Module(Module::LinearXBackward(op)) => {
            let forward = without(&op.out, &op.weight, &op.output_grad);
            Some(forward.gradient(0, &[1], &op.output_grad, &op.out))
        }
        OperationIr::Module(Module::LinearWeightBackward(op)) => {
            let forward = without(&op.x, &op.out, &op.output_grad);
            Some(forward.gradient(1, &[0], &op.output_grad, &op.out))
        }
        OperationIr::Module(Module::LinearBiasBackward(op)) => {
            let forward = Signature::new()
                .input(&op.out, "n")
                .output_of(&op.output_grad, rows(&op.output_grad, 'n'));
            Some(forward.gradient(0, &[], &op.output_grad, &op.out))
        }
        _ => None,
    }
}

/// Returns the signature `[.., m, k] x [.., k, n] -> [.., m, n]` with broadcast batch dims.
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

/// Returns the signature `x[.., k] weight[k, n]`.
fn without(x: &TensorIr, weight: &TensorIr, out: &TensorIr) -> Signature {
    Signature::new()
        .input_of(x, rows(x, 'k'))
        .input(weight, "kn")
        .output_of(out, rows(out, 'n'))
        .sums('k')
}

/// Returns the signature `x[.., k] weight[k, n] + bias[n]`. `k` is whole, because otherwise every rank would add the
/// bias.
fn with_bias(x: &TensorIr, weight: &TensorIr, bias: &TensorIr, out: &TensorIr) -> Signature {
    let mut of_x = rows(x, 'k');
    if let Some(last) = of_x.last_mut() {
        *last = None;
    }
    Signature::new()
        .input_of(x, of_x)
        .input(weight, ".n")
        .input(bias, "n")
        .output_of(out, rows(out, 'n'))
}

/// Returns letters of the alphabet for the leading dims, and `last` for the last one.
fn rows(tensor: &TensorIr, last: Letter) -> Vec<Option<Letter>> {
    let mut letters = alphabet(tensor.shape.num_dims());
    if let Some(letter) = letters.last_mut() {
        *letter = Some(last);
    }
    letters
}

/// Splits a linear layer into a product, which can be sharded along the dim that it sums over, and the addition of the
/// bias.
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
