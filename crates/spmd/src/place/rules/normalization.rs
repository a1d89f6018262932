//! Layer norm, batch norm with given statistics, and softmax.

use burn_ir::{ActivationOperationIr as Activation, ModuleOperationIr as Module, OperationIr};

use crate::place::signature::{Signature, alphabet};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    Some(match operation {
        OperationIr::Module(Module::LayerNorm(op)) => {
            let mut letters = alphabet(op.input.shape.num_dims());
            if let Some(last) = letters.last_mut() {
                *last = None;
            }
            let signature = Signature::new()
                .input_of(&op.input, letters.clone())
                .input(&op.gamma, "");
            let signature = match &op.beta {
                Some(beta) => signature.input(beta, ""),
                None => signature,
            };
            signature.output_of(&op.out, letters)
        }
        OperationIr::Module(Module::BatchNorm(op)) => {
            let letters = alphabet(op.x.shape.num_dims());
            let channel = vec![letters.get(1).copied().flatten()];
            [&op.gamma, &op.beta, &op.mean, &op.variance]
                .into_iter()
                .fold(
                    Signature::new().input_of(&op.x, letters.clone()),
                    |s, tensor| s.input_of(tensor, channel.clone()),
                )
                .output_of(&op.out, letters)
        }
        OperationIr::Activation(
            Activation::Softmax(op) | Activation::LogSoftmax(op) | Activation::Softmin(op),
        ) => {
            let mut letters = alphabet(op.input.shape.num_dims());
            letters[op.axis] = None;
            Signature::new()
                .input_of(&op.input, letters.clone())
                .output_of(&op.out, letters)
        }
        _ => return None,
    })
}
