//! Gather, scatter, select and embeddings.

use burn::tensor::IndexingUpdateOp;
use burn_ir::{BaseOperationIr as Base, ModuleOperationIr as Module, OperationIr, TensorIr};

use crate::place::signature::{Letter, Signature, alphabet};

/// Letter of the dim along which indices are listed.
const INDEX: Letter = 'z';

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    embedding(operation).or_else(|| indexed(operation))
}

/// Returns the signature of an embedding or of its backward.
fn embedding(operation: &OperationIr) -> Option<Signature> {
    let OperationIr::Module(operation) = operation else {
        return None;
    };
    Some(match operation {
        Module::Embedding(op) => looked_up(&op.weights, &op.indices, &op.out),
        Module::EmbeddingBackward(op) => {
            let forward = looked_up(&op.weights, &op.indices, &op.out_grad);
            forward.gradient(0, &[0, 1], &op.out_grad, &op.out)
        }
        _ => return None,
    })
}

/// Returns the signature of an embedding.
fn looked_up(weights: &TensorIr, indices: &TensorIr, out: &TensorIr) -> Signature {
    let places = alphabet(indices.shape.num_dims());
    let mut found = places.clone();
    found.push(Some('d'));
    Signature::new()
        .input(weights, ".d")
        .input_of(indices, places)
        .output_of(out, found)
}

/// Returns the signature of select, gather, scatter or assignment to selected rows.
fn indexed(operation: &OperationIr) -> Option<Signature> {
    Some(match super::base::base(operation)? {
        Base::Select(op) => {
            let mut letters = alphabet(op.tensor.shape.num_dims());
            letters[op.dim] = None;
            let mut out = letters.clone();
            out[op.dim] = Some(INDEX);
            Signature::new()
                .input_of(&op.tensor, letters)
                .input_of(&op.indices, vec![Some(INDEX)])
                .output_of(&op.out, out)
                .linear_in([&op.tensor])
        }
        Base::SelectAssign(op) => {
            let mut letters = alphabet(op.tensor.shape.num_dims());
            letters[op.dim] = None;
            let signature = Signature::new()
                .input_of(&op.tensor, letters.clone())
                .input(&op.indices, "")
                .input_of(&op.value, letters.clone())
                .output_of(&op.out, letters);
            if is_linear(&op.update) {
                signature.linear_in([&op.tensor, &op.value])
            } else {
                signature
            }
        }
        Base::Gather(op) => {
            let letters = shared(&op.tensor, &op.indices, op.dim);
            let mut found = letters.clone();
            found[op.dim] = Some(INDEX);
            Signature::new()
                .input_of(&op.tensor, letters)
                .input_of(&op.indices, found.clone())
                .output_of(&op.out, found)
                .linear_in([&op.tensor])
        }
        Base::Scatter(op) => {
            let letters = shared(&op.tensor, &op.indices, op.dim);
            let signature = Signature::new()
                .input_of(&op.tensor, letters.clone())
                .input_of(&op.indices, letters.clone())
                .input_of(&op.value, letters.clone())
                .output_of(&op.out, letters);
            if is_linear(&op.update) {
                signature.linear_in([&op.tensor, &op.value])
            } else {
                signature
            }
        }
        _ => return None,
    })
}

/// Returns true if the result is linear in tensor and values together.
fn is_linear(update: &IndexingUpdateOp) -> bool {
    matches!(update, IndexingUpdateOp::Add | IndexingUpdateOp::Assign)
}

/// Returns the letters of the dims, except `dim`, in which tensor and indices have the same size.
fn shared(tensor: &TensorIr, indices: &TensorIr, dim: usize) -> Vec<Option<Letter>> {
    let mut letters = alphabet(tensor.shape.num_dims());
    let sizes = tensor
        .shape
        .to_vec()
        .into_iter()
        .zip(indices.shape.to_vec());
    for (index, (letter, (own, other))) in letters.iter_mut().zip(sizes).enumerate() {
        if index == dim || own != other {
            *letter = None;
        }
    }
    letters
}
