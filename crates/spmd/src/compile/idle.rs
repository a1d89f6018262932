//! Optimizer states that a step keeps but does not change.

use burn::tensor::TensorData;
use burn_fsdp_mesh::Layout;
use burn_pack::Scalar;

/// The optimizer state of a parameter that a step does not train. The step keeps it for later checkpoints, and for a
/// step that trains the parameter again.
#[derive(Debug, Clone)]
pub struct IdleState {
    /// Path of the parameter.
    pub path: String,
    /// Named numbers of the state, such as a step counter.
    pub counters: Vec<(String, Scalar)>,
    /// All tensors of the state.
    pub tensors: Vec<IdleTensor>,
}

/// This rank's part of a tensor of an [`IdleState`].
#[derive(Debug, Clone)]
pub struct IdleTensor {
    /// Name of the tensor in the state.
    pub slot: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Layout of the whole tensor on the [mesh](crate::CompiledStep::mesh) of the step.
    pub layout: Layout,
    /// This rank's part.
    pub data: TensorData,
}
