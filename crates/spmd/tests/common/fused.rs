//! The fused operations of the models, as a compiled step runs them.

use burn_fsdp_models::fused::{FusedCost, FusedOperation};
use burn_fsdp_spmd::CustomOperations;
use burn_fsdp_spmd::graph::CustomProfile;
use burn_fsdp_spmd::graph::Flops;

/// All of them. They are in the graphs of losses that `burn_fsdp_models::fused::recorded` records.
pub(crate) fn operations() -> CustomOperations {
    let add = |known: CustomOperations, operation: FusedOperation| {
        known.kernel(
            operation.name(),
            move |call, tensors| operation.run(call, tensors),
            move |call| {
                let FusedCost {
                    matmul,
                    pointwise,
                    scratch_bytes,
                } = operation.cost(call);
                CustomProfile {
                    is_pure: true,
                    is_cheap: operation.is_cheap(),
                    written_over: operation.written_over(),
                    flops: Flops {
                        matmul,
                        convolution: 0,
                        pointwise,
                    },
                    scratch_bytes,
                }
            },
        )
    };
    let all = FusedOperation::ALL.into_iter();
    all.fold(CustomOperations::new(), add)
}
