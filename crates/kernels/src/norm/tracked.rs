//! Layer norms in models, with their gradients.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;

use crate::backend::Kernels;

#[derive(Debug)]
struct LayerNorm;

/// The tensors and the epsilon that the backward pass needs.
#[derive(Clone, Debug)]
struct Saved<T> {
    x: T,
    gamma: T,
    epsilon: f32,
}

impl<B: Kernels> Backward<B, 3> for LayerNorm {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let Saved { x, gamma, epsilon } = ops.state;
        let computed = B::layer_norm_gradients(x, gamma, grad, epsilon);
        for (parent, grad) in ops.parents.into_iter().zip(computed) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

pub(crate) fn tracked<B: Kernels, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    gamma: FloatTensor<Autodiff<B, C>>,
    beta: FloatTensor<Autodiff<B, C>>,
    epsilon: f32,
) -> FloatTensor<Autodiff<B, C>> {
    let nodes = [x.node(), gamma.node(), beta.node()];
    let (x, gamma) = (x.into_primitive(), gamma.into_primitive());
    let beta = beta.into_primitive();
    match Backward::<B, 3>::prepare::<C>(LayerNorm, nodes)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prepared) => {
            let saved = Saved {
                x: x.clone(),
                gamma: gamma.clone(),
                epsilon,
            };
            prepared.finish(saved, B::layer_norm_kernel(x, gamma, beta, epsilon))
        }
        OpsKind::UnTracked(prepared) => {
            prepared.finish(B::layer_norm_kernel(x, gamma, beta, epsilon))
        }
    }
}
