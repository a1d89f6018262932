//! Compilation of steps whose plans are proved.

use burn::backend::Flex;
use burn::module::Module;
use burn::tensor::{Device, TensorData};
use burn_fsdp_spmd::{
    self as spmd, BackendIr, Batch, CompiledStep, Error, Loss, Mode, OptimizerGroups, Override,
    ShardSpec,
};

use crate::certify::lowered;

/// Compiles as the compiler's [`compile`](spmd::compile()) does, which documents the arguments. If the mode requests
/// [proofs](Mode::certified), each plan is proved before it runs.
///
/// # Errors
///
/// Same as the compiler's.
pub fn compile<M, B, L, O>(
    init: impl Fn(&Device) -> M + Send + 'static,
    loss: impl Fn(&M, B) -> L + Send + 'static,
    optimizer: O,
    mode: Mode,
) -> Result<CompiledStep<B, Flex, L::Outputs>, Error>
where
    M: Module + 'static,
    B: Batch,
    L: Loss,
    O: Into<OptimizerGroups>,
{
    let step = spmd::compile(init, loss, optimizer, mode)?;
    Ok(step.lowered_by(lowered))
}

/// Compiles as [`compile`] does, with initial values that each rank reads for itself: see
/// [`compile_from`](spmd::compile_from).
///
/// # Errors
///
/// Same as [`compile_from`](spmd::compile_from).
pub fn compile_from<M, B, L, O, E>(
    init: impl Fn(&Device) -> M + Send + 'static,
    read: impl FnMut(&ShardSpec<'_>) -> Result<Option<TensorData>, E>,
    loss: impl Fn(&M, B) -> L + Send + 'static,
    optimizer: O,
    mode: Mode,
) -> Result<CompiledStep<B, Flex, L::Outputs>, E>
where
    M: Module + 'static,
    B: Batch,
    L: Loss,
    O: Into<OptimizerGroups>,
    E: From<Error>,
{
    let step = spmd::compile_from(init, read, loss, optimizer, mode)?;
    Ok(step.lowered_by(lowered))
}

/// Compiles as [`compile`] does, with an [`Override`] that replaces parts that cannot be traced.
///
/// # Errors
///
/// Same as [`compile`]; [`Error::Override`].
pub fn compile_with<M, B, L, O, V>(
    init: impl Fn(&Device) -> M + Send + 'static,
    loss: impl Fn(&V::Traced, B) -> L + Send + 'static,
    optimizer: O,
    mode: Mode,
    over: V,
) -> Result<CompiledStep<B, Flex, L::Outputs>, Error>
where
    M: Module + 'static,
    B: Batch,
    L: Loss,
    O: Into<OptimizerGroups>,
    V: Override<M> + 'static,
{
    let step = spmd::compile_with(init, loss, optimizer, mode, over)?;
    Ok(step.lowered_by(lowered))
}

/// Compiles for any backend: see [`compile_on`](spmd::compile_on).
///
/// # Errors
///
/// As [`compile_from`] and [`compile_with`].
pub fn compile_on<Be, M, B, L, O, V, E>(
    values: (
        impl Fn(&Device) -> M + Send + 'static,
        impl FnMut(&ShardSpec<'_>) -> Result<Option<TensorData>, E>,
    ),
    loss: impl Fn(&V::Traced, B) -> L + Send + 'static,
    optimizer: O,
    mode: Mode,
    over: V,
    on: (&Device, Be::Device),
) -> Result<CompiledStep<B, Be, L::Outputs>, E>
where
    Be: BackendIr,
    M: Module + 'static,
    B: Batch,
    L: Loss,
    O: Into<OptimizerGroups>,
    V: Override<M> + 'static,
    E: From<Error>,
{
    let step = spmd::compile_on(values, loss, optimizer, mode, over, on)?;
    Ok(step.lowered_by(lowered))
}
