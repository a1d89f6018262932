//! Counts of each choice in the drawn cases, to check that all choices are covered.

use std::collections::BTreeMap;

use super::case::Case;
use super::legs::{End, Engine, Leg, Ranks};
use super::precision::Halves;

/// Numbers of cases by the choices drawn in them.
#[derive(Debug, Default)]
pub(crate) struct Histogram(BTreeMap<String, usize>);

impl Histogram {
    pub(crate) fn add(&mut self, case: &Case) {
        let mut drawn = vec![
            "case".to_owned(),
            format!("optimizer {:?}", case.optimizer),
            format!("legs {}", case.legs.len()),
            format!("micro-batches {}", case.micro_batches),
        ];
        let plan = &case.plan;
        drawn.extend(plan.layers.iter().map(|kind| format!("layer {kind:?}")));
        let states = case.states;
        drawn.extend(states.map(|format| format!("states in {format:?}")));
        drawn.push(format!("rates {:?}", case.rates));
        let mut note = |is_true: bool, name: &str| {
            if is_true {
                drawn.push(name.to_owned());
            }
        };
        note(case.clip.is_some(), "clipped");
        note(plan.adapters.is_some(), "adapters");
        note(
            plan.base_bits().is_some(),
            "adapters on a base in fewer bits",
        );
        note(case.is_in_memory, "checkpoints in memory");
        note(plan.shapes.change(), "shapes that change");
        for leg in &case.legs {
            drawn.extend(of_leg(case, leg));
        }
        drawn.sort();
        drawn.dedup();
        for name in drawn {
            *self.0.entry(name).or_default() += 1;
        }
    }

    pub(crate) fn print(&self) {
        for (name, number) in &self.0 {
            println!("{number:>6} {name}");
        }
    }
}

fn of_leg(case: &Case, leg: &Leg) -> Vec<String> {
    let mut drawn = vec![format!("ranks {:?}", leg.ranks)];
    let Halves {
        compute, reduce, ..
    } = leg.halves();
    if leg.halves().are_used() {
        let name = |dtype: Option<_>| dtype.map_or("as built".to_owned(), |of| format!("{of:?}"));
        drawn.push(format!(
            "compute {}, reduce {}",
            name(compute),
            name(reduce)
        ));
    }
    drawn.push(match leg.end {
        End::Nothing => "end: saved".to_owned(),
        End::InBackground => "end: saved in the background".to_owned(),
        End::Death(death) => {
            let place = format!("{:?}", death.place);
            let place = place.split('(').next().unwrap_or_default();
            format!("end: death, {place}")
        }
    });
    if leg.switched.is_some() {
        drawn.push("layer frozen or trained between legs".to_owned());
    }
    match &leg.engine {
        Engine::Eager(eager) => {
            drawn.push(format!("eager {:?}", eager.strategy));
            drawn.push(format!("eager {:?}", eager.accumulation));
            let is_hybrid = matches!(leg.ranks, Ranks::Copies(2));
            if is_hybrid && leg.is_uneven() {
                drawn.push("eager, copies of shards, uneven rows".to_owned());
            }
            if eager.has_owners {
                drawn.push("eager, owners".to_owned());
            }
            if eager.gathers_in_8_bits {
                drawn.push("eager, gathers in 8 bits".to_owned());
            }
            if eager.moves {
                drawn.push("eager, moves in memory".to_owned());
            }
        }
        Engine::Compiled(compiled) => {
            drawn.push(format!("compiled {:?}", compiled.strategy));
            drawn.push(format!("compiled {:?}", compiled.place));
            if compiled.moves.is_some() {
                drawn.push("compiled, nodes in the next step".to_owned());
            }
            if compiled.has_owners {
                drawn.push("compiled, owners".to_owned());
            }
        }
        Engine::Placed(placed) => {
            if placed.moves.is_some() {
                drawn.push("placed, nodes in the next step".to_owned());
            }
            if let Some(compute) = placed.halves.compute {
                drawn.push(format!("placed in {compute:?}"));
            }
            let cuts = placed.salt.map(|salt| case.plan.cuts(leg.ranks, salt));
            let cuts = cuts.unwrap_or_default();
            drawn.push(match (placed.is_automatic, cuts.len()) {
                (true, _) => "placed, automatic".to_owned(),
                (_, 0) => "placed, batch alone".to_owned(),
                _ => "placed, parameters cut".to_owned(),
            });
            let axes = ["data", "model", "depth"];
            let axes = axes
                .into_iter()
                .filter(|axis| cuts.iter().any(|cut| cut.1 == *axis));
            let axes: Vec<_> = axes.collect();
            if axes.len() > 1 {
                drawn.push(format!("placed, cut on {}", axes.join(" and ")));
            }
            let mut paths: Vec<_> = cuts.iter().map(|cut| &cut.0).collect();
            let number = paths.len();
            paths.dedup();
            if paths.len() < number {
                drawn.push("placed, a parameter cut on two axes".to_owned());
            }
            if case.plan.are_all_cut(&paths) {
                drawn.push("placed, every parameter cut".to_owned());
            }
        }
    }
    drawn
}
