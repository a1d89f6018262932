//! The policy's hooks.

use burn::tensor::Tensor;

use super::ShardPolicy;
use crate::error::Error;
use crate::hooks::{
    GatherHook, GradientHook, PendingTensors, ReductionHook, UnitGather, UnitReduction,
};

impl ShardPolicy {
    /// Sets a function that changes this rank's full gradient of a parameter before it is reduced. It receives the
    /// parameter's path and flat gradient, and returns a gradient of the same length, both without autodiff. It is
    /// called on every rank that has a gradient, inside backward, and must not use sharded modules. Several functions
    /// are applied in the order in which they were set.
    pub fn gradient_hook(
        mut self,
        hook: impl Fn(&str, Tensor<1>) -> Tensor<1> + Send + Sync + 'static,
    ) -> Self {
        let hook = GradientHook::new(hook);
        let hooks = &mut self.hooks;
        hooks.gradient = Some(match hooks.gradient.take() {
            Some(first) => first.then(hook),
            None => hook,
        });
        self
    }

    /// Sets a function that reduces the gradients of a unit in place of the engine, for example with compression. It
    /// receives the full gradients. For each, it sums over the ranks of [`UnitReduction::group`], and returns this
    /// rank's elements of the sum ([`FullGradient::held`](crate::FullGradient::held)), divided by
    /// [`UnitReduction::divisor`]. [`UnitReduction`] provides the collectives for this. An [`audit`](Self::audit)
    /// cannot check the effect of a hook.
    ///
    /// The function is called inside backward, in the same order on all ranks of the shard axis, including those
    /// without a gradient. All ranks must issue the same collectives. It must not use sharded modules. It runs after
    /// [`gradient_hook`](Self::gradient_hook). [`all_reduce_hook`](Self::all_reduce_hook) replaces the engine's other
    /// reductions.
    ///
    /// For example, to send gradients in 16 bits and sum them in 32:
    ///
    /// ```
    /// use burn::tensor::DType;
    /// use burn_fsdp_shard::ShardPolicy;
    ///
    /// let policy = ShardPolicy::new().reduction_hook(|unit| {
    ///     let gradients = unit.gradients().iter();
    ///     unit.reduce_scatter(gradients.map(|gradient| gradient.tensor().cast(DType::BF16)).collect())
    /// });
    /// # let _ = policy;
    /// ```
    pub fn reduction_hook(
        mut self,
        hook: impl Fn(&UnitReduction) -> Result<PendingTensors, Error> + Send + Sync + 'static,
    ) -> Self {
        self.hooks.reduction = Some(ReductionHook::new(hook));
        self
    }

    /// Sets a function that computes the engine's all-reduces of gradients in its place, under the rules of
    /// [`reduction_hook`](Self::reduction_hook). [`UnitReduction::stage`] tells which one:
    ///
    /// - With [`replicate_axis`](Self::replicate_axis), each unit's sum over the replicas. The function receives and
    ///   returns this rank's elements.
    /// - At the end of backward, the reduction over all ranks of the parameters that every rank keeps whole (vectors,
    ///   those below [`whole_below`](Self::whole_below)). One call covers all units with the same policy and divisors.
    ///
    /// With [`Strategy::NoShard`](crate::Strategy::NoShard) there are neither: `reduction_hook` reduces all gradients.
    ///
    /// ```
    /// use burn::tensor::DType;
    /// use burn_fsdp_shard::ShardPolicy;
    ///
    /// let policy = ShardPolicy::new().replicate_axis("replicate").all_reduce_hook(|unit| {
    ///     let gradients = unit.gradients().iter();
    ///     unit.average(gradients.map(|gradient| gradient.tensor().cast(DType::BF16)).collect())
    /// });
    /// # let _ = policy;
    /// ```
    pub fn all_reduce_hook(
        mut self,
        hook: impl Fn(&UnitReduction) -> Result<PendingTensors, Error> + Send + Sync + 'static,
    ) -> Self {
        self.hooks.all_reduce = Some(ReductionHook::new(hook));
        self
    }

    /// Sets a function that gathers a unit's parameters in place of the engine, for example with compression. It
    /// receives this rank's shards, and returns the full parameters, flat and without autodiff, in any float type; the
    /// engine casts them to the compute type. [`UnitGather::all_gather`] is the engine's own gather. All ranks must
    /// return the same bits, because the model computes with what is returned; with
    /// [`Check::Agreement`](burn_fsdp_collectives::Check), ranks compare them.
    ///
    /// The function is called in forward, in backward and in evaluation, in the same order on all ranks of
    /// [`UnitGather::group`], including ranks that do not need the unit, whose results are dropped. All ranks must issue
    /// the same collectives. It must not use sharded modules. A gather that it
    /// returns before the tensors exist ([`PendingTensors`]) overlaps with other work like the engine's own.
    ///
    /// Shards stay exact. Records, checkpoints and summoned parameters are read from the shards, without the function.
    /// Parameters that every rank keeps whole are not gathered. [`gather_in_8_bits`](Self::gather_in_8_bits) cannot be
    /// set as well.
    ///
    /// For example, to send 32-bit weights in 16 bits:
    ///
    /// ```
    /// use burn::tensor::DType;
    /// use burn_fsdp_shard::ShardPolicy;
    ///
    /// let policy = ShardPolicy::new().gather_hook(|unit| {
    ///     let shards = unit.shards().iter();
    ///     unit.all_gather(shards.map(|shard| shard.tensor().cast(DType::BF16)).collect())
    /// });
    /// # let _ = policy;
    /// ```
    pub fn gather_hook(
        mut self,
        hook: impl Fn(&UnitGather) -> Result<PendingTensors, Error> + Send + Sync + 'static,
    ) -> Self {
        self.hooks.gather = Some(GatherHook::new(hook));
        self
    }
}
