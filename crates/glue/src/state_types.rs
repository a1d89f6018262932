//! A check, before training, that an optimizer's state can be restored in the same types.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{DType, Device, Tensor};
use burn_fsdp_shard::{LocalId, Probe, local_ids, local_state};

use crate::error::CheckpointError;
use crate::optimizer_record::{OptimizerParts, check_taken};

/// Checks that an optimizer's state can be restored in the same types. It runs a step on one element of each parameter
/// whose type differs from the type in which Burn creates states.
///
/// # Errors
///
/// [`CheckpointError::StateType`]; [`burn_fsdp_shard::Error::NotSharded`].
pub fn check_state_types<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
) -> Result<(), CheckpointError> {
    let usual: DType = Device::default().settings().float_dtype.into();
    let ids = local_ids(model)?;
    let mut optimizer = optimizer.clone().load_record(OptimizerRecord::default());
    let is_other = |dtype: DType| dtype.is_float() && dtype != usual;
    for local in local_state(model)?
        .into_iter()
        .filter(|local| is_other(local.dtype))
    {
        let Some(LocalId { id, path, .. }) = ids.iter().find(|id| id.path == local.path) else {
            continue;
        };
        let element = |device: Device| Tensor::<1>::ones([1], (&device, local.dtype));
        let value = element(Device::flex().autodiff()).require_grad();
        let path = path.split('.').map(str::to_owned).collect();
        let mut gradients = GradientsParams::new();
        gradients.register(*id, element(Device::flex()));
        let probe = Probe::new(path, Param::initialized(*id, value));
        let mut tried = optimizer.clone();
        let step = AssertUnwindSafe(|| drop(tried.step(0.0, probe, gradients)));
        // An optimizer that does not accept a single element cannot be checked here; its state is checked when it is
        // saved.
        if catch_unwind(step).is_ok() {
            optimizer = tried;
        }
    }
    check_taken(&optimizer, &OptimizerParts::take(&optimizer)?)
}
