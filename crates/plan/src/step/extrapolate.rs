//! Extrapolation of a plan to many equal blocks from plans with few.

use super::memory::{MemoryPlan, Moment};
use super::process::ProcessBytes;
use super::report::Plan;
use super::time::TimePlan;
use crate::category::{Bytes, Category};
use crate::traffic::{Tally, Traffic};
use burn_fsdp_spmd::graph::Flops;

/// A line through two plans of one model with different numbers of blocks.
#[derive(Debug, Clone, Copy)]
struct Line {
    /// `(blocks - few) / (more - few)`.
    at: f64,
}

impl Line {
    fn of(self, few: f64, more: f64) -> f64 {
        (few + (more - few) * self.at).max(0.0)
    }

    fn count(self, few: u64, more: u64) -> u64 {
        self.of(few as f64, more as f64).round() as u64
    }

    fn bytes(self, few: &Bytes, more: &Bytes) -> Bytes {
        let mut bytes = Bytes::default();
        for category in Category::ALL {
            bytes[category] = self.count(few[category], more[category]);
        }
        bytes
    }

    fn tally(self, few: Tally, more: Tally) -> Tally {
        Tally {
            operations: self.count(few.operations, more.operations),
            bytes: self.count(few.bytes, more.bytes),
            sent: self.count(few.sent, more.sent),
        }
    }

    fn time(self, few: TimePlan, more: TimePlan) -> TimePlan {
        TimePlan {
            step: self.of(few.step, more.step),
            compute: self.of(few.compute, more.compute),
            communication: self.of(few.communication, more.communication),
            exposed: self.of(few.exposed, more.exposed),
        }
    }
}

impl Plan {
    /// Extrapolates the plan of `blocks` equal blocks from two plans with fewer blocks, each given with its number of
    /// blocks.
    ///
    /// Every block costs the same, so all numbers are linear in the number of blocks. This includes the peak as long as
    /// all plans peak at the same node, which is the case in a decoder once activations outweigh the loss. The moments
    /// are copied from `more`, with each category scaled to its extrapolated peak.
    pub fn extrapolated(few: (&Self, usize), more: (&Self, usize), blocks: usize) -> Self {
        let ((few, few_blocks), (more, more_blocks)) = (few, more);
        let span = more_blocks as f64 - few_blocks as f64;
        let line = Line {
            at: (blocks as f64 - few_blocks as f64) / span,
        };
        let peak = line.bytes(&few.memory.peak, &more.memory.peak);
        Self {
            num_ranks: more.num_ranks,
            rank: more.rank,
            num_nodes: line.count(few.num_nodes as u64, more.num_nodes as u64) as usize,
            peak_at: format!(
                "{}; extrapolated from {few_blocks} and {more_blocks} blocks",
                unnumbered(&more.peak_at)
            ),
            memory: MemoryPlan {
                at_rest: line.bytes(&few.memory.at_rest, &more.memory.at_rest),
                peak_node: None,
                moments: scaled(&more.memory, &peak),
                reused_in_place: line
                    .count(few.memory.reused_in_place, more.memory.reused_in_place),
                peak,
            },
            process: ProcessBytes::of(peak.total()),
            peak_without_reuse: line.count(few.peak_without_reuse, more.peak_without_reuse),
            traffic: Traffic {
                all_gather: line.tally(few.traffic.all_gather, more.traffic.all_gather),
                reduce_scatter: line.tally(few.traffic.reduce_scatter, more.traffic.reduce_scatter),
                all_reduce: line.tally(few.traffic.all_reduce, more.traffic.all_reduce),
                all_to_all: line.tally(few.traffic.all_to_all, more.traffic.all_to_all),
            },
            flops: Flops {
                matmul: line.count(few.flops.matmul, more.flops.matmul),
                convolution: line.count(few.flops.convolution, more.flops.convolution),
                pointwise: line.count(few.flops.pointwise, more.flops.pointwise),
            },
            time: line.time(few.time, more.time),
            machine: more.machine.clone(),
        }
    }
}

/// Strips the index from the description of a node.
fn unnumbered(node: &str) -> &str {
    node.split_once(": ").map_or(node, |(_, what)| what)
}

/// Scales the moments of a plan to another peak.
fn scaled(plan: &MemoryPlan, peak: &Bytes) -> Vec<Moment> {
    let scale = |bytes: &Bytes| {
        let mut scaled = *bytes;
        for category in Category::ALL {
            if plan.peak[category] > 0 {
                let factor = peak[category] as f64 / plan.peak[category] as f64;
                scaled[category] = (bytes[category] as f64 * factor) as u64;
            }
        }
        scaled
    };
    let total = plan.peak.total().max(1) as f64;
    let whole = peak.total() as f64 / total;
    let moments = plan.moments.iter();
    moments
        .map(|moment| Moment {
            node: moment.node,
            during: scale(&moment.during),
            after: (moment.after as f64 * whole) as u64,
        })
        .collect()
}
