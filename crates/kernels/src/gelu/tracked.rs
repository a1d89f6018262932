//! GELU in models, with its gradient.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;

use crate::backend::Kernels;

#[derive(Debug)]
struct Gelu;

impl<B: Kernels> Backward<B, 1> for Gelu {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::gelu_gradient(ops.state, grad)
        });
    }
}

pub(crate) fn tracked<B: Kernels, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    match Backward::<B, 1>::prepare::<C>(Gelu, [x.node()])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prepared) => {
            let x = x.into_primitive();
            prepared.finish(x.clone(), B::gelu_kernel(x))
        }
        OpsKind::UnTracked(prepared) => prepared.finish(B::gelu_kernel(x.into_primitive())),
    }
}
