//! The plan of a graph, as text, JSON and SVG.

use std::fmt;

use serde::Serialize;

use super::memory::MemoryPlan;
use super::process::ProcessBytes;
use super::time::TimePlan;
use crate::machine::Machine;
#[cfg(feature = "draw")]
use crate::picture;
use crate::size::{Breakdown, Size};
use crate::traffic::Traffic;
use burn_fsdp_spmd::Error;
use burn_fsdp_spmd::graph::Flops;
use burn_fsdp_spmd::graph::Graph;

/// The planned memory, traffic and time of one rank's step.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_spmd::Strategy;
/// use burn_fsdp_spmd::passes::schedule::{Options, pipeline};
/// use burn_fsdp_plan::{Machine, Plan};
/// use burn_fsdp_spmd::trace::{TraceConfig, trace};
///
/// let batch = Tensor::<2>::ones([8, 64], &Device::flex());
/// let graph = trace(
///     |device| LinearConfig::new(64, 64).init(device),
///     |model: &Linear, x: Tensor<2>| model.forward(x).square().mean(),
///     &AdamWConfig::new().build(),
///     &batch,
///     TraceConfig::default(),
/// )?;
/// let graph = pipeline(4, Strategy::FullShard, &Options::default(), &[]).run(graph)?;
/// let plan = Plan::new(&graph, &Machine::cpu(), 0)?;
/// // This rank has a quarter of the weight, the bias and their two states each.
/// assert_eq!(plan.memory.at_rest.total(), 3 * 4 * (64 * 64 + 64) / 4);
/// println!("{plan}");
/// # Ok::<(), burn_fsdp_spmd::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Number of ranks.
    pub num_ranks: usize,
    /// The rank for which the plan was created.
    pub rank: usize,
    /// Number of nodes in the schedule.
    pub num_nodes: usize,
    /// A description of the node at which memory peaks.
    pub peak_at: String,
    /// Live bytes over the step.
    pub memory: MemoryPlan,
    /// An estimate of the rank's share of its process's memory.
    pub process: ProcessBytes,
    /// Peak memory in bytes if no operation overwrote its operand.
    pub peak_without_reuse: u64,
    /// The collectives of the step.
    pub traffic: Traffic,
    /// Number of floating-point operations.
    pub flops: Flops,
    /// The time estimate.
    pub time: TimePlan,
    /// The machine that runs the step.
    pub machine: Machine,
}

impl Plan {
    /// Plans a step of a scheduled graph on rank `rank`.
    ///
    /// # Errors
    ///
    /// Same as [`MemoryPlan::new`].
    pub fn new(graph: &Graph, machine: &Machine, rank: usize) -> Result<Self, Error> {
        let memory = MemoryPlan::new(graph, rank)?;
        Ok(Self {
            num_ranks: graph.num_ranks(),
            rank,
            num_nodes: graph.nodes().len(),
            peak_at: words(graph, memory.peak_node),
            process: memory.process(),
            peak_without_reuse: MemoryPlan::without_reuse(graph, rank)?.peak_bytes(),
            traffic: Traffic::of_graph(graph),
            flops: Flops::of_graph(graph, rank)?,
            time: TimePlan::of_graph(graph, machine, rank)?,
            machine: machine.clone(),
            memory,
        })
    }

    /// Returns the plan as a JSON object.
    ///
    /// # Errors
    ///
    /// [`Error::Internal`] if a number cannot be represented, such as an infinite bandwidth.
    pub fn to_json(&self) -> Result<String, Error> {
        serde_json::to_string(self).map_err(|error| Error::Internal(error.to_string()))
    }

    /// Draws memory over the step as an SVG, stacked by category and with the peak marked. Requires the feature `draw`.
    #[cfg(feature = "draw")]
    pub fn to_svg(&self) -> String {
        let series: Vec<_> = self.memory.moments.iter().map(|m| m.during).collect();
        let title = format!("Planned memory of rank {} of {}", self.rank, self.num_ranks);
        picture::draw(&title, "operation", &series)
    }
}

/// Describes the node at which memory peaks.
fn words(graph: &Graph, node: Option<usize>) -> String {
    match node.and_then(|index| Some((index, graph.nodes().get(index)?))) {
        Some((index, node)) => {
            let path = node.path.as_ref().map(|path| format!(" of {path}"));
            let path = path.unwrap_or_default();
            format!("node {index}: {} in {}{path}", node.name(), node.phase)
        }
        None => "the arrival of the batch".to_owned(),
    }
}

/// Prints a human-readable summary.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, nodes) = (self.num_ranks, self.num_nodes);
        writeln!(f, "rank {} of {ranks}, {nodes} nodes", self.rank)?;
        let peak = self.memory.peak_bytes();
        writeln!(f, "peak    {}  at {}", Size(peak), self.peak_at)?;
        write!(f, "{}", Breakdown(&self.memory.peak))?;
        writeln!(f, "at rest {}", Size(self.memory.at_rest.total()))?;
        let without = self.peak_without_reuse;
        writeln!(
            f,
            "in place: without it the peak is {}",
            Size(without).trimmed()
        )?;
        writeln!(f, "process {}", self.process)?;
        for (kind, tally) in self.traffic.by_kind() {
            if tally.operations > 0 {
                let (bytes, sent) = (Size(tally.bytes), Size(tally.sent));
                let name = kind.as_str();
                let operations = tally.operations;
                writeln!(f, "{name:<14} {operations:>6}  {bytes} whole, {sent} sent")?;
            }
        }
        let Flops {
            matmul,
            convolution,
            pointwise,
        } = self.flops;
        writeln!(
            f,
            "operations: {} in matrix products, {} in convolutions, {} in others",
            Count(matmul),
            Count(convolution),
            Count(pointwise)
        )?;
        let TimePlan {
            step,
            compute,
            communication,
            exposed,
        } = self.time;
        write!(
            f,
            "time on {}: {step:.4} s per step; {compute:.4} s of operations, {communication:.4} s of collectives, \
             {exposed:.4} s of them not overlapped",
            self.machine.name
        )
    }
}

/// A number. Prints with the largest decimal prefix for which it is at least 1.
struct Count(u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const PREFIXES: [&str; 6] = ["", " k", " M", " G", " T", " P"];
        let mut value = self.0 as f64;
        let mut prefix = 0;
        while value >= 1000.0 && prefix + 1 < PREFIXES.len() {
            value /= 1000.0;
            prefix += 1;
        }
        match prefix {
            0 => write!(f, "{}", self.0),
            _ => write!(f, "{value:.2}{}", PREFIXES[prefix]),
        }
    }
}
