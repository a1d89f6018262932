//! The fused operations of the models, as a compiled step runs them.

use burn::backend::Flex;
use burn_fsdp_models::fused::{FusedCost, FusedOperation};
use burn_fsdp_spmd::graph::CustomProfile;
use burn_fsdp_spmd::plan::Flops;
use burn_fsdp_spmd::{CustomOpIr, CustomOperation, CustomOperations, HandleKind};

struct Fused(FusedOperation);

impl CustomOperation<Flex> for Fused {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn run(
        &self,
        call: &CustomOpIr,
        inputs: Vec<HandleKind<Flex>>,
    ) -> Result<Vec<HandleKind<Flex>>, String> {
        let inputs = inputs.into_iter().map(|input| match input {
            HandleKind::Float(tensor) | HandleKind::Int(tensor) | HandleKind::Bool(tensor) => {
                Ok(tensor)
            }
            HandleKind::Quantized(_) => Err("its tensors are not quantized".to_owned()),
        });
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let outputs = self.0.run(call, inputs);
        Ok(outputs.into_iter().map(HandleKind::Float).collect())
    }

    fn profile(&self, call: &CustomOpIr) -> CustomProfile {
        let FusedCost {
            matmul,
            pointwise,
            scratch_bytes,
        } = self.0.cost(call);
        CustomProfile {
            is_pure: true,
            is_cheap: self.0.is_cheap(),
            written_over: self.0.written_over(),
            flops: Flops {
                matmul,
                convolution: 0,
                pointwise,
            },
            scratch_bytes,
        }
    }
}

/// All of them. Losses must be recorded by `burn_fsdp_models::fused::recorded`.
pub(crate) fn operations() -> CustomOperations {
    FusedOperation::ALL.into_iter().map(Fused).collect()
}
