//! The wrap plan: the units of a sharded module and their cost.

use std::collections::HashSet;
use std::fmt;

use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;

use crate::error::Error;
use crate::inspect;
use crate::path::{self, Location};

/// One unit of a [`WrapPlan`]. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnitPlan {
    /// Name of the unit, usually the path of its module; `root` for the outermost unit.
    pub name: String,
    /// Number of parameters (elements) of the whole unit.
    pub num_params: usize,
    /// Bytes of the full parameters that a gather of the unit creates.
    pub unsharded: usize,
    /// Parameter bytes that this rank holds between steps.
    pub held: usize,
    /// True if full weights are kept from forward to backward.
    pub keeps_unsharded: bool,
}

/// The units of a sharded module, with the bytes to expect on this rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrapPlan {
    /// Number of ranks that train the module together.
    pub world_size: usize,
    /// The units, the root first if it has parameters.
    pub units: Vec<UnitPlan>,
    /// Number of units gathered ahead of their use.
    pub prefetch: usize,
    /// Warnings about units that save less memory than they could.
    pub warnings: Vec<String>,
}

impl WrapPlan {
    /// Returns the number of parameters (elements) of the whole module.
    pub fn num_params(&self) -> usize {
        self.units.iter().map(|unit| unit.num_params).sum()
    }

    /// Returns the total parameter bytes that this rank holds between steps.
    pub fn held(&self) -> usize {
        self.units.iter().map(|unit| unit.held).sum()
    }

    /// Returns the expected peak of full parameters and full gradients together, in bytes. It is the sum of:
    ///
    /// - Twice the units that keep their parameters, because their gradients exist at the same time.
    /// - The largest of the other units: twice without prefetching, otherwise `3 + prefetch` times.
    pub fn unsharded_peak(&self) -> usize {
        let kept = self.units.iter().filter(|unit| unit.keeps_unsharded);
        let kept: usize = kept.map(|unit| unit.unsharded).sum();
        let dropped = self.units.iter().filter(|unit| !unit.keeps_unsharded);
        let largest = dropped.map(|unit| unit.unsharded).max().unwrap_or(0);
        let in_flight = if self.prefetch == 0 {
            2
        } else {
            3 + self.prefetch
        };
        2 * kept + in_flight * largest
    }
}

/// Returns the plan of a sharded module, as seen from this rank. If only children of the module were sharded, it is the
/// plan of the first one.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn wrap_plan<M: Module>(module: &M) -> Result<WrapPlan, Error> {
    let root = inspect::root_of(module)?;
    let units: Vec<_> = root
        .units()
        .iter()
        .map(|unit| UnitPlan {
            name: unit.label(),
            num_params: unit.slots.iter().map(|s| s.partition.num_elements()).sum(),
            unsharded: unit.gathered_bytes(),
            held: unit
                .slots
                .iter()
                .map(|s| s.held_bytes(unit.groups.shard.rank()))
                .sum(),
            keeps_unsharded: unit.keeps(),
        })
        .collect();
    let mut plan = WrapPlan {
        world_size: root.group.size(),
        prefetch: root.prefetch(),
        units,
        warnings: Vec::new(),
    };
    let total = plan.num_params();
    // The largest parameter of each unit, which no choice of units divides.
    let indivisible = root.units();
    let indivisible = indivisible.iter().map(|unit| {
        let sizes = unit.slots.iter().map(|slot| slot.partition.num_elements());
        sizes.max().unwrap_or(0)
    });
    let largest = plan.units.iter().zip(indivisible);
    let largest = largest.max_by_key(|(unit, _)| unit.num_params);
    if let Some((unit, one)) = largest
        && 2 * unit.num_params > total
        && 10 * (unit.num_params - one) > total
    {
        plan.warnings.push(format!(
            "unit `{}` holds {} of {} parameters, and the full weights of a unit exist at once, so sharding saves \
             little; make smaller modules units, such as \"blocks.*\"",
            unit.name, unit.num_params, total
        ));
    }
    Ok(plan)
}

impl fmt::Display for WrapPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.units.iter().map(|unit| unit.name.len()).max();
        let width = width.unwrap_or(4).max(4);
        writeln!(
            f,
            "{:<width$}  {:>12}  {:>12}  {:>12}  after forward",
            "unit", "parameters", "unsharded", "per rank"
        )?;
        for unit in &self.units {
            writeln!(
                f,
                "{:<width$}  {:>12}  {:>12}  {:>12}  {}",
                unit.name,
                unit.num_params,
                bytes(unit.unsharded),
                bytes(unit.held),
                if unit.keeps_unsharded {
                    "kept"
                } else {
                    "dropped"
                },
            )?;
        }
        writeln!(
            f,
            "{:<width$}  {:>12}  {:>12}  {:>12}  on {} ranks; at most {} unsharded at once",
            "all",
            self.num_params(),
            "",
            bytes(self.held()),
            self.world_size,
            bytes(self.unsharded_peak()),
        )?;
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        Ok(())
    }
}

fn bytes(count: usize) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} B"),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

/// Returns the number of parameters (elements) of the whole module, sharded or not. A parameter shared by several
/// fields (one id) counts once.
///
/// For a sharded module, Burn's own `Module::num_params` counts every parameter plus its shard.
pub fn num_params<M: Module>(module: &M) -> usize {
    let mut count = Count::default();
    inspect::visit(module, &mut count);
    count.elements
}

#[derive(Default)]
struct Count {
    elements: usize,
    seen: HashSet<ParamId>,
}

impl path::Visitor for Count {
    fn float<const D: usize>(&mut self, _place: &Location, param: &Param<Tensor<D>>) {
        if self.seen.insert(param.id) {
            self.elements += param.lazy_shape().num_elements();
        }
    }
}
