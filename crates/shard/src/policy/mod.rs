//! The sharding policy: how a module is divided into units and shards, and how these are gathered and reduced.

mod base;
mod hooks;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::Lora;
use burn::tensor::{Device, FloatDType};
use burn_fsdp_mesh::{Cut, Pattern, Strategy};

use crate::Precision;
use crate::adapter::Method;
use crate::audit::Audit;
use crate::base_bits::BaseBits;
use crate::divide_factors::DivideFactors;
use crate::hooks::Hooks;

/// Configures how [`fully_shard`](crate::fully_shard) shards a module.
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
    /// The patterns of each joint unit.
    pub(crate) joint_units: Vec<Vec<Pattern>>,
    pub(crate) strategy: Strategy,
    pub(crate) cut: Cut,
    /// Rules that override `cut`; the last match wins.
    pub(crate) cuts: Vec<(Pattern, Cut)>,
    pub(crate) whole_below: usize,
    pub(crate) shard_vectors: bool,
    pub(crate) one_owner: Vec<Pattern>,
    pub(crate) prefetch: Option<usize>,
    pub(crate) keep_root: bool,
    pub(crate) axis: String,
    pub(crate) replicate_axis: Option<String>,
    pub(crate) precision: Precision,
    /// True if layers with states compute in the type of these, whatever the precision.
    pub(crate) stateful_in_full: bool,
    pub(crate) buffers: Option<FloatDType>,
    pub(crate) factors: Option<DivideFactors>,
    pub(crate) ignored: Vec<Pattern>,
    pub(crate) reshard_to: Option<usize>,
    pub(crate) reduce_group: ReduceGroup,
    pub(crate) hooks: Hooks,
    pub(crate) gathers_in_8_bits: bool,
    pub(crate) offload: Option<Device>,
    pub(crate) files: Option<Files>,
    pub(crate) adapters: Vec<AdapterGroup>,
    pub(crate) base_bits: Option<BaseBits>,
    /// The modules whose regions are recomputed; `None` for all.
    pub(crate) recomputed: Option<Vec<Pattern>>,
    pub(crate) audit: Audit,
}

/// Adapters of a group of parameters.
#[derive(Debug, Clone)]
pub(crate) struct AdapterGroup {
    pub(crate) lora: Lora,
    pub(crate) method: Method,
}

/// The parameters whose shards are in files.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    pub(crate) folder: Arc<Path>,
    pub(crate) patterns: Vec<Pattern>,
}

/// Selects the communicator for reductions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReduceGroup {
    /// The same communicator as for gathers, with one queue for both.
    #[default]
    Shared,
    /// A separate communicator, so an engine with a queue for each communicator can overlap reductions and gathers.
    Own,
}

impl Default for ShardPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl ShardPolicy {
    /// Returns the default policy: one unit (the root), full sharding, and prefetching if it hides communication.
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
            stateful_in_full: false,
            buffers: None,
            factors: None,
            ignored: Vec::new(),
            reshard_to: None,
            reduce_group: ReduceGroup::Shared,
            hooks: Hooks::default(),
            gathers_in_8_bits: false,
            offload: None,
            files: None,
            adapters: Vec::new(),
            base_bits: None,
            recomputed: None,
            audit: Audit::default(),
        }
    }

    /// Makes every module whose path matches one of `patterns` a separate unit; the remaining parameters belong to the
    /// root. In a pattern, `*` matches any characters within one path segment, and `**` any number of segments:
    /// `"blocks.*"`, `"conv*"`, `"**.norm"`. If a module and a module inside it both match, the inner one is a separate
    /// unit.
    pub fn units<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.patterns = patterns.into_iter().map(Pattern::new).collect();
        self
    }

    /// Joins all modules whose paths match any of `patterns` into one unit, such as the last norm and the head, like
    /// PyTorch's `fully_shard([norm, head])`. Each call defines a unit. The patterns work as in [`units`](Self::units),
    /// including the rule for a module inside another. The unit's name is its patterns, joined with `+`.
    ///
    /// The parameters of a unit are gathered and held together, so join modules that are used one after the other.
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

    /// Sets what is sharded, and how long full parameters are kept. Default: [`Strategy::FullShard`].
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Sets where parameters may be cut into shards. Default: [`Cut::Elements`].
    pub fn cut(mut self, cut: Cut) -> Self {
        self.cut = cut;
        self
    }

    /// Sets where the matching parameters may be cut, overriding [`cut`](Self::cut). A pattern matches parameters, or
    /// modules with everything in them. If patterns from two calls match a parameter, the later call wins.
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

    /// Keeps parameters with fewer than `elements` elements whole on every rank, like one-dimensional parameters by
    /// [default](Self::shard_vectors). Their gradients share one all-reduce per step. Default 0.
    pub fn whole_below(mut self, elements: usize) -> Self {
        self.whole_below = elements;
        self
    }

    /// Sets whether one-dimensional parameters are sharded like others, so a rank holds only its share of all weights,
    /// gradients and states. Default: they stay whole on every rank, since they are small.
    pub fn shard_vectors(mut self, shard: bool) -> Self {
        self.shard_vectors = shard;
        self
    }

    /// Assigns each matching parameter to one owner rank, instead of sharding it. Between steps only the owner holds
    /// the parameter, and the owner's optimizer updates it. A pattern matches parameters, or modules with everything in
    /// them: `"**"`, `"blocks.*"`, `"**.attention.*.weight"`.
    ///
    /// Use this for optimizers that compute with whole tensors (Muon, Adafactor, LAMB, Burn's clipping by the norm of
    /// each gradient, custom ones). On the owner, the optimizer sees the parameter and its gradient in their original
    /// shape, so the update is bit-identical to an unsharded one. On other ranks the parameter has no gradient and is
    /// not updated. The unit's reduction sends the gradient to the owner, and the next gather distributes the updated
    /// parameter. The traffic is the same as for shards.
    ///
    /// Parameters are assigned by their number of elements: the largest first, each to the rank of the shard axis that
    /// owns the fewest elements. With fewer matching parameters than ranks, some ranks own none. Parameters that every
    /// rank holds whole anyway stay whole, and optimizers also see them in their original shape. These are
    /// one-dimensional parameters (unless [`shard_vectors`](Self::shard_vectors) is set), those below
    /// [`whole_below`](Self::whole_below), and all with [`Strategy::NoShard`].
    pub fn one_owner<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.one_owner = patterns.into_iter().map(Pattern::new).collect();
        self
    }

    /// Sets the number of units that are gathered ahead of their use; `None` selects the default. With 0, each unit is
    /// gathered when it is used, and each reduction blocks. Each prefetched unit costs the memory of one unit. Default:
    /// 1 if the group [overlaps](burn_fsdp_collectives::ProcessGroup::overlaps) communication, as groups of processes
    /// do, and 0 if ranks are threads, which gain nothing from it.
    ///
    /// Training gathers ahead from the second step on, and evaluation from the second forward of a copy on.
    /// [`evaluate`](crate::evaluate()) gathers nothing ahead. Lists
    /// ([`set_forward_prefetch`](crate::UnitHandle::set_forward_prefetch)) replace this number.
    pub fn prefetch(mut self, units: impl Into<Option<usize>>) -> Self {
        self.prefetch = units.into();
        self
    }

    /// Sets whether the root drops its full weights after each use, like other units. Default: it keeps them from
    /// forward to backward, because backward usually begins with the root.
    pub fn reshard_root(mut self, reshard: bool) -> Self {
        self.keep_root = !reshard;
        self
    }

    /// Sets the axis of the mesh to shard over, by its name in the mesh. Default `"shard"`.
    pub fn axis(mut self, axis: impl Into<String>) -> Self {
        self.axis = axis.into();
        self
    }

    /// Selects hybrid sharding: `axis` is the mesh axis over which shards are replicated. Gathers and reduce-scatters
    /// stay on the shard axis, typically within a node. Across the replicate axis there is one all-reduce of the
    /// shards' gradients per unit.
    pub fn replicate_axis(mut self, axis: impl Into<String>) -> Self {
        self.replicate_axis = Some(axis.into());
        self
    }

    /// Sets mixed precision. Default: everything in the type in which the module was built.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Makes the parameters of all `BatchNorm` and recurrent layers compute in the type of the layer's states, wherever
    /// the layers are in the module, like fairscale's `auto_wrap_bn`. As for [`full_in`](Precision::full_in), the model
    /// casts their inputs and outputs. Default: [`precision`](Self::precision) applies to them as to other layers, and
    /// they are rejected with [`Error::LayerType`](crate::Error::LayerType) if they would compute in another type.
    pub fn stateful_layers_in_full(mut self) -> Self {
        self.stateful_in_full = true;
        self
    }

    /// Sets the type of running states, such as BatchNorm's, which they get while sharding. Default: they keep their
    /// type.
    ///
    /// Burn's BatchNorm computes only in the type of its running states. If `dtype` is the compute type of
    /// [`precision`](Self::precision), the layer trains in 16 bits unchanged. Its averages then also have 16 bits, and
    /// lose updates below their resolution.
    ///
    /// The sharded module remembers original types that are wider. Saved steps, exported tensors, summoned modules and
    /// [`into_record`](crate::into_record) have running states in these types; only Burn's own `Module::into_record` has
    /// them in `dtype`. Load a record with `ModuleRecord::cast_to_module_dtype`; otherwise Burn takes the record's types.
    /// This is PyTorch's `buffer_dtype`.
    pub fn buffer_type(mut self, dtype: FloatDType) -> Self {
        self.buffers = Some(dtype);
        self
    }

    /// Sets the divisors of gradients. Default: the number of ranks.
    pub fn divide_factors(mut self, factors: DivideFactors) -> Self {
        self.factors = Some(factors);
        self
    }

    /// Ignores parameters, and modules with everything in them, by patterns as in [`units`](Self::units): `"head"`,
    /// `"**.bias"`. They are neither sharded nor reduced, and each rank has its own.
    pub fn ignore<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.ignored = patterns.into_iter().map(Pattern::new).collect();
        self
    }

    /// After forward, keeps one of `ranks` pieces of the full weights instead of only the shard, so the gather in
    /// backward stays within groups of `ranks` neighbours. `ranks` must divide the size of the shard axis. 1
    /// corresponds to [`Strategy::ShardGradOp`], and the whole axis to [`Strategy::FullShard`].
    pub fn reshard_after_forward_to(mut self, ranks: usize) -> Self {
        self.reshard_to = Some(ranks);
        self
    }

    /// Sets the communicator for reductions. Default: [`ReduceGroup::Shared`].
    pub fn reduce_group(mut self, group: ReduceGroup) -> Self {
        self.reduce_group = group;
        self
    }

    /// Sets whether gathers send shards in 8 bits, like ZeRO++'s quantized weights. This sends about a quarter of the
    /// bytes of 32-bit weights, but rounds the weights. Default: shards are sent in their compute type.
    ///
    /// Each block of 256 elements of a shard, counted from the rank's first element, has a 32-bit scale: a 127th of the
    /// block's largest magnitude. Each element is rounded to the nearest multiple of the scale, so the error is at most
    /// a 254th of the block's largest magnitude. All ranks compute with the same rounded weights, and the gradients are
    /// applied to the exact ones, which are stored, updated, saved and summoned as usual. With
    /// [`Cut::Multiples`](crate::Cut::Multiples)`(256)`, blocks are aligned to the whole parameter, so the rounded
    /// weights do not depend on the number of ranks (including one). An infinite or NaN element makes its whole block
    /// NaN.
    ///
    /// Parameters that every rank holds whole (one-dimensional ones, those below [`whole_below`](Self::whole_below),
    /// all with [`Strategy::NoShard`]) are not rounded. The pieces kept by
    /// [`reshard_after_forward_to`](Self::reshard_after_forward_to) are sent among neighbours in the compute type.
    /// Rounding runs on the host.
    pub fn gather_in_8_bits(mut self, packs: bool) -> Self {
        self.gathers_in_8_bits = packs;
        self
    }

    /// Keeps shards on `host`, the CPU backend `Device::flex()`, while the module computes on the device on which it
    /// was built. Parameters between steps, their gradients, and the optimizer's state and update are then on the host.
    /// Full parameters are still created and freed on the computing device; gathers and reductions use host memory
    /// anyway.
    ///
    /// Tensors that the units do not manage (ignored parameters, running states) stay on the computing device.
    /// `Module::to_device` moves them and changes the device of full parameters, but leaves the shards on the host.
    ///
    /// This has no effect on a module that was built on `host`.
    pub fn offload_to(mut self, host: Device) -> Self {
        self.offload = Some(host);
        self
    }

    /// Selects the regions that are recomputed, by patterns as in [`units`](Self::units): `["blocks.*"]` for all blocks,
    /// `["blocks.0", "blocks.2"]` for some, none for none. [`recompute`](crate::recompute()) then computes a region again
    /// only if each sharded parameter of its module is in a module that matches; otherwise it just runs the forward.
    /// Default: all regions. So a model calls `recompute` wherever it could help, and the policy decides what is worth
    /// its memory. All ranks must select the same regions.
    pub fn recompute_in<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        let patterns = patterns.into_iter().map(Pattern::new);
        self.recomputed = Some(patterns.collect());
        self
    }

    /// Keeps the shards and reduced gradients of the matching parameters in files in `folder`, which are mapped into
    /// memory. The system reads their pages when a gather or the optimizer needs them, and drops them when memory is
    /// scarce. If the optimizer's state is also in files, a rank needs memory only for its largest units and the
    /// activations, not for its share of the model.
    ///
    /// The patterns select the part of the model that is in files: `["**"]`, `["blocks.*"]`, `["**.mlp"]`. A pattern
    /// matches parameters, or modules with everything in them.
    ///
    /// All values have the same bits as in memory, with any optimizer, in clones, averages and checkpoints. A step
    /// writes each new shard and gradient once, so a fast local disk and large batches help. A folder in a memory file
    /// system (`tmpfs`) saves nothing. A step fails if the bytes of a shard have changed; gradients are checked only if
    /// ranks compare bytes (`Check::Agreement`).
    ///
    /// The folder must exist, and may differ between ranks. The files have no names, and disappear with the values,
    /// even if the process is killed. If a file cannot be written, `fully_shard`, [`backward`](crate::backward()) and
    /// functions that change the module's state return [`Error::ShardFile`](crate::Error::ShardFile). Burn's `step` of an
    /// optimizer unwinds with it; [`catch`](crate::catch) returns it as a value.
    ///
    /// Some values remain in memory: parameters that every rank keeps whole by default (vectors, those below
    /// [`whole_below`](Self::whole_below)), gradients that wait for another backward or another reduction, sums in
    /// Burn's `GradientsAccumulator`, and the optimizer's state. Shards must be on the CPU backend: on other devices,
    /// also set [`offload_to`](Self::offload_to).
    ///
    /// ```
    /// use burn_fsdp_shard::ShardPolicy;
    ///
    /// let policy = ShardPolicy::new().units(["blocks.*"]).in_files("/scratch", ["blocks.*"]);
    /// # let _ = policy;
    /// ```
    pub fn in_files<P: Into<String>>(
        mut self,
        folder: impl Into<PathBuf>,
        patterns: impl IntoIterator<Item = P>,
    ) -> Self {
        self.files = Some(Files {
            folder: folder.into().into(),
            patterns: patterns.into_iter().map(Pattern::new).collect(),
        });
        self
    }

    /// Attaches Burn's low-rank adapters while sharding. This freezes every parameter of the module and adds two
    /// trained factors to each two-dimensional parameter that `lora`'s group matches: `a` of shape `[in, rank]` and `b`
    /// of shape `[rank, out]`.
    ///
    /// `module.apply_lora(lora)` before sharding gives the same adapters. It initializes the whole module on every rank,
    /// and freezes what it freezes; plain copies of such a module have the adapters, too. After sharding, it only freezes
    /// parameters.
    ///
    /// The factors are parameters of the unit whose weight they adapt. They are sharded like any other parameter and
    /// have Burn's own paths (`blocks.0.fc.weight.lora.a`). Optimizers, clipping, records and checkpoints see them
    /// there, and a record of the module equals a record of Burn's module with `apply_lora`. A rank holds only shards
    /// of the frozen weights, which have no gradient and no optimizer state, and are not reduced. Like the full base,
    /// the weight `base + alpha / rank * (a @ b)` exists only around the unit's forward and backward.
    ///
    /// [`memory`](crate::memory()) counts the gathered base and factors, but not the weights computed from
    /// them.
    ///
    /// Each call adds a group of parameters, which may have another rank and alpha. If the groups of two calls match a
    /// parameter, the later call wins. A call whose group matches nothing is an error.
    ///
    /// Initial values are Burn's: `a` is normal, drawn on rank 0, and `b` is zero. `Module::materialize` returns the
    /// plain module with its adapters merged; `Param::adapter` does not recognize a sharded adapter. A base that
    /// Burn has quantized (`QLora`) is rejected, like any quantized parameter; see [`base_in`](Self::base_in).
    ///
    /// ```
    /// use burn::module::Lora;
    /// use burn_fsdp_shard::ShardPolicy;
    ///
    /// let policy = ShardPolicy::new().units(["blocks.*"]).lora(Lora::new(16, 32.0));
    /// # let _ = policy;
    /// ```
    ///
    /// Rank 4 for the attention, and rank 16 for everything else in the blocks:
    ///
    /// ```
    /// use burn::module::{Lora, ParamGroup};
    /// use burn_fsdp_shard::ShardPolicy;
    ///
    /// let of = |part: &str, rank: usize| {
    ///     let group = ParamGroup::from_predicate(part);
    ///     Lora::new(rank, 2.0 * rank as f64).set_param_group(group)
    /// };
    /// let policy = ShardPolicy::new().lora(of("blocks", 16)).lora(of("attention", 4));
    /// # let _ = policy;
    /// ```
    pub fn lora(mut self, lora: Lora) -> Self {
        let method = Method::Lora;
        self.adapters.push(AdapterGroup { lora, method });
        self
    }

    /// Attaches adapters as [`lora`](Self::lora) does, and decomposes each adapted weight into a direction and a
    /// magnitude for each output (Liu et al., "DoRA", arXiv 2402.09353; `use_dora` in peft): each column of
    /// `base + alpha / rank * (a @ b)` is divided by its norm and multiplied by its magnitude. As in the paper, the norm
    /// counts as a constant in backward.
    ///
    /// The magnitudes are a third trained parameter of shape `[out]`, at `blocks.0.fc.weight.lora.magnitude`. They
    /// start as the norms of the columns of the base, so a new adapter does not change the model. If you load another
    /// base after sharding, also load magnitudes: they are not computed again.
    ///
    /// Gathered weights have 16 bits with [`Precision`], but norms are computed in 32 bits.
    pub fn dora(mut self, lora: Lora) -> Self {
        let method = Method::Dora;
        self.adapters.push(AdapterGroup { lora, method });
        self
    }

    /// Returns true if sharding attaches [adapters](Self::lora), so the sharded module has parameters that the original
    /// module lacks.
    pub fn attaches_adapters(&self) -> bool {
        !self.adapters.is_empty()
    }

    /// Sets the steps whose gradients are audited. Default: in debug builds the first step and each step with a new
    /// order of operations; in other builds none. Set the same value on all ranks: a step is compared only if all ranks
    /// audit it.
    pub fn audit(mut self, steps: Audit) -> Self {
        self.audit = steps;
        self
    }
}
