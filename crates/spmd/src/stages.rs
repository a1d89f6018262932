//! The graphs of a step, from its trace to the plan.

use std::num::NonZeroU64;

use burn_fsdp_collectives::Fingerprint;

use crate::certificate::{Certificate, Parts, Scale};
use crate::dump::Watch;
use crate::error::Error;
use crate::graph::Graph;
use crate::mode::{Mode, Purpose};
use crate::passes::schedule::OptimizerPlace;
use crate::passes::{Accumulate, ClipGradients, Iteration, MicroSteps, Pipeline};

/// The graphs of a step.
#[derive(Debug)]
pub(crate) enum StepGraphs {
    /// A single graph for the whole step.
    Whole(Box<Graph>),
    /// The graphs of a step that moves nodes into the next one, such as the optimizer into the next forward.
    Iteration(Box<Iteration>),
    /// The graphs of a step over several micro-batches.
    Micro(Box<MicroSteps>),
}

impl StepGraphs {
    /// Returns the graphs, in their order.
    pub(crate) fn all(&self) -> Vec<&Graph> {
        match self {
            Self::Whole(of) => vec![&**of],
            Self::Iteration(of) => vec![&of.setup, &of.main, &of.cleanup],
            Self::Micro(of) => vec![&of.first, &of.next, &of.update],
        }
    }

    /// Returns a fingerprint of all graphs, which is the same on every rank.
    pub(crate) fn fingerprint(&self) -> u64 {
        let all: Vec<u64> = self.all().into_iter().map(Graph::fingerprint).collect();
        let most = match self {
            Self::Iteration(of) => of.max_iterations,
            Self::Whole(_) | Self::Micro(_) => None,
        };
        Fingerprint::of(&(all, most))
    }
}

/// The graphs to keep when passes are applied to a step.
#[derive(Clone, Copy)]
pub(crate) enum Keep<'a> {
    /// The plan.
    Plan,
    /// The graph after each pass.
    All,
    /// The graph after each pass, which must list the same operations as the graph of the same step at other shapes.
    Twins(&'a Stages, &'a Scale),
}

/// The kept graphs of a step, each produced by a pass from the previous one.
pub(crate) struct Stages {
    whole: Vec<Graph>,
    /// If the step has three graphs, the stages of each, from the point where the step was split.
    parts: Vec<Vec<Graph>>,
    /// The fields of [`Iteration`] other than its graphs, for a step that moves nodes into the next one.
    moved: (Option<NonZeroU64>, bool),
    purpose: Purpose,
}

impl Stages {
    /// Applies the passes of a mode to a graph. `watch` is called with the graph, and with the result of each pass.
    ///
    /// # Errors
    ///
    /// The errors of the passes; [`ProofError::Twin`](crate::ProofError::Twin).
    pub(crate) fn of(
        graph: Graph,
        mode: &Mode,
        purpose: Purpose,
        keep: Keep<'_>,
        watch: &mut Watch<'_>,
    ) -> Result<Self, Error> {
        let options = match purpose {
            Purpose::Step => mode.options.clone(),
            // The norm covers all micro-batches, and the optimizer runs after them, regardless of the options.
            Purpose::Micro(_) => {
                let options = mode.options.clone().clip_grad_norm(None);
                options.optimizer(OptimizerPlace::InNextForward)
            }
        };
        let last = mode.last(&options);
        let pipeline = mode.pipeline(&options)?;
        let see = &mut |graph: &Graph| watch("", graph);
        let mut stages = Self {
            whole: keep.applied(&pipeline, graph, |of| &of.whole, see)?,
            parts: Vec::new(),
            moved: (None, false),
            purpose,
        };
        // If a step has several graphs, the last passes are applied to each.
        let none = Pipeline::new();
        let plan = stages.plan()?;
        let split = match purpose {
            Purpose::Micro(num_batches) => {
                let axes = mode.ranks().mesh()?.axes().to_vec();
                let clip = mode.options.clip.map(|clip| ClipGradients { clip, axes });
                let steps = Accumulate { num_batches, clip }.split(plan, &none)?;
                [
                    ("first", steps.first),
                    ("next", steps.next),
                    ("update", steps.update),
                ]
            }
            Purpose::Step => {
                let step = mode.moved(plan)?;
                if step.is_whole() {
                    return stages.finished(keep, &last, see);
                }
                let steps = step.split(&none)?;
                stages.moved = (steps.max_iterations, steps.is_optimizer);
                [
                    ("setup", steps.setup),
                    ("main", steps.main),
                    ("cleanup", steps.cleanup),
                ]
            }
        };
        for (part, (name, graph)) in split.into_iter().enumerate() {
            let see = &mut |graph: &Graph| watch(name, graph);
            let part = keep.applied(&last, graph, |of| Self::part(of, part), see)?;
            stages.parts.push(part);
        }
        Ok(stages)
    }

    /// Applies the last passes to a step of one graph.
    fn finished(
        mut self,
        keep: Keep<'_>,
        last: &Pipeline,
        see: &mut dyn FnMut(&Graph),
    ) -> Result<Self, Error> {
        let plan = self.whole.pop().ok_or_else(no_plan)?;
        let begin = self.whole.len();
        // `see` was already called with the plan, after the pass that produced it.
        let mut is_seen = true;
        let see = &mut |graph: &Graph| {
            if !std::mem::take(&mut is_seen) {
                see(graph);
            }
        };
        let stages = keep.applied(
            last,
            plan,
            |of| of.whole.get(begin..).unwrap_or_default(),
            see,
        )?;
        self.whole.extend(stages);
        Ok(self)
    }

    /// Returns the graphs of one part of a step with three graphs; empty for other steps.
    fn part(of: &Self, number: usize) -> &[Graph] {
        of.parts.get(number).map_or(&[], Vec::as_slice)
    }

    /// Returns the traced graph.
    pub(crate) fn traced(&self) -> Result<&Graph, Error> {
        self.whole.first().ok_or_else(no_plan)
    }

    fn plan(&self) -> Result<Graph, Error> {
        self.whole.last().cloned().ok_or_else(no_plan)
    }

    /// Proves that the plan computes what was traced; `None` if it cannot be proved and no proof was requested.
    pub(crate) fn proved(&self, mode: &Mode) -> Result<Option<Certificate>, Error> {
        let certificate = mode.prove(|proof| proof.of_passes(&self.whole))?;
        let ([first, second, third], Some(_)) = (self.parts.as_slice(), &certificate) else {
            return Ok(certificate);
        };
        let num_batches = match self.purpose {
            Purpose::Micro(num_batches) => Some(num_batches),
            Purpose::Step => None,
        };
        let versions = first.iter().zip(second).zip(third);
        let versions = versions.map(|((first, second), third)| Parts {
            graphs: [first, second, third],
            num_batches,
        });
        let versions: Vec<Parts<'_>> = versions.collect();
        let proved = mode.prove(|proof| proof.of_parts(&self.whole, &versions))?;
        let plans = [first, second, third].map(|part| part.last());
        let plans = || plans.iter().flatten();
        let passes = plans().last().map(|plan| plan.applied().to_vec());
        Ok(certificate
            .filter(|_| proved.is_some())
            .map(|certificate| Certificate {
                num_nodes: plans().map(|plan| plan.nodes().len()).sum(),
                passes: passes.unwrap_or_default(),
                ..certificate
            }))
    }

    /// Returns the graphs that the step runs.
    pub(crate) fn into_graphs(mut self) -> Result<StepGraphs, Error> {
        let mut parts = self.parts.iter_mut().filter_map(Vec::pop);
        let parts = [parts.next(), parts.next(), parts.next()];
        Ok(match (parts, self.purpose) {
            ([Some(first), Some(next), Some(update)], Purpose::Micro(_)) => {
                StepGraphs::Micro(Box::new(MicroSteps {
                    first,
                    next,
                    update,
                }))
            }
            ([Some(setup), Some(main), Some(cleanup)], Purpose::Step) => {
                StepGraphs::Iteration(Box::new(Iteration {
                    setup,
                    main,
                    cleanup,
                    max_iterations: self.moved.0,
                    is_optimizer: self.moved.1,
                }))
            }
            _ => StepGraphs::Whole(Box::new(self.whole.pop().ok_or_else(no_plan)?)),
        })
    }
}

impl Keep<'_> {
    /// Applies passes to a graph, and returns the graphs to keep. `stages_of` selects the stages of these passes at
    /// other shapes. `see` is called as in [`Pipeline::run_seen`], except for twins.
    fn applied(
        self,
        passes: &Pipeline,
        graph: Graph,
        stages_of: impl Fn(&Stages) -> &[Graph],
        see: &mut dyn FnMut(&Graph),
    ) -> Result<Vec<Graph>, Error> {
        match self {
            Self::Plan => Ok(vec![passes.run_seen(graph, see)?]),
            Self::All => passes.stages_seen(graph, see),
            Self::Twins(other, scale) => {
                let others = stages_of(other);
                let first = others.first().ok_or_else(no_plan)?;
                scale.check(first, &graph)?;
                passes.stages_as(graph, others, |other, twin| scale.check(other, twin))
            }
        }
    }
}

fn no_plan() -> Error {
    Error::Internal("no pass made a plan".to_owned())
}
