//! The passes of a compiled step, in order.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{
    AssignUnits, Bucket, ClipGradients, CommonSubexpressions, DeadCode, Deduplicate,
    EarlyOptimizer, FusePointwise, InsertCollectives, Liveness, LossChunks, Pipeline, Prefetch,
    Recompute, RecomputeUnits, Regather, SelectKernels, SinkWaits, Split, StandIns, Units,
    UseKernels,
};
use crate::Precision;
use crate::error::Error;
use crate::graph::Graph;
use crate::pass_id::PassId;
use crate::place::DataParallel;
use crate::ranks::DATA_AXIS;
use crate::transform::GraphTransform;
use burn_fsdp_mesh::{Axis, Clip, LossScaling, Pattern, Strategy};

/// Options of the passes of a compiled step.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// The modules whose parameters are communicated together: derived from the parameters' paths by default.
    pub units: Units,
    /// True to use kernels for functions that Burn composes of many operations, see [`UseKernels`], and for single
    /// operations, see [`SelectKernels`]. This is the default on Burn's CPU backend. Without kernels, a step on one
    /// rank is bit-identical to Burn's own.
    pub kernels: bool,
    /// True to fuse chains of pointwise operations, with bit-identical results, see [`FusePointwise`]. This is the
    /// default on Burn's CPU backend.
    pub fuse: bool,
    /// Compute type of parameters and reduction type of gradients; by default the module's type. Master weights,
    /// optimizer states and the optimizer's arithmetic keep the module's type.
    pub precision: Precision,
    /// Recomputation of cheap forward values in backward: on by default.
    pub recompute: Option<Recompute>,
    /// The units whose forward is recomputed in backward, with only their inputs and outputs kept: none by default, see
    /// [`RecomputeUnits`].
    pub recompute_units: Vec<Pattern>,
    /// True to free gathered weights after forward and gather them again in backward: the default.
    pub reshard_after_forward: bool,
    /// Number of parts of the rows for which the loss and its gradients are computed one after the other, so that the
    /// logits are never whole: 1 by default, see [`LossChunks`].
    pub loss_chunks: usize,
    /// Gradient clipping by norm: off by default.
    pub clip: Option<Clip>,
    /// Scaling of the loss, to keep 16-bit gradients from vanishing: off by default.
    pub loss_scaling: Option<LossScaling>,
    /// Maximum sizes of joined collectives; `None` for one collective per tensor.
    pub bucket: Option<Bucket>,
    /// True to start the next unit's gather before this unit computes. `None`, the default, is true if the group
    /// [overlaps](burn_fsdp_collectives::ProcessGroup::overlaps), as groups of processes do. It is false for ranks that
    /// are threads, which gain nothing from it.
    pub prefetch: Option<bool>,
    /// Position of the optimizer in the step: in backward by default.
    pub optimizer: OptimizerPlace,
}

/// The place in the step where the optimizer updates a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OptimizerPlace {
    /// At the end of the step, after backward.
    AtEnd,
    /// In backward, as soon as the gradient is complete and the parameter is no longer read.
    InBackward,
    /// In the next forward, before the parameter's first read, see [`DeferOptimizer`](super::DeferOptimizer).
    InNextForward,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            units: Units::by_path(),
            kernels: true,
            fuse: true,
            precision: Precision::default(),
            recompute: Some(Recompute::default()),
            recompute_units: Vec::new(),
            loss_chunks: 1,
            reshard_after_forward: true,
            clip: None,
            loss_scaling: None,
            bucket: Some(Bucket::default()),
            prefetch: None,
            optimizer: OptimizerPlace::InBackward,
        }
    }
}

impl Options {
    /// Sets the modules whose parameters are communicated together.
    #[must_use]
    pub fn units(mut self, units: Units) -> Self {
        self.units = units;
        self
    }

    /// Sets whether kernels replace operations of Burn.
    #[must_use]
    pub fn kernels(mut self, uses: bool) -> Self {
        self.kernels = uses;
        self
    }

    /// Sets whether chains of pointwise operations are fused.
    #[must_use]
    pub fn fuse(mut self, fuses: bool) -> Self {
        self.fuse = fuses;
        self
    }

    /// Sets mixed precision. Parameters are cast before they are gathered. Reduced gradients have the parameters' type,
    /// and the returned loss has 32 bits. Tensors of the batch keep their types: the loss closure casts those that it
    /// combines with parameters. `f16` needs [loss scaling](Self::scale_loss).
    ///
    /// With placements, a rank casts its part of a parameter where it is read. Activations are summed over ranks in the
    /// type in which they were computed. Addends of gradients are sent as in data parallelism: their first sum has the
    /// parameter's type.
    ///
    /// Flat shards are cast at the beginning of the step, and the casts stay until their last gather. With
    /// [`OptimizerPlace::InNextForward`] the whole optimizer therefore runs before the first gather.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets the values that are recomputed in backward instead of being kept; `None` for none.
    #[must_use]
    pub fn recompute(mut self, recompute: impl Into<Option<Recompute>>) -> Self {
        self.recompute = recompute.into();
        self
    }

    /// Sets the units whose forward is recomputed in backward, as in [activation checkpointing](RecomputeUnits).
    ///
    /// ```
    /// use burn_fsdp_spmd::passes::schedule::Options;
    ///
    /// let options = Options::default().recompute_units(["blocks.*"]);
    /// ```
    #[must_use]
    pub fn recompute_units<P: Into<Pattern>>(mut self, units: impl IntoIterator<Item = P>) -> Self {
        self.recompute_units = units.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the number of parts of the rows for which the loss and its gradients are computed one after the other. The
    /// logits are then never whole. For a large vocabulary they are the peak of a step's memory. See [`LossChunks`].
    ///
    /// Not supported with placements.
    #[must_use]
    pub fn loss_chunks(mut self, parts: usize) -> Self {
        self.loss_chunks = parts;
        self
    }

    /// Sets whether gathered weights are freed after forward and gathered again in backward.
    #[must_use]
    pub fn reshard_after_forward(mut self, reshard: bool) -> Self {
        self.reshard_after_forward = reshard;
        self
    }

    /// Sets the maximum norm of all gradients together; `None` for no limit. With a limit, no parameter is updated
    /// until all gradients are available.
    #[must_use]
    pub fn clip_grad_norm(mut self, clip: impl Into<Option<Clip>>) -> Self {
        self.clip = clip.into();
        self
    }

    /// Sets how the loss is scaled, which keeps small gradients of `f16` from vanishing; `None` for no scaling.
    /// Gradients are divided by the scale when all micro-batches are summed, before they are clipped. If a gradient has
    /// overflowed on any rank, all ranks skip the step and continue with a smaller scale
    /// ([`CompiledStep::was_skipped`](crate::CompiledStep::was_skipped)). A step with loss scaling always runs as a
    /// step over micro-batches, even if there is only one, with the optimizer at the end. Losses are returned unscaled.
    #[must_use]
    pub fn scale_loss(mut self, scaling: impl Into<Option<LossScaling>>) -> Self {
        self.loss_scaling = scaling.into();
        self
    }

    /// Sets the maximum sizes of joined collectives; `None` for one collective per tensor.
    #[must_use]
    pub fn bucket(mut self, bucket: impl Into<Option<Bucket>>) -> Self {
        self.bucket = bucket.into();
        self
    }

    /// Sets whether the next unit's gather starts before a unit computes; `None` starts it early if the process group
    /// can overlap communication.
    #[must_use]
    pub fn prefetch(mut self, prefetch: impl Into<Option<bool>>) -> Self {
        self.prefetch = prefetch.into();
        self
    }

    /// Sets when the optimizer updates parameters.
    #[must_use]
    pub fn optimizer(mut self, place: OptimizerPlace) -> Self {
        self.optimizer = place;
        self
    }

    /// Returns options without optional passes.
    pub fn none() -> Self {
        Self {
            units: Units::by_path(),
            kernels: false,
            fuse: false,
            precision: Precision::default(),
            recompute: None,
            recompute_units: Vec::new(),
            loss_chunks: 1,
            reshard_after_forward: false,
            clip: None,
            loss_scaling: None,
            bucket: None,
            prefetch: Some(false),
            optimizer: OptimizerPlace::AtEnd,
        }
    }
}

/// Returns the passes for the given number of ranks. The user's `transforms` run before clipping and bucketing.
///
/// With [`OptimizerPlace::InNextForward`], the [`last`] passes are missing:
/// [`DeferOptimizer::split`](super::DeferOptimizer::split) applies them.
pub fn pipeline(
    num_ranks: usize,
    style: impl Into<DataParallel>,
    options: &Options,
    transforms: &[Arc<dyn GraphTransform>],
) -> Pipeline {
    let style = style.into();
    // A single rank takes the same path as many.
    let insert = InsertCollectives {
        num_ranks,
        style,
        axis: DATA_AXIS.into(),
        replicate: None,
        precision: options.precision.clone(),
        owners: BTreeMap::new(),
    };
    let axis = Axis {
        name: DATA_AXIS.to_owned(),
        size: num_ranks,
    };
    let scheduled = divided(insert, options, vec![axis], transforms);
    match options.optimizer {
        OptimizerPlace::InNextForward => scheduled,
        OptimizerPlace::AtEnd | OptimizerPlace::InBackward => scheduled.and(last(options)),
    }
}

/// Returns the pipeline of data parallelism, on a mesh of these axes, without the last passes.
pub(crate) fn divided(
    insert: InsertCollectives,
    options: &Options,
    axes: Vec<Axis>,
    transforms: &[Arc<dyn GraphTransform>],
) -> Pipeline {
    let is_full = insert.style == Strategy::FullShard.into();
    let options = &Options {
        reshard_after_forward: options.reshard_after_forward && is_full,
        ..options.clone()
    };
    if insert.style == DataParallel::Automatic {
        return placed(insert, options, axes, transforms);
    }
    prepared(options)
        .and(loss_chunks(options))
        .and(kernels(options))
        .and(units_again(options))
        .and(cheap_again(options))
        .then(insert)
        .then(Deduplicate)
        .and(scheduled(options, axes, transforms))
}

/// Returns the pipeline around a pass that places every value, without the last passes. The placing pass only handles
/// Burn's operations, and may cut a dim that a kernel needs whole. Kernels therefore come after it, and the choice of
/// cheap values comes after the kernels.
pub fn placed(
    place: impl GraphTransform + 'static,
    options: &Options,
    axes: Vec<Axis>,
    transforms: &[Arc<dyn GraphTransform>],
) -> Pipeline {
    prepared(options)
        .and(units_again(options))
        .then(place)
        .then(Deduplicate)
        .and(kernels(options))
        .and(cheap_again(options))
        .and(scheduled(options, axes, transforms))
}

/// Returns the first passes, for the graph of one rank.
fn prepared(options: &Options) -> Pipeline {
    Pipeline::new()
        .then(AssignUnits(options.units.clone()))
        .then(DeadCode)
        .then(CommonSubexpressions)
        .then(StandIns)
}

/// Returns the pass that computes the loss in parts, if requested.
fn loss_chunks(options: &Options) -> Pipeline {
    match options.loss_chunks {
        0 | 1 => Pipeline::new(),
        parts => Pipeline::new().then(LossChunks { parts }),
    }
}

fn kernels(options: &Options) -> Pipeline {
    if options.kernels {
        Pipeline::new().then(UseKernels)
    } else {
        Pipeline::new()
    }
}

/// Returns the pass that recomputes the chosen units, and the regions that the loss names, in backward.
fn units_again(options: &Options) -> Pipeline {
    let units = options.recompute_units.clone();
    Pipeline::new().then(RecomputeUnits { units })
}

/// Returns the pass that recomputes cheap values in backward, if requested.
fn cheap_again(options: &Options) -> Pipeline {
    match options.recompute {
        Some(recompute) => Pipeline::new().then(recompute),
        None => Pipeline::new(),
    }
}

/// Returns the passes between the insertion of collectives and the [`last`] passes.
fn scheduled(
    options: &Options,
    axes: Vec<Axis>,
    transforms: &[Arc<dyn GraphTransform>],
) -> Pipeline {
    let mut pipeline = Pipeline::new();
    if options.reshard_after_forward {
        pipeline = pipeline.then(Regather);
    }
    for transform in transforms {
        pipeline = pipeline.then(Shared(transform.clone()));
    }
    if let Some(clip) = options.clip {
        pipeline = pipeline.then(ClipGradients { clip, axes });
    }
    if let Some(bucket) = options.bucket {
        pipeline = pipeline.then(bucket);
    }
    if options.prefetch == Some(true) {
        pipeline = pipeline.then(Split).then(Prefetch).then(SinkWaits);
    }
    match options.optimizer {
        OptimizerPlace::InBackward => pipeline.then(EarlyOptimizer),
        // An optimizer in the next forward is moved when the step is split.
        OptimizerPlace::AtEnd | OptimizerPlace::InNextForward => pipeline,
    }
}

/// Returns the passes that run last, on each graph of a step.
pub fn last(options: &Options) -> Pipeline {
    let mut pipeline = Pipeline::new();
    if options.fuse {
        pipeline = pipeline.then(FusePointwise);
    }
    if options.kernels {
        pipeline = pipeline.then(SelectKernels);
    }
    pipeline.then(Liveness)
}

/// A pass that several pipelines share.
#[derive(Debug)]
struct Shared(Arc<dyn GraphTransform>);

impl GraphTransform for Shared {
    fn id(&self) -> PassId {
        self.0.id()
    }

    fn after(&self) -> &'static [PassId] {
        self.0.after()
    }

    fn before(&self) -> &'static [PassId] {
        self.0.before()
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        self.0.transform(graph)
    }
}
