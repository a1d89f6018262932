//! The graphs of a step after each pass.

use burn_fsdp_spmd::Error;
use burn_fsdp_spmd::graph::{Graph, Sizes};

use crate::proof::{Certificate, Parts, Proof};
use crate::twin::Scale;

/// The graphs of a step, each produced by a pass from the previous one: first those of the whole step, and then those
/// of each graph into which it is split.
#[derive(Debug, Default)]
pub(crate) struct Stages(Vec<(&'static str, Vec<Graph>)>);

impl Stages {
    /// Keeps the next graph of a part of the step.
    pub(crate) fn keep(&mut self, part: &'static str, graph: &Graph) {
        match self.0.last_mut() {
            Some((name, graphs)) if *name == part => graphs.push(graph.clone()),
            _ => self.0.push((part, vec![graph.clone()])),
        }
    }

    /// Keeps the next graph of a part of the same step at other shapes. It must list the same operations as the graph
    /// in `real`. The next pass bases its decisions on the sizes in `real`.
    ///
    /// # Errors
    ///
    /// [`ProofError::Twin`](burn_fsdp_spmd::ProofError::Twin).
    pub(crate) fn keep_twin(
        &mut self,
        part: &'static str,
        graph: &mut Graph,
        (real, scale): (&Self, &Scale),
    ) -> Result<(), Error> {
        graph.decide_by(Sizes::default());
        self.keep(part, graph);
        let graphs = self.0.last().map_or(0, |(_, graphs)| graphs.len());
        let others = real.0.get(self.0.len() - 1).map(|(_, graphs)| graphs);
        let others = others.ok_or_else(no_plan)?;
        let other = others.get(graphs - 1).or(others.last());
        let other = other.ok_or_else(no_plan)?;
        scale.check(other, graph)?;
        if let Some(next) = others.get(graphs) {
            // Decisions about a value that the pass changes use its size before the pass.
            graph.decide_by(Sizes::of(next.values().chain(other.values())));
        }
        Ok(())
    }

    /// Returns the traced graph.
    pub(crate) fn traced(&self) -> Result<&Graph, Error> {
        let whole = self.0.first().and_then(|(_, graphs)| graphs.first());
        whole.ok_or_else(no_plan)
    }

    /// Proves that the plan computes what was traced, assuming that kernels equal their composed forms. `num_batches`
    /// is the number of micro-batches, if the step has separate graphs for these.
    pub(crate) fn proved(
        &self,
        proof: &Proof<'_>,
        num_batches: Option<usize>,
    ) -> Result<Certificate, Error> {
        let [(_, whole), parts @ ..] = self.0.as_slice() else {
            return Err(no_plan());
        };
        let certificate = proof.of_passes(whole)?;
        let [(_, first), (_, second), (_, third)] = parts else {
            return Ok(certificate);
        };
        let versions = first.iter().zip(second).zip(third);
        let versions = versions.map(|((first, second), third)| Parts {
            graphs: [first, second, third],
            num_batches,
        });
        proof.of_parts(whole, &versions.collect::<Vec<_>>())?;
        let plans = [first, second, third].map(|part| part.last());
        let plans = || plans.iter().flatten();
        let passes = plans().last().map(|plan| plan.applied().to_vec());
        Ok(Certificate {
            num_nodes: plans().map(|plan| plan.nodes().len()).sum(),
            passes: passes.unwrap_or_default(),
            ..certificate
        })
    }
}

fn no_plan() -> Error {
    Error::Internal("no pass made a plan".to_owned())
}
