//! Applies a mode's passes to a traced step.

use std::sync::Arc;
use std::time::Instant;

use burn_fsdp_mesh::Pattern;

use crate::certificate::{Certificate, Scale, checked_kernels};
use crate::dump::Watch;
use crate::error::Error;
use crate::graph::Graph;
use crate::mode::{Mode, Purpose};
use crate::passes::schedule::OptimizerPlace;
use crate::passes::verify::{verify, verify_types};
use crate::stages::{Keep, Stages, StepGraphs};

/// A step that is ready to run, with its certificate if one was requested.
#[derive(Debug)]
pub(crate) struct Lowered {
    pub(crate) graphs: StepGraphs,
    pub(crate) certificate: Option<Arc<Certificate>>,
}

/// Prepares a graph for the mode, and checks the parameter names in its options.
fn prepared(graph: Graph, mode: &mut Mode) -> Result<Graph, Error> {
    let parameters = graph.parameters().iter().filter(|of| !of.is_buffer);
    let paths: Vec<&str> = parameters.map(|of| &*of.path).collect();
    mode.check_full(&paths)?;
    mode.prepare(graph)
}

/// Applies the passes of a mode to a one-rank graph, traced over the joined batch if the mode has one. If the mode's
/// optimizer runs in the next forward, the result is the main graph. If the loss is
/// [scaled](crate::passes::schedule::Options::scale_loss), the result is the graph of a micro-batch, without the
/// optimizer. Nothing is [dumped](Mode::dump).
///
/// # Errors
///
/// The errors of [`compile`](crate::compile) for the mode, and of the passes.
pub fn lower(graph: Graph, mode: &Mode) -> Result<Graph, Error> {
    let mut mode = mode.clone().without_dump();
    let graph = prepared(graph, &mut mode)?;
    Ok(match lower_all(graph, &mode, mode.purpose(1))?.graphs {
        StepGraphs::Whole(graph) => *graph,
        StepGraphs::Iteration(iteration) => iteration.main,
        StepGraphs::Micro(steps) => steps.next,
    })
}

/// Applies the passes of a mode as [`lower`] does, and proves that the plan computes the original graph. With
/// `num_batches` above one, the step has that many micro-batches. See [`Mode::certified`].
///
/// # Errors
///
/// Same as [`lower`]; [`Error::NotCertified`]; [`Error::NotProvable`].
pub fn certify(graph: Graph, num_batches: usize, mode: &Mode) -> Result<Certificate, Error> {
    let mut mode = mode.clone().without_dump().certified();
    let graph = prepared(graph, &mut mode)?;
    let certificate = lower_all(graph, &mode, mode.purpose(num_batches))?.certificate;
    let certificate = certificate.ok_or_else(nothing_proved)?;
    Ok(Certificate::clone(&certificate))
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
/// Same as [`certify`]; [`ProofError::Twin`](crate::ProofError::Twin) with the first pass after which the two differ,
/// and the node.
pub fn certify_at(
    real: Graph,
    small: Graph,
    num_batches: usize,
    mode: &Mode,
) -> Result<Certificate, Error> {
    let start = Instant::now();
    let mut mode = mode.clone().certified();
    let real = prepared(real, &mut mode)?;
    let small = mode.prepare(small)?;
    let purpose = mode.purpose(num_batches);
    let nobody = &mut |_: &'static str, _: &Graph| {};
    let stages = Stages::of(real, &mode, purpose, Keep::All, nobody)?;
    let scale = Scale::of(stages.traced()?, &small, &mode.ranks().mesh()?)?;
    let keep = Keep::Twins(&stages, &scale);
    let twins = Stages::of(small, &mode, purpose, keep, nobody)?;
    let certificate = twins.proved(&mode)?.ok_or_else(nothing_proved)?;
    let (plan, twin) = (stages.into_graphs()?, twins.into_graphs()?);
    plan.all().into_iter().try_for_each(verify_types)?;
    Ok(Certificate {
        checked_in_floats: checked_kernels(plan.all().into_iter().zip(twin.all()))?,
        plan: plan.fingerprint(),
        elapsed: start.elapsed(),
        ..certificate
    })
}

fn nothing_proved() -> Error {
    Error::Internal("nothing was proved".to_owned())
}

/// Applies the passes of a mode, and returns all resulting graphs.
pub(crate) fn lower_all(graph: Graph, mode: &Mode, purpose: Purpose) -> Result<Lowered, Error> {
    let title = match purpose {
        Purpose::Step => "a step of one batch".to_owned(),
        Purpose::Micro(num_batches) => format!("a step of {num_batches} micro-batches"),
    };
    mode.dumped(&title, |watch| lower_seen(graph, mode, purpose, watch))
}

fn lower_seen(
    graph: Graph,
    mode: &Mode,
    purpose: Purpose,
    watch: &mut Watch<'_>,
) -> Result<Lowered, Error> {
    let is_proved = mode.is_proved(&graph);
    let keep = if is_proved { Keep::All } else { Keep::Plan };
    let stages = Stages::of(graph, mode, purpose, keep, watch)?;
    let certificate = if is_proved {
        stages.proved(mode)?
    } else {
        None
    };
    let graphs = stages.into_graphs()?;
    let check = if mode.verify { verify } else { verify_types };
    graphs.all().into_iter().try_for_each(check)?;
    let nodes = graphs.all().into_iter().map(|plan| plan.nodes().len());
    mode.check_proved(graphs.fingerprint(), nodes.sum())?;
    let certificate = match certificate {
        None => None,
        Some(certificate) => {
            let plans = graphs.all().into_iter();
            let certificate = Certificate {
                checked_in_floats: checked_kernels(plans.map(|plan| (plan, plan)))?,
                plan: graphs.fingerprint(),
                ..certificate
            };
            tracing::info!(%certificate, "proved");
            Some(Arc::new(certificate))
        }
    };
    Ok(Lowered {
        graphs,
        certificate,
    })
}

/// Applies the passes of a mode to the graph of an evaluation, which has no gradients.
pub(crate) fn lower_forward(graph: Graph, mode: &Mode) -> Result<Graph, Error> {
    let options = mode.options.clone().clip_grad_norm(None).recompute(None);
    let options = options.recompute_units::<Pattern>([]);
    let options = options.optimizer(OptimizerPlace::AtEnd);
    mode.dumped("an evaluation", |watch| {
        let see = &mut |graph: &Graph| watch("", graph);
        let passes = mode.pipeline(&options)?.and(mode.last(&options));
        let plan = passes.run_seen(graph, see)?;
        verify_types(&plan)?;
        Ok(plan)
    })
}
