//! Evaluation in which ranks take different routes through a module: before each gather, they exchange which unit each
//! needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_fsdp_collectives::ProcessGroup;

use super::routes::Routes;
use super::state::Root;
use crate::copies::{Copies, Generation};
use crate::error::Error;
use crate::schedule::Operation;

/// The message of a rank that needs no more units.
const DONE: u32 = u32::MAX;

/// The message of a rank that failed.
const FAILED: u32 = u32::MAX - 1;

/// A unit of the evaluated module, with its root.
pub(crate) type Evaluable = (Arc<Root>, Arc<Generation>);

/// Returns true if both are equal values of one unit. Comparing pointers is not enough, because values from several
/// generations may be combined anew for each request.
pub(crate) fn are_equal(one: &Generation, other: &Generation) -> bool {
    Arc::ptr_eq(&one.unit, &other.unit) && one.version() == other.version()
}

/// An evaluation that all ranks of a group take part in.
struct Evaluated {
    /// The outermost root of the evaluated module.
    root: Arc<Root>,
    group: ProcessGroup,
    /// The units, in the module's order, of the copy of the module that all ranks evaluate.
    units: Vec<Evaluable>,
    /// True once a rank has failed, which ends the evaluation on all ranks.
    is_broken: AtomicBool,
}

/// An evaluation in progress, which ends when this is dropped (also by unwinding).
pub(crate) struct Evaluation(Arc<Evaluated>);

impl Drop for Evaluation {
    fn drop(&mut self) {
        for (root, generation) in &self.0.units {
            // This breaks the reference cycle between root and evaluation. It also drops units that only some ranks
            // gathered last.
            root.progress().routes = None;
            Copies::of(generation).drop_full_of(generation.version());
        }
    }
}

impl Evaluation {
    /// Begins an evaluation of `units` of a module with the outermost root `root`.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside another evaluation; [`Error::Option`] for units of several groups; [`Error::Collective`]
    /// if ranks compare bytes and full parameters are corrupted.
    pub(crate) fn begin(root: &Arc<Root>, units: Vec<Evaluable>) -> Result<Self, Error> {
        let group = units.first().map_or(&root.group, |(root, _)| &root.group);
        if let Some((other, generation)) = units.iter().find(|(root, _)| root.group != *group) {
            return Err(Error::Option {
                option: "the module to evaluate",
                expected: "sharded over one group",
                got: format!(
                    "sharded over `{}`, with unit `{}` over `{}`",
                    group.name(),
                    generation.unit.label(),
                    other.group.name()
                ),
            });
        }
        for (root, generation) in &units {
            let mut progress = root.progress();
            if progress.routes.is_some() {
                return Err(Error::State {
                    unit: generation.unit.label(),
                    expected: "in no other evaluation".to_owned(),
                    got: "in one".to_owned(),
                    advice: "let one `evaluate` return before starting the next",
                });
            }
            // Ranks that read nothing in this evaluation would keep the last unit of a previously evaluated copy.
            progress.reading.end()?;
        }
        let evaluated = Arc::new(Evaluated {
            root: root.clone(),
            group: group.clone(),
            units,
            is_broken: AtomicBool::new(false),
        });
        for (root, _) in &evaluated.units {
            root.progress().routes = Some(evaluated.clone());
        }
        Ok(Self(evaluated))
    }

    /// Takes part in the other ranks' gathers until all are done.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if another rank fails; a failed collective.
    pub(crate) fn finish(self) -> Result<(), Error> {
        self.0.join_until(DONE)
    }

    /// Tells the other ranks that this one failed.
    pub(crate) fn fail(self) {
        if !self.0.is_broken.load(Ordering::Relaxed) {
            // A second error is ignored: this rank already has one, and all ranks notice a failed collective.
            drop(self.0.told(FAILED));
        }
    }
}

impl Evaluated {
    /// Sends this rank's message `own` to the other ranks, and returns the messages of all ranks.
    fn told(&self, own: u32) -> Result<Vec<u32>, Error> {
        let label = self.root.label(format_args!("routes of an evaluation"));
        let notes = self.group.exchange(label, own.to_le_bytes().to_vec())?;
        let read = |note: &Vec<u8>| <[u8; 4]>::try_from(&note[..]).map_or(DONE, u32::from_le_bytes);
        Ok(notes.iter().map(read).collect())
    }

    /// Takes part in the other ranks' gathers until the unit at `own` is next, or until all ranks are done.
    ///
    /// In each round every rank reports the unit that it needs, and all gather the first reported unit in module order.
    /// Ranks that are behind catch up, so ranks on the same route gather each unit together.
    fn join_until(&self, own: u32) -> Result<(), Error> {
        loop {
            let wanted = self.told(own)?;
            if let Some(rank) = wanted.iter().position(|note| *note == FAILED) {
                self.is_broken.store(true, Ordering::Relaxed);
                return Err(self.state(
                    "evaluated by all ranks",
                    format!("no longer evaluated by rank {rank}, which failed"),
                ));
            }
            let next = wanted.into_iter().min().unwrap_or(DONE);
            if next == own {
                return Ok(());
            }
            let Some((root, generation)) = self.units.get(next as usize) else {
                return Err(self.state(
                    "in the same module on all ranks",
                    format!("in a module without unit {next}, which another rank evaluates"),
                ));
            };
            let operation = Operation::UnshardForward(generation.unit.position());
            root.join_gather(generation, operation)?;
        }
    }

    fn state(&self, expected: &str, got: String) -> Error {
        let unit = self.units.first();
        Error::State {
            unit: unit.map_or_else(String::new, |(_, generation)| generation.unit.label()),
            expected: expected.to_owned(),
            got,
            advice: "evaluate the same module on all ranks, and fix the error of that rank",
        }
    }
}

impl Routes for Evaluated {
    fn meet(&self, generation: &Arc<Generation>) -> Result<(), Error> {
        let mut units = self.units.iter();
        match units.position(|(_, unit)| are_equal(unit, generation)) {
            Some(place) => self.join_until(u32::try_from(place).unwrap_or(DONE)),
            None => Err(Error::State {
                unit: generation.unit.label(),
                expected: "part of the module that `evaluate` passes to the closure".to_owned(),
                got: "part of another copy".to_owned(),
                advice: "run the module that the closure receives",
            }),
        }
    }
}
