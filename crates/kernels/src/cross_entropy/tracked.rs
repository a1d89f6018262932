//! The cross entropy in models, with its gradient.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::{FloatTensor, IntTensor};

use crate::backend::Kernels;

#[derive(Debug)]
struct CrossEntropy;

impl<B: Kernels> Backward<B, 1> for CrossEntropy {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::cross_entropy_gradient(ops.state, grad)
        });
    }
}

pub(crate) fn tracked<B: Kernels, C: CheckpointStrategy>(
    logits: FloatTensor<Autodiff<B, C>>,
    targets: IntTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    let prepared = Backward::<B, 1>::prepare::<C>(CrossEntropy, [logits.node()])
        .compute_bound()
        .stateful();
    let [gradient, loss] = B::cross_entropy_kernel(logits.into_primitive(), targets);
    match prepared {
        OpsKind::Tracked(prepared) => prepared.finish(gradient, loss),
        OpsKind::UnTracked(prepared) => prepared.finish(loss),
    }
}
