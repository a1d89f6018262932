//! The proof of a plan, as printed.

use std::fmt;

use burn_fsdp::Mesh;
use burn_fsdp::internals::compile::graph::Graph;
use burn_fsdp::internals::compile::passes::PassId;
use burn_fsdp::internals::compile::{Error, prove};
use burn_fsdp::internals::plan::TracedEstimate;
use serde::Serialize;

/// An estimate, with a proof if one was requested.
#[derive(Serialize)]
pub(super) struct Proved<'a> {
    #[serde(flatten)]
    pub(super) estimate: &'a TracedEstimate,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) proof: Option<Proof>,
}

/// A proof of the plan, on a narrow version of the model.
#[derive(Serialize)]
pub(super) struct Proof {
    blocks: usize,
    ranks: usize,
    num_nodes: usize,
    num_tensors: usize,
    seconds: f64,
    /// Passes that produced the plan, in order.
    passes: Vec<String>,
    /// Operations that the proof treats as opaque: it only assumes that equal operands give equal results.
    taken_as_they_are: Vec<String>,
    /// Kernels that were compared, on random numbers, with equivalent simple operations.
    checked_in_floats: Vec<String>,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, ranks, .. } = self;
        write!(
            f,
            "\nproved in {:.1} s: a plan of all {blocks} blocks on {ranks} ranks computes the traced step, with {} \
             tensors equal modulo 2^61 - 1\n  by the passes {}\n  assuming blocks of 8 elements and 4 tokens \
             instead of the planned sizes (on which the joining of collectives depends), exact sums, and that \
             kernels compute their compositions\n",
            self.seconds,
            self.num_tensors,
            self.passes.join(", "),
        )?;
        if !self.checked_in_floats.is_empty() {
            let kernels = self.checked_in_floats.join(", ");
            writeln!(f, "  checked in 64-bit floats only: {kernels}")?;
        }
        if self.taken_as_they_are.is_empty() {
            Ok(())
        } else {
            writeln!(
                f,
                "  taken as they are: {}",
                self.taken_as_they_are.join(", ")
            )
        }
    }
}

impl Proof {
    /// Proves that the last of `stages` computes the same as the first. If it cannot, the error names the pass at
    /// fault.
    pub(super) fn of(stages: &[Graph], blocks: usize, ranks: usize) -> Result<Self, Error> {
        let certificate = prove(stages, &Mesh::line("data", ranks)?, None)?;
        Ok(Self {
            blocks,
            ranks,
            num_nodes: certificate.num_nodes,
            num_tensors: certificate.num_tensors,
            seconds: certificate.elapsed.as_secs_f64(),
            passes: certificate.passes.iter().map(PassId::to_string).collect(),
            taken_as_they_are: certificate.uninterpreted,
            checked_in_floats: certificate.checked_in_floats.into_keys().collect(),
        })
    }
}
