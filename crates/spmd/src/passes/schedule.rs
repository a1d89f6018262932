//! The passes of a compiled step, in order.

use std::sync::Arc;

use super::{DeadCode, GraphTransform, InsertCollectives, Liveness, Pipeline};
use crate::Error;
use crate::graph::Graph;
use crate::place::DataParallel;

/// Which passes run, and how.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Options {}

impl Default for Options {
    fn default() -> Self {
        Self {}
    }
}

/// The passes for that many ranks. `transforms` are the user's.
pub fn pipeline(
    num_ranks: usize,
    style: DataParallel,
    options: &Options,
    transforms: &[Arc<dyn GraphTransform>],
) -> Pipeline {
    let _ = options;
    let mut pipeline = Pipeline::new().then(DeadCode);
    // One rank alone has nobody to exchange with; a group of one has itself.
    pipeline = pipeline.then(InsertCollectives {
        num_ranks,
        style,
        axis: "data".into(),
    });
    for transform in transforms {
        pipeline = pipeline.then(Shared(transform.clone()));
    }
    pipeline.then(Liveness)
}

/// A pass that is used by several pipelines.
#[derive(Debug)]
struct Shared(Arc<dyn GraphTransform>);

impl GraphTransform for Shared {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn after(&self) -> &'static [&'static str] {
        self.0.after()
    }

    fn before(&self) -> &'static [&'static str] {
        self.0.before()
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        self.0.transform(graph)
    }
}
