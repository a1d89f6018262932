//! The passes that split collectives into start and wait, and move work in between.
//!
//! No later pass joins collectives.

use std::collections::{BTreeSet, VecDeque};

use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::{Collective, CollectiveKind, Graph, Node, Payload, Role, Stage};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that splits every collective into its start and its wait, so later passes can move work in between.
///
/// ```text
/// before                          after
/// %9 = all_gather(%0)             %20 = start_all_gather(%0)
///                                 %9 = wait_all_gather(%20)
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Split;

impl GraphTransform for Split {
    fn id(&self) -> PassId {
        PassId::Split
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::InsertCollectives]
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut scheduled = Vec::new();
        for node in graph.take_nodes() {
            match &node.collective {
                Some(collective) if collective.stage == Stage::Whole => {
                    let inputs: Vec<_> = node.inputs().collect();
                    let outputs: Vec<_> = node.outputs().collect();
                    let mut pending = Vec::new();
                    for output in &outputs {
                        let tensor = graph.read(*output)?;
                        let shape = tensor.shape.to_vec();
                        pending.push(graph.add_value(shape, tensor.dtype, Role::Temporary));
                    }
                    let stage = |stage| Collective {
                        stage,
                        ..collective.clone()
                    };
                    let phase = node.phase;
                    let start = stage(Stage::Start);
                    let start = graph.collective_node(start, &inputs, &pending, phase)?;
                    let wait = stage(Stage::Wait);
                    let wait = graph.collective_node(wait, &pending, &outputs, phase)?;
                    scheduled.extend([start, wait].map(|half| Node {
                        path: node.path.clone(),
                        ..half
                    }));
                }
                _ => scheduled.push(node),
            }
        }
        graph.set_nodes(scheduled);
        Ok(graph)
    }
}

/// The pass that starts each all-gather of weights right after the wait of the one before it: the next unit's weights
/// are gathered while this unit computes. One gather is in flight at a time, in addition to the unit in use.
///
/// ```text
/// before                                  after
/// start_all_gather [blocks.0]             start_all_gather [blocks.0]
/// wait_all_gather [blocks.0]              wait_all_gather [blocks.0]
/// ... blocks.0 ...                        start_all_gather [blocks.1]
/// start_all_gather [blocks.1]             ... blocks.0 ...
/// wait_all_gather [blocks.1]              wait_all_gather [blocks.1]
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Prefetch;

impl GraphTransform for Prefetch {
    fn id(&self) -> PassId {
        PassId::Prefetch
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::Split]
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let nodes = graph.take_nodes();
        let is = |node: &Node, stage| {
            let collective = node.collective.as_ref();
            collective.is_some_and(|c| {
                let is_gather = c.kind == CollectiveKind::AllGather;
                is_gather && c.payload == Payload::Parameter && c.stage == stage
            })
        };
        let mut starts: VecDeque<usize> = VecDeque::new();
        for (index, node) in nodes.iter().enumerate() {
            if is(node, Stage::Start) {
                starts.push_back(index);
            }
        }
        // No gather precedes the first one.
        let mut early: BTreeSet<usize> = BTreeSet::new();
        let mut next = starts.into_iter().skip(1);
        let mut scheduled = Vec::with_capacity(nodes.len());
        for (index, node) in nodes.iter().enumerate() {
            if early.contains(&index) {
                continue;
            }
            scheduled.push(node.clone());
            // Shards are given, so a start may move to any earlier place.
            if is(node, Stage::Wait)
                && let Some(start) = next.next()
                && start > index
            {
                early.insert(start);
                let mut moved = nodes[start].clone();
                moved.phase = node.phase;
                scheduled.push(moved);
            }
        }
        graph.set_nodes(scheduled);
        Ok(graph)
    }
}

/// The pass that moves each wait down to the first read of its result, so other work runs in between. A reduction is
/// waited for before the next one starts, because it holds whole gradients until then.
///
/// ```text
/// before                             after
/// %20 = start_reduce_scatter(%7)     %20 = start_reduce_scatter(%7)
/// %9 = wait_reduce_scatter(%20)      %8 = Float.Matmul(%1, %2)
/// %8 = Float.Matmul(%1, %2)          %9 = wait_reduce_scatter(%20)
/// %10 = NumericFloat.Add(%8, %9)     %10 = NumericFloat.Add(%8, %9)
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct SinkWaits;

impl GraphTransform for SinkWaits {
    fn id(&self) -> PassId {
        PassId::SinkWaits
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::Split]
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut scheduled: Vec<Node> = Vec::new();
        let mut held: VecDeque<Node> = VecDeque::new();
        for node in graph.take_nodes() {
            let stage = node
                .collective
                .as_ref()
                .map(|collective| (collective.kind, collective.stage));
            match stage {
                Some((_, Stage::Wait)) => {
                    held.push_back(node);
                    continue;
                }
                // Before the next reduction, the earlier ones finish in order.
                Some((kind, Stage::Start)) if kind.contract().reduces => {
                    let is_reduction = |node: &Node| {
                        let collective = node.collective.as_ref();
                        collective.is_some_and(|c| c.kind.contract().reduces)
                    };
                    release(&mut held, &mut scheduled, is_reduction);
                }
                _ => {}
            }
            let reads: Vec<TensorId> = node.inputs().collect();
            release(&mut held, &mut scheduled, |wait| {
                wait.outputs().any(|id| reads.contains(&id))
            });
            scheduled.push(node);
        }
        scheduled.extend(held);
        let mut phase = None;
        for node in &mut scheduled {
            if node.collective.is_some() {
                node.phase = phase.map_or(node.phase, |phase| node.phase.max(phase));
            }
            phase = Some(phase.map_or(node.phase, |phase: crate::graph::Phase| {
                phase.max(node.phase)
            }));
        }
        graph.set_nodes(scheduled);
        Ok(graph)
    }
}

/// Schedules the held waits for which `fits` is true.
fn release(held: &mut VecDeque<Node>, scheduled: &mut Vec<Node>, fits: impl Fn(&Node) -> bool) {
    let mut rest = VecDeque::new();
    for wait in held.drain(..) {
        if fits(&wait) {
            scheduled.push(wait)
        } else {
            rest.push_back(wait)
        }
    }
    *held = rest;
}
