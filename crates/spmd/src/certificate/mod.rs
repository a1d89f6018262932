//! The certificate of a compiled plan: a proof, before it runs, that it computes what was traced.
//!
//! See the README beside the code for what is proved, under which assumptions, and what is not seen.

mod base;
mod call;
mod custom;
mod field;
mod given;
mod lanes;
mod machine;
mod module;
mod numeric;
mod outcome;
mod pointwise;
mod products;
mod reference;
mod scalar;
mod tensor;
mod transport;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_fsdp_mesh::{Clip, Mesh};

use crate::error::Error;
use crate::graph::{Flops, Graph, Node};
use crate::pass_id::PassId;
use given::{Given, bounds};
use machine::{Fault, Machine};
use outcome::Outcome;

/// Runs of a plan one after the other: the second begins with what the first has left.
const NUM_RUNS: u64 = 2;

/// A proof that a plan computes what was traced, on all its ranks.
#[derive(Debug, Clone)]
pub struct Certificate {
    /// The ranks that the plan is for.
    pub num_ranks: usize,
    /// The passes that made it, in order.
    pub passes: Vec<PassId>,
    /// Nodes of the plan.
    pub num_nodes: usize,
    /// Tensors that come out of a step and were found equal, on each rank: loss, outputs, parameters, states, buffers.
    pub num_tensors: usize,
    /// Elements that were compared.
    pub num_elements: usize,
    /// Operations that stand for themselves: functions of which nothing is known but that equal operands give equal
    /// results.
    pub uninterpreted: Vec<String>,
    /// Passes of the user, which change what the step means as they like: it is not proved that they are right.
    pub assumed: Vec<PassId>,
    /// Time that the proof took.
    pub elapsed: Duration,
}

/// Prints what was proved, in a line.
impl fmt::Display for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} nodes on {} ranks compute the traced step: {} tensors, {} elements, equal modulo 2^61 - 1",
            self.num_nodes, self.num_ranks, self.num_tensors, self.num_elements
        )?;
        if !self.uninterpreted.is_empty() {
            write!(f, "; taken as they are: {}", self.uninterpreted.join(", "))?;
        }
        if !self.assumed.is_empty() {
            let names: Vec<String> = self.assumed.iter().map(PassId::to_string).collect();
            write!(f, "; not proved: {}", names.join(", "))?;
        }
        write!(f, "; {} ms", self.elapsed.as_millis())
    }
}

/// Proves that `plan` computes what `traced` does when the ranks of `mesh` divide the batch among them: each computes
/// loss and gradients of its own rows, the optimizer steps with the means, clipped by `clip` if the plan clips, and the
/// loss that comes out is the mean, too. Either graph may be one of one rank, or one for all ranks of the mesh, in which
/// case it is taken as it is.
///
/// Nothing runs, and no rank communicates; a rank may prove the plan alone.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_mesh::Mesh;
/// use burn_fsdp_spmd::passes::schedule::{self, Options};
/// use burn_fsdp_spmd::trace::{TraceConfig, trace};
/// use burn_fsdp_spmd::{Strategy, prove};
///
/// let batch = Tensor::<2>::zeros([4, 3], &Device::flex());
/// let traced = trace(
///     |device: &Device| LinearConfig::new(3, 2).init(device),
///     |model: &Linear, x: Tensor<2>| model.forward(x).mean(),
///     &AdamWConfig::new().build(),
///     &batch,
///     TraceConfig::default(),
/// )?;
/// let plan = schedule::pipeline(3, Strategy::FullShard, &Options::default(), &[]).run(traced.clone())?;
/// println!("{}", prove(&traced, &plan, &Mesh::line("data", 3)?, None)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::NotCertified`].
pub fn prove(
    traced: &Graph,
    plan: &Graph,
    mesh: &Mesh,
    clip: Option<Clip>,
) -> Result<Certificate, Error> {
    let graphs = [traced.clone(), plan.clone()];
    let stages = Stages {
        graphs: &graphs,
        mesh,
        clip,
    };
    stages.certify()
}

/// The plan of a step on its way through the passes.
pub(crate) struct Stages<'a> {
    /// The graph as traced and after each pass, the last of which is the plan.
    pub(crate) graphs: &'a [Graph],
    pub(crate) mesh: &'a Mesh,
    /// The clipping that the passes insert.
    pub(crate) clip: Option<Clip>,
}

impl Stages<'_> {
    /// Proves the plan equal to the traced step, in which every rank has rows of its own.
    ///
    /// # Errors
    ///
    /// [`Error::NotCertified`] with the pass, and the node where that is known.
    pub(crate) fn certify(&self) -> Result<Certificate, Error> {
        let start = Instant::now();
        let [traced, .., plan] = self.graphs else {
            return Err(Error::Internal("no pass has made a plan".to_owned()));
        };
        let bounds = bounds(traced);
        // A pass of the user changes what the step means: what comes after it is compared with what it has left.
        let is_assumed = |graph: &&Graph| matches!(last(graph), Some(PassId::User(_)));
        let mut from = traced;
        if let Some(changed) = self.graphs.iter().rev().find(is_assumed) {
            from = changed;
        }
        let expected = self.outcomes(from, plan, &bounds);
        let expected = expected.map_err(|fault| self.error(from, &fault))?;
        let mut machine = Machine::new(self.mesh);
        let got = self.outcomes_on(&mut machine, (plan, plan), &bounds);
        let agrees = got.as_ref().is_ok_and(|got| *got == expected);
        if !agrees {
            return Err(self.first_fault(&bounds));
        }
        let num_tensors = expected.iter().map(|run| run.tensors.len()).sum();
        let num_elements = expected.iter().map(Outcome::num_elements).sum();
        let assumed = self.graphs.iter().filter(is_assumed).filter_map(last);
        Ok(Certificate {
            num_ranks: self.mesh.size(),
            passes: plan.applied().to_vec(),
            num_nodes: plan.nodes().len(),
            num_tensors,
            num_elements,
            uninterpreted: machine.opaque(),
            assumed: assumed.collect(),
            elapsed: start.elapsed(),
        })
    }

    /// Returns what comes out of runs of a graph, with clipping as `like` has it.
    fn outcomes(
        &self,
        graph: &Graph,
        like: &Graph,
        bounds: &BTreeMap<Arc<str>, usize>,
    ) -> Result<Vec<Outcome>, Fault> {
        let mut machine = Machine::new(self.mesh);
        self.outcomes_on(&mut machine, (graph, like), bounds)
    }

    fn outcomes_on(
        &self,
        machine: &mut Machine<'_>,
        graphs: (&Graph, &Graph),
        bounds: &BTreeMap<Arc<str>, usize>,
    ) -> Result<Vec<Outcome>, Fault> {
        let runs = 0..NUM_RUNS;
        runs.map(|run| self.run(machine, graphs, bounds, run))
            .collect()
    }

    fn run(
        &self,
        machine: &mut Machine<'_>,
        (graph, like): (&Graph, &Graph),
        bounds: &BTreeMap<Arc<str>, usize>,
        run: u64,
    ) -> Result<Outcome, Fault> {
        let given = Given {
            mesh: self.mesh,
            bounds,
            run,
        };
        machine.begin(graph, &given)?;
        let outcome = match is_divided(graph) {
            false => {
                let clips = like.applied().contains(&PassId::ClipGradients);
                let clip = self.clip.as_ref().filter(|_| clips);
                reference::averaged(machine, graph, clip)?
            }
            true => {
                for (index, node) in graph.nodes().iter().enumerate() {
                    machine.run_node(index, node)?;
                }
                Outcome::of(machine, graph)?
            }
        };
        machine.finish(graph)?;
        Ok(outcome)
    }

    /// Returns the error of the first pass whose graph is not what the one before it is.
    fn first_fault(&self, bounds: &BTreeMap<Arc<str>, usize>) -> Error {
        for pair in self.graphs.windows(2) {
            let [before, after] = pair else { continue };
            if matches!(last(after), Some(PassId::User(_))) {
                continue;
            }
            let compared = self.outcomes(before, after, bounds).and_then(|expected| {
                let got = self.outcomes(after, after, bounds)?;
                let runs = expected.iter().zip(&got);
                Ok(runs
                    .filter_map(|(expected, got)| expected.difference(got))
                    .next())
            });
            match compared {
                Ok(None) => {}
                Err(fault) => return self.error(after, &fault),
                Ok(Some(difference)) => {
                    let node = self.first_node(before, after, bounds);
                    let (node, operation) = named(after, node);
                    return Error::NotCertified {
                        pass: last(after),
                        node,
                        operation,
                        rank: difference.rank,
                        reason: format!("{} differs: {}", difference.what, difference.reason),
                    };
                }
            }
        }
        Error::Internal("a plan differs from its trace, and no pass does".to_owned())
    }

    fn error(&self, graph: &Graph, fault: &Fault) -> Error {
        let (node, operation) = named(graph, Some(fault.node));
        Error::NotCertified {
            pass: last(graph),
            node,
            operation,
            rank: fault.rank,
            reason: fault.reason.clone(),
        }
    }

    /// Returns the first node that writes another value than the graph before has of the same number.
    fn first_node(
        &self,
        before: &Graph,
        after: &Graph,
        bounds: &BTreeMap<Arc<str>, usize>,
    ) -> Option<usize> {
        let noted = |graph: &Graph| {
            let mut machine = Machine::new(self.mesh).noting();
            // What it has noted until it fails is enough.
            let _ = self.run(&mut machine, (graph, after), bounds, 0);
            machine
        };
        let (expected, got) = (noted(before), noted(after));
        let differs = |node: &Node| {
            node.outputs().any(|id| {
                (0..self.mesh.size()).any(|rank| {
                    let (a, b) = (expected.written(rank, id), got.written(rank, id));
                    a.is_some() && b.is_some() && a != b
                })
            })
        };
        after.nodes().iter().position(differs)
    }
}

/// Returns true if the graph is for ranks that communicate.
fn is_divided(graph: &Graph) -> bool {
    graph.applied().contains(&PassId::InsertCollectives)
}

fn last(graph: &Graph) -> Option<PassId> {
    graph.applied().last().copied()
}

fn named(graph: &Graph, node: Option<usize>) -> (Option<usize>, String) {
    let found = node.and_then(|node| graph.nodes().get(node));
    let name = found.map_or_else(String::new, Node::name);
    (node.filter(|_| found.is_some()), name)
}

/// Returns the number of products that a run of a graph of one rank takes, as its shapes tell.
pub(crate) fn work(graph: &Graph) -> u64 {
    let of_node = |node: &Node| {
        let elements = node.operation.nodes().into_iter();
        let elements = elements.map(|tensor| tensor.shape.num_elements() as u64);
        Flops::of_node(node).total() / 2 + elements.sum::<u64>()
    };
    graph.nodes().iter().map(of_node).sum()
}
