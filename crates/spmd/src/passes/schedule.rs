//! The passes of a compiled step, in order.

use std::sync::Arc;

use super::{
    AssignUnits, Bucket, CommonSubexpressions, DeadCode, Deduplicate, EarlyOptimizer,
    InsertCollectives, Liveness, Pipeline, Prefetch, Recompute, Regather, SinkWaits, Split,
    StandIns, Units,
};
use crate::error::Error;
use crate::graph::Graph;
use crate::pass_id::PassId;
use crate::place::DataParallel;
use crate::ranks::DATA_AXIS;
use crate::transform::GraphTransform;

/// Which passes run, and how.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// The modules whose parameters travel together: by the paths, unless patterns are given.
    pub units: Units,
    /// Compute cheap values again in backward instead of keeping them: on by default.
    pub recompute: Option<Recompute>,
    /// Free gathered weights after forward and gather them again in backward: on by default.
    pub reshard_after_forward: bool,
    /// How collectives are joined; `None` for one per tensor.
    pub bucket: Option<Bucket>,
    /// Start the next unit's gather before this unit computes: off by default, because ranks that are
    /// threads move the bytes when they wait.
    pub prefetch: bool,
    /// When parameters are updated: in backward by default.
    pub optimizer: OptimizerPlace,
}

/// Where the optimizer's part for a parameter runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OptimizerPlace {
    /// After backward.
    AtEnd,
    /// As soon as the gradient is complete and nothing reads the parameter any more.
    InBackward,
    /// Before the parameter is read first in the next step, see [`DeferOptimizer`](super::DeferOptimizer).
    InNextForward,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            units: Units::by_path(),
            recompute: Some(Recompute::default()),
            reshard_after_forward: true,
            bucket: Some(Bucket::default()),
            prefetch: false,
            optimizer: OptimizerPlace::InBackward,
        }
    }
}

impl Options {
    /// Only what is needed for the step to be right.
    pub fn none() -> Self {
        Self {
            units: Units::by_path(),
            recompute: None,
            reshard_after_forward: false,
            bucket: None,
            prefetch: false,
            optimizer: OptimizerPlace::AtEnd,
        }
    }
}

/// The passes for that many ranks. `transforms` are the user's, and come before bucketing.
///
/// With [`OptimizerPlace::InNextForward`] what they give has still to be split.
pub fn pipeline(
    num_ranks: usize,
    style: DataParallel,
    options: &Options,
    transforms: &[Arc<dyn GraphTransform>],
) -> Pipeline {
    // One rank takes the same path as many.
    let insert = InsertCollectives {
        num_ranks,
        style,
        axis: DATA_AXIS.into(),
    };
    let options = Options {
        reshard_after_forward: options.reshard_after_forward && style == DataParallel::FullyShard,
        ..options.clone()
    };
    pipeline_with(insert, &options, transforms)
}

/// The passes around one that inserts collectives.
pub(crate) fn pipeline_with(
    insert: impl GraphTransform + 'static,
    options: &Options,
    transforms: &[Arc<dyn GraphTransform>],
) -> Pipeline {
    let mut pipeline = Pipeline::new()
        .then(AssignUnits(options.units.clone()))
        .then(DeadCode)
        .then(CommonSubexpressions)
        .then(StandIns);
    if let Some(recompute) = options.recompute {
        pipeline = pipeline.then(recompute);
    }
    pipeline = pipeline.then(insert).then(Deduplicate);
    if options.reshard_after_forward {
        pipeline = pipeline.then(Regather);
    }
    for transform in transforms {
        pipeline = pipeline.then(Shared(transform.clone()));
    }
    if let Some(bucket) = options.bucket {
        pipeline = pipeline.then(bucket);
    }
    if options.prefetch {
        pipeline = pipeline.then(Split).then(Prefetch).then(SinkWaits);
    }
    match options.optimizer {
        OptimizerPlace::AtEnd => pipeline.then(Liveness),
        OptimizerPlace::InBackward => pipeline.then(EarlyOptimizer).then(Liveness),
        // There are three graphs after that, see `DeferOptimizer::split`.
        OptimizerPlace::InNextForward => pipeline,
    }
}

/// A pass that is used by several pipelines.
#[derive(Debug)]
struct Shared(Arc<dyn GraphTransform>);

impl GraphTransform for Shared {
    fn id(&self) -> PassId {
        self.0.id()
    }

    fn after(&self) -> &'static [PassId] {
        &[]
    }

    fn before(&self) -> &'static [PassId] {
        &[]
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        self.0.transform(graph)
    }
}
