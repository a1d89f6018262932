//! The sharding policy: which parameters are gathered together, and when full weights are dropped.

use burn::module::Lora;
use burn::tensor::{Device, Tensor};
use burn_fsdp_mesh::{Cut, Pattern, Strategy};

use crate::Precision;
use crate::audit::Audit;
use crate::error::Error;
use crate::gradient_hook::GradientHook;
use crate::reduction_hook::{ReductionHook, UnitReduction};

/// The policy by which [`fully_shard`](crate::fully_shard) shards a module.
///
/// ```
/// use burn_fsdp_shard::{ShardPolicy, Strategy};
///
/// let policy = ShardPolicy::new().units(["blocks.*"]).strategy(Strategy::FullShard);
/// # let _ = policy;
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct ShardPolicy {
    pub(crate) patterns: Vec<Pattern>,
    /// Each element lists the modules of one unit.
    pub(crate) joint_units: Vec<Vec<Pattern>>,
    pub(crate) strategy: Strategy,
    pub(crate) cut: Cut,
    /// Overrides `cut`; the last pattern that matches counts.
    pub(crate) cuts: Vec<(Pattern, Cut)>,
    pub(crate) whole_below: usize,
    pub(crate) shard_vectors: bool,
    pub(crate) one_owner: Vec<Pattern>,
    pub(crate) prefetch: Option<usize>,
    pub(crate) keep_root: bool,
    pub(crate) axis: String,
    pub(crate) replicate_axis: Option<String>,
    pub(crate) precision: Precision,
    pub(crate) factors: Option<DivideFactors>,
    pub(crate) ignored: Vec<Pattern>,
    pub(crate) reshard_to: Option<usize>,
    pub(crate) reduce_group: ReduceGroup,
    pub(crate) hook: Option<GradientHook>,
    pub(crate) reduction: Option<ReductionHook>,
    pub(crate) gathers_in_8_bits: bool,
    pub(crate) offload: Option<Device>,
    pub(crate) lora: Option<Lora>,
    pub(crate) audit: Audit,
}

/// The divisors of gradients, in place of the number of ranks: `pre` divides each rank's gradient, `post` the
/// sum. Sums are computed in at least 32 bits, so the split matters only for bit-equality with other systems.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DivideFactors {
    /// The divisor of each rank's gradient before the sum.
    pub pre: f64,
    /// The divisor of the sum.
    pub post: f64,
}

impl DivideFactors {
    /// Returns the split of `ranks` that keeps 16-bit sums in range, as fairscale and PyTorch make
    /// it: a power of two near the square root, and the rest.
    pub fn balanced(ranks: usize) -> Self {
        let mut pre = 1;
        while ranks.is_multiple_of(pre) && ranks / pre > pre {
            pre *= 2;
        }
        Self {
            pre: pre as f64,
            post: ranks as f64 / pre as f64,
        }
    }
}

/// The communicator that reductions go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReduceGroup {
    /// The communicator of the gathers: one queue.
    #[default]
    Shared,
    /// A separate communicator, which allows an engine with queues per communicator to overlap the two.
    Own,
}

impl Default for ShardPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl ShardPolicy {
    /// Returns the default policy: one unit (the root), full sharding, and prefetching where it hides
    /// communication.
    pub fn new() -> Self {
        Self {
            patterns: Vec::new(),
            joint_units: Vec::new(),
            strategy: Strategy::FullShard,
            cut: Cut::Elements,
            cuts: Vec::new(),
            whole_below: 0,
            shard_vectors: false,
            one_owner: Vec::new(),
            prefetch: None,
            keep_root: true,
            axis: "shard".to_owned(),
            replicate_axis: None,
            precision: Precision::default(),
            factors: None,
            ignored: Vec::new(),
            reshard_to: None,
            reduce_group: ReduceGroup::Shared,
            hook: None,
            reduction: None,
            gathers_in_8_bits: false,
            offload: None,
            lora: None,
            audit: Audit::default(),
        }
    }

    /// Makes every module whose path matches one of `patterns` a separate unit; the root takes the rest. A pattern
    /// names path segments; `*` matches any characters within one segment, and `**` any number of segments:
    /// `"blocks.*"`, `"conv*"`, `"**.norm"`. If two patterns match on one path, the inner module wins.
    pub fn units<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.patterns = patterns.into_iter().map(Pattern::new).collect();
        self
    }

    /// Joins all modules whose paths match any of `patterns` into one unit, such as the last norm and the head, like
    /// PyTorch's `fully_shard([norm, head])`. Each call defines a unit. The patterns are like those in
    /// [`units`](Self::units), and again an inner module wins. The unit's name is its patterns, joined with `+`.
    ///
    /// Parameters that are gathered together are held together, so join modules that are used one after the
    /// other.
    ///
    /// ```
    /// use burn_fsdp_shard::ShardPolicy;
    ///
    /// let policy = ShardPolicy::new().units(["blocks.*"]).unit_of(["norm", "head"]);
    /// # let _ = policy;
    /// ```
    pub fn unit_of<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        let patterns = patterns.into_iter().map(Pattern::new).collect();
        self.joint_units.push(patterns);
        self
    }

    /// Sets what ranks divide, and until when full parameters stay.
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Sets where parameters may be cut.
    pub fn cut(mut self, cut: Cut) -> Self {
        self.cut = cut;
        self
    }

    /// Sets where the matching parameters may be cut, in place of [`cut`](Self::cut). A pattern names a parameter, or a
    /// module with everything in it. If the patterns of two calls match a parameter, the later one counts.
    pub fn cut_of<P: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = P>,
        cut: Cut,
    ) -> Self {
        let patterns = patterns
            .into_iter()
            .map(|pattern| (Pattern::new(pattern), cut));
        self.cuts.extend(patterns);
        self
    }

    /// Keeps parameters of fewer than `elements` elements whole on every rank, as is the
    /// [default](Self::shard_vectors) for parameters of one dimension. Their gradients share one all-reduce per
    /// step. Default 0.
    pub fn whole_below(mut self, elements: usize) -> Self {
        self.whole_below = elements;
        self
    }

    /// Sets whether parameters of one dimension are sharded like others, so that a rank holds its share of everything:
    /// weights, gradients and states. Default: they stay whole on every rank, since they are small.
    pub fn shard_vectors(mut self, shard: bool) -> Self {
        self.shard_vectors = shard;
        self
    }

    /// Assigns each matching parameter to one owner rank, instead of sharding it. Between steps only the owner holds
    /// the parameter, and its optimizer updates it. A pattern names a parameter, or a module with everything in it:
    /// `"**"`, `"blocks.*"`, `"**.attention.*.weight"`.
    ///
    /// For optimizers that compute with whole tensors (Muon, Adafactor, LAMB, Burn's clipping by the norm of each
    /// gradient, custom ones). On the owner, the optimizer sees the parameter and its gradient in their original shape,
    /// so the update is bit-identical to an unsharded one. On other ranks the parameter has no gradient and is not
    /// updated. The unit's reduction sends the gradient to the owner, and the next gather distributes the updated
    /// parameter. The traffic is the same as for shards.
    ///
    /// Parameters are assigned by their number of elements: the largest first, each to the rank of the shard axis that
    /// owns the fewest elements. With fewer matching parameters than ranks, some ranks own none. Parameters that every
    /// rank holds whole anyway stay whole, and optimizers also see them in their original shape. These are
    /// one-dimensional parameters, those below [`whole_below`](Self::whole_below), and all with [`Strategy::NoShard`].
    pub fn one_owner<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.one_owner = patterns.into_iter().map(Pattern::new).collect();
        self
    }

    /// Sets the number of units that are gathered ahead of their use; `None` selects the default. 0 gathers each unit
    /// when it is touched and waits for each reduction; every further step costs one unit of memory. Default: 1 where
    /// the group [overlaps](burn_fsdp_collectives::ProcessGroup::overlaps), as groups of processes do, and 0 where
    /// ranks are threads, which gain nothing by it.
    pub fn prefetch(mut self, units: impl Into<Option<usize>>) -> Self {
        self.prefetch = units.into();
        self
    }

    /// Sets whether the root also drops its full weights after each use. Default: it keeps them from its
    /// forward to its backward, because it is needed first in both.
    pub fn reshard_root(mut self, reshard: bool) -> Self {
        self.keep_root = !reshard;
        self
    }

    /// Sets the axis of the mesh to shard over, by its name in the mesh. Default `"shard"`.
    pub fn axis(mut self, axis: impl Into<String>) -> Self {
        self.axis = axis.into();
        self
    }

    /// Chooses hybrid sharding: `axis` is the mesh axis over which the shards are replicated. Gathers and
    /// reduce-scatters stay on the shard axis, inside a node. One all-reduce of the shards' gradients per
    /// unit crosses the replicate axis.
    pub fn replicate_axis(mut self, axis: impl Into<String>) -> Self {
        self.replicate_axis = Some(axis.into());
        self
    }

    /// Sets mixed precision. Default: everything in the type in which the module was built.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets the divisors of gradients. Default: the number of ranks.
    pub fn divide_factors(mut self, factors: DivideFactors) -> Self {
        self.factors = Some(factors);
        self
    }

    /// Ignores parameters, and modules with everything in them, by pattern as in [`units`](Self::units): `"head"`,
    /// `"**.bias"`. They are neither sharded nor reduced, and are separate on each rank.
    pub fn ignore<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.ignored = patterns.into_iter().map(Pattern::new).collect();
        self
    }

    /// After forward, drops full weights to one of `ranks` pieces instead of to the shard, so that the gather
    /// of backward stays within groups of `ranks` neighbours. This is between 1, which is
    /// [`Strategy::ShardGradOp`], and the whole shard axis, which is [`Strategy::FullShard`]. `ranks` must
    /// divide the axis' size.
    pub fn reshard_after_forward_to(mut self, ranks: usize) -> Self {
        self.reshard_to = Some(ranks);
        self
    }

    /// Sets the communicator that reductions go through.
    pub fn reduce_group(mut self, group: ReduceGroup) -> Self {
        self.reduce_group = group;
        self
    }

    /// Sets whether gathers send shards in 8 bits, as ZeRO++'s quantized weights do: about a quarter of the bytes, for
    /// weights that are rounded. Default: they are sent in their compute type.
    ///
    /// Each block of 256 elements of a shard, counted from the first that the rank holds, has a scale of 32 bits, a 127th of the
    /// largest magnitude in it, and each element a whole number of such steps, to the nearest: it is off by at most
    /// a 254th of the largest of its block. All ranks compute with the same rounded weights, whose gradients are those of
    /// the exact ones; these are kept, stepped, saved and summoned as ever. With
    /// [`Cut::Multiples`](crate::Cut::Multiples)`(256)` blocks are those of the whole parameter, so that the weights do not depend on the
    /// number of ranks, one among them. An infinite or undefined element makes its block undefined.
    ///
    /// What every rank holds whole (parameters of one dimension, those below [`whole_below`](Self::whole_below), all
    /// with [`Strategy::NoShard`]) is not rounded. The pieces that
    /// [`reshard_after_forward_to`](Self::reshard_after_forward_to) leaves with neighbours are sent among them in the
    /// compute type. Rounding is the host's work.
    pub fn gather_in_8_bits(mut self, packs: bool) -> Self {
        self.gathers_in_8_bits = packs;
        self
    }

    /// Keeps shards on `host`, the CPU backend `Device::flex()`, while the module computes on the device on which it
    /// was built: parameters between steps, their gradients, and the optimizer's state and update. Full parameters are
    /// still created and freed on the computing device; gathers and reductions use host memory anyway.
    ///
    /// Tensors that the units do not manage (ignored parameters, running states) stay on the computing device.
    /// `Module::to_device` moves them, and the device of full parameters, but not the shards.
    ///
    /// For a module that was built on `host` this changes nothing, because its shards are already there.
    pub fn offload_to(mut self, host: Device) -> Self {
        self.offload = Some(host);
        self
    }

    /// Attaches Burn's low-rank adapters while sharding. This freezes every parameter of the module and adds two
    /// trained factors to each two-dimensional parameter that `lora`'s group matches: `a` of shape `[in, rank]` and `b`
    /// of shape `[rank, out]`. Use it in place of `module.apply_lora(lora)`, which Burn allows neither before nor after
    /// sharding.
    ///
    /// The factors are parameters of the unit whose weight they adapt. They are sharded like others and have Burn's own
    /// paths (`blocks.0.fc.weight.lora.a`). Optimizers, clipping, records and checkpoints see them there, and a record
    /// of the module equals a record of Burn's module with `apply_lora`. A rank holds only shards of the frozen
    /// weights: no gradient, no optimizer state, nothing to reduce. The weight `base + alpha / rank * (a @ b)` exists
    /// around a unit's own forward and backward, like the full base.
    ///
    /// [`memory`](crate::memory()) counts the gathered base and factors, but not the weights computed from
    /// them.
    ///
    /// Initial values are Burn's: `a` is normal, drawn on rank 0, and `b` is zero. `Module::materialize` gives the
    /// plain module with its adapters merged; `Param::adapter` does not recognize a sharded one. A quantized base
    /// (`QLora`) is rejected, as its type is.
    ///
    /// ```
    /// use burn::module::Lora;
    /// use burn_fsdp_shard::ShardPolicy;
    ///
    /// let policy = ShardPolicy::new().units(["blocks.*"]).lora(Lora::new(16, 32.0));
    /// # let _ = policy;
    /// ```
    pub fn lora(mut self, lora: Lora) -> Self {
        self.lora = Some(lora);
        self
    }

    /// Returns true if sharding attaches [adapters](Self::lora), so that the sharded module has parameters that the
    /// module itself lacks.
    pub fn attaches_adapters(&self) -> bool {
        self.lora.is_some()
    }

    /// Sets the steps whose gradients are audited. Default: in debug builds the first step and each step that follows a
    /// new order of operations; in other builds none. All ranks must make the same choice; otherwise nothing is
    /// compared.
    pub fn audit(mut self, steps: Audit) -> Self {
        self.audit = steps;
        self
    }

    /// Sets a function that changes this rank's full gradient of a parameter before it is reduced. It gets the
    /// parameter's path and the flat gradient, and returns one of the same length, both without autodiff. It is called
    /// on every rank that has a gradient, inside backward, and must not use sharded modules. A second function gets the
    /// result of the first.
    pub fn gradient_hook(
        mut self,
        hook: impl Fn(&str, Tensor<1>) -> Tensor<1> + Send + Sync + 'static,
    ) -> Self {
        let hook = GradientHook::new(hook);
        self.hook = Some(match self.hook.take() {
            Some(first) => first.then(hook),
            None => hook,
        });
        self
    }

    /// Sets a function that reduces the gradients of a unit in place of the engine, for example with compression. It
    /// gets the full gradients. For each it returns the elements that this rank holds
    /// ([`FullGradient::held`](crate::FullGradient::held)) of the sum over the ranks of [`UnitReduction::group`],
    /// divided by [`UnitReduction::divisor`]. [`UnitReduction`] has the collectives for it. An [`audit`](Self::audit)
    /// cannot see the effect of a hook.
    ///
    /// The function is called inside backward, in the same order on all ranks of the shard axis, also on those that
    /// have no gradient. All must communicate in the same way in it. It must not use sharded modules. It runs after
    /// [`gradient_hook`](Self::gradient_hook). Parameters that every rank keeps whole under another strategy than
    /// [`Strategy::NoShard`] (vectors, those below [`whole_below`](Self::whole_below)) are still reduced by the engine.
    ///
    /// For example, gradients that are sent in 16 bits, with sums in 32:
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
        hook: impl Fn(&UnitReduction) -> Result<Vec<Tensor<1>>, Error> + Send + Sync + 'static,
    ) -> Self {
        self.reduction = Some(ReductionHook::new(hook));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::DivideFactors;

    #[test]
    fn factors_match_the_table() {
        let pairs = [
            (1, 1.0, 1.0),
            (2, 2.0, 1.0),
            (3, 2.0, 1.5),
            (4, 2.0, 2.0),
            (6, 4.0, 1.5),
            (8, 4.0, 2.0),
            (12, 4.0, 3.0),
            (16, 4.0, 4.0),
            (32, 8.0, 4.0),
            (64, 8.0, 8.0),
            (128, 16.0, 8.0),
            (256, 16.0, 16.0),
        ];
        for (ranks, pre, post) in pairs {
            assert_eq!(DivideFactors::balanced(ranks), DivideFactors { pre, post });
        }
    }
}
