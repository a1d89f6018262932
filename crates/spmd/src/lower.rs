//! The application of a mode's passes to a traced step.

use std::sync::Arc;

use burn_fsdp_mesh::Pattern;

use crate::certificate::{Certificate, Parts};
use crate::error::Error;
use crate::graph::Graph;
use crate::mode::{Mode, Purpose};
use crate::passes::schedule::{self, OptimizerPlace, Options};
use crate::passes::verify::{verify, verify_types};
use crate::passes::{Accumulate, ClipGradients, DeferOptimizer, Iteration, MicroSteps};

/// A step, ready to run, with the proof of what it computes, if that was asked for.
#[derive(Debug)]
pub(crate) struct Lowered {
    pub(crate) graphs: StepGraphs,
    pub(crate) certificate: Option<Arc<Certificate>>,
}

/// The graphs of a step.
#[derive(Debug)]
pub(crate) enum StepGraphs {
    /// The one graph of every step.
    Whole(Box<Graph>),
    /// The graphs of a mode whose optimizer runs in the next forward.
    Iteration(Box<Iteration>),
    /// The graphs of a step over several micro-batches.
    Micro(Box<MicroSteps>),
}

/// Applies the passes of a mode to a graph of one rank, over the joined batch where the mode has one. If the mode's
/// optimizer runs in the next forward, the result is the main graph; of a loss that is
/// [scaled](schedule::Options::scale_loss) it is that of a micro-batch, without the optimizer.
///
/// # Errors
///
/// Those of the passes.
pub fn lower(graph: Graph, mode: &Mode) -> Result<Graph, Error> {
    let mut mode = mode.clone();
    let graph = mode.prepare(graph)?;
    Ok(match lower_all(graph, &mode, mode.purpose(1))?.graphs {
        StepGraphs::Whole(graph) => *graph,
        StepGraphs::Iteration(iteration) => iteration.main,
        StepGraphs::Micro(steps) => steps.next,
    })
}

/// Applies the passes of a mode as [`lower`] does, of a step of `num_batches` micro-batches where they are several, and
/// proves that the plan computes the graph as it is. See [`Mode::certified`].
///
/// # Errors
///
/// Those of the passes; [`Error::NotCertified`]; [`Error::NotProvable`].
pub fn certify(graph: Graph, num_batches: usize, mode: &Mode) -> Result<Certificate, Error> {
    let mut mode = mode.clone().certified();
    let graph = mode.prepare(graph)?;
    let certificate = lower_all(graph, &mode, mode.purpose(num_batches))?.certificate;
    let certificate =
        certificate.ok_or_else(|| Error::Internal("nothing was proved".to_owned()))?;
    Ok(Certificate::clone(&certificate))
}

/// Applies the passes of a mode, and returns all graphs that result.
pub(crate) fn lower_all(graph: Graph, mode: &Mode, purpose: Purpose) -> Result<Lowered, Error> {
    let options = match purpose {
        Purpose::Step => mode.options.clone(),
        // The norm is that of all micro-batches, and the optimizer comes after them, wherever it is otherwise.
        Purpose::Micro(_) => {
            let options = mode.options.clone().clip_grad_norm(None);
            options.optimizer(OptimizerPlace::InNextForward)
        }
    };
    let Passed {
        plan,
        traced,
        mut certificate,
    } = passed(graph, mode, &options)?;
    let last = schedule::last(&options);
    let graphs = match purpose {
        Purpose::Micro(num_batches) => {
            let axes = mode.ranks().mesh()?.axes().to_vec();
            let clip = mode.options.clip.map(|clip| ClipGradients { clip, axes });
            let steps = Accumulate { num_batches, clip }.split(plan, &last)?;
            StepGraphs::Micro(Box::new(steps))
        }
        Purpose::Step if options.optimizer == OptimizerPlace::InNextForward => {
            StepGraphs::Iteration(Box::new(DeferOptimizer.split(plan, &last)?))
        }
        Purpose::Step => StepGraphs::Whole(Box::new(plan)),
    };
    let (all, parts) = match (&graphs, purpose) {
        (StepGraphs::Iteration(of), _) => {
            let all = vec![&of.setup, &of.main, &of.cleanup];
            (all, Some(Parts::Iteration(of)))
        }
        (StepGraphs::Micro(of), Purpose::Micro(num_batches)) => {
            let all = vec![&of.first, &of.next, &of.update];
            (all, Some(Parts::Micro(of, num_batches)))
        }
        (StepGraphs::Whole(of), _) => (vec![&**of], None),
        _ => (Vec::new(), None),
    };
    let check = if mode.verify { verify } else { verify_types };
    all.into_iter().try_for_each(check)?;
    if let (Some(parts), Some(traced)) = (parts, &traced) {
        let of_passes = certificate.take();
        let proved = mode.prove(|proof| proof.of_parts(traced, parts))?;
        certificate = of_passes
            .zip(proved)
            .map(|(of_passes, kernels)| Certificate {
                checked_in_floats: kernels,
                ..of_passes
            });
    }
    if let Some(certificate) = &certificate {
        tracing::info!(%certificate, "proved");
    }
    Ok(Lowered {
        graphs,
        certificate: certificate.map(Arc::new),
    })
}

/// A graph after the passes.
struct Passed {
    plan: Graph,
    /// The graph before them, if it was proved equal.
    traced: Option<Graph>,
    certificate: Option<Certificate>,
}

/// Applies the passes of a mode, and proves them where it is to be.
fn passed(graph: Graph, mode: &Mode, options: &Options) -> Result<Passed, Error> {
    let pipeline = mode.pipeline(options)?;
    if !mode.is_proved(&graph) {
        return Ok(Passed {
            plan: pipeline.run(graph)?,
            traced: None,
            certificate: None,
        });
    }
    let mut stages = pipeline.stages(graph)?;
    let certificate = mode.prove(|proof| proof.of_passes(&stages))?;
    let plan = stages.pop();
    Ok(Passed {
        plan: plan.ok_or_else(|| Error::Internal("no pass has made a plan".to_owned()))?,
        traced: certificate.is_some().then(|| stages.swap_remove(0)),
        certificate,
    })
}

/// Applies the passes of a mode to the graph of an evaluation, which has no gradients.
pub(crate) fn lower_forward(graph: Graph, mode: &Mode) -> Result<Graph, Error> {
    let options = mode.options.clone().clip_grad_norm(None).recompute(None);
    let options = options.recompute_units::<Pattern>([]);
    let options = options.optimizer(OptimizerPlace::AtEnd);
    let plan = mode.pipeline(&options)?.run(graph)?;
    verify_types(&plan)?;
    Ok(plan)
}
