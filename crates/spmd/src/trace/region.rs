//! Regions of a loss that a model marks for recomputation in backward.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{Device, Tensor};
use burn_ir::{OperationIr, TensorId};

use super::capture::float_id;
use crate::graph::Graph;

/// The marks before and after a region. A mark is a tensor that nothing reads.
pub(super) type Marks = [TensorId; 2];

thread_local! {
    /// The regions in the trace that runs on this thread; `None` outside of traces.
    static REGIONS: RefCell<Option<Vec<Marks>>> = const { RefCell::new(None) };
}

/// Returns true inside the loss of a step that is being traced.
pub fn is_traced() -> bool {
    REGIONS.with_borrow(Option::is_some)
}

/// Runs `body`, a part of a loss on `device`, as a region: its inputs and outputs are kept for backward, which
/// recomputes its other values, as for a unit in [`RecomputeUnits`](crate::passes::RecomputeUnits). Outside of a trace,
/// this only runs `body`.
pub fn traced_region<T>(device: &Device, body: impl FnOnce() -> T) -> T {
    let before = mark(device);
    let result = body();
    if let (Some(before), Some(behind)) = (before, mark(device)) {
        REGIONS.with_borrow_mut(|regions| {
            if let Some(regions) = regions {
                regions.push([before, behind]);
            }
        });
    }
    result
}

/// Records a mark. Returns `None` outside of traces.
fn mark(device: &Device) -> Option<TensorId> {
    let mark = is_traced().then(|| float_id(&Tensor::<1>::empty([1], device)));
    mark.flatten().map(|mark| mark.id)
}

/// Collects the regions of one trace. Dropping it restores the regions of the enclosing trace, if there is one.
pub(super) struct Regions(Option<Vec<Marks>>);

impl Regions {
    pub(super) fn begin() -> Self {
        Self(REGIONS.replace(Some(Vec::new())))
    }

    /// Stops collecting regions, and returns the collected ones.
    pub(super) fn taken(&self) -> Vec<Marks> {
        REGIONS.with_borrow_mut(|regions| regions.take().unwrap_or_default())
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        REGIONS.set(self.0.take());
    }
}

/// Returns the values recorded between the marks of each region.
pub(super) fn values(operations: &[OperationIr], regions: &[Marks]) -> Vec<BTreeSet<TensorId>> {
    let mut positions = BTreeMap::new();
    for (position, operation) in operations.iter().enumerate() {
        positions.extend(operation.outputs().map(|output| (output.id, position)));
    }
    let between = |marks: &Marks| {
        let [before, behind] = marks.map(|mark| positions.get(&mark).copied());
        let inside = &operations[before?..behind?];
        let values = inside.iter().flat_map(OperationIr::outputs);
        Some(values.map(|value| value.id).collect())
    };
    regions.iter().filter_map(between).collect()
}

/// Declares the regions in the graph. `ids` maps recorded values to the graph's values.
pub(super) fn declare(
    graph: &mut Graph,
    regions: Vec<BTreeSet<TensorId>>,
    ids: &BTreeMap<TensorId, TensorId>,
) {
    for region in regions {
        let values: BTreeSet<_> = region
            .iter()
            .filter_map(|id| ids.get(id).copied())
            .collect();
        if !values.is_empty() {
            graph.add_region(values);
        }
    }
}
