//! Compares a plan with the trace, and the three graphs of a divided step with the whole step.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_fsdp_mesh::{Clip, Mesh};

use super::floats;
use super::given::{Given, bounds};
use super::machine::{Fault, Machine};
use super::outcome::{Difference, Outcome};
use super::reference;
use burn_fsdp_spmd::Error;
use burn_fsdp_spmd::Expand;
use burn_fsdp_spmd::graph::{Graph, Node};
use burn_fsdp_spmd::passes::PassId;

/// A proof that a plan computes the traced step on all its ranks.
#[derive(Debug, Clone)]
pub struct Certificate {
    /// The number of ranks in the plan.
    pub num_ranks: usize,
    /// The applied passes, in order.
    pub passes: Vec<PassId>,
    /// The number of nodes of the plan.
    pub num_nodes: usize,
    /// The number of results that were compared on each rank, over all steps of the proof: loss, outputs, parameters,
    /// states, buffers.
    pub num_tensors: usize,
    /// The number of elements of these results, over all ranks.
    pub num_elements: usize,
    /// Operations that were treated as uninterpreted functions: equal operands have equal results, and nothing else is
    /// assumed.
    pub uninterpreted: Vec<String>,
    /// Kernels that were replaced with their composed forms in the proof, each with the number of different calls. All
    /// calls were checked in 64-bit floats, except fused programs of 16-bit values.
    pub checked_in_floats: BTreeMap<String, usize>,
    /// Passes that are not proved: the user's, which may change what the step computes, and gradient clipping after
    /// them.
    pub assumed: Vec<PassId>,
    /// Fingerprint of the plan, over all graphs of a step. [`Mode::proved`](burn_fsdp_spmd::Mode::proved) compares it with the
    /// plan that is about to run.
    pub plan: u64,
    /// Duration of the proof.
    pub elapsed: Duration,
}

/// Prints a summary in one line.
impl fmt::Display for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} nodes on {} ranks compute the traced step: {} tensors, {} elements, equal modulo 2^61 - 1",
            self.num_nodes, self.num_ranks, self.num_tensors, self.num_elements
        )?;
        if !self.uninterpreted.is_empty() {
            write!(f, "; uninterpreted: {}", self.uninterpreted.join(", "))?;
        }
        if !self.checked_in_floats.is_empty() {
            let kernels = self.checked_in_floats.iter();
            let kernels = kernels.map(|(name, forms)| format!("{name} ({forms})"));
            let kernels: Vec<String> = kernels.collect();
            write!(f, "; checked in 64-bit floats: {}", kernels.join(", "))?;
        }
        if !self.assumed.is_empty() {
            let names: Vec<String> = self.assumed.iter().map(PassId::to_string).collect();
            write!(f, "; not proved: {}", names.join(", "))?;
        }
        write!(f, "; {} ms", self.elapsed.as_millis())
    }
}

/// Number of consecutive steps in a proof. Each begins with the state that the previous step left.
const NUM_STEPS: usize = 2;

/// The settings of a proof.
#[derive(Clone, Copy)]
pub(crate) struct Proof<'a> {
    pub(crate) mesh: &'a Mesh,
    /// The clipping that the passes insert.
    pub(crate) clip: Option<Clip>,
    /// The placements of the batch, if it was traced as one joined batch.
    pub(crate) joined: Option<&'a Expand>,
}

/// The three graphs of a divided step.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    /// The graphs of [`Iteration`](burn_fsdp_spmd::passes::Iteration) or of [`MicroSteps`](burn_fsdp_spmd::passes::MicroSteps), in the
    /// order of their fields.
    pub(crate) graphs: [&'a Graph; 3],
    /// Number of micro-batches of a step; `None` if some of its nodes run in the next step.
    pub(crate) num_batches: Option<usize>,
}

impl<'a> Parts<'a> {
    /// Returns the graph that records the applied passes.
    fn plan(self) -> &'a Graph {
        match self.num_batches {
            None => self.graphs[1],
            Some(_) => self.graphs[2],
        }
    }
}

/// Checks the kernels of several graphs against their composed forms. Each graph is paired with its twin at small
/// shapes, or with itself. Returns, for each kernel, the largest number of checks in one graph.
///
/// # Errors
///
/// [`Error::NotCertified`] with a kernel that differs from its composed form.
pub(crate) fn checked_kernels<'a>(
    graphs: impl IntoIterator<Item = (&'a Graph, &'a Graph)>,
) -> Result<BTreeMap<String, usize>, Error> {
    let mut all: BTreeMap<String, usize> = BTreeMap::new();
    for (graph, twin) in graphs {
        let checked = floats::check(graph, twin);
        let checked = checked.map_err(|floats::Difference { node, reason }| {
            let fault = Fault {
                node,
                rank: 0,
                reason,
            };
            not_certified(graph, &fault)
        });
        for (name, forms) in checked? {
            let known = all.entry(name).or_default();
            *known = forms.max(*known);
        }
    }
    Ok(all)
}

/// The number of valid indices of each input, by name.
type Bounds = BTreeMap<Arc<str>, usize>;

impl Proof<'_> {
    /// Proves that the last graph computes the same step as the first, assuming that kernels equal their composed
    /// forms.
    ///
    /// # Errors
    ///
    /// [`Error::NotCertified`]; [`Error::NotProvable`] if a step over a joined batch differs and has uninterpreted
    /// operations.
    pub(crate) fn of_passes(&self, stages: &[Graph]) -> Result<Certificate, Error> {
        let start = Instant::now();
        let [traced, .., plan] = stages else {
            return Err(Error::Internal("no pass made a plan".to_owned()));
        };
        let bounds = bounds(traced);
        // A user's pass may change what the step computes. Graphs before it are compared with the trace, and graphs
        // after it with its result.
        let (mut proved, mut opaque) = (Vec::new(), BTreeSet::new());
        for part in stages.chunk_by(|_, next| !is_assumed(next)) {
            let (expected, taken) = self.of_run(part, &bounds)?;
            proved = expected;
            opaque.extend(taken);
        }
        let assumed = stages.iter().filter(|graph| is_assumed(graph));
        Ok(Certificate {
            num_ranks: self.mesh.size(),
            passes: plan.applied().to_vec(),
            num_nodes: plan.nodes().len(),
            num_tensors: proved.iter().map(|of| of.tensors().count()).sum(),
            num_elements: proved.iter().map(Outcome::num_elements).sum(),
            uninterpreted: opaque.into_iter().collect(),
            checked_in_floats: BTreeMap::new(),
            assumed: assumed.filter_map(last).collect(),
            plan: plan.fingerprint(),
            elapsed: start.elapsed(),
        })
    }

    /// Proves that the last of these graphs, which have no user's pass between them, computes the same step as the
    /// first. Returns the outcomes of its steps, and its uninterpreted operations.
    fn of_run(
        &self,
        stages: &[Graph],
        bounds: &Bounds,
    ) -> Result<(Vec<Outcome>, Vec<String>), Error> {
        let [from, .., plan] = stages else {
            return Ok((Vec::new(), Vec::new()));
        };
        let expected = self.outcomes(&mut self.machine(from)?, (from, plan), bounds);
        let expected = expected.map_err(|fault| not_certified(from, &fault))?;
        let mut machine = self.machine(plan)?;
        let got = self.outcomes(&mut machine, (plan, plan), bounds);
        let opaque = machine.opaque();
        if got.as_ref().is_ok_and(|got| *got == expected) {
            return Ok((expected, opaque));
        }
        // An uninterpreted function of parts differs from the function of the whole tensor, so a difference need not be
        // a fault.
        Err(if self.joined.is_some() && !opaque.is_empty() {
            Error::NotProvable {
                what: format!("by placements with {}", opaque.join(", ")),
            }
        } else {
            self.first_fault(stages, bounds)?
        })
    }

    /// Proves that the three graphs of a step, run one after the other, compute the traced step. The plan is the last
    /// of `versions`, and each version is the result of applying a pass to the previous version.
    ///
    /// # Errors
    ///
    /// Same as [`of_passes`](Self::of_passes), with the first pass whose graphs do not compute the traced step.
    /// [`Error::NotProvable`] if a user's pass in `stages`, the graphs before the split, changed what the step
    /// computes.
    pub(crate) fn of_parts(&self, stages: &[Graph], versions: &[Parts<'_>]) -> Result<(), Error> {
        let (Some(traced), Some(last_version)) = (stages.first(), versions.last()) else {
            return Err(Error::Internal("a step has no graphs".to_owned()));
        };
        let Err(error) = self.of_version(traced, *last_version) else {
            return Ok(());
        };
        if let Some(user) = stages.iter().find(|graph| is_assumed(graph)).and_then(last) {
            return Err(Error::NotProvable {
                what: format!("of several graphs after the user's pass \"{user}\""),
            });
        }
        let mut errors = versions
            .iter()
            .map(|version| self.of_version(traced, *version));
        Err(errors.find_map(Result::err).unwrap_or(error))
    }

    fn of_version(&self, traced: &Graph, parts: Parts<'_>) -> Result<(), Error> {
        let bounds = bounds(traced);
        let (num_steps, num_batches) = match parts.num_batches {
            None => (NUM_STEPS + 1, 1),
            Some(num_batches) => (NUM_STEPS, num_batches),
        };
        let plan = parts.plan();
        let is_clipped = parts.graphs.into_iter().any(clips);
        let clip = self.clip.as_ref().filter(|_| is_clipped);
        let mut machine = self.machine(traced)?;
        let expected = (0..num_steps).map(|step| {
            let runs = step * num_batches..(step + 1) * num_batches;
            let batches: Vec<_> = runs.map(|run| self.given(&machine, &bounds, run)).collect();
            reference::step(&mut machine, traced, clip, &batches)
        });
        let expected = expected.collect::<Result<Vec<_>, _>>();
        let expected = expected.map_err(|fault| not_certified(traced, &fault))?;
        let expected = self.on_all_ranks(expected, traced);
        let mut machine = self.machine(plan)?;
        let got = match parts.num_batches {
            None => self.iterated(&mut machine, parts.graphs, num_steps, &bounds),
            Some(batches) => self.accumulated(&mut machine, parts.graphs, batches, &bounds),
        };
        let got = got.map_err(|(graph, fault)| not_certified(graph, &fault))?;
        match first_difference(&expected, &got) {
            None => Ok(()),
            Some(difference) => Err(differs(plan, None, &difference)),
        }
    }

    /// Runs steps that move some nodes into the next step, and returns the outcome of each.
    fn iterated<'g>(
        &self,
        machine: &mut Machine,
        [setup, main, cleanup]: [&'g Graph; 3],
        num_steps: usize,
        bounds: &Bounds,
    ) -> Result<Vec<Outcome>, (&'g Graph, Fault)> {
        let mut outcomes: Vec<Outcome> = Vec::new();
        for step in 0..=num_steps {
            let graph = match step {
                0 => setup,
                step if step == num_steps => cleanup,
                _ => main,
            };
            let given = self.given(machine, bounds, step);
            let outcome = run(machine, graph, &given).map_err(|fault| (graph, fault))?;
            // The values of moved nodes belong to the previous step.
            let (moved, own) = outcome.divided(cleanup);
            if let Some(before) = outcomes.last_mut() {
                before.seen.extend(moved.seen);
                before.stepped.extend(moved.stepped);
            }
            if step < num_steps {
                outcomes.push(own);
            }
        }
        Ok(outcomes)
    }

    /// Runs steps of several micro-batches, and returns the outcome of each.
    fn accumulated<'g>(
        &self,
        machine: &mut Machine,
        [first, next, update]: [&'g Graph; 3],
        num_batches: usize,
        bounds: &Bounds,
    ) -> Result<Vec<Outcome>, (&'g Graph, Fault)> {
        let mut outcomes = Vec::new();
        for step in 0..NUM_STEPS {
            let mut outcome = Outcome::default();
            for batch in 0..num_batches {
                let graph = match batch {
                    0 => first,
                    _ => next,
                };
                let given = self.given(machine, bounds, step * num_batches + batch);
                let own = run(machine, graph, &given).map_err(|fault| (graph, fault))?;
                let seen = reference::of_batch(own.seen, batch, num_batches);
                outcome.seen.extend(seen);
            }
            let graph = update;
            let given = self.given(machine, bounds, step);
            let own = run(machine, graph, &given).map_err(|fault| (graph, fault))?;
            outcome.seen.extend(own.seen);
            outcome.stepped = own.stepped;
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    /// Creates the machine for a graph. It has one rank for the trace of a joined batch.
    fn machine(&self, graph: &Graph) -> Result<Machine, Error> {
        let mesh = if self.joined.is_some() && !is_divided(graph) {
            Mesh::line("one", 1)?
        } else {
            self.mesh.clone()
        };
        Ok(Machine::new(mesh))
    }

    fn given<'b>(&'b self, machine: &Machine, bounds: &'b Bounds, run: usize) -> Given<'b> {
        Given {
            mesh: machine.mesh().clone(),
            bounds,
            joined: self.joined,
            run: run as u64,
        }
    }

    /// Returns the outcomes of consecutive steps of a graph. A graph without collectives clips if `like` does.
    fn outcomes(
        &self,
        machine: &mut Machine,
        (graph, like): (&Graph, &Graph),
        bounds: &Bounds,
    ) -> Result<Vec<Outcome>, Fault> {
        let steps = 0..NUM_STEPS;
        let outcomes = steps.map(|step| self.step(machine, (graph, like), bounds, step));
        let outcomes = outcomes.collect::<Result<_, _>>()?;
        Ok(self.on_all_ranks(outcomes, graph))
    }

    fn step(
        &self,
        machine: &mut Machine,
        (graph, like): (&Graph, &Graph),
        bounds: &Bounds,
        step: usize,
    ) -> Result<Outcome, Fault> {
        let given = self.given(machine, bounds, step);
        if is_divided(graph) {
            run(machine, graph, &given)
        } else {
            let clip = self.clip.as_ref().filter(|_| clips(like));
            reference::step(machine, graph, clip, &[given])
        }
    }

    /// Repeats the outcomes of one rank for all ranks, if the graph is the trace of a joined batch.
    fn on_all_ranks(&self, mut outcomes: Vec<Outcome>, graph: &Graph) -> Vec<Outcome> {
        if self.joined.is_some() && !is_divided(graph) {
            for outcome in &mut outcomes {
                let all = outcome
                    .seen
                    .values_mut()
                    .chain(outcome.stepped.values_mut());
                all.for_each(|tensors| *tensors = vec![tensors[0].clone(); self.mesh.size()]);
            }
        }
        outcomes
    }

    /// Returns the error for the first pass whose graph computes different results from the first graph.
    fn first_fault(&self, stages: &[Graph], bounds: &Bounds) -> Result<Error, Error> {
        let mut known: BTreeMap<bool, Vec<Outcome>> = BTreeMap::new();
        for pair in stages.windows(2) {
            let [before, after] = pair else { continue };
            let expected = match known.entry(clips(after)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(missing) => {
                    let from = &stages[0];
                    let made = self.outcomes(&mut self.machine(from)?, (from, after), bounds);
                    missing.insert(made.map_err(|fault| not_certified(from, &fault))?)
                }
            };
            match self.outcomes(&mut self.machine(after)?, (after, after), bounds) {
                Err(fault) => return Ok(not_certified(after, &fault)),
                Ok(got) => {
                    if let Some(difference) = first_difference(expected, &got) {
                        let node = self.first_node((before, after), bounds)?;
                        return Ok(differs(after, node, &difference));
                    }
                }
            }
        }
        let lost = "a plan differs from its trace, but no pass does".to_owned();
        Ok(Error::Internal(lost))
    }

    /// Returns the first node whose result differs from the value with the same id in the previous graph.
    fn first_node(
        &self,
        (before, after): (&Graph, &Graph),
        bounds: &Bounds,
    ) -> Result<Option<usize>, Error> {
        let noted = |graph: &Graph| {
            let mut machine = self.machine(graph)?.noting();
            // The values recorded before a failure are enough.
            let _ = self.step(&mut machine, (graph, after), bounds, 0);
            Ok::<_, Error>(machine)
        };
        let (expected, got) = (noted(before)?, noted(after)?);
        let differs = |node: &Node| {
            node.outputs().any(|id| {
                (0..self.mesh.size()).any(|rank| {
                    let (a, b) = (expected.written(rank, id), got.written(rank, id));
                    a.is_some() && b.is_some() && a != b
                })
            })
        };
        Ok(after.nodes().iter().position(differs))
    }
}

/// Runs a graph on all ranks.
fn run(machine: &mut Machine, graph: &Graph, given: &Given<'_>) -> Result<Outcome, Fault> {
    machine.begin(graph, given)?;
    for (index, node) in graph.nodes().iter().enumerate() {
        machine.run_node(index, node)?;
    }
    let outcome = Outcome::of(machine, graph)?;
    machine.finish(graph, |_| true)?;
    Ok(outcome)
}

/// Returns true if the graph is for ranks that communicate.
fn is_divided(graph: &Graph) -> bool {
    graph.applied().contains(&PassId::InsertCollectives)
}

/// Returns true if the last pass may have changed what the step computes: a user's pass, or gradient clipping after
/// one, which can only be compared with the trace.
fn is_assumed(graph: &Graph) -> bool {
    let is_user = |pass: &PassId| matches!(pass, PassId::User(_));
    match graph.applied() {
        [before @ .., PassId::ClipGradients] => before.iter().any(is_user),
        applied => applied.last().is_some_and(is_user),
    }
}

fn clips(graph: &Graph) -> bool {
    graph.applied().contains(&PassId::ClipGradients)
}

fn last(graph: &Graph) -> Option<PassId> {
    graph.applied().last().copied()
}

fn first_difference(expected: &[Outcome], got: &[Outcome]) -> Option<Difference> {
    let mut steps = expected.iter().zip(got);
    steps.find_map(|(expected, got)| expected.difference(got))
}

fn differs(graph: &Graph, node: Option<usize>, difference: &Difference) -> Error {
    let Difference { what, rank, reason } = difference;
    let fault = Fault {
        node: node.unwrap_or(graph.nodes().len()),
        rank: *rank,
        reason: format!("{what} differs: {reason}"),
    };
    not_certified(graph, &fault)
}

fn not_certified(graph: &Graph, fault: &Fault) -> Error {
    let node = graph.nodes().get(fault.node);
    Error::NotCertified {
        pass: last(graph),
        node: node.map(|_| fault.node),
        operation: node.map_or_else(String::new, Node::name),
        rank: fault.rank,
        reason: fault.reason.clone(),
    }
}
