//! Evaluation in which ranks take different routes through a module: before each gather they tell each other what they need.

use std::sync::Arc;

use burn_fsdp_collectives::ProcessGroup;

use super::routes::Routes;
use super::state::Root;
use crate::copies::Generation;
use crate::error::Error;
use crate::schedule::Operation;

/// The note of a rank that needs nothing more.
const DONE: u32 = u32::MAX;

/// An evaluation by the ranks of a group.
struct Evaluated {
    group: ProcessGroup,
    /// The units of the copy of the module that all ranks evaluate, in the module's order, with their roots.
    units: Vec<(Arc<Root>, Arc<Generation>)>,
}

/// An evaluation under way. It ends when this is dropped, by unwinding or otherwise.
pub(crate) struct Evaluation(Arc<Evaluated>);

impl Drop for Evaluation {
    fn drop(&mut self) {
        // They hold each other until then.
        self.0
            .units
            .iter()
            .for_each(|(root, _)| root.progress().routes = None);
    }
}

impl Evaluation {
    /// Begins an evaluation of `units`, each with the root that it is below, by the ranks of `group`.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside another one.
    pub(crate) fn begin(
        group: ProcessGroup,
        units: Vec<(Arc<Root>, Arc<Generation>)>,
    ) -> Result<Self, Error> {
        let mut inside = units
            .iter()
            .filter(|(root, _)| root.progress().routes.is_some());
        if let Some((_, generation)) = inside.next() {
            return Err(Error::State {
                unit: generation.unit.label(),
                expected: "in no evaluation".to_owned(),
                got: "in one".to_owned(),
                advice: "let one `evaluate` end before the next begins",
            });
        }
        let evaluated = Arc::new(Evaluated { group, units });
        for (root, _) in &evaluated.units {
            root.progress().routes = Some(evaluated.clone());
        }
        Ok(Self(evaluated))
    }

    /// Takes part in the gathers of the other ranks until all are done.
    ///
    /// # Errors
    ///
    /// A failed collective.
    pub(crate) fn finish(self) -> Result<(), Error> {
        self.0.join_until(DONE)
    }
}

impl Evaluated {
    /// Takes part in the gathers of the other ranks until the unit at `own` is next, or until all are done.
    ///
    /// In each round every rank says what it needs, and all gather the first of these in the module's order: whoever is
    /// behind comes up to the others, so that ranks on one route gather each unit together.
    fn join_until(&self, own: u32) -> Result<(), Error> {
        loop {
            let note = own.to_le_bytes().to_vec();
            let notes = self.group.exchange("routes of an evaluation", note)?;
            let wanted = notes
                .iter()
                .map(|note| <[u8; 4]>::try_from(&note[..]).map_or(DONE, u32::from_le_bytes));
            let next = wanted.min().unwrap_or(DONE);
            if next == own {
                return Ok(());
            }
            let (root, generation) = &self.units[next as usize];
            let operation = Operation::UnshardForward(generation.unit.position());
            root.join_gather(generation, operation)?;
        }
    }
}

impl Routes for Evaluated {
    fn meet(&self, generation: &Arc<Generation>) -> Result<(), Error> {
        let mut units = self.units.iter();
        match units.position(|(_, unit)| Arc::ptr_eq(unit, generation)) {
            Some(place) => self.join_until(u32::try_from(place).unwrap_or(DONE)),
            None => Err(Error::State {
                unit: generation.unit.label(),
                expected: "of the module that `evaluate` gives".to_owned(),
                got: "of another copy".to_owned(),
                advice: "run the module that the closure gets",
            }),
        }
    }
}
