//! Fused attention on tensors `[batch, heads, queries, width]`.

use burn_ir::{ModuleOperationIr as Module, OperationIr, TensorIr};

use crate::place::signature::{Letter, Signature};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    let OperationIr::Module(Module::Attention(op)) = operation else {
        return None;
    };
    let query: &str = if op.options.is_causal {
        // A query's position determines the keys that it attends to.
        "bh.."
    } else {
        "bhs."
    };
    let mut signature = Signature::new()
        .input(&op.query, query)
        .input(&op.key, "bh..")
        .input(&op.value, "bh.e");
    let out = op.out.shape.to_vec();
    let masks = op.mask.iter().chain(&op.attn_bias);
    for mask in masks {
        signature = signature.input_of(mask, broadcast(mask, &out, query));
    }
    let out: String = query[..3].to_owned() + "e";
    Some(signature.output(&op.out, &out))
}

/// Returns the letters of a mask `[batch, heads, queries, keys]`; dims of size 1 are broadcast.
fn broadcast(mask: &TensorIr, out: &[usize], letters: &str) -> Vec<Option<Letter>> {
    let dims = mask
        .shape
        .to_vec()
        .into_iter()
        .zip(out)
        .zip(letters.chars());
    dims.map(|((own, out), letter)| (own == *out && letter != '.').then_some(letter))
        .collect()
}
