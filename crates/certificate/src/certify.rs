//! Proofs of the plans of modes, before they run or without running them.

use std::sync::Arc;
use std::time::Instant;

use burn_fsdp_spmd::graph::{Flops, Graph, Node};
use burn_fsdp_spmd::passes::verify::verify_types;
use burn_fsdp_spmd::{Certify, Error, Lowered, Lowering, Mode, PassHook, StepGraphs, Summary};

use crate::proof::{Certificate, Proof, checked_kernels};
use crate::stages::Stages;
use crate::twin::Scale;

/// Maximum [`work`] of a step, over all ranks, for which a debug build proves the plan by default.
const SMALL_PLAN: u64 = 1 << 22;

/// The fingerprint of its plan, for [`Mode::proved`].
impl From<&Certificate> for u64 {
    fn from(certificate: &Certificate) -> Self {
        certificate.plan
    }
}

/// Lowers a prepared trace, and proves its plan if the mode requests it. The summary is the [`Certificate`]. See
/// [`CompiledStep::lowered_by`](burn_fsdp_spmd::CompiledStep::lowered_by).
///
/// # Errors
///
/// The errors of the passes; [`Error::NotCertified`]; [`Error::NotProvable`] if the mode always requests a proof.
pub fn lowered(graph: Graph, mut step: Lowering<'_>) -> Result<Lowered, Error> {
    let is_proved = match step.certify() {
        Certify::Small => work(&graph) * step.mesh()?.size() as u64 <= SMALL_PLAN,
        choice => choice == Certify::Always,
    };
    if !is_proved {
        return step.lower(graph);
    }
    let (graphs, certificate) = proved(graph, &mut step, &mut |_, _| Ok(()))?;
    let certificate = match certificate {
        Err(Error::NotProvable { .. }) if step.certify() == Certify::Small => None,
        certificate => Some(certificate?),
    };
    if let Some(certificate) = &certificate {
        tracing::info!(%certificate, "proved");
    }
    let summary = certificate.map(|certificate| Arc::new(certificate) as Arc<dyn Summary>);
    step.finish(graphs, summary)
}

/// Applies the passes of a mode as [`lower`](burn_fsdp_spmd::lower()) does, and proves that the plan computes the original graph. With
/// `num_batches` above one, the step has that many micro-batches. See [`Mode::certified`].
///
/// # Errors
///
/// Same as [`lower`](burn_fsdp_spmd::lower()); [`Error::NotCertified`]; [`Error::NotProvable`].
pub fn certify(graph: Graph, num_batches: usize, mode: &Mode) -> Result<Certificate, Error> {
    certify_hooked(graph, num_batches, mode, &mut |_, _| Ok(()))
}

/// Proves as [`certify`] does, with a hook that may change the result of each pass.
pub(crate) fn certify_hooked(
    graph: Graph,
    num_batches: usize,
    mode: &Mode,
    hook: &mut PassHook<'_>,
) -> Result<Certificate, Error> {
    let mut mode = mode.clone().certified();
    let graph = Lowering::prepared(graph, &mut mode)?;
    let mut step = Lowering::new(&mode, num_batches);
    let (graphs, certificate) = proved(graph, &mut step, hook)?;
    let certificate = certificate?;
    step.finish(graphs, None)?;
    Ok(certificate)
}

/// Proves the plan for `real`, a step traced at the shapes of a run, which may be too large for [`certify`]. `small` is
/// the same step traced at small shapes.
///
/// The passes plan `real`, and then its twin, `small`. For the twin, they decide what to recompute, fuse and join from
/// the sizes in `real`. After every pass, both plans must list the same operations on the same values, and may differ
/// only in sizes, as the traces do. The twin is proved as in [`certify`]. Kernels are checked in floats at the shapes
/// of the run, if these are not too large. The comparison detects passes that are wrong only at large shapes. The proof
/// detects passes whose decisions for large shapes are wrong.
///
/// The model must behave the same at the small shapes. As a rule, dims of size one stay one, and all others are at
/// least two. Burn's `Linear` on three or more dims folds the leading dims into one if the result is squarer, unless
/// the second-to-last dim is a multiple of 32. Keep that dim at one, or large enough that `Linear` decides as in the
/// run. The model's widths may also be smaller.
///
/// # Errors
///
/// Same as [`certify`]; [`ProofError::Twin`](burn_fsdp_spmd::ProofError::Twin) with the first pass after which the two differ,
/// and the node.
pub fn certify_at(
    real: Graph,
    small: Graph,
    num_batches: usize,
    mode: &Mode,
) -> Result<Certificate, Error> {
    certify_at_hooked([real, small], num_batches, mode, &mut |_, _| Ok(()))
}

/// Proves as [`certify_at`] does, with a hook that may change the result of each pass.
pub(crate) fn certify_at_hooked(
    [real, small]: [Graph; 2],
    num_batches: usize,
    mode: &Mode,
    hook: &mut PassHook<'_>,
) -> Result<Certificate, Error> {
    let start = Instant::now();
    let mut mode = mode.clone().certified();
    let real = Lowering::prepared(real, &mut mode)?;
    let small = Lowering::prepared(small, &mut mode)?;
    let mut step = Lowering::new(&mode, num_batches);
    let (stages, plan) = recorded(real, &mut step, hook)?;
    let scale = Scale::of(stages.traced()?, &small, &step.mesh()?)?;
    let mut twins = Stages::default();
    let twin = step.run(small, &mut |part, graph| {
        hook(part, graph)?;
        twins.keep_twin(part, graph, (&stages, &scale))
    })?;
    let pairs = || plan.all().into_iter().zip(twin.all());
    pairs().try_for_each(|(plan, twin)| scale.check(plan, twin))?;
    let certificate = with_proof(&step, |proof| twins.proved(proof, step.num_batches()))?;
    plan.all().into_iter().try_for_each(verify_types)?;
    Ok(Certificate {
        checked_in_floats: checked_kernels(pairs())?,
        plan: plan.fingerprint(),
        elapsed: start.elapsed(),
        ..certificate
    })
}

/// Lowers a prepared trace, and returns the graphs of all passes and the plan.
fn recorded(
    graph: Graph,
    step: &mut Lowering<'_>,
    hook: &mut PassHook<'_>,
) -> Result<(Stages, StepGraphs), Error> {
    let mut stages = Stages::default();
    let graphs = step.run(graph, &mut |part, graph| {
        hook(part, graph)?;
        stages.keep(part, graph);
        Ok(())
    })?;
    Ok((stages, graphs))
}

/// Lowers a prepared trace, and returns its plan with the result of the proof.
fn proved(
    graph: Graph,
    step: &mut Lowering<'_>,
    hook: &mut PassHook<'_>,
) -> Result<(StepGraphs, Result<Certificate, Error>), Error> {
    let (stages, graphs) = recorded(graph, step, hook)?;
    let certificate = with_proof(step, |proof| {
        let certificate = stages.proved(proof, step.num_batches())?;
        let plans = graphs.all().into_iter();
        Ok(Certificate {
            checked_in_floats: checked_kernels(plans.map(|plan| (plan, plan)))?,
            plan: graphs.fingerprint(),
            ..certificate
        })
    });
    Ok((graphs, certificate))
}

/// Calls a function with the settings of a step's proof.
fn with_proof(
    step: &Lowering<'_>,
    call: impl FnOnce(&Proof<'_>) -> Result<Certificate, Error>,
) -> Result<Certificate, Error> {
    call(&Proof {
        mesh: &step.mesh()?,
        clip: step.clip(),
        joined: step.joined()?,
    })
}

/// Estimates the work of a run of a one-rank graph from its shapes: the multiplications plus the elements of all
/// operands and results.
fn work(graph: &Graph) -> u64 {
    let of_node = |node: &Node| {
        let elements = node.operation.nodes().into_iter();
        let elements = elements.map(|tensor| tensor.shape.num_elements() as u64);
        Flops::of_node(node).total() / 2 + elements.sum::<u64>()
    };
    graph.nodes().iter().map(of_node).sum()
}
