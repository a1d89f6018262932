//! The estimate of a step's time.

use std::collections::BTreeMap;

use burn_ir::{FloatOperationIr, OperationIr, TensorId};
use serde::Serialize;

use crate::machine::Machine;
use burn_fsdp_spmd::Error;
use burn_fsdp_spmd::graph::{Collective, Graph, Node, Stage};
use burn_fsdp_spmd::graph::{Flops, touched_bytes};

/// An estimate of one step on one rank, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct TimePlan {
    /// The whole step, from the batch to the new parameters.
    pub step: f64,
    /// Time of computation.
    pub compute: f64,
    /// Time of collectives, whether or not they overlap with computation.
    pub communication: f64,
    /// Time spent waiting for collectives, while nothing computes.
    pub exposed: f64,
}

impl TimePlan {
    /// Estimates the time of a scheduled graph on rank `rank`.
    ///
    /// Nodes run in order. Each takes as long as its arithmetic or its memory traffic, whichever is longer (the
    /// roofline model: Williams, Waterman, Patterson, 2009). Collectives run one at a time and overlap with other nodes
    /// from their start to their wait. A collective that is not split is waited for immediately. Nodes that only other
    /// ranks run, for parameters that they own, take this rank no time.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] if ranks own values and the graph does not have this rank.
    pub fn of_graph(graph: &Graph, machine: &Machine, rank: usize) -> Result<Self, Error> {
        let absent = graph.absent_on(rank)?;
        let mut clock = Clock::default();
        for node in graph.nodes().iter().filter(|node| !absent.skips(node)) {
            clock.run(node, graph.num_ranks(), machine);
        }
        let Clock { mut time, now, .. } = clock;
        time.step = now;
        Ok(time)
    }
}

#[derive(Default)]
struct Clock {
    time: TimePlan,
    now: f64,
    /// Time at which the last collective ends.
    network_free: f64,
    ends: BTreeMap<TensorId, f64>,
}

impl Clock {
    fn run(&mut self, node: &Node, num_ranks: usize, machine: &Machine) {
        let Some(collective) = &node.collective else {
            let seconds = node_seconds(node, machine);
            self.time.compute += seconds;
            self.now += seconds;
            return;
        };
        if collective.stage == Stage::Wait {
            let ends = node.inputs().filter_map(|id| self.ends.remove(&id));
            let until = ends.fold(0.0, f64::max);
            self.wait(until);
            return;
        }
        let seconds = collective_seconds(collective, num_ranks, machine);
        self.time.communication += seconds;
        self.network_free = self.network_free.max(self.now) + seconds;
        match collective.stage {
            Stage::Start => {
                let end = self.network_free;
                self.ends.extend(node.outputs().map(|output| (output, end)));
            }
            _ => self.wait(self.network_free),
        }
    }

    fn wait(&mut self, until: f64) {
        self.time.exposed += (until - self.now).max(0.0);
        self.now = self.now.max(until);
    }
}

pub(crate) fn node_seconds(node: &Node, machine: &Machine) -> f64 {
    let flops = Flops::of_node(node);
    let size = match &node.operation {
        OperationIr::Float(dtype, FloatOperationIr::Matmul(_)) => dtype.size(),
        operation => operation.outputs().next().map_or(4, |out| out.dtype.size()),
    };
    let arithmetic = (flops.matmul + flops.convolution) as f64 / machine.flops(size);
    arithmetic.max(touched_bytes(node) as f64 / machine.memory_bandwidth)
}

fn collective_seconds(collective: &Collective, num_ranks: usize, machine: &Machine) -> f64 {
    let kind = collective.kind;
    let bytes = kind.circulating_bytes(collective.num_bytes() as u64, num_ranks);
    f64::from(kind.rounds()) * machine.gather_seconds(bytes as f64, num_ranks)
}
