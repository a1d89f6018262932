//! A training run by the legs of a case.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn_fsdp::{Check, Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, launch};

use super::case::Case;
use super::compiled::CompiledRun;
use super::eager::EagerRun;
use super::legs::{Death, End, Engine, Leg, Place, Ranks};
use super::outcome::Outcome;
use super::run::{KILLED, Run, Strike};
use super::saving::{Shelf, finish, saved_params};

/// A rank's report of a leg, also if it dies at the end of it.
#[derive(Debug, Clone, Default)]
struct Report {
    losses: Vec<f32>,
    evaluated: f32,
}

/// The reports of all ranks, by rank.
type Reports = Arc<Mutex<Vec<Option<Report>>>>;

impl Case {
    /// Trains by the legs; each continues from a checkpoint of the previous one.
    pub(crate) fn by_legs(&self) -> Result<Outcome, String> {
        let shelf = Shelf::new(self.is_in_memory).map_err(|error| error.to_string())?;
        let mut outcome = Outcome::default();
        let mut case = self.clone();
        for (steps, leg) in self.legs() {
            if let Some(layer) = leg.switched {
                case.plan.switch(layer);
            }
            case.plan.halves = leg.halves();
            // The proof by placements rejects some operations by name.
            let proved = case.by_leg(leg, steps.clone(), &shelf, true);
            let of_ranks = match proved {
                Err(error) if error.contains("cannot be proved") => {
                    // A step after the last saved one may be the first with its shapes.
                    let forgotten = shelf.forget_after(steps.start as u64);
                    forgotten.map_err(|error| error.to_string())?;
                    case.by_leg(leg, steps.clone(), &shelf, false)?
                }
                proved => proved?,
            };
            let ranks = of_ranks.len() as f32;
            outcome.losses.extend((0..leg.steps).map(|step| {
                let sum: f32 = of_ranks.iter().map(|report| report.losses[step]).sum();
                sum / ranks
            }));
            // The first rank's statistics of batches are saved.
            outcome.evaluated.push(of_ranks[0].evaluated);
            let forgotten = shelf.forget_after(steps.end as u64);
            forgotten.map_err(|error| error.to_string())?;
        }
        outcome.params = saved_params(&shelf.checkpoints()).map_err(|error| error.to_string())?;
        Ok(outcome)
    }

    /// Returns each rank's report. Plans are proved before they run, if requested.
    fn by_leg(
        &self,
        leg: &Leg,
        steps: std::ops::Range<usize>,
        shelf: &Shelf,
        proves: bool,
    ) -> Result<Vec<Report>, String> {
        let number = leg.ranks.number();
        // Ranks compare bytes in every other leg: unchanged data must never be reported as changed.
        let check = match steps.len() % 2 {
            0 => Check::Agreement,
            _ => Check::Calls,
        };
        let config = LaunchConfig::new(number)
            .deadline(Duration::from_secs(60))
            .check(check);
        let all: Reports = Arc::new(Mutex::new(vec![None; number]));
        let (case, of_ranks, of_leg, shelf) =
            (self.clone(), all.clone(), leg.clone(), shelf.clone());
        let launched = launch(config, move |world| {
            let mesh = of_leg.ranks.mesh(&world)?;
            let mut run = case.run((&of_leg, proves), &mesh, (&shelf, steps.start))?;
            let mut report = Report::default();
            for step in steps.clone() {
                report.losses.push(run.step(step, &Strike::default())?);
            }
            report.evaluated = run.evaluate(steps.end)?;
            if let Ok(mut all) = of_ranks.lock() {
                all[world.rank()] = Some(report);
            }
            finish(&mut *run, &shelf, (steps.end, of_leg.end), &world)
        });
        match (launched, leg.end) {
            (Ok(_), End::Death(death)) if self.is_sure(death, leg) => {
                return Err(format!("{leg:?}: a rank has died, and nobody has noticed"));
            }
            (Err(error), End::Death(_)) if is_of_death(&error.to_string()) => {}
            (Err(error), _) => return Err(format!("{leg:?}: {error}")),
            (Ok(_), _) => {}
        }
        let reports = all.lock().map_err(|error| error.to_string())?.clone();
        let reports: Option<Vec<_>> = reports.into_iter().collect();
        reports.ok_or_else(|| format!("{leg:?}: a rank has reported nothing"))
    }

    fn run(
        &self,
        (leg, proves): (&Leg, bool),
        mesh: &ProcessMesh,
        (shelf, start): (&Shelf, usize),
    ) -> Result<Box<dyn Run>, Error> {
        let from = (&shelf.checkpoints(), start);
        Ok(match &leg.engine {
            Engine::Eager(eager) => Box::new(EagerRun::new(self, (leg, eager), mesh, from)?),
            _ => Box::new(CompiledRun::new(self, (leg, proves), mesh, from)?),
        })
    }

    /// Returns true if the death comes whatever the engine does.
    fn is_sure(&self, death: Death, leg: &Leg) -> bool {
        match (death.place, &leg.engine) {
            (Place::Layer(layers), Engine::Eager(_)) => layers < self.plan.num_hops(),
            (Place::Collective, Engine::Eager(_)) => leg.ranks.number() > 1,
            (Place::Storage(calls), _) => calls == 0,
            _ => false,
        }
    }
}

/// Returns true if an error reports a death on purpose.
fn is_of_death(error: &str) -> bool {
    let words = [KILLED, "made this rank fail", "made this rank panic"];
    words.iter().any(|words| error.contains(words))
}

impl Ranks {
    fn mesh(self, world: &ProcessGroup) -> Result<ProcessMesh, Error> {
        let mesh = match self {
            Self::Line(ranks) => Mesh::line("shard", ranks)?,
            Self::Copies(ranks) => Mesh::new([("replicate", 2), ("shard", ranks)])?,
            Self::Grid(data, model, 1) => Mesh::new([("data", data), ("model", model)])?,
            Self::Grid(data, model, depth) => {
                Mesh::new([("data", data), ("model", model), ("depth", depth)])?
            }
        };
        Ok(ProcessMesh::new(world, mesh)?)
    }
}
