//! Calls of kernels by models, with their gradients.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, TensorMetadata};
use burn_ir::ScalarIr;

use crate::backend::{Keeps, Kernels, ModelCall, TensorKind};
use crate::table::FusedOperation;

/// The kernel of the gradients.
#[derive(Debug)]
struct Tracked(FusedOperation);

/// What the backward pass needs.
#[derive(Clone, Debug)]
struct Kept<F, I> {
    floats: Vec<F>,
    ints: Vec<I>,
    scalars: Vec<ScalarIr>,
    /// The shapes and types of the gradients.
    gradients: Vec<TensorKind>,
}

impl<B: Kernels, const N: usize> Backward<B, N> for Tracked {
    type State = Kept<FloatTensor<B>, IntTensor<B>>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let mut kept = ops.state;
        kept.floats.push(grads.consume::<B>(&ops.node));
        let operands = (kept.floats, kept.ints);
        let computed = B::run_kernel(self.0, operands, kept.scalars, &kept.gradients);
        for (parent, grad) in ops.parents.into_iter().zip(computed) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// Runs a call on floats that may need gradients.
pub(crate) fn tracked<B: Kernels, C: CheckpointStrategy, const N: usize>(
    floats: [FloatTensor<Autodiff<B, C>>; N],
    ints: Vec<IntTensor<B>>,
    call: ModelCall,
) -> FloatTensor<Autodiff<B, C>> {
    let nodes = floats.each_ref().map(|x| x.node());
    let floats = floats.map(|x| x.into_primitive());
    match Backward::<B, N>::prepare::<C>(Tracked(call.gradient), nodes)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prepared) => {
            let (scalars, keeps) = (call.scalars.clone(), call.keeps);
            let gradients = floats.iter().map(|x| (x.shape(), x.dtype())).collect();
            let (operands, indices) = match keeps {
                Keeps::Operands(count) => (floats[..count].to_vec(), ints.clone()),
                Keeps::Result => (Vec::new(), Vec::new()),
            };
            let (result, first) = result_of::<B>(floats.into(), ints, call);
            let kept = Kept {
                floats: operands.into_iter().chain(first).collect(),
                ints: indices,
                scalars,
                gradients,
            };
            prepared.finish(kept, result)
        }
        OpsKind::UnTracked(prepared) => {
            prepared.finish(result_of::<B>(floats.into(), ints, call).0)
        }
    }
}

/// Runs a call, and returns its result, and the kernel's first result if that is another one.
pub(crate) fn result_of<B: Kernels>(
    floats: Vec<FloatTensor<B>>,
    ints: Vec<IntTensor<B>>,
    call: ModelCall,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let mut results = B::run_kernel(call.kernel, (floats, ints), call.scalars, &call.results);
    let result = results.pop().expect("a kernel has a result");
    (result, results.pop())
}
