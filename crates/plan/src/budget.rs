//! The search for a schedule within a memory budget.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_spmd::graph::{Graph, Phase};
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::passes::{AssignUnits, GraphTransform, UnitVisit, unit_visits};
use burn_fsdp_spmd::{Error, Mode, ScaleError, lower};

use burn_ir::{BaseOperationIr, OperationIr, TensorId};

use crate::machine::Machine;
use crate::size::Size;
use crate::step::{MemoryPlan, TimePlan, node_seconds};

/// Maximum number of units for which every subset is tried.
const FEW: usize = 6;

/// The units to recompute for a step to stay within a memory budget, as returned by [`fit`].
#[derive(Debug, Clone)]
pub struct Fitted {
    /// The options that were passed to [`fit`], with these units to recompute.
    pub options: Options,
    /// Units whose forward is recomputed in backward, in forward order.
    pub units: Vec<Arc<str>>,
    /// Highest estimated peak memory of a rank's process, in bytes.
    pub peak_bytes: u64,
    /// Estimated duration of the step in seconds.
    pub seconds: f64,
    /// Number of schedules that the search planned.
    pub tried: usize,
}

/// The error of [`fit`].
#[derive(Debug, thiserror::Error)]
pub enum BudgetError {
    /// No schedule that was tried fits in the budget.
    #[error(
        "the best plan found needs {} of memory per rank, {least} bytes, but the budget is {budget} bytes; raise \
         the budget, use more ranks, or make the batch smaller",
        Size(*.least).trimmed()
    )]
    TooSmall {
        /// The budget in bytes per rank.
        budget: u64,
        /// The lowest peak of the schedules that were tried, in bytes per rank.
        least: u64,
    },
    /// The step cannot be lowered, or does not support a memory budget.
    #[error(transparent)]
    Step(#[from] Error),
}

/// Chooses the units that a step recomputes in backward: as little as possible for every rank to stay within `bytes`.
///
/// Memory is the plan's estimate for the process ([`MemoryPlan::process`]): the exact peak of the tensors, times
/// [`ProcessBytes::FACTOR`](crate::ProcessBytes::FACTOR). If the step fits without recomputation, nothing is
/// recomputed. With up to six units, every subset is tried, and the one with the fastest plan that fits is chosen. With
/// more, units are added in forward order until the step fits, and unnecessary ones are then removed. The estimate is
/// for steps of one batch; steps with several micro-batches need more memory.
///
/// `graph` must come unchanged from [`trace`](burn_fsdp_spmd::trace::trace). `options` are the mode's options; their
/// [`recompute_units`](Options::recompute_units) are replaced. The call is not collective. Ranks choose the same units
/// if they pass equal arguments and have equal numbers of threads. If they choose differently, the step is rejected
/// before it runs.
///
/// # Errors
///
/// [`BudgetError::TooSmall`] if no schedule that was tried fits; [`Error::Precision`] if the graph was traced without
/// the [types](burn_fsdp_spmd::trace::TraceConfig::precision) in which the options compute; [`Error::LossScale`] if the
/// loss is [scaled](Options::scale_loss); errors of lowering.
pub fn fit(
    graph: &Graph,
    mode: &Mode,
    options: &Options,
    bytes: u64,
) -> Result<Fitted, BudgetError> {
    if options.loss_scaling.is_some() {
        return Err(BudgetError::Step(ScaleError::Budget.into()));
    }
    if !computes_as(graph, options) {
        return Err(BudgetError::Step(Error::Precision {
            what: "within a memory budget for a graph that was traced in the model's types",
            way_out: "trace it with the options' `TraceConfig::precision`",
        }));
    }
    let named = AssignUnits(options.units.clone()).transform(graph.clone())?;
    let mut units: Vec<Unit> = Vec::new();
    // Nodes outside all modules belong to the unit with the empty name, which is not recomputed.
    let visits = unit_visits(&named).into_iter();
    for visit in visits.filter(|visit| !visit.unit.is_empty()) {
        let cost = cost(&named, &visit);
        match units.iter_mut().find(|unit| unit.name == visit.unit) {
            Some(unit) => unit.cost += cost,
            None => units.push(Unit {
                name: visit.unit,
                cost,
            }),
        }
    }
    let mut search = Search {
        graph,
        mode,
        options,
        budget: bytes,
        units,
        least: u64::MAX,
        tried: 0,
    };
    let found = match search.units.len() {
        0..=FEW => search.all()?,
        _ => search.first_ones()?,
    };
    found.ok_or(BudgetError::TooSmall {
        budget: bytes,
        least: search.least,
    })
}

/// Returns true if forward casts every parameter that it reads to the parameter's compute type in `options`, unless the
/// parameter already has that type.
fn computes_as(graph: &Graph, options: &Options) -> bool {
    let types = graph.parameters().iter().filter(|of| !of.is_buffer);
    let types = types.filter_map(|parameter| {
        let own = graph.value(parameter.value)?.dtype;
        let compute = options.precision.compute_of(&parameter.path, own);
        Some((parameter.value, (own, compute)))
    });
    let types: BTreeMap<TensorId, (DType, DType)> = types.collect();
    let forward = graph.nodes().iter().filter(|n| n.phase == Phase::Forward);
    let mut reads = forward.flat_map(|node| node.inputs().map(move |input| (node, input)));
    reads.all(|(node, input)| {
        let cast = match &node.operation {
            OperationIr::BaseFloat(BaseOperationIr::Cast(cast)) => Some(cast.out.dtype),
            _ => None,
        };
        let of = types.get(&input);
        // A model that computes in the parameter's own type may cast it freely.
        of.is_none_or(|(own, compute)| own == compute || cast == Some(*compute))
    })
}

/// A unit, and the duration of its forward pass in seconds.
struct Unit {
    name: Arc<str>,
    cost: f64,
}

/// Returns the duration of a visit's nodes in seconds.
fn cost(graph: &Graph, visit: &UnitVisit) -> f64 {
    let machine = machine();
    let nodes = visit.nodes.iter().map(|index| &graph.nodes()[*index]);
    nodes.map(|node| node_seconds(node, &machine)).sum()
}

fn machine() -> Machine {
    Machine::cpu()
}

struct Search<'a> {
    graph: &'a Graph,
    mode: &'a Mode,
    options: &'a Options,
    budget: u64,
    units: Vec<Unit>,
    /// The lowest peak of the schedules that were tried, in bytes per rank.
    least: u64,
    tried: usize,
}

impl Search<'_> {
    /// Plans the step that recomputes these units. Returns `None` if it needs too much memory.
    fn plan(&mut self, chosen: &BTreeSet<usize>) -> Result<Option<Fitted>, Error> {
        let units: Vec<_> = chosen
            .iter()
            .map(|index| self.units[*index].name.clone())
            .collect();
        let names = units.iter().map(|unit| &**unit);
        let options = self.options.clone().recompute_units(names);
        let lowered = lower(
            self.graph.clone(),
            &self.mode.clone().options(options.clone()),
        )?;
        self.tried += 1;
        // The first rank has the longest shards, and the last rank's shards differ most from them. With owners, every
        // rank differs.
        let last = lowered.num_ranks().saturating_sub(1);
        let (mut peak_bytes, mut seconds) = (0, 0f64);
        for rank in 0..=last {
            if rank == 0 || rank == last || !lowered.absent_on(rank)?.is_empty() {
                peak_bytes = peak_bytes.max(MemoryPlan::new(&lowered, rank)?.process().bytes);
                seconds = seconds.max(TimePlan::of_graph(&lowered, &machine(), rank)?.step);
            }
        }
        self.least = self.least.min(peak_bytes);
        Ok((peak_bytes <= self.budget).then_some(Fitted {
            options,
            units,
            peak_bytes,
            seconds,
            tried: self.tried,
        }))
    }

    /// Plans the step without recomputation if it then fits, and otherwise with the fastest subset of units that fits.
    /// The costs of units are not additive, because operations that two units recompute may be merged.
    fn all(&mut self) -> Result<Option<Fitted>, Error> {
        let number = self.units.len();
        if let Some(found) = self.plan(&BTreeSet::new())? {
            return Ok(Some(found));
        }
        let mut best: Option<Fitted> = None;
        for mask in 1..1_usize << number {
            let choice = (0..number).filter(|unit| mask >> unit & 1 == 1).collect();
            if let Some(found) = self.plan(&choice)?
                && best
                    .as_ref()
                    .is_none_or(|best| found.seconds < best.seconds)
            {
                best = Some(found);
            }
        }
        if let Some(best) = &mut best {
            best.tried = self.tried;
        }
        Ok(best)
    }

    /// Selects units in forward order until the step fits, and then drops unnecessary ones, the most expensive first.
    fn first_ones(&mut self) -> Result<Option<Fitted>, Error> {
        let first = |number: usize| (0..number).collect::<BTreeSet<_>>();
        let number = self.units.len();
        if let Some(found) = self.plan(&first(0))? {
            return Ok(Some(found));
        }
        // Backward needs the head's activations immediately, so recomputing them may need more memory.
        let mut best = None;
        for most in (1..=number).rev() {
            best = self.plan(&first(most))?.map(|found| (most, found));
            if best.is_some() {
                break;
            }
        }
        let Some((most, mut found)) = best else {
            return Ok(None);
        };
        // `low` units are too few, and `high` units are enough.
        let (mut low, mut high) = (0, most);
        while high - low > 1 {
            let middle = usize::midpoint(low, high);
            match self.plan(&first(middle))? {
                Some(fewer) => (high, found) = (middle, fewer),
                None => low = middle,
            }
        }
        let mut chosen = first(high);
        let mut by_cost: Vec<usize> = chosen.iter().copied().collect();
        by_cost.sort_by(|a, b| self.units[*b].cost.total_cmp(&self.units[*a].cost));
        // Equal blocks are equivalent: if one of them is necessary, so are the others.
        by_cost.dedup_by(|a, b| self.units[*a].cost == self.units[*b].cost);
        for unit in by_cost {
            let mut fewer = chosen.clone();
            fewer.remove(&unit);
            if let Some(without) = self.plan(&fewer)? {
                (chosen, found) = (fewer, without);
            }
        }
        found.tried = self.tried;
        Ok(Some(found))
    }
}
