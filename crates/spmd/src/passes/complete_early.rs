//! The order of gradients: each is complete, and reduced, as soon as its parts are there.
//!
//! Burn's backward visits what the forward did first at its very end: a bias that was reshaped, a table that was transposed. So
//! small gradients come late, and the bucket of their unit would wait for them with all of the unit's whole gradients.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use burn_ir::TensorId;

use crate::graph::{CollectiveKind, Node, Payload, Phase};

/// Moves reductions of gradients, and what is computed for them alone, to where their operands are complete, if they would come
/// behind another unit's collective otherwise.
pub(super) fn complete_early(nodes: Vec<Node>) -> Vec<Node> {
    let places = places(&nodes);
    let mut behind: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
    let mut stay = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.into_iter().enumerate() {
        match places.get(&index) {
            Some(place) => behind.entry(*place).or_default().push(node),
            None => stay.push((index, node)),
        }
    }
    let mut scheduled = Vec::new();
    for (index, node) in stay {
        scheduled.push(node);
        scheduled.extend(behind.remove(&index).unwrap_or_default());
    }
    scheduled
}

/// Returns the nodes that move, each with the node that stays and behind which it comes.
fn places(nodes: &[Node]) -> BTreeMap<usize, usize> {
    let readers = readers(nodes);
    let served = serve_reductions(nodes, &readers);
    let is_fence = |index: usize| nodes[index].collective.is_some() && !served.contains(&index);
    let mut fences = vec![0];
    for index in 0..nodes.len() {
        fences.push(fences[index] + usize::from(is_fence(index)));
    }
    // Phases come in order.
    let forward = nodes.iter().rposition(|node| node.phase == Phase::Forward);
    let mut writers: HashMap<TensorId, usize> = HashMap::new();
    let mut places: BTreeMap<usize, usize> = BTreeMap::new();
    for (index, node) in nodes.iter().enumerate() {
        let written = node.inputs().filter_map(|id| writers.get(&id).copied());
        // What is written by one that moves is there where that one comes.
        let ready = written.map(|writer| places.get(&writer).copied().unwrap_or(writer));
        if let Some(ready) = ready.max().max(forward)
            && node.phase == Phase::Backward
            && served.contains(&index)
            && fences[index] > fences[ready + 1]
        {
            places.insert(index, ready);
        }
        writers.extend(node.outputs().map(|id| (id, index)));
    }
    wait_for_readers(nodes, &readers, &mut places);
    places
}

/// Moves nodes no further than to the first of their readers. What is computed again in backward reads values of forward alone:
/// of every unit it would be there at once.
fn wait_for_readers(nodes: &[Node], readers: &Readers, places: &mut BTreeMap<usize, usize>) {
    for (index, node) in nodes.iter().enumerate().rev() {
        if node.collective.is_some() || !places.contains_key(&index) {
            continue;
        }
        let read_by = node.outputs().filter_map(|id| readers.get(&id)).flatten();
        let first = read_by.filter_map(|reader| places.get(reader)).min();
        // Readers that stay come behind its own place.
        match first.copied().filter(|first| *first < index) {
            Some(first) => places.insert(index, first),
            None => places.remove(&index),
        };
    }
}

/// The nodes that read each value.
type Readers = HashMap<TensorId, Vec<usize>>;

fn readers(nodes: &[Node]) -> Readers {
    let mut readers = Readers::new();
    for (index, node) in nodes.iter().enumerate() {
        for id in node.inputs() {
            readers.entry(id).or_default().push(index);
        }
    }
    readers
}

/// Returns the reductions of gradients, and the nodes of backward whose results nothing else reads.
fn serve_reductions(nodes: &[Node], readers: &Readers) -> BTreeSet<usize> {
    let mut served = BTreeSet::new();
    for (index, node) in nodes.iter().enumerate().rev() {
        let is_served = match &node.collective {
            Some(of) => of.payload == Payload::Gradient && of.kind != CollectiveKind::AllGather,
            None => {
                let mut results = node.outputs();
                let serves = |id| {
                    readers
                        .get(&id)
                        .is_some_and(|all| all.iter().all(|at| served.contains(at)))
                };
                node.phase == Phase::Backward && !node.is_opaque() && results.all(serves)
            }
        };
        if is_served {
            served.insert(index);
        }
    }
    served
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use burn::optim::AdamWConfig;
    use burn::tensor::Device;
    use burn_fsdp_collectives::ProcessGroup;
    use burn_ir::TensorId;

    use super::{complete_early, readers};
    use crate::Strategy;
    use crate::graph::{CollectiveKind, Graph, Node, Phase};
    use crate::lower::lower;
    use crate::mode::Mode;
    use crate::models::{Gpt, tokens};
    use crate::passes::schedule::Options;
    use crate::trace::{TraceConfig, trace};

    /// The units in the order in which they are gathered or reduced.
    fn visits(graph: &Graph) -> Vec<(CollectiveKind, String)> {
        let collectives = graph
            .nodes()
            .iter()
            .filter_map(|node| node.collective.as_ref());
        collectives
            .map(|of| (of.kind, of.label.to_string()))
            .collect()
    }

    /// In backward a block is reduced before the block below it is gathered: no two blocks have whole gradients at once.
    #[test]
    fn a_unit_is_reduced_before_the_next_one_is_gathered() {
        let batch = tokens(0, 0, 2, &Device::flex());
        let optimizer = AdamWConfig::new().build();
        let traced = trace(
            Gpt::new,
            Gpt::loss,
            &optimizer,
            &batch,
            TraceConfig::default(),
        )
        .unwrap();
        for options in [
            Options::default(),
            Options::default().kernels(false).fuse(false),
        ] {
            let mode =
                Mode::data_parallel(ProcessGroup::fake(2, 0), Strategy::FullShard).options(options);
            let plan = lower(traced.clone(), &mode).unwrap();
            let visits = visits(&plan);
            let at = |kind, unit: &str| {
                let mut all = visits.iter().enumerate();
                let found =
                    all.rfind(|(_, (other, label))| *other == kind && label.starts_with(unit));
                found.unwrap_or_else(|| panic!("{unit} in {visits:?}")).0
            };
            for block in 1..3 {
                let reduced = at(CollectiveKind::ReduceScatter, &format!("blocks.{block}"));
                let gathered = at(CollectiveKind::AllGather, &format!("blocks.{}", block - 1));
                assert!(reduced < gathered, "blocks.{block}: {visits:#?}");
            }
        }
    }

    /// Returns how many gathers run between each node of backward and the first that reads its result.
    fn waits(nodes: &[Node]) -> BTreeMap<TensorId, usize> {
        let readers = readers(nodes);
        let is_gather = |node: &&Node| {
            let of = node.collective.as_ref();
            of.is_some_and(|of| of.kind == CollectiveKind::AllGather)
        };
        let mut waits = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            let first = node.outputs().find_map(|id| readers.get(&id)?.first());
            if node.phase == Phase::Backward
                && node.collective.is_none()
                && let (Some(first), Some(id)) = (first, node.outputs().next())
            {
                let gathers = nodes[index..*first].iter().filter(is_gather).count();
                waits.insert(id, gathers);
            }
        }
        waits
    }

    /// What is computed again from values of forward alone comes when its unit is visited, not all at once.
    #[test]
    fn nothing_is_computed_earlier_than_it_is_read() {
        let batch = tokens(0, 0, 2, &Device::flex());
        let optimizer = AdamWConfig::new().build();
        let config = TraceConfig::default();
        let traced = trace(Gpt::new, Gpt::loss, &optimizer, &batch, config).unwrap();
        let options = Options::default().bucket(None);
        let mode =
            Mode::data_parallel(ProcessGroup::fake(2, 0), Strategy::FullShard).options(options);
        let nodes = lower(traced, &mode).unwrap().take_nodes();
        let order = |nodes: &[Node]| -> Vec<_> { nodes.iter().flat_map(Node::outputs).collect() };
        let (before, was) = (waits(&nodes), order(&nodes));
        let early = complete_early(nodes);
        assert_ne!(order(&early), was, "gradients were moved");
        for (id, gathers) in waits(&early) {
            assert!(
                gathers <= before[&id],
                "{id:?} waits for {gathers} gathers, before {}",
                before[&id]
            );
        }
    }
}
